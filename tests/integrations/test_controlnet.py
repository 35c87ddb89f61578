"""ControlNets through engines, one and several, in every pipeline that takes them; T2I-Adapter and IP-Adapter."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetUnionPipeline,
)

import sdaccel
from sdaccel.errors import ExportError, ModelError, UnsupportedCall
from sdaccel.models.checkpoint import controlnets, open_checkpoint
from sdaccel.models.pipeline import load_pipeline
from sdaccel.verify import verify
from tests import pipelines
from tests.integrations.conftest import error, images, plain, reasons, same, through_engines
from tests.integrations.test_patches import ip_adapter, residual, unet_inputs
from tests.tolerances import PIPELINE_MAX_ABS

KINDS = (
    "controlnet",
    "controlnet-img2img",
    "controlnet-inpaint",
    "sdxl-controlnet",
    "sdxl-controlnet-img2img",
    "sdxl-controlnet-inpaint",
)
CALLS: dict[str, dict[str, Any]] = {
    "scale 1": {"controlnet_conditioning_scale": 1.0},
    "scale 0.3": {"controlnet_conditioning_scale": 0.3},
    "guess mode": {"guess_mode": True, "controlnet_conditioning_scale": 0.8},
    "at first": {"control_guidance_end": 0.5, "controlnet_conditioning_scale": 1.0},
    "at last": {"control_guidance_start": 0.5, "controlnet_conditioning_scale": 1.0},
}


def call(kind: str, count: int, **options: Any) -> dict[str, Any]:
    """The call of a pipeline with ``count`` ControlNets, each with its own image, scale and share of the steps."""
    if count == 1:
        return options
    image = "image" if kind.endswith("controlnet") else "control_image"
    options[image] = [pipelines.picture(seed=seed) for seed in range(4, 4 + count)]
    scale = options["controlnet_conditioning_scale"]
    options["controlnet_conditioning_scale"] = [scale / (1 + index) for index in range(count)]
    if "control_guidance_end" in options:
        options["control_guidance_end"] = [options["control_guidance_end"], *[1.0] * (count - 1)]
    return options


@pytest.fixture(scope="module")
def pair():
    """(accelerated, in torch) of a kind: tests that share them leave them as they were."""
    made: dict[Any, Any] = {}

    def get(kind: str, count: int = 1) -> tuple[Any, Any]:
        if (kind, count) not in made:
            pipe = pipelines.make(kind, controlnets=count)
            sdaccel.accelerate(pipe, store=pipelines.shared_store())
            made[kind, count] = pipe, pipelines.make(kind, controlnets=count)
        return made[kind, count]

    return get


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_equals_torch(kind, count, pair):
    ours, theirs = pair(kind, count)
    wanted = {f"controlnet_{index}" if index else "controlnet" for index in range(count)}
    found = {}
    for name in CALLS if kind.endswith("controlnet") else ("scale 1", "guess mode"):
        options = call(kind, count, **CALLS[name])
        found[name] = images(ours, kind, **options)
        assert same(found[name], images(theirs, kind, **options)), name
        assert through_engines(ours), ours.sdaccel.last_report
        assert ours.sdaccel.last_report.components.keys() >= {"unet", *wanted}
    for name in found.keys() - {"scale 1"}:
        assert abs(found[name] - found["scale 1"]).max() > PIPELINE_MAX_ABS, name


@pytest.mark.parametrize("kind", ["controlnet", "sdxl-controlnet"])
def test_odd_sizes_and_several_images(kind, pair):
    """13x9 latents, halved once and twice."""
    options = {"image": pipelines.picture(72, 104), "num_images_per_prompt": 2, "guidance_scale": 1.0}
    ours, theirs = pair(kind)
    for guidance in (1.0, 5.0):
        options["guidance_scale"] = guidance
        found = images(ours, kind, **options)
        assert found.shape[:3] == (2, 104, 72)
        assert same(found, images(theirs, kind, **options))
        assert through_engines(ours), ours.sdaccel.last_report


def test_a_size_outside_every_profile_is_torch(pair):
    ours, theirs = pair("controlnet")
    image = pipelines.picture(160, 64)
    assert same(images(ours, "controlnet", image=image), images(theirs, "controlnet", image=image))
    assert "width 160 is outside" in reasons(ours)["controlnet"]
    assert "width 20 is outside" in reasons(ours)["unet"]


def test_half_precision(pair):
    """Residuals come in the pipeline's type, the engine computes in float32."""
    ours = sdaccel.accelerate(pipelines.make("controlnet"), store=pipelines.shared_store()).to(torch.bfloat16)
    with torch.no_grad():
        call = {key: value.bfloat16() if isinstance(value, torch.Tensor) else value for key, value in inputs().items()}
        down, mid = ours.controlnet(**call, conditioning_scale=0.5, return_dict=False)
    assert {residual.dtype for residual in (*down, mid)} == {torch.bfloat16}
    found = images(ours, "controlnet")
    assert through_engines(ours), ours.sdaccel.last_report
    assert error(found, images(pair("controlnet")[1], "controlnet")) < 0.1


def test_where_the_scale_is_0_nothing_is_computed(pair):
    ours, theirs = pair("controlnet")
    options = {"control_guidance_end": 0.5, "num_inference_steps": 4}
    assert same(images(ours, "controlnet", **options), images(theirs, "controlnet", **options))
    report = ours.sdaccel.last_report
    assert (report.components["controlnet"].calls, report.components["unet"].calls) == (2, 4)
    assert report.notes == ["controlnet: where its scale is 0 it was not computed."]
    off = images(ours, "controlnet", controlnet_conditioning_scale=0.0)
    assert same(off, images(plain("sd1"), "sd1"))
    assert ours.sdaccel.last_report.ok and not ours.sdaccel.last_report.fallbacks


def test_residuals_leave_nothing_behind(accelerated):
    """Without residuals the UNet's engine gives the same bits as ever."""
    pipe = accelerated("sd1")
    given = {
        "down_block_additional_residuals": [
            residual(2, *shape) for shape in ((8, 8, 8), (8, 8, 8), (8, 4, 4), (16, 4, 4))
        ],
        "mid_block_additional_residual": residual(2, 16, 4, 4),
    }
    with torch.no_grad():
        before = pipe.unet(**unet_inputs()).sample
        with_them = pipe.unet(**unet_inputs(**given)).sample
        assert torch.equal(pipe.unet(**unet_inputs()).sample, before)
    assert (with_them - before).abs().max() > 0.01
    assert not pipe.sdaccel.last_report.fallbacks


# --- calls of a ControlNet


def inputs(**changed: Any) -> dict[str, Any]:
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(8))
    return unet_inputs(controlnet_cond=image) | changed


NET_CALLS: dict[str, Any] = {
    "plain": ({}, None),
    "in a tuple": ({"return_dict": False}, None),
    "scale": ({"conditioning_scale": 0.3}, None),
    "scale in a tensor": ({"conditioning_scale": torch.tensor(0.3)}, None),
    "scale 0": ({"conditioning_scale": 0.0}, None),
    "guess mode": ({"conditioning_scale": 0.5, "guess_mode": True}, None),
    "one image for all": ({"controlnet_cond": residual(1, 3, 64, 64)}, None),
    "LoRA scale": ({"cross_attention_kwargs": {"scale": 0.5}}, None),
    "a timestep for each sample": ({"timestep": torch.tensor([3, 900])}, None),
    "class labels": ({"class_labels": torch.tensor([1, 2])}, "class_labels, which engines do not take"),
    "mask": ({"attention_mask": torch.tensor([[1] * 77, [1] * 9 + [0] * 68])}, "attention_mask"),
    "a sample too large": (
        {"sample": residual(2, 4, 24, 24), "controlnet_cond": residual(2, 3, 192, 192)},
        "height 24 is outside",
    ),
}


@pytest.mark.parametrize("name", NET_CALLS)
def test_calls(name, pair):
    changed, why = NET_CALLS[name]
    results = []
    ours, theirs = pair("controlnet")
    for pipe in (ours, theirs):
        with torch.no_grad():
            try:
                results.append(pipe.controlnet(**inputs(**changed)))
            except RuntimeError as error:  # of a mask that no layer has a use for
                results.append(str(error))
    found, expected = results
    assert type(found) is type(expected)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert len(found[0]) == len(expected[0])
        for one, other in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
            assert one.shape == other.shape and (one - other).abs().max() <= PIPELINE_MAX_ABS
    last = ours.sdaccel.last_report
    assert any(why in fallback.reason for fallback in last.fallbacks) if why else not last.fallbacks, last
    ours.sdaccel._latest.__init__()


def test_wrong_calls_are_the_modules_own_error(pair):
    for pipe in pair("controlnet"):
        with torch.no_grad(), pytest.raises(TypeError, match="nonsense"):
            pipe.controlnet(**inputs(nonsense=1))
        with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
            pipe.controlnet(**inputs(controlnet_cond=residual(2, 3, 72, 72)))
    pair("controlnet")[0].sdaccel._latest.__init__()


@pytest.mark.parametrize(
    "change",
    [{"controlnet_conditioning_channel_order": "bgr"}, {"global_pool_conditions": True}],
    ids=lambda change: next(iter(change)),
)
def test_what_the_config_does_around_the_network(change, pair):
    usual, _ = pair("controlnet")
    ours, theirs = (pipelines.make("controlnet") for _ in range(2))
    for pipe in (ours, theirs):
        pipe.controlnet.register_to_config(**change)
    sdaccel.accelerate(ours, store=pipelines.shared_store(), build="never")
    assert ours.sdaccel.engines() == usual.sdaccel.engines()
    found = images(ours, "controlnet")
    assert same(found, images(theirs, "controlnet"))
    assert through_engines(ours), ours.sdaccel.last_report
    assert abs(found - images(usual, "controlnet")).max() > PIPELINE_MAX_ABS


# --- engines


def test_an_engine_serves_a_controlnet_whatever_its_place(pair):
    """A pipeline's second ControlNet alone in another one needs no engine of its own."""
    two, _ = pair("controlnet", 2)
    pipe = pipelines.make("controlnet")
    pipe.controlnet = pipelines.make("controlnet", controlnets=2).controlnet.nets[1]
    sdaccel.accelerate(pipe, store=pipelines.shared_store(), build="never")
    assert pipe.sdaccel.engines()["controlnet"] == two.sdaccel.engines()["controlnet_1"]
    engine = next(entry.engine for entry in pipe.sdaccel.contexts["controlnet"].engines)
    assert (engine.component, engine.source) == ("controlnet", "controlnet")
    assert str(engine.profiles[0]["image_height"]) == "64-64-128"
    images(pipe, "controlnet")
    assert through_engines(pipe), pipe.sdaccel.last_report


def test_components_are_what_is_asked_for(pair):
    names = {"unet", "controlnet", "controlnet_1"}
    for asked, given in ((["controlnet"], names - {"unet"}), (["controlnet_1", "unet"], names - {"controlnet"})):
        pipe = pipelines.make("controlnet", controlnets=2)
        sdaccel.accelerate(pipe, store=pipelines.shared_store(), components=asked)
        assert pipe.sdaccel.engines().keys() == given
        options = call("controlnet", 2, **CALLS["scale 1"])
        assert same(images(pipe, "controlnet", **options), images(pair("controlnet", 2)[1], "controlnet", **options))
        assert pipe.sdaccel.last_report.components.keys() == given
    with pytest.raises(ModelError, match="no weights for controlnet"):
        sdaccel.accelerate(pipelines.make("sd1"), store=pipelines.shared_store(), components=["controlnet"])


def test_a_checkpoint_names_controlnets_as_diffusers_saves_them():
    pipe = pipelines.make("controlnet", controlnets=2)
    parts = open_checkpoint(pipe).components
    assert [name for name in parts if name.startswith("controlnet")] == ["controlnet", "controlnet_1"]
    assert parts["controlnet"].tensors.keys() == pipe.controlnet.nets[0].state_dict().keys()
    assert parts["controlnet"].content_hash != parts["controlnet_1"].content_hash
    pipe.controlnet.nets[1] = pipe.controlnet.nets[0]
    assert controlnets(pipe) == {"controlnet": pipe.controlnet.nets[0]}
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    images(pipe, "controlnet", **call("controlnet", 2, **CALLS["scale 1"]))
    assert through_engines(pipe), pipe.sdaccel.last_report
    assert pipe.sdaccel.last_report.components["controlnet"].calls == 4


def test_a_model_saved_with_controlnets_is_built_with_them(tmp_path, pair):
    """From the folder's files alone: what `accelerate` would have built of the pipeline."""
    pipe, _ = pair("controlnet", 2)
    pipe.save_pretrained(tmp_path)
    built = sdaccel.build(tmp_path, store=pipelines.shared_store(), components=["controlnet"])
    engines = pipe.sdaccel.engines()
    assert [[entry.key] for entry in built] == [engines["controlnet"], engines["controlnet_1"]]
    found = verify(open_checkpoint(tmp_path), pipelines.shared_store(), components=["controlnet_1"])
    assert found.ok and {check.component for check in found.checks} == {"controlnet"}
    assert any(check.shape["width"] == 9 and check.shape["image_width"] == 72 for check in found.checks)
    loaded = load_pipeline(open_checkpoint(tmp_path))
    assert [*controlnets(loaded)] == ["controlnet", "controlnet_1"]
    state, same_state = (net.controlnet.nets[1].state_dict() for net in (pipe, loaded))
    assert all(torch.equal(state[name], same_state[name]) for name in state)
    (tmp_path / "controlnet_1" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="controlnet_1: no weights"):
        open_checkpoint(tmp_path)


# --- what cannot be, or has changed


def test_a_new_controlnet_adds_nothing_and_is_no_fault():
    """Before its training a ControlNet's last layers are zero."""
    pipe = pipelines.make("controlnet")
    pipe.controlnet = ControlNetModel.from_unet(pipe.unet, conditioning_channels=3).eval().requires_grad_(False)
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "controlnet"), images(plain("sd1"), "sd1"))
    assert through_engines(pipe), pipe.sdaccel.last_report


def test_a_controlnet_with_nan_is_torch_and_no_success(pair):
    ours, _ = pair("controlnet")
    with torch.no_grad():
        ours.controlnet(**inputs(controlnet_cond=torch.full((2, 3, 64, 64), float("nan"))))
    report = ours.sdaccel.last_report
    assert "NaN" in reasons(ours)["controlnet"] and not report.ok
    report.__init__()


def test_a_controlnet_of_a_kind_that_no_graph_carries_is_torch():
    pipes = [pipelines.make("controlnet") for _ in range(2)]
    for pipe in pipes:
        config = {name: value for name, value in pipe.controlnet.config.items() if not name.startswith("_")}
        config |= {"addition_embed_type": "text", "addition_embed_type_num_heads": 2}
        pipe.controlnet = pipelines.scaled(ControlNetModel(**config), 9)
    ours, theirs = pipes
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    assert same(images(ours, "controlnet"), images(theirs, "controlnet"))
    assert "addition_embed_type is 'text'" in reasons(ours)["controlnet"]
    assert reasons(ours).keys() == {"controlnet"}
    assert ours.sdaccel.last_report.components["unet"].torch_calls == 0
    with pytest.raises(ExportError, match="addition_embed_type"):
        sdaccel.accelerate(theirs, store=pipelines.shared_store(), components=["controlnet"])


def test_a_union_controlnet_is_torch():
    pipes = []
    for _ in range(2):
        base = pipelines.make("sdxl")
        given = inspect.signature(ControlNetUnionModel.__init__).parameters
        config = {name: value for name, value in base.unet.config.items() if name in given and name != "self"}
        config |= {"num_trans_channel": 8, "num_proj_channel": 8, "projection_class_embeddings_input_dim": 34}
        union = ControlNetUnionModel(**config, conditioning_embedding_out_channels=(4, 4, 8, 8))
        parts = {
            name: part for name, part in base.components.items() if name not in ("image_encoder", "feature_extractor")
        }
        pipe = StableDiffusionXLControlNetUnionPipeline(**parts, controlnet=pipelines.scaled(union, 9))
        pipe.set_progress_bar_config(disable=True)
        pipes.append(pipe)
    options = {"control_image": [pipelines.picture()], "control_mode": [1]}
    ours, theirs = pipes
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    found = images(ours, "sdxl", **options)
    assert same(found, images(theirs, "sdxl", **options))
    assert reasons(ours) == {"controlnet": "controlnet is a ControlNetUnionModel: it stays in torch."}
    assert ours.sdaccel.last_report.components["unet"].torch_calls == 0
    assert not same(found, images(plain("sdxl"), "sdxl"))
    with pytest.raises(UnsupportedCall, match=r"ControlNetUnionModel: .*, and fallback=False .*components=\['unet'"):
        sdaccel.accelerate(theirs, store=pipelines.shared_store(), fallback=False)
    assert not hasattr(theirs, "sdaccel")


def test_controlnets_that_come_later_are_reported():
    pipes = [pipelines.make("controlnet") for _ in range(2)]
    ours, _ = pipes
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    for pipe in pipes:
        pipe.controlnet = pipelines.make("controlnet", seed=3).controlnet
    assert same(*(images(pipe, "controlnet") for pipe in pipes))
    assert reasons(ours) == {"controlnet": "pipe.controlnet was replaced after accelerate()"}
    for pipe in pipes:
        pipe.controlnet = pipelines.make("controlnet", controlnets=2).controlnet
    options = call("controlnet", 2, **CALLS["scale 1"])
    assert same(*(images(pipe, "controlnet", **options) for pipe in pipes))
    assert reasons(ours).keys() == {"controlnet", "controlnet_1"}


def test_a_controlnet_added_by_from_pipe(accelerated, pair):
    """The UNet's engine takes its residuals at once; accelerated itself, the ControlNet has an engine too."""
    base = accelerated("sd1")
    pipe = StableDiffusionControlNetPipeline.from_pipe(base, controlnet=pipelines.make("controlnet").controlnet)
    pipe.set_progress_bar_config(disable=True)
    expected = images(pair("controlnet")[1], "controlnet")
    assert same(images(pipe, "controlnet"), expected)
    assert base.sdaccel.last_report.components["unet"].calls == 2 and not base.sdaccel.last_report.fallbacks
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "controlnet"), expected)
    assert through_engines(pipe) and pipe.sdaccel.last_report.components["controlnet"].calls == 2
    assert same(images(base, "sd1"), images(plain("sd1"), "sd1")) and through_engines(base)


def test_edited_weights_of_a_controlnet_are_never_ignored(pair):
    pipes = [pipelines.make("controlnet") for _ in range(2)]
    sdaccel.accelerate(pipes[0], store=pipelines.shared_store())
    for pipe in pipes:
        pipe.controlnet.controlnet_mid_block.weight.data.mul_(-1)
    found, expected = (images(pipe, "controlnet") for pipe in pipes)
    assert same(found, expected)
    assert abs(expected - images(pair("controlnet")[1], "controlnet")).max() > PIPELINE_MAX_ABS


def test_adapters_of_a_controlnet(pair):
    """A control LoRA (PEFT) in the engine, at the scale of the call too."""
    from peft import LoraConfig

    ours, theirs = (pipelines.make("controlnet") for _ in range(2))
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    for pipe in (ours, theirs):
        pipe.controlnet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "conv_in"]), "lineart")
        for name, value in pipe.controlnet.named_parameters():
            if "lora_" in name:
                value.data.copy_(residual(*value.shape) / 3)
        pipe.controlnet.requires_grad_(False)
    before = images(pair("controlnet")[1], "controlnet")
    found = images(ours, "controlnet")
    assert same(found, images(theirs, "controlnet"))
    assert abs(found - before).max() > PIPELINE_MAX_ABS
    assert through_engines(ours), ours.sdaccel.last_report
    assert ours.sdaccel.last_report.components["controlnet"].adapters == ["lineart"]
    for scale in (0.5, 1.0):
        options = {"cross_attention_kwargs": {"scale": scale}, "return_dict": False}
        with torch.no_grad():
            one, other = (pipe.controlnet(**inputs(**options))[1] for pipe in (ours, theirs))
        assert (one - other).abs().max() <= PIPELINE_MAX_ABS
    ours.controlnet.disable_adapters()
    assert same(images(ours, "controlnet"), before)


def test_restore_leaves_no_trace():
    pipe = pipelines.make("controlnet", controlnets=2)
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert all("forward" in net.__dict__ for net in pipe.controlnet.nets)
    sdaccel.restore(pipe)
    assert not any("forward" in net.__dict__ for net in (*pipe.controlnet.nets, pipe.unet))


# --- other guides (G10)


def test_t2i_adapter_is_torch():
    ours, theirs = pipelines.make("adapter"), pipelines.make("adapter")
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    found = images(ours, "adapter")
    assert same(found, images(theirs, "adapter"))
    assert not same(found, images(plain("sd1"), "sd1"))
    assert "T2I-Adapter" in reasons(ours)["unet"]
    assert reasons(ours).keys() == {"unet"}
    # Past its share of the steps the adapter is left out, and engines go on.
    found = images(ours, "adapter", adapter_conditioning_scale=0.0)
    assert same(found, images(theirs, "adapter", adapter_conditioning_scale=0.0))


def test_an_ip_adapter_loaded_before_accelerate_is_torch():
    pipes = [pipelines.make("controlnet") for _ in range(2)]
    for pipe in pipes:
        pipe.unet._load_ip_adapter_weights([ip_adapter(pipe.unet)])
    ours, theirs = pipes
    sdaccel.accelerate(ours, store=pipelines.shared_store())
    options = {"ip_adapter_image_embeds": [residual(2, 1, 12)]}
    found = images(ours, "controlnet", **options)
    assert same(found, images(theirs, "controlnet", **options))
    assert "IPAdapterAttnProcessor" in reasons(ours)["unet"]
    assert ours.sdaccel.last_report.components["controlnet"].torch_calls == 0


def test_an_ip_adapter_beside_a_controlnet_of_sdxl():
    """The ControlNet has no use for image_embeds, in torch either; only the UNet leaves its engine."""
    pipes = [pipelines.make("sdxl-controlnet") for _ in range(2)]
    sdaccel.accelerate(pipes[0], store=pipelines.shared_store())
    for pipe in pipes:
        pipe.unet._load_ip_adapter_weights([ip_adapter(pipe.unet)])
    options = {"ip_adapter_image_embeds": [residual(2, 1, 12)]}
    assert same(*(images(pipe, "sdxl-controlnet", **options) for pipe in pipes))
    assert reasons(pipes[0]).keys() == {"unet"}
