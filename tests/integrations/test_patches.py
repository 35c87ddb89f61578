"""Whatever changes a pipeline, after accelerate or before: engines follow, or torch runs with the reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

import sdaccel
from sdaccel.errors import UnsupportedCall
from tests import pipelines
from tests.integrations.conftest import error, images, plain, reasons, same, through_engines
from tests.tolerances import PIPELINE_MAX_ABS


@pytest.fixture
def sd1(accelerated):
    return accelerated("sd1")


def in_torch(pipe: Any, change: Any, why: str, component: str = "unet", kind: str = "sd1") -> None:
    """After ``change`` the image is what torch gives after it, and the report says why."""
    change(pipe)
    found = images(pipe, kind)
    assert component in reasons(pipe), pipe.sdaccel.last_report
    assert why in reasons(pipe)[component]
    other = pipelines.make(kind)
    change(other)
    expected = images(other, kind)
    assert same(found, expected)
    assert error(expected, images(plain(kind), kind)) > PIPELINE_MAX_ABS, "the change changes nothing"


def in_engines(pipe: Any, change: Any, kind: str = "sd1") -> None:
    """After ``change`` engines give the image that torch gives after it."""
    change(pipe)
    found = images(pipe, kind)
    assert through_engines(pipe), pipe.sdaccel.last_report
    other = pipelines.make(kind)
    change(other)
    expected = images(other, kind)
    assert same(found, expected)
    assert error(expected, images(plain(kind), kind)) > PIPELINE_MAX_ABS, "the change changes nothing"


def through_again(pipe: Any, kind: str = "sd1") -> None:
    assert same(images(pipe, kind), images(plain(kind), kind))
    assert through_engines(pipe), pipe.sdaccel.last_report


class Louder(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


def test_freeu(sd1):
    in_torch(sd1, lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6), "FreeU is on")
    sd1.disable_freeu()
    through_again(sd1)


def test_attention_processors(sd1):
    in_torch(sd1, lambda pipe: pipe.unet.set_attn_processor(Louder()), "attention processor Louder")
    sd1.unet.set_attn_processor(AttnProcessor2_0())
    through_again(sd1)
    same_name = type("AttnProcessor2_0", (Louder,), {})
    in_torch(sd1, lambda pipe: pipe.unet.set_attn_processor(same_name()), "attention processor")


def test_a_processor_set_before_accelerate():
    pipe = pipelines.make("sd1")
    pipe.unet.set_attn_processor(Louder())
    expected = images(pipe, "sd1")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert "Louder" in reasons(pipe)["unet"]
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    through_again(pipe)


def _merging(pipe: Any) -> None:
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    kind = type(block)
    forward = lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs) * 1.2  # noqa: E731
    block.__class__ = type("MergingBlock", (kind,), {"forward": forward})


def _louder_block(pipe: Any) -> None:
    block = pipe.unet.mid_block.resnets[0]
    kept = block.forward
    block.forward = lambda *args: kept(*args) * 1.5


def _circular(pipe: Any) -> None:
    for part in (part for part in pipe.unet.modules() if isinstance(part, nn.Conv2d)):
        part.padding_mode = "circular"
        part._reversed_padding_repeated_twice = [part.padding[1]] * 2 + [part.padding[0]] * 2


def _another_activation(pipe: Any) -> None:
    pipe.unet.conv_act = nn.ReLU()


def _a_class_of_its_own(pipe: Any) -> None:
    kind = type(pipe.unet)
    forward = lambda self, *args, **kwargs: (kind.forward(self, *args, **kwargs)[0] * 1.1,)  # noqa: E731
    pipe.unet.__class__ = type("LouderUNet", (kind,), {"forward": forward})


def _darker(pipe: Any) -> None:
    kept = pipe.vae.decode
    pipe.vae.decode = lambda latents, *args, **kwargs: kept(latents * 0.5, *args, **kwargs)


@pytest.mark.parametrize(
    ("patch", "component", "reason"),
    [
        (_merging, "unet", "has become a MergingBlock"),
        (_louder_block, "unet", "forward of mid_block.resnets.0 has been replaced"),
        (_circular, "unet", "padding_mode"),
        (_another_activation, "unet", "conv_act has become a ReLU"),
        (_a_class_of_its_own, "unet", "the class LouderUNet has a forward"),
        (_darker, "vae_decoder", "replaced before accelerate()"),
    ],
)
def test_patches_from_before_accelerate(patch, component, reason):
    pipe = pipelines.make("sd1")
    patch(pipe)
    expected = images(pipe, "sd1")
    assert not same(expected, images(plain("sd1"), "sd1"))
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert reason in reasons(pipe)[component]


def test_a_class_patched_before_accelerate(monkeypatch):
    pipe = pipelines.make("sd1")
    kind = type(pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0])
    kept = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: kept(self, *args, **kwargs) * 1.2)
    expected = images(pipe, "sd1")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert reasons(pipe)["unet"] == "forward of the class BasicTransformerBlock had been replaced before accelerate()."


def test_a_patch_from_before_accelerate_that_is_taken_back():
    pipe = pipelines.make("sd1")
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    kind = type(block)
    _merging(pipe)
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    images(pipe, "sd1")
    assert "unet" in reasons(pipe)
    block.__class__ = kind
    through_again(pipe)


def test_fused_projections(sd1):
    sd1.fuse_qkv_projections()
    through_again(sd1)
    sd1.unfuse_qkv_projections()
    through_again(sd1)


def test_hooks_inside_run_in_torch(sd1):
    handles = []

    def hook(pipe):
        handles.append(pipe.unet.mid_block.register_forward_hook(lambda module, args, out: out * 1.5))

    in_torch(sd1, hook, "mid_block has a forward hook")
    handles[0].remove()
    through_again(sd1)


def test_a_hook_on_the_whole_unet_is_honoured(sd1):
    def hook(module, args, kwargs, out):
        return (out[0] * 1.1,)

    other = pipelines.make("sd1")
    for pipe in (sd1, other):
        pipe.unet.register_forward_hook(hook, with_kwargs=True)
    assert same(images(sd1, "sd1"), images(other, "sd1"))
    assert through_engines(sd1), sd1.sdaccel.last_report


def test_forward_replaced_after_accelerate(sd1):
    def twice(pipe):
        kept = type(pipe.unet).forward
        pipe.unet.forward = lambda *args, **kwargs: (kept(pipe.unet, *args, **kwargs)[0] * 1.1,)

    in_torch(sd1, twice, "unet.forward was replaced after accelerate()")


def test_forward_wrapped_after_accelerate_keeps_the_engine(sd1):
    other = pipelines.make("sd1")
    for pipe in (sd1, other):
        kept = pipe.unet.forward
        pipe.unet.forward = lambda *args, kept=kept, **kwargs: (kept(*args, **kwargs)[0] * 1.1,)
    assert same(images(sd1, "sd1"), images(other, "sd1"))
    assert through_engines(sd1), sd1.sdaccel.last_report


def test_forward_replaced_before_accelerate():
    pipe = pipelines.make("sd1")
    kept = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: (kept(*args, **kwargs)[0] * 1.1,)
    expected = images(pipe, "sd1")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert "replaced before accelerate()" in reasons(pipe)["unet"]


def test_classes_replaced_on_instances(sd1):
    in_torch(sd1, _merging, "has become a MergingBlock")


def test_methods_replaced_on_classes(sd1, monkeypatch):
    kind = type(sd1.unet.mid_block)
    expected = images(sd1, "sd1")
    kept = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: kept(self, *args, **kwargs) * 1.5)
    assert not same(images(sd1, "sd1"), expected)
    assert f"forward of the class {kind.__name__} has been replaced" in reasons(sd1)["unet"]
    monkeypatch.undo()
    through_again(sd1)
    kind = type(sd1.unet)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: (whole(self, *args, **kwargs)[0] * 1.1,))
    assert not same(images(sd1, "sd1"), expected)


def test_seamless_tiling(sd1):
    def circular(pipe):
        for part in (*pipe.unet.modules(), *pipe.vae.modules()):
            if isinstance(part, nn.Conv2d):
                part.padding_mode = "circular"
                part._reversed_padding_repeated_twice = [part.padding[1]] * 2 + [part.padding[0]] * 2

    in_torch(sd1, circular, "padding_mode")
    assert "padding_mode" in reasons(sd1)["vae_decoder"]


def test_a_replaced_layer(sd1):
    def replace(pipe):
        torch.manual_seed(1)
        pipe.unet.conv_out = nn.Conv2d(8, 4, 3, padding=1).requires_grad_(False)

    kept = sd1.unet.conv_out
    in_torch(sd1, replace, "conv_out has been replaced")
    sd1.unet.conv_out = kept
    through_again(sd1)


def test_a_replaced_component(sd1):
    def replace(pipe):
        pipe.unet = pipelines.make("sd1", seed=30).unet

    in_torch(sd1, replace, "pipe.unet was replaced after accelerate()")


def test_a_replaced_component_without_fallback_is_refused(accelerated):
    pipe = accelerated("sd1", fallback=False)
    kept, pipe.unet = pipe.unet, pipelines.make("sd1", seed=30).unet
    with pytest.raises(UnsupportedCall, match="unet was replaced"):
        images(pipe, "sd1")
    pipe.unet = kept
    through_again(pipe)


class _Around(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.dtype, self.device = inner.dtype, inner.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_module_around_ours_is_no_replacement(sd1):
    sd1.unet = _Around(sd1.unet)
    through_again(sd1)


def test_a_component_that_is_taken_away_did_not_run_in_torch(sd1):
    prompt, negative = sd1.encode_prompt("a red circle", "cpu", 1, True)
    sd1.text_encoder = None
    images(sd1, "sd1", prompt=None, prompt_embeds=prompt, negative_prompt_embeds=negative)
    assert through_engines(sd1), sd1.sdaccel.last_report


# --- weights


def test_weights_edited_in_place(sd1):
    def edit(pipe):
        pipe.unet.conv_out.weight.data[0, 0, 0, 1] += 1.0

    in_engines(sd1, edit)
    assert "unet: conv_out.weight changed since the build" in str(sd1.sdaccel.last_report)
    sd1.unet.conv_out.weight.data.copy_(plain("sd1").unet.conv_out.weight)
    through_again(sd1)


def test_small_edits_are_edits(sd1):
    def scale(pipe):
        for parameter in pipe.unet.parameters():
            parameter.data.mul_(1.001)

    in_engines(sd1, scale)
    assert " weights, conv_in.weight first, changed since the build" in str(sd1.sdaccel.last_report)


@pytest.mark.parametrize("source", ["vae", "text_encoder"])
def test_weights_of_other_components(source, sd1):
    def edit(pipe):
        next(iter(reversed(list(getattr(pipe, source).parameters())))).data.add_(0.3)

    in_engines(sd1, edit)


def test_replaced_parameters(sd1):
    def replace(pipe):
        pipe.unet.conv_in.weight = nn.Parameter(pipe.unet.conv_in.weight * 1.1, requires_grad=False)

    in_engines(sd1, replace)


def test_load_state_dict(sd1):
    other = pipelines.make("sd1", seed=40).unet.state_dict()
    in_engines(sd1, lambda pipe: pipe.unet.load_state_dict(other))
    sd1.unet.load_state_dict(plain("sd1").unet.state_dict(), assign=True)
    through_again(sd1)


def test_an_edit_beside_a_trip_through_half_precision(sd1):
    sd1.to(torch.float16)
    sd1.to(torch.float32)
    images(sd1, "sd1")
    assert through_engines(sd1)
    before = images(sd1, "sd1")
    sd1.unet.conv_out.weight.data[0, 0, 0, 1] += 1.0
    assert not same(images(sd1, "sd1"), before)
    assert through_engines(sd1) and "conv_out.weight changed since the build" in str(sd1.sdaccel.last_report)


def test_direct_calls_of_a_module_notice_edits_too(sd1):
    ids = torch.arange(77)[None]
    encoder, expected = sd1.text_encoder, plain("sd1").text_encoder(torch.arange(77)[None])[0]
    assert torch.allclose(encoder(ids)[0], expected, atol=1e-4)
    encoder.embeddings.token_embedding.weight.data[5, 0] += 3
    deadline = time.monotonic() + 30  # outside a generation weights are read whole only now and then
    while (encoder(ids)[0] - expected).abs().max() < 0.1:
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- textual inversion


def test_textual_inversion(sd1):
    def invert(pipe):
        vectors = torch.randn(5, 12, generator=torch.Generator().manual_seed(9))
        pipe.load_textual_inversion({"<mine>": vectors}, token="<mine>")

    options = {"prompt": "a <mine> circle"}
    other = pipelines.make("sd1")
    before = images(sd1, "sd1", **options)
    for pipe in (sd1, other):
        invert(pipe)
    found = images(sd1, "sd1", **options)
    assert same(found, images(other, "sd1", **options))
    assert not same(found, before)
    assert through_engines(sd1), sd1.sdaccel.last_report
    for pipe in (sd1, other):
        pipe.unload_textual_inversion()
    assert same(images(sd1, "sd1", **options), images(other, "sd1", **options))
    assert through_engines(sd1), sd1.sdaccel.last_report
    for pipe in (sd1, other):
        invert(pipe)
    sdaccel.accelerate(sd1, store=pipelines.shared_store())
    assert same(images(sd1, "sd1", **options), found)
    assert through_engines(sd1), sd1.sdaccel.last_report


# --- adapters


def lora(module: nn.Module, prefix: str, targets: tuple[str, ...], seed: int, scale: float = 0.5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name.removesuffix(".base_layer").endswith(targets):
            key = f"{prefix}.{name.removesuffix('.base_layer')}"
            state[f"{key}.lora_A.weight"] = torch.randn(2, part.in_features, generator=generator)
            state[f"{key}.lora_B.weight"] = scale * torch.randn(part.out_features, 2, generator=generator)
    assert state
    return state


def load(pipe: Any, name: str, seed: int = 1, scale: float = 0.5, text: bool = False, **options: Any) -> None:
    state = lora(pipe.unet, "unet", ("to_q", "to_v", "to_out.0"), seed, scale)
    if text:
        state |= lora(pipe.text_encoder, "text_encoder", ("q_proj", "v_proj"), seed, scale)
    pipe.load_lora_weights(state, adapter_name=name, **options)


def test_lora_loaded_after(sd1):
    in_engines(sd1, lambda pipe: load(pipe, "style"))
    report = sd1.sdaccel.last_report
    assert report.components["unet"].adapters == ["style"] and "style" in str(report)
    sd1.set_adapters("style", 0.0)
    through_again(sd1)
    sd1.set_adapters("style", 1.0)
    sd1.disable_lora()
    through_again(sd1)
    assert sd1.sdaccel.last_report.components["unet"].adapters == []
    sd1.enable_lora()
    assert not same(images(sd1, "sd1"), images(plain("sd1"), "sd1"))
    sd1.unload_lora_weights()
    through_again(sd1)


def test_lora_on_the_text_encoder(sd1):
    in_engines(sd1, lambda pipe: load(pipe, "style", text=True))
    assert sd1.sdaccel.last_report.components["text_encoder"].adapters == ["style"]


def test_lora_loaded_before():
    pipe = pipelines.make("sd1")
    load(pipe, "style")
    expected = images(pipe, "sd1")
    assert not same(expected, images(plain("sd1"), "sd1"))
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    unaccelerated = sdaccel.accelerate(pipelines.make("sd1"), store=pipelines.shared_store())
    assert pipe.sdaccel.engines() == unaccelerated.sdaccel.engines(), "the engine is of the base"
    assert same(images(pipe, "sd1"), expected)
    assert through_engines(pipe) and pipe.sdaccel.last_report.components["unet"].adapters == ["style"]
    pipe.disable_lora()
    through_again(pipe)
    pipe.unload_lora_weights()
    through_again(pipe)


def test_two_loras_are_told_apart(sd1):
    load(sd1, "one", seed=1)
    load(sd1, "two", seed=2)
    other = pipelines.make("sd1")
    load(other, "one", seed=1)
    load(other, "two", seed=2)
    for names, weights in ((["two"], [0.8]), (["one", "two"], [0.5, 1.0]), (["one", "two"], [0.0, 1.0])):
        for pipe in (sd1, other):
            pipe.set_adapters(names, weights)
        assert same(images(sd1, "sd1"), images(other, "sd1"))
        active = [name for name, weight in zip(names, weights, strict=True) if weight]
        assert sd1.sdaccel.last_report.components["unet"].adapters == active
        assert through_engines(sd1), sd1.sdaccel.last_report


@pytest.mark.parametrize("scale", [0.5, 1e-3])
def test_fused_lora(scale, sd1):
    def fuse(pipe):
        load(pipe, "style", scale=scale)
        pipe.fuse_lora()

    in_engines(sd1, fuse)
    assert sd1.sdaccel.last_report.components["unet"].adapters == ["style"]
    fused = images(sd1, "sd1")
    sd1.unload_lora_weights()  # the fused weights stay, nothing else tells
    assert same(images(sd1, "sd1"), fused)
    assert through_engines(sd1) and "changed since the build" in str(sd1.sdaccel.last_report)


def test_unfused_lora(sd1):
    other = pipelines.make("sd1")
    for pipe in (sd1, other):
        load(pipe, "style")
        pipe.fuse_lora()
        pipe.unfuse_lora()
        pipe.disable_lora()
    assert same(images(sd1, "sd1"), images(other, "sd1"))
    assert through_engines(sd1), sd1.sdaccel.last_report


def test_lora_fused_before_accelerate_is_part_of_the_engine():
    pipe = pipelines.make("sd1")
    load(pipe, "style")
    pipe.fuse_lora()
    expected = images(pipe, "sd1")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert through_engines(pipe), pipe.sdaccel.last_report


# --- what the UNet can be called with


def unet_inputs(**changed: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": 501,
        "encoder_hidden_states": torch.randn(2, 77, 12, generator=generator),
    } | changed


def residual(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


_DOWN = ((2, 8, 8, 8), (2, 8, 8, 8), (2, 8, 4, 4), (2, 16, 4, 4))
UNET_CALLS: dict[str, Any] = {
    "text mask": ({"encoder_attention_mask": torch.tensor([[1] * 77, [1] * 9 + [0] * 68])}, "encoder_attention_mask"),
    "T2I-Adapter": (
        lambda: {"down_intrablock_additional_residuals": [residual(2, 8, 8, 8), residual(2, 16, 4, 4)]},
        "T2I-Adapter",
    ),
    "T2I-Adapter, the old way": (
        lambda: {"down_block_additional_residuals": [residual(2, 8, 8, 8), residual(2, 16, 4, 4)]},
        "down path or of the middle alone",
    ),
    "middle residual alone": (lambda: {"mid_block_additional_residual": residual(2, 16, 4, 4)}, "the middle alone"),
    "no reason, half a timestep": ({"timestep": torch.tensor(500.5)}, None),
    "float timestep": ({"timestep": 12.25}, None),
    "a timestep for each sample": ({"timestep": torch.tensor([3, 900])}, None),
    "one timestep in a list": ({"timestep": torch.tensor([3])}, None),
    "float64 timestep": ({"timestep": torch.tensor(500.0, dtype=torch.float64)}, None),
    "residuals": (
        lambda: {
            "down_block_additional_residuals": tuple(residual(*shape) for shape in _DOWN),
            "mid_block_additional_residual": residual(2, 16, 4, 4),
        },
        None,
    ),
    "not contiguous": (
        {"sample": torch.randn(8, 8, 4, 2, generator=torch.Generator().manual_seed(1)).permute(3, 2, 0, 1)},
        None,
    ),
    "expanded": ({"encoder_hidden_states": torch.linspace(-1, 1, 12).expand(2, 77, 12)}, None),
    "odd latents": ({"sample": residual(2, 4, 13, 9)}, None),
    "too many tokens": ({"encoder_hidden_states": residual(2, 308, 12)}, "tokens 308 is outside 77-231"),
    "few tokens": ({"encoder_hidden_states": residual(2, 5, 12)}, "tokens 5 is outside"),
    "large": ({"sample": residual(2, 4, 24, 24)}, "height 24 is outside 4-16|height 24 is outside 8-16"),
}


@pytest.mark.parametrize("name", UNET_CALLS)
def test_calls_of_the_unet(name, accelerated, request):
    changed, why = UNET_CALLS[name]
    results = []
    pipe = _shared(accelerated, request)
    for unet in (pipe.unet, plain("sd1").unet):
        with torch.no_grad():
            results.append(unet(**unet_inputs(**(changed() if callable(changed) else changed))).sample)
    assert (results[0] - results[1]).abs().max() < 1e-4
    last = pipe.sdaccel.last_report
    if why is None:
        assert last.components["unet"].torch_calls == 0, last
    else:
        assert any(part in last.fallbacks[-1].reason for part in why.split("|")), last
    pipe.sdaccel._latest.__init__()


def _shared(accelerated, request) -> Any:
    if not hasattr(request.module, "_pipe"):
        request.module._pipe = accelerated("sd1")
    return request.module._pipe


def test_gradients_are_torch(sd1):
    call = unet_inputs()
    call["sample"].requires_grad_(True)
    sd1.unet(**call).sample.square().sum().backward()
    expected = unet_inputs()
    expected["sample"].requires_grad_(True)
    plain("sd1").unet(**expected).sample.square().sum().backward()
    assert torch.allclose(call["sample"].grad, expected["sample"].grad, rtol=1e-4, atol=1e-4)
    assert "gradients are wanted" in reasons(sd1)["unet"]


def test_training_parameters_are_torch(sd1):
    sd1.unet.requires_grad_(True)
    assert sd1.unet(**unet_inputs()).sample.requires_grad
    with torch.no_grad():
        sd1.unet(**unet_inputs())
    assert sd1.sdaccel.last_report.components["unet"].calls == 1


def test_inference_mode_autocast_and_float64(sd1):
    with torch.inference_mode():
        found = sd1.unet(**unet_inputs()).sample
        assert (found - plain("sd1").unet(**unet_inputs()).sample).abs().max() < 1e-4
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert (sd1.unet(**unet_inputs()).sample - found).abs().max() < 1e-4
    assert "autocast" in sd1.sdaccel.last_report.notes[0]
    assert not sd1.sdaccel.last_report.fallbacks
    sd1.unet.to(torch.float64)
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in unet_inputs().items()}
    with torch.no_grad():
        assert sd1.unet(**double).sample.dtype == torch.float64
    assert "float64" in reasons(sd1)["unet"]


def test_unknown_arguments_are_the_modules_own_error(sd1):
    with pytest.raises(TypeError, match="nonsense"):
        sd1.unet(**unet_inputs(nonsense=1))
    for wrong in ({"encoder_hidden_states": torch.zeros(3, 77, 12)}, {"attention_mask": torch.ones(2, 64)}):
        for unet in (sd1.unet, plain("sd1").unet):
            with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
                unet(**unet_inputs(**wrong))


def test_text_encoder_masks_and_outputs(sd1):
    ids = torch.tensor([[298, 5, 6, 7] + [299] * 73])
    mask = torch.tensor([[1] * 5 + [0] * 72])
    ours, theirs = sd1.text_encoder, plain("sd1").text_encoder
    with torch.no_grad():
        for options in ({}, {"output_hidden_states": True}, {"attention_mask": mask}, {"return_dict": False}):
            found, expected = ours(ids, **options), theirs(ids, **options)
            assert type(found) is type(expected)
            if options == {"return_dict": False}:
                pairs = zip(found, expected, strict=True)
            else:
                assert list(found.keys()) == list(expected.keys())
                pairs = zip(found.values(), expected.values(), strict=True)
            for one, other in pairs:
                for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (one, other)), strict=True):
                    assert torch.allclose(a, b, atol=1e-4)
    assert "attention_mask" in reasons(sd1)["text_encoder"]


def test_ip_adapter_embeds(sd1):
    call = unet_inputs(added_cond_kwargs={"image_embeds": [residual(2, 4, 12)]})
    with torch.no_grad():
        found, expected = sd1.unet(**call).sample, plain("sd1").unet(**call).sample
    assert (found - expected).abs().max() < 1e-4
    assert "image_embeds (IP-Adapter)" in reasons(sd1)["unet"]


def ip_adapter(unet: nn.Module) -> dict[str, Any]:
    """An IP-Adapter's state: projections to four tokens, keys and values for each cross-attention."""
    generator = torch.Generator().manual_seed(11)
    rand = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    wide = unet.config.cross_attention_dim
    state = {"proj.weight": rand(4 * wide, 12), "proj.bias": rand(4 * wide)}
    state |= {"norm.weight": rand(wide), "norm.bias": rand(wide)}
    keys = {}
    number = 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
            keys |= {f"{number}.to_k_ip.weight": rand(width, wide), f"{number}.to_v_ip.weight": rand(width, wide)}
            number += 2
    return {"image_proj": state, "ip_adapter": keys}


def test_ip_adapter(sd1):
    def load(pipe):
        pipe.unet._load_ip_adapter_weights([ip_adapter(pipe.unet)])
        pipe.set_ip_adapter_scale(0.7)

    embeds = {"ip_adapter_image_embeds": [residual(2, 1, 12)]}
    other = pipelines.make("sd1")
    for pipe in (sd1, other):
        load(pipe)
    assert same(images(sd1, "sd1", **embeds), images(other, "sd1", **embeds))
    assert reasons(sd1)["unet"], sd1.sdaccel.last_report
    sd1.unload_ip_adapter()
    through_again(sd1)


# --- torch.compile


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
@pytest.mark.parametrize("how", ["module", "in place"])
def test_compiled_unets_do_not_crash(when, how):
    pipe = pipelines.make("sd1")

    def compile_it():
        if how == "module":
            pipe.unet = torch.compile(pipe.unet, backend="eager")
        else:
            pipe.unet.compile(backend="eager")

    if when == "before":
        compile_it()
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    if when == "after":
        compile_it()
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    report = pipe.sdaccel.last_report
    assert reasons(pipe).get("unet") or report.components["unet"].calls
    sdaccel.restore(pipe)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
