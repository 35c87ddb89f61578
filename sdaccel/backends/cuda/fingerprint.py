"""Sums and samples of many weights at once, to tell whether they are still the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sdaccel.backends.cuda.launch import kernel

FILE, THREADS = "fingerprint.cu", 256
SAMPLES = 16
BLOCKS = 32
"""a tensor"""
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_DEFINES = {"SDACCEL_T": "half_t", "SAMPLES": SAMPLES}
VARIANTS = [(FILE, "fingerprint", _DEFINES, (7, 5))]


def readable(tensor: Tensor) -> bool:
    """Whether `fingerprints` takes it: on a GPU, floating, not empty, without gaps in memory."""
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return tensor.is_cuda and tensor.dtype in KINDS and tensor.numel() > 0 and dense


def fingerprints(tensors: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """(sum over the bits of each, samples [tensors, 16] float32 on the CPU). Waits for the GPU that all are on.

    The sum is that of the elements as signed integers modulo 2 to their width, whatever their order in memory. Samples
    are at `places` of the values in their order by indices, whatever that in memory; fewer values come several times.
    Raises BackendError where the kernel cannot be had.
    """
    table = np.empty((len(tensors), 4 + SAMPLES), np.int64)
    for row, tensor in zip(table, tensors, strict=True):
        row[:4] = tensor.data_ptr(), tensor.numel(), tensor.element_size(), KINDS[tensor.dtype]
        row[4:] = _offsets(tuple(tensor.shape), tensor.stride())
    device = tensors[0].device
    with torch.cuda.device(device):
        run = kernel(FILE, "fingerprint", _DEFINES)
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        samples = torch.empty(len(tensors), SAMPLES, device=device)
        run((BLOCKS, len(tensors)), THREADS, (torch.from_numpy(table).to(device), sums, samples))
        totals = sums.tolist()
    return [_signed(total, width) for total, width in zip(totals, table[:, 2].tolist(), strict=True)], samples.cpu()


def _signed(total: int, width: int) -> int:
    """``total`` modulo 2 to ``width`` bytes, as a signed integer."""
    half = 1 << (8 * width - 1)
    return (total + half) % (2 * half) - half


def places(count: int) -> np.ndarray:
    """Which of ``count`` values are looked at: at most SAMPLES, evenly spread, from the first to the last."""
    return np.linspace(0, max(count, 1) - 1, min(max(count, 1), SAMPLES)).round().astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """In elements, of the samples; as many as there are, the last one repeated."""
    found = places(int(np.prod(shape)))
    offsets = np.zeros(len(found), np.int64)
    for index, stride in zip(np.unravel_index(found, shape) if shape else (), strides, strict=True):
        offsets += index * stride
    return np.pad(offsets, (0, SAMPLES - len(found)), mode="edge")
