"""What moves or maps elements without reducing them. Each class is one op: its reference and its tactics.

Images are [B, C, H, W] with the channels innermost in memory, unless said otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.launch import Device, Kernel, Long, kernel
from sdaccel.backends.cuda.ops.layout import C_TYPE, HALVES, aligned, empty_image, pixels
from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.errors import BackendError

FILE, THREADS = "elementwise.cu", 256  # as in the source
VARIANTS = [
    (FILE, "upsample", {"SDACCEL_T": "half_t"}, (7, 5)),
    (FILE, "timestep_embedding", {"SDACCEL_T": "bf16_t", "SOURCE": "int64_t"}, (7, 5)),
    (FILE, "changed", {"SDACCEL_T": "half_t"}, (7, 5)),
]
NUMBERS = {**C_TYPE, torch.int64: "int64_t", torch.int32: "int32_t"}


def _kernel(entry: str, dtype: torch.dtype, **defines: object) -> Kernel:
    return kernel(FILE, entry, {"SDACCEL_T": C_TYPE[dtype], **defines})


def _blocks(threads: int) -> int:
    return -(-threads // THREADS)


def _pdl(device: Device) -> bool:
    return device.capability >= (9, 0)


def _even(x: Tensor) -> bool:
    """Channels are innermost and every pixel starts on 16 bytes."""
    strides = pixels(x)
    return (
        x.dtype in HALVES
        and x.numel() > 0
        and strides is not None
        and not any(n % 8 for n in (x.shape[1], *strides))
        and aligned(x)
        and math.prod(x.shape[1:]) < 2**31
    )


def _channels_last(y: Tensor) -> Tensor:
    return y.movedim(1, -1).contiguous().movedim(-1, 1)


class upsample:
    """The nearest pixel, to ``sides`` (height, width): source row = floor(row * rows in / rows out)."""

    @staticmethod
    def reference(x: Tensor, *, sides: tuple[int, int]) -> Tensor:
        for axis, side in zip((2, 3), sides, strict=True):
            source = torch.arange(side, device=x.device) * x.shape[axis] // side
            x = x.index_select(axis, source)
        return x

    @staticmethod
    def tactics(device: Device, x: Tensor, *, sides: tuple[int, int]) -> list[Tactic]:
        height, width = sides

        def plain() -> Tensor:
            if (height, width) == (2 * x.shape[2], 2 * x.shape[3]):
                return _channels_last(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            return _channels_last(upsample.reference(x, sides=sides))

        def run() -> Tensor:
            y = empty_image(x, x.shape[1], sides)
            image, pixel = pixels(x) or (0, 0)
            chunks = x.shape[1] // 8
            _kernel("upsample", x.dtype)(
                (_blocks(width * chunks), height, x.shape[0]),
                THREADS,
                [x, Long(image), pixel, y, chunks, x.shape[2], x.shape[3], height, width],
                pdl=_pdl(device),
            )
            return y

        suits = device.capability >= (7, 5) and _even(x) and max(*sides, *x.shape[2:]) <= 32768
        return [*([Tactic("ours", run)] if suits else []), Tactic("torch", plain)]


class timestep_embedding:
    """timestep [B], frequencies [D / 2] or [1, D / 2] float32 → [B, D] of ``dtype``: the sines of timestep · frequency,
    then the cosines; the other way round with ``flip_sin_to_cos``."""

    @staticmethod
    def frequencies(width: int, freq_shift: float = 0.0, max_period: float = 10000.0) -> Tensor:
        """Of diffusers' get_timestep_embedding, for even widths: float32 [width / 2], on the CPU."""
        half = width // 2
        return torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / (half - freq_shift))

    @staticmethod
    def reference(timestep: Tensor, frequencies: Tensor, *, flip_sin_to_cos: bool, dtype: torch.dtype) -> Tensor:
        angles = timestep.to(frequencies.dtype)[:, None] * frequencies.reshape(1, -1)
        parts = (angles.cos(), angles.sin()) if flip_sin_to_cos else (angles.sin(), angles.cos())
        y = torch.cat(parts, -1)
        return y if y.dtype == torch.float64 else y.to(dtype)

    @staticmethod
    def tactics(
        device: Device, timestep: Tensor, frequencies: Tensor, *, flip_sin_to_cos: bool, dtype: torch.dtype
    ) -> list[Tactic]:
        def run() -> Tensor:
            half, batch = frequencies.numel(), timestep.shape[0]
            y = torch.empty((batch, 2 * half), dtype=dtype, device=timestep.device)
            _kernel("timestep_embedding", dtype, SOURCE=NUMBERS[timestep.dtype])(
                (_blocks(half), batch),
                THREADS,
                [timestep, timestep.stride(0), frequencies, y, half, int(flip_sin_to_cos)],
                pdl=_pdl(device),
            )
            return y

        suits = (
            dtype in HALVES
            and timestep.dtype in NUMBERS
            and timestep.dim() == 1
            and timestep.numel() > 0
            and frequencies.dtype == torch.float32
            and frequencies.is_contiguous()
            and frequencies.numel() > 0
        )
        plain = Tactic(
            "torch",
            lambda: timestep_embedding.reference(timestep, frequencies, flip_sin_to_cos=flip_sin_to_cos, dtype=dtype),
        )
        return [*([Tactic("ours", run)] if suits else []), plain]


def changed(value: Tensor, stored: Tensor, flag: Tensor) -> None:
    """flag = 1 where any bit of ``value`` differs from ``stored``, else 0; stored = value.

    value, stored: the same shape and type; stored is dense. flag: int32 [1] on the device, 0 or 1 before the call.
    Raises BackendError where they do not match.
    """
    if value.shape != stored.shape or value.dtype != stored.dtype or flag.dtype != torch.int32 or flag.numel() != 1:
        raise BackendError(
            f"changed: {tuple(value.shape)} {value.dtype} against {tuple(stored.shape)} {stored.dtype}, "
            f"flag {tuple(flag.shape)} {flag.dtype}."
        )
    if value.stride() != stored.stride() or not value.is_contiguous():
        value = value.contiguous()
    size = value.numel() * value.element_size()
    if not stored.is_contiguous() or not aligned(value, stored) or size % 2 or size >= 2**34:
        old, new = (t.reshape(-1).view(torch.uint8) for t in (stored, value))
        flag.copy_((old != new).any().reshape(flag.shape))
        stored.copy_(value)
        return
    device = Device.at(value.device.index)
    words, rest = size // 16, size % 16 // 2
    blocks = max(1, min(_blocks(words), 2 * device.sms))
    compare = _kernel("changed", torch.float16)
    compare((blocks,), THREADS, [value, stored, words, rest, flag], pdl=_pdl(device))
