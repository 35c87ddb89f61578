"""How activations lie in memory: images [B, C, H, W] with the channels innermost, tokens [B, S, C]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

C_TYPE = {torch.float16: "half_t", torch.bfloat16: "bf16_t", torch.float32: "float"}
HALVES = (torch.float16, torch.bfloat16)


def pixels(x: Tensor) -> tuple[int, int] | None:
    """(stride of an image, stride of a pixel) in elements when the channels of x [B, C, ...] are innermost and its
    pixels are evenly spaced; None otherwise."""
    if x.shape[1] > 1 and x.stride(1) != 1:
        return None
    row, inner = x.shape[1], 1
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if inner == 1:
            row = stride
        elif stride != row * inner:
            return None
        inner *= size
    return (x.stride(0) if x.shape[0] > 1 else row * inner), row


def rows(x: Tensor) -> int | None:
    """Stride of a row in elements when the rows x[..., :] are evenly spaced and dense within; None otherwise."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    row, inner = x.shape[-1], 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if inner == 1:
            row = stride
        elif stride != row * inner:
            return None
        inner *= size
    return row


def aligned(*tensors: Tensor | None) -> bool:
    """All start on 16 bytes."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


def empty_image(like: Tensor, channels: int, spatial: Sequence[int] | None = None) -> Tensor:
    """[B, channels, *spatial] of like's type and device, channels innermost."""
    spatial = like.shape[2:] if spatial is None else spatial
    return torch.empty((like.shape[0], *spatial, channels), dtype=like.dtype, device=like.device).movedim(-1, 1)
