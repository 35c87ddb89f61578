"""GEGLU: y = first half · gelu(second half), gelu by the error function. x [..., 2 C] → y [..., C]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.launch import Device, kernel
from sdaccel.backends.cuda.ops.layout import C_TYPE, HALVES, aligned, rows
from sdaccel.backends.cuda.tactic import Tactic

FILE, THREADS = "geglu.cu", 256  # as in the source
VARIANTS = [
    (FILE, "geglu", {"SDACCEL_T": element, "CHUNKS": chunks, "UNROLL": unroll}, (7, 5))
    for element, chunks, unroll in (("half_t", 320, 2), ("half_t", 640, 4), ("bf16_t", 160, 1))
]


def reference(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate)


def tactics(device: Device, x: Tensor) -> list[Tactic]:
    channels = x.shape[-1] // 2
    suits = (
        x.dtype in HALVES
        and 0 < x.numel() < 2**32
        and x.shape[-1] % 16 == 0
        and (step := rows(x)) is not None
        and step % 8 == 0
        and aligned(x)
    )
    count = x.numel() // max(1, 2 * channels) * (channels // 8)
    found = sorted((Unroll(n) for n in (1, 2, 4)), key=lambda how: abs(how.unroll - count / (THREADS * 4 * device.sms)))

    def run(how: Unroll) -> Tactic:
        return Tactic(how.name, lambda: how(device, x))

    return [*map(run, found if suits else []), Tactic("torch", lambda: reference(x))]


@dataclass(frozen=True)
class Unroll:
    """``unroll`` results of 16 bytes a thread."""

    unroll: int

    @property
    def name(self) -> str:
        return f"ours<unroll={self.unroll}>"

    def __call__(self, device: Device, x: Tensor) -> Tensor:
        y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        chunks = y.numel() // 8
        defines = {"SDACCEL_T": C_TYPE[x.dtype], "CHUNKS": y.shape[-1] // 8, "UNROLL": self.unroll}
        grid = (-(-chunks // (THREADS * self.unroll)),)
        kernel(FILE, "geglu", defines)(grid, THREADS, [x, rows(x), y, chunks], pdl=device.capability >= (9, 0))
        return y
