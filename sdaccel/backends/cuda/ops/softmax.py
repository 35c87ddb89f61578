"""Softmax over the last axis of scale · x. x [..., n] in float32 or the type of the result, y [..., n] of ``dtype``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sdaccel.backends.cuda.launch import Device, Long, kernel
from sdaccel.backends.cuda.ops.layout import C_TYPE, HALVES, aligned, rows
from sdaccel.backends.cuda.tactic import Tactic

FILE = "softmax.cu"
LOG2_E = 1.4426950408889634
VARIANTS = [
    (FILE, "softmax", {"SDACCEL_T": element, "SOURCE": source, **how}, (7, 5))
    for element, source, how in (
        ("half_t", "float", {"THREADS": 512, "ROWS": 1, "VECTORS": 4, "WIDTH": 8}),
        ("bf16_t", "bf16_t", {"THREADS": 128, "ROWS": 1, "VECTORS": 4, "WIDTH": 8}),
        ("half_t", "float", {"THREADS": 1024, "ROWS": 1, "VECTORS": 0, "WIDTH": 8}),
        ("half_t", "half_t", {"THREADS": 32, "ROWS": 4, "VECTORS": 8, "WIDTH": 1}),
    )
]


def reference(x: Tensor, *, scale: float, dtype: torch.dtype | None = None) -> Tensor:
    y = (x * scale).softmax(-1)
    return y if dtype is None or x.dtype == torch.float64 else y.to(dtype)


def tactics(device: Device, x: Tensor, *, scale: float, dtype: torch.dtype | None = None) -> list[Tactic]:
    made = x.dtype if dtype is None else dtype
    step = rows(x)
    suits = (
        made in HALVES
        and x.dtype in (made, torch.float32)
        and x.numel() > 0
        and step is not None
        and scale > 0
        and x.data_ptr() % x.element_size() == 0
    )
    wide = suits and step is not None and x.shape[-1] % 8 == 0 and step % 8 == 0 and aligned(x)

    def run(how: Rows) -> Tactic:
        return Tactic(how.name, lambda: how(device, x, scale, made))

    found = Rows.options(x.shape[-1], 8 if wide else 1) if suits else iter(())
    return [*map(run, found), Tactic("torch", lambda: torch.softmax(x.float() * scale, -1).to(made))]


@dataclass(frozen=True)
class Rows:
    """``threads`` hold a row in registers, ``vectors`` of ``width`` elements each; vectors 0: the row is read twice."""

    threads: int
    vectors: int
    width: int

    @property
    def name(self) -> str:
        return f"ours<threads={self.threads},vectors={self.vectors},width={self.width}>"

    @classmethod
    def options(cls, columns: int, width: int) -> Iterator[Rows]:
        most = 4 if width == 8 else 16
        fits = [n for n in (32, 128, 256, 512, 1024) if -(-columns // (n * width)) <= most]
        for threads in fits[:2]:
            yield cls(threads, -(-columns // (threads * width)), width)
        if columns > 8192:
            yield cls(1024, 0, width)
            yield cls(512, 0, width)

    def __call__(self, device: Device, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        columns = x.shape[-1]
        count = x.numel() // columns
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        together = 4 if self.threads == 32 else 1
        sizes = {"THREADS": self.threads, "ROWS": together, "VECTORS": self.vectors, "WIDTH": self.width}
        softmax = kernel(FILE, "softmax", {"SDACCEL_T": C_TYPE[dtype], "SOURCE": C_TYPE[x.dtype], **sizes})
        softmax(
            (-(-count // together),),
            self.threads * together,
            [x, Long(rows(x) or 0), y, Long(columns), count, columns, scale * LOG2_E],
            pdl=device.capability >= (9, 0),
        )
        return y
