"""Elementwise ops: python -m tests.backends.cuda.bench_elementwise"""

from __future__ import annotations

import torch

from sdaccel.backends.cuda.ops import elementwise
from tests.backends.cuda.checks import flush_buffer, image, microseconds, report


def main() -> None:
    flush = flush_buffer()
    half = torch.float16
    report(
        "upsample 1x256x512x512",
        10 * 256 * 512 * 512,
        elementwise.upsample,
        image(1, 256, 512, 512, half),
        flush=flush,
        sides=(1024, 1024),
    )
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
