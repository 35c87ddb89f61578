"""The shapes that real Stable Diffusion models run at, for every test to draw from."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_CHUNK = 77
TOKENS = (77, 154, 231)
"""Prompts of one to three chunks."""

ODD_LATENTS = ((13, 9), (125, 125), (104, 152))
"""(height, width) that two or three halvings do not divide, from reports of broken skip connections."""

SDXL_BUCKETS = (
    (1024, 1024),
    (1152, 896),
    (896, 1152),
    (1216, 832),
    (832, 1216),
    (1344, 768),
    (768, 1344),
    (1536, 640),
    (640, 1536),
)
"""(width, height) in pixels that SDXL was trained at."""


@dataclass(frozen=True)
class UNetShapes:
    """What a published UNet computes: one entry a level, finest first."""

    native_side: int
    """pixels; latents are an eighth"""
    text_width: int
    channels: tuple[int, ...]
    heads: tuple[int, ...]
    """attention heads; 0 where a level has none"""
    layers: int
    """resnets a level on the way down; one more on the way up"""
    vector: int | None = None
    """width of y"""

    @property
    def latent(self) -> int:
        return self.native_side // 8

    def head_dims(self) -> list[int]:
        return [channels // heads for channels, heads in zip(self.channels, self.heads, strict=True) if heads]

    def attention(self, side: int | None = None, tokens: int = PROMPT_CHUNK) -> list[tuple[int, int, int, int]]:
        """(heads, queries, keys, head dim) of each level's self- and cross-attention at ``side`` pixels."""
        shapes = []
        for level, (channels, heads) in enumerate(zip(self.channels, self.heads, strict=True)):
            if heads:
                queries = ((side or self.native_side) // 8 >> level) ** 2
                shapes += [(heads, queries, keys, channels // heads) for keys in (queries, tokens)]
        return shapes


SD15 = UNetShapes(512, 768, (320, 640, 1280, 1280), (8, 8, 8, 0), 2)
SD21 = UNetShapes(768, 1024, (320, 640, 1280, 1280), (5, 10, 20, 0), 2)
SDXL = UNetShapes(1024, 2048, (320, 640, 1280), (0, 10, 20), 2, vector=2816)
SDXL_REFINER = UNetShapes(1024, 1280, (384, 768, 1536, 1536), (0, 12, 24, 0), 2, vector=2560)
UNETS = {"sd15": SD15, "sd21": SD21, "sdxl": SDXL, "sdxl-refiner": SDXL_REFINER}

VAE_CHANNELS = (128, 256, 512, 512)
VAE_ATTENTION_HEAD_DIM = 512
"""one head over all pixels of the latent"""

TEXT_WIDTHS = {"sd15": (768,), "sd21": (1024,), "sdxl": (768, 1280), "sdxl-refiner": (1280,)}
