"""Every kind of tile in a process of its own, so that one that traps does not hide the others:
python -m tests.backends.cuda.smoke_gemm [index of a tile]"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from sdaccel.errors import BackendError
from tests.backends.cuda import test_conv, test_linear
from tests.backends.cuda.test_linear import TILES

SECONDS = 120


def one(index: int) -> None:
    os.environ["SDACCEL_SPIN_LIMIT"] = "2000"
    tile = TILES[index]
    cases = {
        f"linear {shape}": lambda shape=shape: test_linear.test_every_tile(tile, shape)
        for shape in ((256, 320, 64), (128, 320, 512), (1000, 640, 840), (8192, 1280, 640))
        if tile.split <= -(-shape[2] // 64)
    }
    if tile.n % 64 == 0:
        cases["geglu"] = lambda: test_linear.test_every_tile_geglu(tile, (1000, 640, 840))
    for shape in ((2, 64, 8, 8, 320), (3, 200, 13, 21, 96), (2, 640, 32, 32, 640)):
        cases[f"conv {shape}"] = lambda shape=shape: test_conv.test_every_tile(tile, shape)
    cases["upsample"] = lambda: test_conv.test_every_tile_upsample(tile)
    for name, case in cases.items():
        try:
            case()
            print(f"{tile}: {name}: right", flush=True)
        except AssertionError as wrong:
            print(f"{tile}: {name}: {str(wrong).splitlines()[0] if str(wrong) else 'wrong'}", flush=True)
        except (RuntimeError, BackendError) as error:
            print(f"{tile}: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            if isinstance(error, torch.AcceleratorError):  # nothing runs in this process any more
                return


def separately(index: int) -> str:
    command = [sys.executable, "-m", "tests.backends.cuda.smoke_gemm", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as expired:
        return f"{TILES[index]}: hangs: {expired.stdout}\n"
    return done.stdout + (done.stderr[-1000:] if done.returncode else "")


def main() -> None:
    with ThreadPoolExecutor(8) as pool:
        for text in pool.map(separately, range(len(TILES))):
            print(text, end="")


if __name__ == "__main__":
    one(int(sys.argv[1])) if len(sys.argv) > 1 else main()
