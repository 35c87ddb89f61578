"""GEGLU: python -m tests.backends.cuda.bench_geglu"""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import geglu
from tests.backends.cuda.checks import flush_buffer, report

SHAPES = [(8192, 2560), (2048, 5120), (8192, 1280), (512, 5120), (65536, 2560)]


def main() -> None:
    flush = flush_buffer()
    for rows, channels in SHAPES:
        x = torch.randn(2, rows // 2, 2 * channels, device="cuda", dtype=torch.float16)
        report(f"{rows}x{channels}", 3 * 2 * rows * channels, geglu, x, flush=flush)


if __name__ == "__main__":
    main()
