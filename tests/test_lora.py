"""LoRA files: what they are named by, what they change, and that nothing of them stays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sdaccel
from sdaccel.draw import Request, draw
from sdaccel.errors import ModelError, SettingError
from sdaccel.lora import Lora
from tests import pipelines
from tests.integrations.test_patches import lora

REQUEST = Request("a red circle", width=64, height=64, steps=2, seed=3)


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.safetensors", "a.safetensors", 1.0),
        ('"my style.safetensors":0.8', '"my style.safetensors"', 0.8),
        ("/x/a.safetensors:-1", "/x/a.safetensors", -1.0),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", 1.0),
        (r"C:\loras\a.safetensors:.5", r"C:\loras\a.safetensors", 0.5),
        ("a:b.safetensors", "a:b.safetensors", 1.0),
    ],
)
def test_a_file_and_its_strength(text, path, scale):
    found = Lora.parse(text)
    assert (str(found.path), found.scale) == (str(Path(path.strip('"'))), scale)


@pytest.mark.parametrize("text", ["a.safetensors:11", "a.safetensors:nan", "a.safetensors:inf"])
def test_a_strength_has_bounds(text):
    with pytest.raises(SettingError, match="not between -10 and 10"):
        Lora.parse(text)


@pytest.fixture(scope="module")
def pipe():
    return sdaccel.accelerate(pipelines.make("sd1"), store=pipelines.shared_store())


def drawn(pipe, *loras: Lora):
    result = draw(pipe, Request(**{**vars(REQUEST), "loras": loras}))
    return np.asarray(result.images[0].image), result


def test_it_changes_the_image_and_nothing_stays(pipe, tmp_path):
    style = tmp_path / "ink.v2.safetensors"
    save_file(lora(pipe.unet, "unet", ("to_q", "to_v"), 1), str(style))
    plain, result = drawn(pipe)
    assert not result.fallbacks and "<lora:" not in result.images[0].parameters
    half, result = drawn(pipe, Lora(style, 0.5))
    assert "ink_v2" in result.fallbacks[0].reason and result.fallbacks[0].component == "unet"
    assert result.images[0].parameters.startswith("a red circle <lora:ink.v2:0.5>\n")
    whole, _ = drawn(pipe, Lora(style))
    twice, _ = drawn(pipe, Lora(style, 0.25), Lora(style, 0.25))
    assert len({image.tobytes() for image in (plain, half, whole)}) == 3
    assert np.abs(half.astype(int) - twice).max() <= 2
    again, result = drawn(pipe)
    assert np.array_equal(again, plain) and not result.fallbacks


def test_what_cannot_be_used_is_named_and_loses_nothing(pipe, tmp_path, monkeypatch):
    plain, _ = drawn(pipe)
    other = tmp_path / "other.safetensors"
    save_file({"nothing.lora_A.weight": torch.zeros(2, 2), "nothing.lora_B.weight": torch.zeros(2, 2)}, str(other))
    wide = tmp_path / "wide.safetensors"
    state = lora(pipe.unet, "unet", ("to_q",), 1)
    save_file({name: torch.zeros(*(side + 1 for side in tensor.shape)) for name, tensor in state.items()}, str(wide))
    (tmp_path / "text.safetensors").write_text("<html>", encoding="utf-8")
    (tmp_path / "a.bin").write_bytes(b"")
    for name, kind in (
        ("other.safetensors", ModelError),
        ("wide.safetensors", ModelError),
        ("text.safetensors", ModelError),
        ("none.safetensors", SettingError),
        ("a.bin", SettingError),
    ):
        with pytest.raises(kind, match=name.replace(".", r"\.")):
            drawn(pipe, Lora(tmp_path / name))
        image, result = drawn(pipe)
        assert np.array_equal(image, plain) and not result.fallbacks, name
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install"):
        drawn(pipe, Lora(other))
