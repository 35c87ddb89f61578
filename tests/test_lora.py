"""LoRA files: what they are named by, what they change, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import sdaccel
from sdaccel import cli
from sdaccel.adapters import Layer
from sdaccel.builder import build
from sdaccel.draw import Request, draw, open_pipeline, report_lines
from sdaccel.errors import ModelError, SettingError
from sdaccel.lora import LiveWeights, Lora, applied
from sdaccel.models.checkpoint import open_checkpoint
from sdaccel.models.demo import GUIDANCE_SCALE, demo_lora_path, demo_model_path
from sdaccel.profile import parse_profiles
from sdaccel.runtime import ComponentRun, RunReport
from tests import pipelines
from tests.integrations.conftest import error, images, same, through_engines
from tests.integrations.test_patches import lora
from tests.tolerances import PIPELINE_MAX_ABS

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


# ---- formats, each against weights that are merged by hand


def random(*shape: int) -> Tensor:
    return torch.randn(shape) / max(1, shape[-1]) ** 0.5


def _low_rank(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    kernel = [1] * (w.dim() - 2)
    up, down = random(len(w), 2, *kernel), random(2, *w.shape[1:])
    return {"lora_up.weight": up, "lora_down.weight": down}, (up.flatten(1) @ down.flatten(1)).reshape(w.shape)


def kohya(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    parts, delta = _low_rank(w)
    return parts | {"alpha": torch.tensor(1.0)}, w + s * 0.5 * delta


def diffusers(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    parts, delta = _low_rank(w)
    return {"lora_A.weight": parts["lora_down.weight"], "lora_B.weight": parts["lora_up.weight"]}, w + s * delta


def locon(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    if w.dim() == 2:
        return kohya(w, s)
    up, mid, down = random(len(w), 2, 1, 1), random(2, 2, *w.shape[2:]), random(2, w.shape[1], 1, 1)
    delta = torch.einsum("or,rqhw,qi->oihw", up[..., 0, 0], mid, down[..., 0, 0])
    return {"lora_up.weight": up, "lora_mid.weight": mid, "lora_down.weight": down}, w + s * delta


def loha(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    n = w[0].numel()
    a, b, c, d = random(len(w), 2), random(2, n), random(len(w), 2), random(2, n)
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d}, w + s * (a @ b * (c @ d)).reshape(w.shape)


def lokr(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    a, b = random(2, 2), random(len(w) // 2, w.shape[1] // 2, *w.shape[2:])
    blocks = torch.einsum("ab,cd...->acbd...", a, b)
    return {"lokr_w1": a, "lokr_w2": b}, w + s * blocks.reshape(w.shape)


def ia3(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    v = random(len(w))
    return {"weight": v, "on_input": torch.tensor(False)}, w * (1 + s * v.reshape(-1, *[1] * (w.dim() - 1)))


def dora(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    parts, delta = _low_rank(w)
    m = 1 + torch.rand(len(w), *[1] * (w.dim() - 1))
    norm = (w + delta).flatten(1).norm(dim=1).reshape(m.shape)
    return parts | {"dora_scale": m}, w + s * (m * (w + delta) / norm - w)


def full(w: Tensor, s: float) -> tuple[dict[str, Tensor], Tensor]:
    delta = 0.5 * random(*w.shape)
    return {"diff": delta}, w + s * delta


LINEAR, CONV = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k", "down_blocks.1.resnets.0.conv1"
TEXT = "encoder.layers.0.self_attn.q_proj"
LAYERS = (("unet", LINEAR), ("unet", CONV), ("text_encoder", TEXT))


def key(component: str, module: str, dots: bool) -> str:
    if dots:
        return f"{component}.{'text_model.' * (component != 'unet')}{module}"
    prefix = "lora_unet" if component == "unet" else "lora_te_text_model"
    return f"{prefix}_{module}".replace(".", "_")


@pytest.fixture(scope="module")
def sd1() -> Any:
    return pipelines.make("sd1")


@pytest.fixture
def style(tmp_path: Path, sd1: Any) -> Lora:
    return written(tmp_path / "ink.v2.safetensors", sd1, 1)


@pytest.fixture
def other(tmp_path: Path, sd1: Any) -> Lora:
    return written(tmp_path / "oil.safetensors", sd1, 2)


def written(path: Path, pipe: Any, seed: int) -> Lora:
    state = lora(pipe.unet, "unet", ("to_q", "to_v"), seed)
    for name in ("text_encoder", "text_encoder_2"):
        if getattr(pipe, name, None) is not None:
            state |= lora(getattr(pipe, name), name, ("q_proj", "v_proj"), seed)
    save_file(state, path)
    return Lora(path, 0.8)


def weights_of(pipe: Any) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor.clone()
        for part in ("unet", "text_encoder", "vae")
        for name, tensor in getattr(pipe, part).state_dict().items()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture
def untouched(sd1: Any) -> Iterator[dict[str, Tensor]]:
    """Weights that are the same after the test, to the last bit."""
    before = weights_of(sd1)
    yield before
    assert equal(weights_of(sd1), before)


@pytest.mark.parametrize("make", [kohya, diffusers, locon, loha, lokr, ia3, dora, full])
@pytest.mark.parametrize("scale", [0.7, -0.4])
def test_images_are_those_of_merged_weights(sd1, untouched, tmp_path, make: Callable[..., Any], scale):
    torch.manual_seed(4)
    merged = pipelines.make("sd1")
    state = {}
    for component, module in LAYERS:
        weight = getattr(merged, component).get_submodule(module).weight
        parts, value = make(weight.detach().clone(), scale)
        weight.data.copy_(value)
        state |= {f"{key(component, module, make is diffusers)}.{part}": each for part, each in parts.items()}
    save_file(state, tmp_path / "a.safetensors")
    plain = images(sd1, "sd1")
    with applied(sd1, [Lora(tmp_path / "a.safetensors", scale)]) as weights:
        assert not weights.notes and weights.adapters.keys() == {"unet", "text_encoder"}
        found = images(sd1, "sd1")
    assert same(found, images(merged, "sd1"))
    assert error(found, plain) > PIPELINE_MAX_ABS, "the file changes nothing"


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_two_at_once_are_what_peft_makes_of_them(kind, tmp_path):
    pipe, peft = pipelines.make(kind), pipelines.make(kind)
    chosen = [written(tmp_path / f"{seed}.safetensors", pipe, seed) for seed in (1, 2)]
    chosen = [Lora(each.path, scale) for each, scale in zip(chosen, (0.7, -0.5), strict=True)]
    for each in chosen:
        peft.load_lora_weights(str(tmp_path), weight_name=each.path.name, adapter_name=each.name)
    peft.set_adapters([each.name for each in chosen], [each.scale for each in chosen])
    expected = images(peft, kind)
    with applied(pipe, chosen) as weights:
        assert same(images(pipe, kind), expected)
        assert weights.adapters["text_encoder"] == ("1:0.7", "2:-0.5")
        assert ("text_encoder_2" in weights.adapters) == (kind == "sdxl")
    assert error(expected, images(pipe, kind)) > PIPELINE_MAX_ABS


def test_the_demo_lora_is_what_peft_makes_of_it():
    request = Request(
        "a red circle on a blue background", width=256, height=256, steps=5, seed=1, guidance=GUIDANCE_SCALE
    )
    pipe = open_pipeline(open_checkpoint(demo_model_path()), request)
    with torch.inference_mode():
        found = draw(pipe, Request(**{**vars(request), "loras": (Lora(demo_lora_path()),)})).images[0].image
    plain = draw(pipe, request).images[0].image
    pipe.load_lora_weights(demo_lora_path().parent, weight_name=demo_lora_path().name)
    expected = draw(pipe, request).images[0].image
    distance = [np.abs(np.asarray(image, dtype=int) - np.asarray(expected)).max() for image in (found, plain)]
    assert distance[0] <= 1 and distance[1] > 50


# ---- sets that follow each other


def test_sets_follow_each_other_to_the_last_bit(sd1, untouched, style, other):
    weights = LiveWeights(sd1)
    found = []
    for loras in ((style,), (other,), (style,), (other, style), (style, style), (), (style,), ()):
        weights.set(loras)
        assert weights.loras == loras
        found.append(weights_of(sd1))
    first, second, again, both, twice, none, last, nothing = found
    assert equal(first, again) and equal(first, last) and equal(none, untouched) and equal(nothing, untouched)
    assert not any(equal(first, different) for different in (second, both, twice, none))


def test_only_what_changes_is_computed(sd1, untouched, style, other, monkeypatch):
    weights, computed = LiveWeights(sd1), []
    added = Layer.added
    monkeypatch.setattr(Layer, "added", lambda self, *rest: computed.append(self.name) or added(self, *rest))
    weights.set([style])
    count = len(computed)
    weights.set([style])
    assert len(computed) == count > 0
    os.utime(style.path, ns=(1, 1))
    weights.set([style])  # another file, for all that is known
    assert len(computed) == 2 * count
    weights.set([])
    assert len(computed) == 2 * count


@pytest.mark.parametrize("before", [False, True])
def test_a_fault_in_the_middle_leaves_the_base(sd1, untouched, style, other, monkeypatch, before):
    weights, calls = LiveWeights(sd1), []
    weights.set([other] * before)
    added = Layer.added

    def fails(self: Layer, *rest: Any) -> Tensor:
        calls.append(self)
        if len(calls) == 3:
            raise ModelError("changed since it was opened.")
        return added(self, *rest)

    monkeypatch.setattr(Layer, "added", fails)
    with pytest.raises(ModelError, match=r"ink\.v2\.safetensors: changed since"):
        weights.set([style])
    assert not weights.loras and not weights.adapters and equal(weights_of(sd1), untouched)
    with pytest.raises(KeyError), applied(sd1, [style]):
        raise KeyError


def test_half_precision_is_computed_in_full(tmp_path):
    class Pipe:
        unet = torch.nn.Module()

    Pipe.unet.conv_in = torch.nn.Conv2d(4, 8, 3).half()
    base = Pipe.unet.conv_in.weight.detach().clone()
    parts, merged = kohya(base.float(), 0.3)
    save_file({f"lora_unet_conv_in.{name}": each for name, each in parts.items()}, tmp_path / "a.safetensors")
    with torch.inference_mode(), applied(Pipe, [Lora(tmp_path / "a.safetensors", 0.3)]):
        assert torch.equal(Pipe.unet.conv_in.weight, merged.half())
        assert not Pipe.unet.conv_in.weight.is_inference()
    assert torch.equal(Pipe.unet.conv_in.weight, base)


@pytest.mark.gpu
@pytest.mark.parametrize("spare", [True, False])
def test_on_a_gpu_weights_stay_where_they_are(tmp_path, monkeypatch, spare):
    pipe = pipelines.make("sd1").to("cuda", torch.float16)
    first, second = (written(tmp_path / f"{seed}.safetensors", pipe, seed) for seed in (1, 2))
    monkeypatch.setattr("sdaccel.lora._fits_beside", lambda parameters: spare)
    places = {name: each.data_ptr() for name, each in pipe.unet.named_parameters()}
    before, weights = weights_of(pipe), LiveWeights(pipe)
    weights.set([first])
    once = weights_of(pipe)
    weights.set([second])
    assert not equal(weights_of(pipe), once)
    weights.set([first])
    assert equal(weights_of(pipe), once)
    weights.set([])
    assert equal(weights_of(pipe), before)
    assert places == {name: each.data_ptr() for name, each in pipe.unet.named_parameters()}


def test_engines_follow(sd1, untouched, style, other, tmp_path):
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=pipelines.shared_store())
    weights, found = LiveWeights(pipe), {}
    for loras in ((), (style,), (other,), (style,), (other, Lora(style.path, -0.3)), ()):
        weights.set(loras)
        image = images(pipe, "sd1")
        report = pipe.sdaccel.last_report
        weights.tell(report)
        assert through_engines(pipe), report
        names = sorted(f"{lora.name}:{lora.scale:g}" for lora in loras)
        assert {name: run.adapters for name, run in report.components.items()} == {
            "text_encoder": names, "unet": names, "vae_decoder": [],
        }  # fmt: skip
        with applied(sd1, loras):
            assert same(image, images(sd1, "sd1"))
        assert np.array_equal(found.setdefault(loras, image), image)
    assert error(found[style,], found[()]) > PIPELINE_MAX_ABS


def test_generate_draws_with_the_demo_lora_through_engines(tmp_path, capsys):
    store = pipelines.shared_store()
    profiles = parse_profiles(["128"], ["1"], ["77"], native=256)
    build(demo_model_path(), components=["unet"], profiles=profiles, store=store, check=False)

    def generate(*arguments: str) -> tuple[np.ndarray, dict[str, Any]]:
        path = tmp_path / f"{len(arguments)}.png"
        common = ["--res", "128", "--steps", "4", "--seed", "1", "-o", str(path), "--json"]
        common += ["--store", str(store.root), "--build", "never"]
        assert cli.run(["generate", "a red circle on a blue background", *common, *arguments]) == 0
        return np.asarray(Image.open(path), dtype=int), json.loads(capsys.readouterr().out)["reports"][0]

    style = ["--lora", f"{demo_lora_path()}:10"]
    found, report = generate(*style)
    expected, _ = generate(*style, "--no-engine")
    assert {fallback["component"] for fallback in report["fallbacks"]} == {"text_encoder", "vae_decoder"}
    assert {name: (run["calls"] > 0, run["adapters"]) for name, run in report["components"].items()} == {
        "text_encoder": (False, []), "unet": (True, ["blueprint:10"]), "vae_decoder": (False, []),
    }  # fmt: skip
    assert np.abs(found - expected).max() <= 1
    plain, _ = generate()
    assert np.abs(found - plain).max() > 50


# ---- what is told, and what is refused


def test_reports_name_what_ran_and_what_is_not_used(sd1, untouched, style, tmp_path):
    state = lora(sd1.unet, "unet", ("to_q",), 1)
    state |= {f"lora_te2_text_model_encoder_layers_{i}_mlp_fc1.lora_down.weight": torch.zeros(2, 12) for i in range(4)}
    state |= {f"lora_te2_text_model_encoder_layers_{i}_mlp_fc1.lora_up.weight": torch.zeros(24, 2) for i in range(4)}
    save_file(state | {"\x1b[31mjunk": torch.zeros(1)}, tmp_path / "part.safetensors")
    report = RunReport()
    report.components = {name: ComponentRun(calls=1) for name in ("unet", "text_encoder", "vae_decoder")}
    with applied(sd1, [style, Lora(tmp_path / "part.safetensors")]) as weights:
        weights.tell(report)
    assert {name: run.adapters for name, run in report.components.items()} == {
        "unet": ["ink.v2:0.8", "part:1"], "text_encoder": ["ink.v2:0.8"], "vae_decoder": [],
    }  # fmt: skip
    (note,) = report.notes
    assert note.startswith("part.safetensors: not used: \\x1b[31mjunk (of no known adapter format); ")
    assert "there is no text_encoder_2" in note and note.endswith("2 more, which sdaccel lora inspect names")


def test_what_cannot_be_used_is_named_and_changes_nothing(sd1, untouched, style, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    none = {"nothing.lora_A.weight": torch.zeros(2, 2), "nothing.lora_B.weight": torch.zeros(2, 2)}
    save_file(none, tmp_path / "none.safetensors")
    wide = {f"{key('unet', LINEAR, True)}.{part}": torch.zeros(2, 2) for part in ("lora_A.weight", "lora_B.weight")}
    save_file(wide | lora(sd1.unet, "unet", ("to_q",), 1), tmp_path / "wide.safetensors")
    (tmp_path / "text.safetensors").write_text("<html>", encoding="utf-8")
    (tmp_path / "a.bin").write_bytes(b"")
    weights = LiveWeights(sd1)
    weights.set([style])
    styled = weights_of(sd1)
    for name, kind, words in (
        ("none.safetensors", ModelError, "changes nothing of this model"),
        ("wide.safetensors", ModelError, rf"{LINEAR}\.lora_A\.weight: .* weights 2 × 2, but .* is \(8, 12\)"),
        ("text.safetensors", ModelError, "not a safetensors file"),
        ("gone.safetensors", SettingError, "is not there"),
        ("a.bin", SettingError, "no .safetensors file"),
    ):
        with pytest.raises(kind, match=f"{name}.*{words}"):
            weights.set([style, Lora(tmp_path / name)])
        assert equal(weights_of(sd1), styled) and weights.loras == (style,)
    weights.set([])


def test_an_image_says_what_it_was_drawn_with(sd1, untouched, style):
    result = draw(sd1, Request(**{**vars(REQUEST), "loras": (style,), "prompt": "circle " * 90, "negative": "x " * 80}))
    assert result.images[0].parameters.startswith(f"{'circle ' * 90} <lora:ink.v2:0.8>\n")
    prompt, negative = result.notes
    assert "the prompt has" in prompt and "are read" in prompt and "the negative prompt has" in negative
    assert report_lines(result) == [prompt, negative]


@pytest.mark.parametrize(
    ("prompt", "negative", "told"),
    [
        ("a circle, (red) [blue], ratio 1:2 (a: b), a 50% {cut}", "", []),
        ("a <lora:ink.v2:0.8> circle <lora:ink.v2:0.8>", "<lyco:x>", ["<lora:ink.v2:0.8> is read", "<lyco:x> is read"]),
        ("a (red:1.2) circle", "", ["are read as words"]),
        ("a circle", "a [circle:square:0.5]", ["are read as words"]),
        ("a circle BREAK red", "", ["are read as words"]),
    ],
)
def test_what_only_web_uis_understand_is_told(sd1, prompt, negative, told):
    result = draw(sd1, Request(**{**vars(REQUEST), "prompt": prompt, "negative": negative}))
    assert len(result.notes) == len(told)
    assert all(words in note for words, note in zip(told, result.notes, strict=True)), result.notes
