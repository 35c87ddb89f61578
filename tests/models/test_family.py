"""Families and variants come from configs."""

from __future__ import annotations

import pytest

from sdaccel.errors import ModelError
from sdaccel.models.family import Family, detect_family, native_side, vae_factor, variant
from sdaccel.models.single_file import published

SETS = {
    "sd15": (Family.SD1, 512),
    "sd21-base": (Family.SD2, 512),
    "sd21": (Family.SD2, 768),
    "sdxl": (Family.SDXL, 1024),
    "sdxl-refiner": (Family.SDXL_REFINER, 1024),
}


@pytest.mark.parametrize("name", SETS)
def test_published_models(name):
    unet, vae = published(name, "unet"), published(name, "vae")
    family, side = SETS[name]
    encoders = {
        Family.SDXL: {"text_encoder", "text_encoder_2"},
        Family.SDXL_REFINER: {"text_encoder_2"},
    }.get(family, {"text_encoder"})
    assert detect_family(unet, encoders) is family
    for rest in (set(), {"text_encoder"}, {"text_encoder_2"}):  # a UNet says it alone, whatever encoder is left out
        assert detect_family(unet, rest) is family
    assert native_side(unet, vae) == native_side(unet, vae, family) == side
    assert vae_factor(vae) == 8
    assert variant(unet) == "text-to-image"
    without = {key: value for key, value in unet.items() if key != "sample_size"}
    assert native_side(without, vae) == (1024 if family.is_xl else 512)
    assert family.label.startswith("Stable Diffusion")


@pytest.mark.parametrize(
    ("channels", "expected"), [(4, "text-to-image"), (9, "inpaint"), (8, "8-channel"), (5, "5-channel")]
)
def test_variants(channels, expected):
    assert variant({"in_channels": channels, "out_channels": 4}) == expected


def test_sizes():
    vae = {"block_out_channels": [1, 2, 3]}
    assert native_side({"sample_size": [96, 64]}, vae) == 384
    assert vae_factor({}) == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"encoder_hid_dim_type": "text_image_proj"}, "Kolors"),
        ({"class_embed_type": "projection"}, "unCLIP"),
        ({"num_class_embeds": 1000}, "upscaler"),
        ({"addition_embed_type": "text"}, "addition_embed_type='text'"),
        ({"cross_attention_dim": None}, "no cross-attention width"),
    ],
)
def test_other_networks(change, says):
    with pytest.raises(ModelError, match=rf"{says}.*Expected"):
        detect_family(published("sd15", "unet") | change, {"text_encoder"})


def test_ip_adapters_do_not_change_the_family():
    assert detect_family(published("sd15", "unet") | {"encoder_hid_dim_type": "ip_image_proj"}, ()) is Family.SD1
