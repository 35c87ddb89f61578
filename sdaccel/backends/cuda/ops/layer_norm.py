"""Layer normalisation over the last axis, with what is added to the residual stream before it.

sum = x + residual + bias_in, y = norm(sum) * scale + bias. x and residual [..., C], the vectors [C].
The result is y, or (y, sum) where residual or bias_in is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.launch import Device, kernel
from sdaccel.backends.cuda.ops.layout import C_TYPE, HALVES, aligned, rows
from sdaccel.backends.cuda.tactic import Tactic

FILE, THREADS = "layer_norm.cu", 128  # as in the source
VARIANTS = [
    (FILE, "layer_norm", {"SDACCEL_T": element, "CHANNELS": channels, "LANES": lanes}, (7, 5))
    for channels, lanes in ((320, 8), (640, 16), (768, 32), (1024, 32), (1280, 32), (2048, 32))
    for element in (("half_t", "bf16_t") if channels == 1280 else ("half_t",))
]


def reference(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    bias_in: Tensor | None = None,
    *,
    epsilon: float,
) -> Tensor | tuple[Tensor, Tensor]:
    total = x
    for more in (bias_in, residual):
        total = total if more is None else total + more
    y = F.layer_norm(total, scale.shape, scale, bias, epsilon)
    return y if total is x else (y, total)


def tactics(
    device: Device,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    bias_in: Tensor | None = None,
    *,
    epsilon: float,
) -> list[Tactic]:
    def run(how: Lanes) -> Tactic:
        return Tactic(how.name, lambda: how(device, x, scale, bias, residual, bias_in, epsilon))

    ours = Lanes.options(x.shape[-1]) if _suits(x, scale, bias, residual, bias_in) else []
    plain = Tactic("torch", lambda: reference(x, scale, bias, residual, bias_in, epsilon=epsilon))
    return [*map(run, ours), plain]


def _suits(x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None, bias_in: Tensor | None) -> bool:
    tensors = (x, scale, bias, residual, bias_in)
    return (
        x.dtype in HALVES
        and all(t is None or t.dtype == x.dtype for t in tensors)
        and x.numel() > 0
        and x.shape[-1] % 8 == 0
        and scale.shape == bias.shape == x.shape[-1:]
        and (bias_in is None or bias_in.shape == scale.shape)
        and (residual is None or residual.shape == x.shape)
        and all(t is None or ((step := rows(t)) is not None and step % 8 == 0) for t in (x, residual))
        and all(t is None or t.is_contiguous() for t in (scale, bias, bias_in))
        and aligned(*tensors)
    )


@dataclass(frozen=True)
class Lanes:
    """A row in the registers of ``lanes`` threads."""

    lanes: int

    @property
    def name(self) -> str:
        return f"ours<lanes={self.lanes}>"

    @classmethod
    def options(cls, channels: int) -> list[Lanes]:
        """At most 10 vectors of 16 bytes a thread, first what leaves no thread idle and has about 5."""
        chunks = channels // 8

        def cost(lanes: int) -> float:
            vectors = -(-chunks // lanes)
            return vectors * lanes / chunks + 0.1 * abs(vectors - 5)

        return [cls(lanes) for lanes in sorted((4, 8, 16, 32), key=cost) if -(-chunks // lanes) <= 10][:2]

    def __call__(
        self,
        device: Device,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        bias_in: Tensor | None,
        epsilon: float,
    ) -> Tensor | tuple[Tensor, Tensor]:
        channels = x.shape[-1]
        count = x.numel() // channels
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(y) if residual is not None or bias_in is not None else None
        step = rows(residual) if residual is not None else 0
        normalise = kernel(
            FILE, "layer_norm", {"SDACCEL_T": C_TYPE[x.dtype], "CHANNELS": channels, "LANES": self.lanes}
        )
        normalise(
            (-(-count // (THREADS // self.lanes)),),
            THREADS,
            [x, rows(x), residual, step, bias_in, scale, bias, y, total, count, epsilon],
            pdl=device.capability >= (9, 0),
        )
        return y if total is None else (y, total)
