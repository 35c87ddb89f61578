"""What the form asks for: read, checked field by field, turned into the builder's words."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from sdaccel.errors import BackendError, ModelError, PickleRefused, ProfileError, SettingError
from sdaccel.profile import ImageProfile, Range
from sdaccel.ui.requests import BuildRequest, open_checkpoint, parse, problems, words

FULL = BuildRequest(
    model="/Modelle/schöne bilder.safetensors",
    resolutions=("512", "832x1216"),
    batches=("1-4",),
    tokens=("77-231",),
    components=("unet", "vae_decoder"),
    precision="fp32",
    backend="onnxruntime",
    allow_pickle=True,
)
EXACT = BuildRequest(profiles=(ImageProfile(Range(64, 64, 128), Range(64, 96, 128)), ImageProfile.native(256)))


@pytest.mark.parametrize("request_", [BuildRequest(), FULL, EXACT, BuildRequest(preset="demo")])
def test_json_both_ways(request_):
    assert BuildRequest.from_json(json.loads(json.dumps(request_.to_json()))) == request_


def test_what_is_left_out_has_its_default():
    assert BuildRequest.from_json({}) == BuildRequest(model="demo")
    assert BuildRequest.from_json({"resolutions": ["256"]}) == BuildRequest(resolutions=("256",))


@pytest.mark.parametrize(
    "document, why",
    [
        (None, "object of fields"),
        ([], "object of fields"),
        ({"modle": "x"}, "no field 'modle'.*It has model, preset"),
        ({"model": ""}, "model must be text"),
        ({"model": "a\0b"}, "model must be text"),
        ({"model": 3}, "model must be text"),
        ({"model": "x" * 5000}, "model must be text of 1 to 4096"),
        ({"resolutions": "512"}, "resolutions must be a list"),
        ({"tokens": ["77"] * 65}, "tokens must be a list of at most 64"),
        ({"allow_pickle": 1}, "allow_pickle must be true or false"),
        ({"profiles": [{}]}, r"profiles must give \[min, opt, max\]"),
        ({"profiles": [3]}, "profiles must give"),
        ({"profiles": [{"width": [9, 9, 9], "height": [64, 64, 64]}]}, "profiles: width 9 cannot be built.*Try 64"),
    ],
)
def test_other_documents_are_refused_by_field(document, why):
    with pytest.raises(SettingError, match=why):
        BuildRequest.from_json(document)


def test_the_words_of_a_form():
    assert words(" 512, 832x1216;1-4\n 77 ") == ("512", "832x1216", "1-4", "77")
    assert words("  ") == ()


def test_names_for_people():
    assert (BuildRequest().name, FULL.name) == ("demo", "schöne bilder")


def test_the_configuration_of_a_build():
    config = parse(BuildRequest(resolutions=("128-256",), batches=("2",), tokens=("77",), components=("unet",)))
    side = Range(128, 256, 256)  # opt is the model's native side
    assert config.profiles == (ImageProfile(side, side, Range(2, 2, 2), Range(77, 77, 77)),)
    assert (config.components, config.precision, config.backend) == (("unet",), None, "onnxruntime")
    assert config.check
    assert parse(BuildRequest()).profiles == (ImageProfile.native(256),)
    assert parse(EXACT).profiles == EXACT.profiles
    assert len(parse(BuildRequest(preset="demo")).profiles) == 2


def test_the_setting_decides_where_the_form_says_auto(monkeypatch):
    monkeypatch.setenv("SDACCEL_BACKEND", "nonsense")
    assert "there is no backend 'nonsense'" in problems(BuildRequest())["backend"]
    assert problems(BuildRequest(backend="onnxruntime")) == {}


def test_all_that_is_wrong_is_told_at_once():
    found = problems(
        BuildRequest(
            resolutions=("256", "100"),
            batches=("4-1",),
            tokens=("many",),
            components=("unet", "controlnot"),
            precision="fp8",
        )
    )
    assert set(found) == {"resolutions", "batches", "tokens", "components", "precision"}
    assert "100 cannot be built" in found["resolutions"] and "Try 96." in found["resolutions"]
    assert "1 <= min <= opt <= max" in found["batches"]
    assert "Write 4, 1-4 or 1-2-4" in found["tokens"]
    assert "Components: unet, vae_decoder" in found["components"]
    assert "It builds fp32." in found["precision"]


def test_the_rest_is_checked_without_the_model(tmp_path):
    found = problems(BuildRequest(model=str(tmp_path / "nicht da"), resolutions=("x",), components=("unet",)))
    assert set(found) == {"model", "resolutions"}
    assert "no such file or folder" in found["model"] and "Name a diffusers folder" in found["model"]


@pytest.mark.parametrize(
    "change, field, why",
    [
        ({"model": " "}, "model", "no model is named"),
        ({"model": "a\0b"}, "model", "cannot be opened|no such file"),
        ({"components": ()}, "components", "no component is chosen"),
        ({"components": ("text_encoder_2",)}, "components", "no weights for text_encoder_2"),
        ({"backend": "tensorflow"}, "backend", "Backends: auto, cuda, onnxruntime"),
        ({"preset": "sdxl"}, "preset", "the model is sd1"),
        ({"preset": "mine"}, "preset", "there is no preset 'mine'"),
        ({"preset": "demo", "batches": ("2",)}, "preset", "choose no preset"),
        ({"profiles": EXACT.profiles, "tokens": ("77",)}, "profiles", "profiles stand alone"),
    ],
)
def test_one_wrong_field(change, field, why):
    wrong = replace(BuildRequest(), **change)
    found = problems(wrong)
    assert list(found) == [field]
    assert re.search(why, found[field])
    with pytest.raises((ModelError, ProfileError, SettingError, BackendError)):
        parse(wrong)


def test_a_pickle_needs_permission(tmp_path):
    path = tmp_path / "altes Modell.ckpt"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(PickleRefused):
        open_checkpoint(BuildRequest(model=str(path)))
    assert "pickle" in problems(BuildRequest(model=str(path)))["model"]


def test_a_web_page_is_no_model(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("<!doctype html><title>log in</title>", encoding="utf-8")
    assert "an HTML page" in problems(BuildRequest(model=str(path)))["model"]
