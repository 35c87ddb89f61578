"""Microseconds of every tactic: python -m tests.backends.cuda.bench_attention [part of a shape's name]"""

from __future__ import annotations

import statistics
import sys

import torch

from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import attention

# name: (batch, heads, queries, keys, head dim)
SHAPES = {
    "sdxl cross 4096x77 d64": (2, 10, 4096, 77, 64),
    "sdxl cross 1024x77 d64": (2, 20, 1024, 77, 64),
    "sd15 cross 4096x77 d40": (2, 8, 4096, 77, 40),
    "sd15 cross 1024x77 d80": (2, 8, 1024, 77, 80),
    "sd15 cross 256x77 d160": (2, 8, 256, 77, 160),
    "sd15 cross 64x77 d160": (2, 8, 64, 77, 160),
    "sdxl cross 4096x231 d64": (2, 10, 4096, 231, 64),
    "sdxl self 4096 d64": (2, 10, 4096, 4096, 64),
    "sdxl self 1024 d64": (2, 20, 1024, 1024, 64),
    "sd15 self 4096 d40": (2, 8, 4096, 4096, 40),
    "sd15 self 1024 d80": (2, 8, 1024, 1024, 80),
    "sd15 self 256 d160": (2, 8, 256, 256, 160),
    "sd15 self 64 d160": (2, 8, 64, 64, 160),
    "sdxl self 1024 d64 batch 16": (16, 20, 1024, 1024, 64),
    "vae 4096 d512": (1, 1, 4096, 4096, 512),
    "vae 16384 d512": (1, 1, 16384, 16384, 512),
}
CALLS = 20


def microseconds(run, flush: torch.Tensor, calls: int = CALLS) -> float:
    """Median, with a cold L2."""
    run()
    times = []
    for _ in range(calls):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * start.elapsed_time(end) for start, end in times)


def main(wanted: str = "") -> None:
    device = Device.current()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for name, (batch, heads, queries, keys, head_dim) in SHAPES.items():
        if wanted not in name:
            continue
        width = heads * head_dim
        q = torch.randn(batch, queries, width, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(batch, keys, width, device="cuda", dtype=torch.float16) for _ in range(2))
        operations = 4 * batch * heads * queries * keys * head_dim
        moved = 4 * batch * width * (queries + keys)
        times: dict[str, float] = {}
        for tactic in attention.tactics(device, q, k, v, heads=heads, scale=head_dim**-0.5):
            if tactic.name == "sdpa-math":
                continue
            try:
                times[tactic.name] = microseconds(graphed(tactic.run), flush, CALLS if queries < 16384 else 3)
            except RuntimeError as problem:
                print(f"{name:28} {tactic.name}: {problem}")
                continue
        torch_time = times["torch"]
        for tactic_name, time in times.items():
            print(
                f"{name:28} {tactic_name:34} {time:9.1f} us {operations / time / 1e6:7.1f} TFLOP/s "
                f"{moved / time / 1e6:6.2f} TB/s {time / torch_time:6.2f} of torch"
            )


def graphed(run):
    """Launches without the host's part of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


if __name__ == "__main__":
    main(*sys.argv[1:2])
