"""Elementwise ops: python -m tests.backends.cuda.bench_elementwise"""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import elementwise
from tests.backends.cuda.checks import flush_buffer, image, microseconds, report


def main() -> None:
    flush = flush_buffer()
    half = torch.float16
    for channels, side in ((640, 64), (1280, 32)):
        x = image(2, channels, side, side, half)
        size = 2 * x.numel()
        name = f"2x{channels}x{side}x{side}"
        add = torch.randn(2, channels, device="cuda", dtype=half)
        report(f"silu {name}", 2 * size, elementwise.activate, x, flush=flush, activation="silu")
        report(f"add [B, C] + silu {name}", 2 * size, elementwise.activate, x, add, flush=flush, activation="silu")
        report(f"upsample {name}", 5 * size, elementwise.upsample, x, flush=flush, sides=(2 * side, 2 * side))
        report(f"concat {name}", 4 * size, elementwise.concat, x, x.clone(), flush=flush)
    report(
        "upsample 1x256x512x512",
        10 * 256 * 512 * 512,
        elementwise.upsample,
        image(1, 256, 512, 512, half),
        flush=flush,
        sides=(1024, 1024),
    )
    latents = torch.randn(2, 4, 128, 128, device="cuda")
    size = 4 * latents.numel()
    report("latents in", 2 * size, elementwise.pack_image, latents, flush=flush, channels=8, dtype=half)
    packed = image(2, 8, 128, 128, half)
    report("latents out", 2 * size, elementwise.unpack_image, packed, flush=flush, channels=4, dtype=torch.float32)
    frequencies = elementwise.timestep_embedding.frequencies(320).cuda()
    timestep = torch.tensor([981.0, 981.0], device="cuda")
    attributes = {"flip_sin_to_cos": True, "dtype": half}
    report("timestep", 1280, elementwise.timestep_embedding, timestep, frequencies, flush=flush, **attributes)
    prompt = torch.randn(2, 77, 2048, device="cuda", dtype=half)
    kept, flag = prompt.clone(), torch.ones(1, dtype=torch.int32, device="cuda")
    time = microseconds(lambda: elementwise.changed(prompt, kept, flag), flush)
    print(f"changed 2x77x2048: {time:.1f} us")


if __name__ == "__main__":
    main()
