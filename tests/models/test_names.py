"""Names and shapes at the published sizes, against the libraries' own networks and diffusers' own converters."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders import single_file_utils as theirs
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdaccel.models import ldm
from sdaccel.models.single_file import CONFIGS, published
from sdaccel.models.tensors import TensorRef
from tests.models import tiny

SETS = ("sd15", "sd21-base", "sd21", "sdxl", "sdxl-refiner")
PARTS = [
    (name, part.stem) for name in SETS for part in sorted((CONFIGS / name).glob("*.json")) if part.stem != "scheduler"
]
LCM = {"time_cond_proj_dim": 256}
SSD_1B = {  # distilled SDXL: depths differ from layer to layer, no attention in the middle
    "mid_block_type": "UNetMidBlock2D",
    "transformer_layers_per_block": [1, 2, 4],
    "reverse_transformer_layers_per_block": [[4, 4, 10], [2, 1, 1], 1],
}


def network(component: str, config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        if component == "unet":
            return UNet2DConditionModel.from_config(config)
        if component == "vae":
            return AutoencoderKL.from_config(config)
        kind = CLIPTextModelWithProjection if ldm.has_projection(config) else CLIPTextModel
        return kind(CLIPTextConfig.from_dict(config))


@pytest.mark.parametrize(("name", "component"), PARTS)
def test_published_configs(name, component):
    config = published(name, component)
    places = ldm.places(component, config)
    state = network(component, config).state_dict()
    assert {place.name: place.shape for place in places} == {key: tuple(value.shape) for key, value in state.items()}
    assert len({place.ldm for place in places}) == len(places) == len(state)
    shapes = {place.ldm: place.shape for place in places}
    infer = {"unet": ldm.infer_unet, "vae": ldm.infer_vae}.get(component, ldm.infer_clip)
    assert infer(shapes, config) == config


@pytest.mark.parametrize("change", [{"in_channels": 9}, LCM, {"layers_per_block": [1, 2, 3]}, SSD_1B], ids=str)
def test_variants_of_a_unet(change):
    config = published("sdxl", "unet") | change
    places = ldm.places("unet", config)
    state = network("unet", config).state_dict()
    assert {place.name: place.shape for place in places} == {key: tuple(value.shape) for key, value in state.items()}
    found = ldm.infer_unet({place.ldm: place.shape for place in places}, published("sdxl", "unet"))
    assert ldm.places("unet", found) == places


@pytest.mark.parametrize(
    "config", [{"use_quant_conv": False, "use_post_quant_conv": False}, {"latent_channels": 16}], ids=str
)
def test_variants_of_a_vae(config):
    config = published("sdxl", "vae") | config
    places = ldm.places("vae", config)
    state = network("vae", config).state_dict()
    assert {place.name: place.shape for place in places} == {key: tuple(value.shape) for key, value in state.items()}
    for names in ("name", "ldm"):
        found = ldm.infer_vae({getattr(place, names): place.shape for place in places}, published("sdxl", "vae"))
        assert ldm.places("vae", found) == places


@pytest.mark.parametrize("key", ["dual_cross_attention", "class_embeddings_concat"])
def test_unknown_layers_are_said_to_be_unknown(key):
    with pytest.raises(ldm.Unmodelled, match=key):
        ldm.places("unet", published("sd15", "unet") | {key: True})


@pytest.mark.parametrize("name", SETS)
def test_unet_names_as_diffusers_converts_them(name):
    config = published(name, "unet")
    places = ldm.places("unet", config)
    prefix = "model.diffusion_model."
    file = {prefix + place.ldm: torch.empty(place.shape, device="meta") for place in places}
    expected = theirs.convert_ldm_unet_checkpoint(dict(file), config)
    assert expected.keys() == {place.name for place in places}
    assert all(expected[place.name] is file[prefix + place.ldm] for place in places)
    # and as the original code's module tree gives them
    names = tiny.unet_names(network("unet", config))
    assert names == {place.name: prefix + place.ldm for place in places}
    assert theirs.infer_diffusers_model_type(_with_encoder_keys(name, file)) in {
        "sd15": ("v1",),
        "sdxl": ("xl_base",),
        "sdxl-refiner": ("xl_refiner",),
    }.get(name, ("v2",))


def _with_encoder_keys(name: str, file: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    key = {"sdxl": "xl_base", "sdxl-refiner": "xl_refiner"}.get(name)
    return {**file, theirs.CHECKPOINT_KEY_NAMES[key]: torch.empty(1)} if key else file


def test_averaged_names_as_diffusers_reads_them():
    for name in SETS:
        for place in ldm.places("unet", published(name, "unet")):
            flat = "".join(f"model.diffusion_model.{place.ldm}".split(".")[1:])
            assert ldm.with_dots(flat.removeprefix("diffusion_model")) == place.ldm
    assert ldm.with_dots("somethingelse") is None


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_vae_names_as_diffusers_converts_them(name):
    config = published(name, "vae")
    places = ldm.places("vae", config)
    prefix = "first_stage_model."

    def stored(place: ldm.Place) -> torch.Size:
        attention = ".attn_1." in place.ldm and len(place.shape) == 2
        return torch.Size((*place.shape, 1, 1) if attention else place.shape)

    file = {prefix + place.ldm: torch.empty(stored(place), device="meta") for place in places}
    expected = theirs.convert_ldm_vae_checkpoint(dict(file), config)
    assert {key: tuple(value.shape) for key, value in expected.items()} == {place.name: place.shape for place in places}
    assert tiny.vae_names(network("vae", config)) == {place.name: prefix + place.ldm for place in places}
    refs = {place.ldm: TensorRef(place.ldm, "F32", tuple(stored(place)), file[prefix + place.ldm]) for place in places}
    found, rest = ldm.assemble("vae", config, refs, "here", original=True)
    assert found.keys() == expected.keys() and not rest


@pytest.mark.parametrize(("kind", "projects"), [("sd2", False), ("sdxl", True)])
def test_open_clip_as_diffusers_converts_it(kind, projects):
    torch.manual_seed(0)
    encoder = tiny.text_encoder(projects, layers=4, act="gelu")
    file = tiny.open_clip_weights(encoder, "")
    if not projects:
        file["text_projection"] = torch.randn(64, 64)
    expected = theirs.convert_open_clip_checkpoint(encoder, {f"p.{key}": value for key, value in file.items()}, "p.")
    refs = {key: TensorRef(key, "F32", tuple(value.shape), value) for key, value in file.items()}
    found, rest = ldm.from_open_clip(refs, 4)
    assert rest == ["logit_scale"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].read(), expected[key]) for key in expected)


def test_real_open_clip_towers_have_their_published_depth():
    def tower(blocks: int, *extra: str) -> set[str]:
        return {f"transformer.resblocks.{block}.ln_1.weight" for block in range(blocks)} | set(extra)

    assert ldm.open_clip_layers(tower(24, "text_projection"), projects=False) == 23
    assert ldm.open_clip_layers(tower(24), projects=False) == 23
    assert ldm.open_clip_layers(tower(23), projects=False) == 23
    assert ldm.open_clip_layers(tower(32, "text_projection"), projects=True) == 32
