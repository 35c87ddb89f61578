"""Tiles of matrix products on sm_90a (kernels/include/gemm_sm90.cuh): which there are, and what they should cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sdaccel import settings
from sdaccel.backends.cuda.launch import Device, TensorMap

ELEMENTS = {torch.float16: "half_t", torch.bfloat16: "bf16_t"}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "quick_gelu": 3, "geglu": 4}
THREADS = 384
HEIGHTS = (64, 128, 256)
"""rows of a tile"""
OFFERED = 6
"""how many tiles a call offers"""
MULTICAST = False
"""whether tiles that share their weights between two blocks are among them"""

_OVERHEAD = 2048
"""bytes of shared memory beside the blocks: alignment and barriers"""


def spin_limit() -> dict[str, object]:
    """The macro that ends waits which last too long; the tests' safety net."""
    milliseconds = settings.SPIN_LIMIT.value()
    return {settings.SPIN_LIMIT.name: milliseconds} if milliseconds else {}


@dataclass(frozen=True)
class Tile:
    """How the engine is cut; the macros of gemm_sm90.cuh."""

    m: int
    n: int
    """rows of the weight, values and gates together"""
    stages: int
    pingpong: bool = False
    multicast: bool = False
    split: int = 1

    def __str__(self) -> str:
        more = [name for name, on in (("pingpong", self.pingpong), ("multicast", self.multicast)) if on]
        more += [f"split={self.split}"] if self.split > 1 else []
        return ",".join([f"{self.m}x{self.n}x{self.stages}", *more])

    @property
    def cluster(self) -> int:
        return 2 if self.multicast else self.split

    @property
    def shared(self) -> int:
        return self.stages * (self.m + self.n) * 128 + _OVERHEAD

    def defines(self, dtype: torch.dtype, activation: str) -> dict[str, object]:
        found: dict[str, object] = {
            "SDACCEL_T": ELEMENTS[dtype],
            "ACTIVATION": ACTIVATIONS[activation],
            "TILE_M": self.m,
            "TILE_N": self.n,
            "STAGES": self.stages,
            "PINGPONG": int(self.pingpong),
            "MULTICAST": int(self.multicast),
            "SPLIT": self.split,
        }
        return found | spin_limit()

    def grid(self, device: Device, tiles_m: int, tiles_n: int) -> int:
        """blocks"""
        if self.split > 1:
            return tiles_m * tiles_n * self.split
        if self.multicast:
            return 2 * min(-(-tiles_m // 2) * tiles_n, device.sms // 2)
        return min(tiles_m * tiles_n, device.sms)

    def weight_map(self, weight: Tensor, activation: str) -> TensorMap:
        """weight [rows, K], rows a multiple of 32, permuted as the engine wants it."""
        rows, k = weight.shape
        geglu = activation == "geglu"
        row = k * weight.element_size()
        columns = self.n // 2 if geglu else self.n
        box = (64, 2, 4, columns // 32, 2 if self.multicast and not geglu else 4)
        return TensorMap.tiled(weight, (k, 2, 4, rows // 32, 4), (row, 8 * row, 32 * row, 2 * row), box)


def can_run(device: Device, dtype: torch.dtype, n: int) -> bool:
    return device.capability[0] == 9 and dtype in ELEMENTS and n % 32 == 0


def aligned(x: Tensor, *strides: int) -> bool:
    """What a copy by the engine needs: the address and strides (in elements) in multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in strides)


def best_tiles(
    device: Device, tiles_m: Mapping[int, int], n: int, blocks: int, *, activation: str = "none", phases: int = 1
) -> list[Tile]:
    """The cheapest first. tiles_m: how many tiles of rows there are, by their height. blocks: 64-wide steps of K.
    phases: how often all of it is done, with different weights."""
    geglu = activation == "geglu"
    costs: dict[Tile, float] = {}
    for tile in _all(device, tuple(tiles_m), activation):
        columns = tile.n // 2 if geglu else tile.n
        if tile.split <= max(1, blocks // 4) and columns - n < 64:
            costs[tile] = cost(device, tile, tiles_m[tile.m], phases * -(-n // columns), blocks)
    return sorted(costs, key=costs.__getitem__)[:OFFERED]


def _all(device: Device, heights: tuple[int, ...], activation: str) -> Iterator[Tile]:
    for m in heights:
        for n in range(64, 257, 32):
            if activation == "geglu" and n % 64:
                continue
            stages = min(8, (device.shared_per_block - _OVERHEAD) // ((m + n) * 128))
            if stages < 3:
                continue
            for pingpong in (False, True):
                registers = m // (64 if pingpong else 128) * n // 2
                if not 0 < registers <= 192:
                    continue
                for multicast in (False, True) if MULTICAST else (False,):
                    yield Tile(m, n, stages, pingpong, multicast)
                if not pingpong:
                    for split in (2, 4, 8):
                        if m * n * 4 <= stages * (m + n) * 128:
                            yield Tile(m, n, stages, split=split)


def cost(device: Device, tile: Tile, tiles_m: int, tiles_n: int, blocks: int) -> float:
    """Clock cycles of the launch, as measured on an H200 (1.7 GHz) over all tiles of 48 layers of SD 1.5 and SDXL.

    A multiprocessor multiplies 2048 pairs and reads 128 bytes of shared memory a cycle, and gets 60 bytes from L2.
    """
    multiply = 1.1 * tile.m * tile.n / 32
    shared = tile.m / 64 * 4 * (2048 + 32 * tile.n) / 128
    fetch = (tile.m + tile.n / (2 if tile.multicast else 1)) * 128 / 60
    step = 20 + max(multiply, shared, fetch)
    write = 600 + tile.m * tile.n / 16
    start = 2400
    if tile.split > 1:
        clusters = device.sms * 21 // 22 // tile.split  # they do not fill every part of the chip
        turns = -(-tiles_m * tiles_n // clusters)
        meet = 350 + tile.m * tile.n / 4.3
        return start + turns * (start + -(-blocks // tile.split) * step + meet + write / tile.split)
    tiles = -(-tiles_m // 2) * tiles_n if tile.multicast else tiles_m * tiles_n
    turns = -(-tiles // (device.sms // tile.cluster))
    main = blocks * step
    if tile.pingpong:
        return 1200 + start + turns * max(main, write) + write
    return start + turns * (main + write)
