"""LayerNorm, alone and with a residual: python -m tests.backends.cuda.bench_layer_norm"""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import layer_norm
from tests.backends.cuda.checks import flush_buffer, report

SHAPES = [(8192, 640), (2048, 1280), (8192, 320), (512, 1280), (65536, 640), (16384, 1280), (154, 2048), (154, 768)]


def main() -> None:
    flush = flush_buffer()
    for rows, channels in SHAPES:
        x, residual = torch.randn(2, 2, rows // 2, channels, device="cuda", dtype=torch.float16)
        scale, bias, bias_in = torch.randn(3, channels, device="cuda", dtype=torch.float16)
        size = 2 * rows * channels
        report(f"{rows}x{channels}", 2 * size, layer_norm, x, scale, bias, flush=flush, epsilon=1e-5)
        more = (residual, bias_in)
        report(f"{rows}x{channels} + residual", 4 * size, layer_norm, x, scale, bias, *more, flush=flush, epsilon=1e-5)


if __name__ == "__main__":
    main()
