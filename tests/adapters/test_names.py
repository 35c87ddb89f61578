"""Modules of the published models under the names that trainers give them."""

from __future__ import annotations

import pytest

from sdaccel.adapters.keys import split_key, split_module
from sdaccel.adapters.names import Modules
from sdaccel.models import ldm
from sdaccel.models.single_file import CONFIGS, published

FAMILIES = ("sd15", "sd21", "sdxl", "sdxl-refiner")


def components(family: str) -> dict[str, list[ldm.Place]]:
    found = {"unet": ldm.places("unet", published(family, "unet"))}
    for name in ("text_encoder", "text_encoder_2"):
        if (CONFIGS / family / f"{name}.json").is_file():
            found[name] = ldm.places(name, published(family, name))
    return found


def module(name: str) -> str:
    return name.rpartition(".")[0]


PREFIXES = {"unet": ["lora_unet_"], "text_encoder": ["lora_te_", "lora_te1_"], "text_encoder_2": ["lora_te2_"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_is_found_under_every_name(family):
    parts = components(family)
    modules = {name: Modules(place.name for place in places) for name, places in parts.items()}
    count = 0
    for component, places in parts.items():
        for place in places:
            if not place.name.endswith(".weight"):
                continue
            target = module(place.name)
            for style in (target, module(place.ldm)):
                for prefix in PREFIXES[component]:
                    flat = f"{prefix}{style.replace('.', '_')}.lora_down.weight"
                    key = split_key(flat)
                    assert key is not None and key.part == "down"
                    where, inside = split_module(key.module)
                    assert (where, modules[where].find(inside)) == (component, target), flat
                assert modules[component].find(style) == target
                count += 1
    assert count > 300


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_names_are_never_those_of_two_modules(family):
    for places in components(family).values():
        names = {}
        for place in places:
            for style in {module(place.name), module(place.ldm)}:
                assert names.setdefault(style.replace(".", "_"), module(place.name)) == module(place.name)


@pytest.mark.parametrize("family", ("sd15", "sdxl"))
def test_the_modules_of_torch_are_those(family):
    """The published config through diffusers itself, without memory for weights."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(published(family, "unet"))
    modules = Modules(unet.state_dict())
    walked = [name for name, each in unet.named_modules() if isinstance(each, (torch.nn.Linear, torch.nn.Conv2d))]
    assert len(walked) > 200
    for name in walked:
        assert modules.find(split_module("lora_unet_" + name.replace(".", "_"))[1]) == name


CASES = {
    "unet.down_blocks.0.attentions.0.proj_in.lora_A.weight": ("unet", "down_blocks.0.attentions.0.proj_in", "down"),
    "unet.mid_block.attentions.0.proj_in.lora.up.weight": ("unet", "mid_block.attentions.0.proj_in", "up"),
    "mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.down.weight": (
        "unet", "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0", "down",
    ),
    "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight": (
        "text_encoder", "text_model.encoder.layers.0.mlp.fc1", "up",
    ),
    "base_model.model.unet.conv_in.lora_B.default.weight": ("unet", "conv_in", "up"),
    "model.diffusion_model.input_blocks.1.1.proj_in.lora_A.weight": ("unet", "input_blocks.1.1.proj_in", "down"),
    "lora_te2_text_projection.alpha": ("text_encoder_2", "text_projection", "alpha"),
    "transformer.blocks.0.attn.to_q.lora_A.weight": ("transformer", "blocks.0.attn.to_q", "down"),
    "lora_unet_conv_in.hada_w1_a": ("unet", "conv_in", "hada_w1_a"),
    "lycoris_conv_in.lokr_w2_b": ("unet", "conv_in", "lokr_w2_b"),
    "base_model.model.conv_in.lora_magnitude_vector": ("unet", "conv_in", "magnitude"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_names_of_every_kind(name):
    key = split_key(name)
    assert key is not None
    assert (*split_module(key.module), key.part) == CASES[name]


@pytest.mark.parametrize("name", ["string_to_param", "lora_unet_conv_in.lora_down", "alpha", ".alpha", ""])
def test_names_of_no_format(name):
    assert split_key(name) is None
