from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import sdaccel
from sdaccel.errors import ExportError
from sdaccel.export.components import COMPONENTS, component_spec, kind_of, residual_layout, source_of
from sdaccel.export.to_onnx import architecture_hash
from tests import shapes
from tests.export import tiny

CONFIGS = Path(sdaccel.__file__).parent / "models" / "configs"


def published(model: str, component: str) -> dict:
    return json.loads((CONFIGS / model / f"{component}.json").read_text(encoding="utf-8"))


def inputs_of(component: str, config: dict) -> dict[str, tuple]:
    return {tensor.name: tensor.shape for tensor in component_spec(component, config).inputs}


def test_both_halves_of_the_vae_share_their_weights():
    sources = [source_of(component) for component in COMPONENTS]
    assert sources == ["unet", "vae", "vae", "text_encoder", "text_encoder_2", "controlnet"]
    with pytest.raises(ExportError, match=r"no component 'refiner'.*vae_decoder"):
        source_of("refiner")


def test_further_controlnets_have_weights_of_their_own_and_the_architecture_of_the_first():
    assert source_of("controlnet_1") == "controlnet_1"
    assert [kind_of(name) for name in ("controlnet", "controlnet_12", "unet")] == ["controlnet", "controlnet", "unet"]
    assert component_spec("controlnet_1", tiny.CONTROLNET) == component_spec("controlnet", tiny.CONTROLNET)
    assert architecture_hash("controlnet_1", tiny.CONTROLNET) == architecture_hash("controlnet", tiny.CONTROLNET)
    for name in ("controlnet_0", "controlnet_", "controlnet_1a"):
        with pytest.raises(ExportError, match="no component"):
            source_of(name)


def test_a_controlnet_gives_what_the_unet_takes():
    for unet, controlnet in ((tiny.SD1, tiny.CONTROLNET), (tiny.SDXL, tiny.CONTROLNET_SDXL)):
        residuals = [tensor for tensor in component_spec("unet", unet).inputs if "residual" in tensor.name]
        assert [tensor.name for tensor in component_spec("controlnet", controlnet).outputs] == [
            tensor.name for tensor in residuals
        ]
    inputs = inputs_of("controlnet", tiny.CONTROLNET_SDXL)
    assert inputs["y"] == ("batch", 34)
    assert inputs["controlnet_cond"] == ("batch", 3, "image_height", "image_width")
    short = {**tiny.CONTROLNET, "conditioning_embedding_out_channels": [4, 8, 8]}
    first = component_spec("controlnet", short).shapes[0]
    assert (first["image_height"], first["image_width"]) == (4 * first["height"], 4 * first["width"])


@pytest.mark.parametrize(("name", "channels"), [("sd1", 4), ("inpaint", 9), ("lcm-8-channel", 8)])
def test_channels_come_from_the_config(name, channels):
    assert inputs_of("unet", tiny.UNETS[name])["sample"] == ("batch", channels, "height", "width")


def test_vector_and_guidance_inputs_exist_where_the_config_has_them():
    assert "y" not in inputs_of("unet", tiny.SD1)
    assert inputs_of("unet", tiny.SDXL)["y"] == ("batch", 34)
    assert inputs_of("unet", tiny.REFINER)["y"] == ("batch", 30)
    assert inputs_of("unet", tiny.LCM_8_CHANNELS)["timestep_cond"] == ("timestep_cond_batch", 6)
    assert "timestep_cond" not in inputs_of("unet", tiny.SDXL)


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_residuals_are_what_the_down_path_makes(name):
    """The declared layout against the sizes of the skips that diffusers computes."""
    from diffusers import UNet2DConditionModel

    config = {key: value for key, value in tiny.UNETS[name].items() if not key.startswith("_")}
    unet = UNet2DConditionModel(**config)
    skips, mids = [], []
    unet.conv_in.register_forward_hook(lambda module, args, out: skips.append(out))
    for block in unet.down_blocks:
        block.register_forward_hook(lambda module, args, out: skips.extend(out[1]))
    unet.mid_block.register_forward_hook(lambda module, args, out: mids.append(out))
    sample, text = torch.randn(2, 4, 13, 9), torch.randn(2, 5, 12)
    added = {"text_embeds": torch.randn(2, 10), "time_ids": torch.zeros(2, 6)} if name == "sdxl" else None
    with torch.inference_mode():
        unet(sample, torch.tensor(3), text, added_cond_kwargs=added)
    expected = component_spec("unet", config).optional_shapes({"batch": 2, "height": 13, "width": 9, "tokens": 5})
    assert list(expected.values()) == [tuple(tensor.shape) for tensor in [*skips, *mids]]


@pytest.mark.parametrize("model", list(shapes.UNETS))
def test_test_shapes_are_those_of_published_configs(model):
    want, config = shapes.UNETS[model], published(model, "unet")
    levels = len(config["block_out_channels"])
    heads = config["attention_head_dim"]
    heads = [heads] * levels if isinstance(heads, int) else heads
    attends = ["CrossAttn" in kind for kind in config["down_block_types"]]
    assert tuple(config["block_out_channels"]) == want.channels
    assert tuple(count if has else 0 for count, has in zip(heads, attends, strict=True)) == want.heads
    assert (config["cross_attention_dim"], config["sample_size"]) == (want.text_width, want.latent)
    assert config.get("projection_class_embeddings_input_dim") == want.vector
    assert len(residual_layout(config)) == 1 + levels * want.layers + (levels - 1) + 1


def test_text_encoders_give_every_hidden_state():
    spec = component_spec("text_encoder_2", published("sdxl", "text_encoder_2"))
    names = [tensor.name for tensor in spec.outputs]
    assert names == [f"hidden_{index}" for index in range(33)] + ["last_hidden_state", "pooled"]
    assert spec.outputs[-1].shape == ("batch", 1280)


@pytest.mark.parametrize(
    ("component", "change", "named"),
    [
        ("unet", {"class_embed_type": "timestep"}, "class_embed_type is 'timestep'"),
        ("unet", {"num_class_embeds": 10}, "num_class_embeds is 10"),
        ("unet", {"addition_embed_type": "text"}, "addition_embed_type is 'text'"),
        ("unet", {"addition_embed_type": "text_time"}, "projection_class_embeddings_input_dim is None"),
        ("unet", {"encoder_hid_dim_type": "ip_image_proj"}, "encoder_hid_dim_type is 'ip_image_proj'"),
        ("unet", {"attention_type": "gated"}, "attention_type is 'gated'"),
        ("unet", {"down_block_types": ["DownBlock2D", "KDownBlock2D"]}, "down_block_types is 'KDownBlock2D'"),
        ("unet", {"_class_name": "UNet3DConditionModel"}, "_class_name is 'UNet3DConditionModel'"),
        ("vae_decoder", {"_class_name": "AutoencoderTiny"}, "_class_name is 'AutoencoderTiny'"),
        ("controlnet", {"_class_name": "ControlNetUnionModel"}, "_class_name is 'ControlNetUnionModel'"),
        ("controlnet", {"class_embed_type": "timestep"}, "controlnet cannot.*class_embed_type is 'timestep'"),
        ("text_encoder", {"model_type": "t5"}, "model_type is 't5'"),
        ("text_encoder", {"eos_token_id": [1, 2]}, "eos_token_id"),
    ],
)
def test_refusals_name_the_config_field(component, change, named):
    config = {"unet": tiny.SD1, "vae_decoder": tiny.VAE, "text_encoder": tiny.TEXT}
    config = {**config, "controlnet": tiny.CONTROLNET}[component]
    with pytest.raises(ExportError, match=named) as caught:
        component_spec(component, {**config, **change})
    assert caught.value.hint


def test_hash_ignores_what_leaves_the_graph_alone():
    same = {**tiny.SD1, "sample_size": 96, "_name_or_path": "elsewhere", "_diffusers_version": "0.1", "dropout": 0.1}
    written_out = {**same, "time_cond_proj_dim": None, "upcast_attention": None, "act_fn": "silu"}
    assert {architecture_hash("unet", config) for config in (tiny.SD1, same, written_out)} == {
        architecture_hash("unet", tiny.SD1)
    }
    assert architecture_hash("vae_decoder", {**tiny.VAE, "scaling_factor": 0.13025}) == architecture_hash(
        "vae_decoder", tiny.VAE
    )
    outside = {"controlnet_conditioning_channel_order": "bgr", "global_pool_conditions": True}
    assert architecture_hash("controlnet", {**tiny.CONTROLNET, **outside}) == architecture_hash(
        "controlnet", tiny.CONTROLNET
    )
    assert architecture_hash("text_encoder", {**tiny.TEXT, "torch_dtype": "float16"}) == architecture_hash(
        "text_encoder", tiny.TEXT
    )


def test_hash_tells_architectures_apart(monkeypatch):
    hashes = [architecture_hash(component, config) for component, config in tiny.MODELS.values()]
    changed = [{"norm_eps": 1e-6}, {"flip_sin_to_cos": False}, {"layers_per_block": 2}, {"center_input_sample": True}]
    hashes += [architecture_hash("unet", {**tiny.SD1, **change}) for change in changed]
    hashes.append(architecture_hash("text_encoder", {**tiny.TEXT, "vocab_size": 61}))
    hashes.append(architecture_hash("text_encoder", {**tiny.TEXT, "eos_token_id": 2}))
    hashes.append(architecture_hash("controlnet", {**tiny.CONTROLNET, "conditioning_channels": 1}))
    assert len(set(hashes)) == len(hashes)
    monkeypatch.setattr("diffusers.__version__", "99.0")
    assert architecture_hash("unet", tiny.SD1) != hashes[0]
