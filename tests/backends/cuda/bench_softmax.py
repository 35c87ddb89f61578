"""Softmax of float32 scores to fp16: python -m tests.backends.cuda.bench_softmax"""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import softmax
from tests.backends.cuda.checks import flush_buffer, report

SHAPES = [(16384, 16384), (4096, 4096), (4096, 36864), (16384, 1024), (40960, 77)]


def main() -> None:
    flush = flush_buffer()
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, device="cuda")
        report(f"{rows}x{columns}", 6 * rows * columns, softmax, x, flush=flush, scale=0.1, dtype=torch.float16)


if __name__ == "__main__":
    main()
