"""Which kind of Stable Diffusion a set of component configs describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from sdaccel.errors import ModelError

Config = Mapping[str, Any]


class Family(Enum):
    SD1 = "sd1"
    SD2 = "sd2"
    SDXL = "sdxl"
    SDXL_REFINER = "sdxl-refiner"

    @property
    def label(self) -> str:
        return _LABELS[self]

    @property
    def is_xl(self) -> bool:
        return self in (Family.SDXL, Family.SDXL_REFINER)


_LABELS = {
    Family.SD1: "Stable Diffusion 1.x",
    Family.SD2: "Stable Diffusion 2.x",
    Family.SDXL: "Stable Diffusion XL",
    Family.SDXL_REFINER: "Stable Diffusion XL refiner",
}
EXPECTED = "Expected " + ", ".join(_LABELS.values()) + "."
_NATIVE_SIDE = {Family.SD1: 512, Family.SD2: 512, Family.SDXL: 1024, Family.SDXL_REFINER: 1024}


def detect_family(unet_config: Config, components: Collection[str]) -> Family:
    """The family of a UNet beside the named components ("text_encoder", …). Raises ModelError for any other network."""
    addition = unet_config.get("addition_embed_type")
    encoder_hid = unet_config.get("encoder_hid_dim_type")
    if encoder_hid not in (None, "ip_image_proj"):
        raise ModelError(
            f"the UNet projects its text through encoder_hid_dim_type={encoder_hid!r} (Kolors, IF).", hint=EXPECTED
        )
    if unet_config.get("class_embed_type") is not None or unet_config.get("num_class_embeds") is not None:
        raise ModelError("the UNet takes class labels (an upscaler or unCLIP).", hint=EXPECTED)
    if addition == "text_time":
        return _base_or_refiner(unet_config, components)
    if addition is not None:
        raise ModelError(f"the UNet has addition_embed_type={addition!r}.", hint=EXPECTED)
    if not isinstance(unet_config.get("cross_attention_dim"), (int, list, tuple)):
        raise ModelError("the UNet has no cross-attention width (cross_attention_dim) in its config.", hint=EXPECTED)
    return Family.SD2 if unet_config.get("use_linear_projection") else Family.SD1


def _base_or_refiner(unet_config: Config, components: Collection[str]) -> Family:
    if {"text_encoder", "text_encoder_2"} <= set(components):
        return Family.SDXL
    # A pipeline may have been saved without an encoder, so widths decide: the vector is the pooled text and six sizes
    # (base) or five, one of them a score (refiner), and the refiner alone attends to the very encoder that the pooled
    # text comes from.
    width, sizes = (
        unet_config.get(key) for key in ("projection_class_embeddings_input_dim", "addition_time_embed_dim")
    )
    if not isinstance(width, int) or not isinstance(sizes, int):
        raise ModelError("the UNet's config lacks the widths of its added embeddings.", hint=EXPECTED)
    return Family.SDXL_REFINER if width - 5 * sizes == unet_config.get("cross_attention_dim") else Family.SDXL


def variant(unet_config: Config) -> str:
    """What the input channels are for: "text-to-image", "inpaint" (latents, mask, masked latents), "8-channel", …"""
    given = int(unet_config.get("in_channels") or 4)
    latent = int(unet_config.get("out_channels") or 4)
    if given == latent:
        return "text-to-image"
    return "inpaint" if given == 2 * latent + 1 else f"{given}-channel"


def vae_factor(vae_config: Config) -> int:
    """Image pixels per latent pixel, along one side."""
    levels = vae_config.get("block_out_channels")
    return 2 ** (len(levels) - 1) if isinstance(levels, (list, tuple)) and 0 < len(levels) < 16 else 8


def native_side(unet_config: Config, vae_config: Config, family: Family | None = None) -> int:
    """The image side, in pixels, that the model was trained at."""
    size = unet_config.get("sample_size")
    if isinstance(size, (list, tuple)):
        size = max((side for side in size if isinstance(side, int)), default=None)
    if isinstance(size, int) and size > 0:
        return size * vae_factor(vae_config)
    return _NATIVE_SIDE[family or detect_family(unet_config, ())]
