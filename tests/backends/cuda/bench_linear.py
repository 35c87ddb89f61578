"""Microseconds of every tactic:
python -m tests.backends.cuda.bench_linear [part of a shape's name [tiles a shape [multicast]]]
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from sdaccel.backends.cuda import gemm, nvrtc
from sdaccel.backends.cuda.launch import CACHE, Device
from sdaccel.backends.cuda.ops import linear
from sdaccel.backends.cuda.tactic import Tactic
from tests.backends.cuda.bench_attention import graphed, microseconds

# name: (rows, N, K, activation, residual)
SHAPES = {
    "sdxl qkv 64": (8192, 1920, 640, "none", False),
    "sdxl out 64": (8192, 640, 640, "none", True),
    "sdxl geglu 64": (8192, 2560, 640, "geglu", False),
    "sdxl down 64": (8192, 640, 2560, "none", True),
    "sdxl qkv 32": (2048, 3840, 1280, "none", False),
    "sdxl out 32": (2048, 1280, 1280, "none", True),
    "sdxl geglu 32": (2048, 5120, 1280, "geglu", False),
    "sdxl down 32": (2048, 1280, 5120, "none", True),
    "sdxl batch 16 geglu 32": (16384, 5120, 1280, "geglu", False),
    "sdxl batch 16 down 32": (16384, 1280, 5120, "none", True),
    "sd15 qkv 64": (8192, 960, 320, "none", False),
    "sd15 out 64": (8192, 320, 320, "none", True),
    "sd15 geglu 64": (8192, 1280, 320, "geglu", False),
    "sd15 down 64": (8192, 320, 1280, "none", True),
    "sd15 geglu 32": (2048, 2560, 640, "geglu", False),
    "sd15 down 32": (2048, 640, 2560, "none", True),
    "sd15 qkv 16": (512, 3840, 1280, "none", False),
    "sd15 out 16": (512, 1280, 1280, "none", True),
    "sd15 geglu 16": (512, 5120, 1280, "geglu", False),
    "sd15 down 16": (512, 1280, 5120, "none", True),
    "sd15 out 8": (128, 1280, 1280, "none", True),
    "prompt 154": (154, 20480, 2048, "none", False),
    "time 2": (2, 1280, 1280, "silu", False),
    "time 2 all": (2, 15360, 1280, "none", False),
    "time 16": (16, 1280, 1280, "silu", False),
}


def compile_all(file: str, tactics: list[Tactic], device: Device) -> None:
    """On all cores, before anything is timed."""
    found = [t.run.defines for t in tactics if hasattr(t.run, "defines")]
    unique = list({tuple(sorted(defines.items())): defines for defines in found}.values())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        cubins = pool.map(_cubin, [file] * len(unique), unique, [device.arch] * len(unique))
        for defines, cubin in zip(unique, cubins, strict=True):
            CACHE.add(nvrtc.key(nvrtc.Source.read(file), defines, device.arch), cubin)


def _cubin(file: str, defines: nvrtc.Defines, arch: str) -> bytes:
    return nvrtc.compile(nvrtc.Source.read(file), defines, arch).data


def report(name: str, operations: float, moved: float, tactics: list[Tactic], flush: torch.Tensor) -> None:
    times: dict[str, float] = {}
    for tactic in tactics:
        try:
            times[tactic.name] = microseconds(graphed(tactic.run), flush)
        except RuntimeError as problem:
            print(f"{name:24} {tactic.name}: {problem}")
    library = min((time for key, time in times.items() if not key.startswith(("ours", "gemv"))), default=float("nan"))
    for key, time in sorted(times.items(), key=lambda item: item[1]):
        print(
            f"{name:24} {key:40} {time:8.1f} us {operations / time / 1e6:6.1f} TFLOP/s "
            f"{moved / time / 1e6:5.2f} TB/s {time / library:5.2f} of the library"
        )


def main(wanted: str = "", offered: str = "6", multicast: str = "") -> None:
    gemm.OFFERED, gemm.MULTICAST = int(offered), bool(multicast)
    device = Device.current()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    cases = {}
    for name, (rows, n, k, activation, residual) in SHAPES.items():
        if wanted not in name:
            continue
        wide = 2 * n if activation == "geglu" else n
        x, weight, bias = (torch.randn(*s, device="cuda", dtype=torch.float16) for s in ((rows, k), (wide, k), (wide,)))
        more = torch.randn(rows, n, device="cuda", dtype=torch.float16) if residual else None
        found = linear.tactics(device, x, weight / k**0.5, bias, more, activation=activation)
        moved = 2.0 * (rows * k + wide * k + rows * n * (2 if residual else 1))
        cases[name] = (2.0 * rows * wide * k, moved, found)
    compile_all("gemm_sm90.cu", [tactic for *_, found in cases.values() for tactic in found], device)
    for name, case in cases.items():
        report(name, *case, flush)


if __name__ == "__main__":
    main(*sys.argv[1:])
