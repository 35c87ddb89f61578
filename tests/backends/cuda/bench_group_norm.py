"""GroupNorm+SiLU: python -m tests.backends.cuda.bench_group_norm. Bandwidth counts one read and one write."""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import group_norm
from tests.backends.cuda.checks import copy_bandwidth, flush_buffer, image, report
from tests.backends.cuda.test_group_norm import UNET, VAE


def main() -> None:
    flush = flush_buffer()
    print(f"copy: {copy_bandwidth(flush):.2f} TB/s")
    for batch, channels, more, height, width in (*UNET, *((b, c, 0, side, side) for b, c, side in VAE)):
        x = image(batch, channels, height, width, torch.float16)
        x2 = image(batch, more, height, width, x.dtype) if more else None
        scale, bias = torch.randn(2, channels + more, device="cuda", dtype=x.dtype)
        label = f"{batch}x{channels}{f'+{more}' if more else ''}x{height}x{width}"
        moved = 2 * 2 * batch * (channels + more) * height * width
        attributes = {"groups": 32, "epsilon": 1e-5, "activation": "silu"}
        report(label, moved, group_norm, x, scale, bias, x2, None, flush=flush, **attributes)


if __name__ == "__main__":
    main()
