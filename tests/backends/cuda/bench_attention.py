"""Microseconds of every tactic: python -m tests.backends.cuda.bench_attention [part of a shape's name] [--sweep]

--sweep tries many more launch parameters than the tuner does and prints the best.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdaccel.backends.cuda import nvrtc
from sdaccel.backends.cuda.launch import CACHE, Device
from sdaccel.backends.cuda.ops import attention
from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.errors import BackendError
from tests.backends.cuda.checks import microseconds

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


def sweep(device: Device, head_dim: int, queries: int, keys: int) -> list[tuple[Callable[..., Tensor], Any]]:
    """(runner, parameters) worth a try."""
    found: list[tuple[Callable[..., Tensor], Any]] = []
    if keys <= attention.CROSS_KEYS:
        found += [
            (attention._run_cross, attention.Cross(warps, tiles, blocks))
            for warps, tiles, blocks in itertools.product((2, 4, 8), (1, 2), (1, 2, 3, 4))
            if warps * blocks * tiles <= (16 if head_dim <= 80 and keys <= 80 else 8)
            and blocks * attention.Cross(warps, tiles, blocks).shared(head_dim, keys) <= device.shared_per_block
        ]
        found += [
            (attention._run_cross_sm90, attention.CrossSm90(most.keys, most.stages, blocks))
            for most in attention.cross_sm90_parameters(device, head_dim, keys)
            for blocks in range(max(1, most.blocks - 2), most.blocks + 1)
        ]
    else:
        cuts = [(2, 128), (2, 192), (3, 96), (3, 128), (4, 64)] if head_dim <= 64 else [(2, 96), (2, 128), (3, 96)]
        found += [
            (attention._run_flash_sm90, parameters)
            for (warpgroups, keys), turns, polynomial in itertools.product(
                [(2, 256), *cuts] if head_dim == 40 else cuts, (False, True), (0, 1, 2)
            )
            for parameters in [attention.FlashSm90(warpgroups, keys, 2, turns, polynomial)]
            if parameters.shared(head_dim) <= device.shared_per_block
        ]
    return found


def compile_together(device: Device, file: str, variants: list[dict[str, object]]) -> None:
    """The cache would compile them one after the other."""
    source = nvrtc.Source.read(file)
    with ThreadPoolExecutor() as pool:
        cubins = pool.map(lambda defines: nvrtc.compile(source, defines, device.arch), variants)
        for defines, cubin in zip(variants, cubins, strict=True):
            CACHE.add(nvrtc.key(source, defines, device.arch), cubin.data)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("shape", nargs="?", default="")
    arguments.add_argument("--sweep", action="store_true")
    chosen = arguments.parse_args()
    device = Device.current()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for name, (batch, heads, queries, keys, head_dim) in SHAPES.items():
        if chosen.shape not in name:
            continue
        width = heads * head_dim
        q = torch.randn(batch, queries, width, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(batch, keys, width, device="cuda", dtype=torch.float16) for _ in range(2))
        scale = head_dim**-0.5
        tactics = attention.tactics(device, q, k, v, heads=heads, scale=scale)
        if chosen.sweep and head_dim in attention.HEAD_DIMS:
            tried = sweep(device, head_dim, queries, keys)
            if keys <= attention.CROSS_KEYS:
                old = [how.defines(q.dtype, head_dim, keys) for _, how in tried if isinstance(how, attention.Cross)]
                new = [how.defines(q.dtype, head_dim) for _, how in tried if isinstance(how, attention.CrossSm90)]
                compile_together(device, "cross_attention.cu", old)
                compile_together(device, "cross_attention_sm90.cu", new)
            else:
                variants = [how.defines(q.dtype, head_dim) for _, how in tried]
                compile_together(device, "flash_attention_sm90.cu", variants)
            known = {tactic.name for tactic in tactics}
            tactics += [
                Tactic(str(parameters), partial(runner, device, parameters, q, k, v, heads, scale))
                for runner, parameters in tried
                if str(parameters) not in known
            ]
        times: dict[str, float] = {}
        for tactic in tactics:
            if tactic.name != "sdpa-math":
                try:
                    run = graphed(tactic.run) if head_dim > 160 else tactic.run
                    times[tactic.name] = microseconds(run, flush, CALLS if queries < 16384 else 3)
                except (RuntimeError, BackendError) as problem:
                    print(f"{name:28} {tactic.name}: {problem}")
        operations = 4 * batch * heads * queries * keys * head_dim
        moved = 4 * batch * width * (queries + keys)
        for tactic_name, time in sorted(times.items(), key=lambda item: item[1])[: 12 if chosen.sweep else None]:
            print(
                f"{name:28} {tactic_name:60} {time:9.1f} us {operations / time / 1e6:7.1f} TFLOP/s "
                f"{moved / time / 1e6:6.2f} TB/s {time / times['torch']:6.2f} of torch"
            )


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """Many launches without the host's part of them. For few it would add more than it takes away."""
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
    main()
