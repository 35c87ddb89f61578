"""Linear layers: activation([x, x2] weightᵀ + bias + residual).

x [..., K], rows of one stride (views of wider rows are fine); x2 [..., K2] or None; weight [N, K + K2], with geglu
[2 N, K] (values, then gates; no residual); bias [N] or [2 N]; residual [..., N]; result [..., N] contiguous.
``group``: 0, or how many channels lie together: result [N / group, ..., group].
``flag``: None, or one int32 on the device. Where it holds 0 at run time, the result keeps what its memory held: the
caller knows that it is still valid. Tactics of torch compute it again, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.gemm import ACTIVATIONS, ELEMENTS, HEIGHTS, THREADS, Tile, aligned, best_tiles, can_run
from sdaccel.backends.cuda.launch import Device, Kernel, Long, TensorMap, kernel
from sdaccel.backends.cuda.ops import geglu
from sdaccel.backends.cuda.ops.layout import rows
from sdaccel.backends.cuda.tactic import Tactic

FILE = "gemm_sm90.cu"
MMA_FILE = "gemm_sm80.cu"
FEW_ROWS = 16
"""The most that the matrix-vector kernel takes."""


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    activation: str = "none",
    group: int = 0,
) -> Tensor:
    y = F.linear(x if x2 is None else torch.cat((x, x2), -1), weight, bias)
    return grouped(activate(y if residual is None else y + residual, activation), group)


def grouped(y: Tensor, group: int) -> Tensor:
    """[..., N] → [N / group, ..., group], each group of channels by itself; as it is where ``group`` is 0."""
    return y.unflatten(-1, (-1, group)).movedim(-2, 0).contiguous() if group else y


def activate(y: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return y
    if activation == "silu":
        return F.silu(y)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "quick_gelu":
        return y * torch.sigmoid(1.702 * y)
    if activation == "geglu":
        value, gate = y.chunk(2, -1)
        return value * F.gelu(gate)
    raise ValueError(f"activation {activation!r}; known are {', '.join(ACTIVATIONS)}")


def activate_in_place(y: Tensor, activation: str) -> Tensor:
    """In y's own memory where torch can."""
    if activation == "silu":
        return F.silu(y, inplace=True)
    if activation == "gelu":
        return torch.ops.aten.gelu_(y)
    return activate(y, activation)


def tactics(
    device: Device,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    flag: Tensor | None = None,
    *,
    activation: str = "none",
    group: int = 0,
) -> list[Tactic]:
    call = Call(x, weight, bias, residual, x2, flag, activation, group)
    few = list(_few_rows(device, call))
    products = ours(device, call)[: 2 if few else None]
    return [*few, *products, *([] if products else _torch_and_geglu(device, call)), *_torch(call)]


@dataclass(frozen=True, eq=False)
class Call:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    x2: Tensor | None
    flag: Tensor | None
    activation: str
    group: int = 0

    @property
    def n(self) -> int:
        return self.weight.shape[0] // (2 if self.activation == "geglu" else 1)

    @property
    def rows(self) -> int:
        return self.x.shape[:-1].numel()

    def result(self) -> Tensor:
        rows = self.x.shape[:-1]
        shape = (self.n // self.group, *rows, self.group) if self.group else (*rows, self.n)
        return torch.empty(shape, dtype=self.x.dtype, device=self.x.device)


def matrix(x: Tensor) -> Tensor | None:
    """[..., K] as [rows, K] without a copy, or None where rows do not have one stride."""
    stride = rows(x)
    return None if stride is None else x.as_strided((x.shape[:-1].numel(), x.shape[-1]), (stride, 1))


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch(call: Call) -> Iterator[Tactic]:
    yield Tactic("torch", partial(_torch_linear, call))
    if call.group:
        return
    if call.x2 is not None:
        yield Tactic("torch<two products>", partial(_torch_two, call))
    elif call.residual is not None and matrix(call.residual) is not None and matrix(call.x) is not None:
        yield Tactic("torch<addmm>", partial(_torch_addmm, call))


def _torch_linear(call: Call) -> Tensor:
    x = call.x if call.x2 is None else torch.cat((call.x, call.x2), -1)
    y = F.linear(x, call.weight, call.bias)
    y = activate_in_place(y if call.residual is None else y.add_(call.residual), call.activation)
    return grouped(y, call.group) if call.group else y.contiguous()


def _torch_two(call: Call) -> Tensor:
    first, second = call.weight.split((call.x.shape[-1], call.weight.shape[1] - call.x.shape[-1]), 1)
    y = F.linear(call.x, first, call.bias).flatten(0, -2)
    y = y.addmm_(call.x2.flatten(0, -2), second.T).view(*call.x.shape[:-1], -1)  # type: ignore[union-attr]
    return activate_in_place(y if call.residual is None else y.add_(call.residual), call.activation)


def _torch_addmm(call: Call) -> Tensor:
    residual, x = matrix(call.residual), matrix(call.x)  # type: ignore[arg-type]
    y = torch.addmm(residual, x, call.weight.T)  # type: ignore[arg-type]
    y = y if call.bias is None else y.add_(call.bias)
    return activate_in_place(y.view(*call.x.shape[:-1], -1), call.activation)


def _torch_and_geglu(device: Device, call: Call) -> Iterator[Tactic]:
    """Where no product of ours has it in its epilogue."""
    if call.activation == "geglu" and device.capability >= (7, 5) and call.x.dtype in ELEMENTS and call.x2 is None:
        yield Tactic("torch, geglu", lambda: geglu.tactics(device, F.linear(call.x, call.weight, call.bias))[0].run())


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(device: Device, call: Call) -> list[Tactic]:
    parts = _matrices(call)
    if parts is None:
        return []
    if can_run(device, call.x.dtype, call.n):
        blocks = sum(-(-t.shape[1] // 64) for t in parts[:2] if t is not None)
        heights = {m: -(-call.rows // m) for m in HEIGHTS}
        tiles = best_tiles(device, heights, call.n, blocks, activation=call.activation)
        launches = {f"ours<{tile}>": _Launch(device, call, tile, *parts) for tile in tiles}
        skips = call.flag is not None
        return [Tactic(name, launch, ((FILE, launch.defines),), skips) for name, launch in launches.items()]
    if device.capability[0] != 9 and mma_can_run(device, call) and not call.group:
        mma = {f"ours<{tile}>": _LaunchMma(device, call, tile, *parts) for tile in mma_tiles(device, call)}
        return [Tactic(name, run, ((MMA_FILE, run.defines),)) for name, run in mma.items()]
    return []


def _matrices(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """x, x2 and the residual as matrices, or None for what no kernel of ours reads."""
    x = matrix(call.x)
    x2 = None if call.x2 is None else matrix(call.x2)
    residual = None if call.residual is None else matrix(call.residual)
    if x is None or (x2 is None) != (call.x2 is None) or (residual is None) != (call.residual is None):
        return None
    if not call.weight.is_contiguous() or (call.activation == "geglu" and residual is not None):
        return None
    if not all(aligned(t, t.stride(0), t.shape[1]) for t in (x, x2, call.weight, residual) if t is not None):
        return None
    return x, x2, residual


# --- sm_90a -----------------------------------------------------------------------------------------------------------


class _Launch:
    """One tile; its kernel and maps are made at the first run."""

    def __init__(self, device: Device, call: Call, tile: Tile, x: Tensor, x2: Tensor | None, residual: Tensor | None):
        self._device, self._call, self._tile = device, call, tile
        self._x, self._x2, self._residual = x, x2, residual
        self.defines = tile.defines(x.dtype, call.activation) | ({"GROUP": call.group} if call.group else {})
        self._made: tuple[Kernel, tuple[TensorMap, ...]] | None = None

    def __call__(self) -> Tensor:
        call, tile = self._call, self._tile
        if self._made is None:
            x = self._row_map(self._x)
            x2 = x if self._x2 is None else self._row_map(self._x2)
            weight = tile.weight_map(call.weight, call.activation)
            self._made = kernel(FILE, "gemm_sm90", self.defines), (x, x2, weight)
        run, maps = self._made
        out = call.result()
        k2 = 0 if self._x2 is None else self._x2.shape[1]
        stride = Long(0 if self._residual is None else self._residual.stride(0))
        columns = tile.n // 2 if call.activation == "geglu" else tile.n
        run(
            (tile.grid(self._device, -(-call.rows // tile.m), -(-call.n // columns)),),
            THREADS,
            (*maps, out, call.bias, self._residual, call.flag, call.rows, call.n, self._x.shape[1], k2, stride),
            shared=tile.shared,
            cluster=tile.cluster,
            pdl=True,
        )
        return out

    def _row_map(self, x: Tensor) -> TensorMap:
        rows, k = x.shape
        return TensorMap.tiled(x, (k, rows), (x.stride(0) * x.element_size(),), (64, self._tile.m))


# --- sm_80 and later --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MmaTile:
    """How kernels/gemm_sm80.cu is cut."""

    m: int
    n: int
    """rows of the weight, values and gates together"""
    warp_m: int
    """rows of x a warp multiplies with 64 of the weight"""
    stages: int

    def __str__(self) -> str:
        return f"mma,{self.m}x{self.n}x{self.stages},warp={self.warp_m}"

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * self.n // 64 * 32

    @property
    def shared(self) -> int:
        return self.stages * (self.m + self.n) * 64

    def defines(self, dtype: torch.dtype, activation: str) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "ACTIVATION": ACTIVATIONS[activation],
            "TILE_M": self.m,
            "TILE_N": self.n,
            "WARP_M": self.warp_m,
            "STAGES": self.stages,
        }

    def tiles(self, call: Call) -> int:
        columns = self.n // 2 if call.activation == "geglu" else self.n
        return -(-call.rows // self.m) * -(-call.n // columns)


MMA_TILES = (
    MmaTile(128, 256, 64, 3),
    MmaTile(128, 128, 64, 4),
    MmaTile(128, 128, 32, 3),
    MmaTile(128, 64, 32, 4),
    MmaTile(64, 64, 32, 4),
)


def mma_can_run(device: Device, call: Call) -> bool:
    return device.capability >= (8, 0) and call.x.dtype in ELEMENTS and call.n % 8 == 0 and call.rows > 0


def mma_tiles(device: Device, call: Call) -> list[MmaTile]:
    """Those that fit, the cheapest first: rounds of blocks by what a block multiplies and loads."""

    def cost(tile: MmaTile) -> int:
        together = max(1, min(device.shared_per_block // tile.shared, 512 // tile.threads))
        rounds = -(-tile.tiles(call) // (device.sms * together))
        return rounds * together * (tile.m * tile.n + 32 * (tile.m + tile.n))

    return sorted((tile for tile in MMA_TILES if tile.shared <= device.shared_per_block), key=cost)


class _LaunchMma:
    def __init__(
        self, device: Device, call: Call, tile: MmaTile, x: Tensor, x2: Tensor | None, residual: Tensor | None
    ):
        self._device, self._call, self._tile = device, call, tile
        self._x, self._x2, self._residual = x, x2, residual
        self.defines = tile.defines(x.dtype, call.activation)

    def __call__(self) -> Tensor:
        call, tile, x, x2 = self._call, self._tile, self._x, self._x2
        out = call.result()
        strides = [Long(0 if t is None else t.stride(0)) for t in (x, x2, self._residual)]
        sizes = (call.rows, call.n, x.shape[1], 0 if x2 is None else x2.shape[1])
        kernel(MMA_FILE, "gemm_sm80", self.defines)(
            (tile.tiles(call),),
            tile.threads,
            (x, x2, call.weight, out, call.bias, self._residual, call.flag, *sizes, *strides),
            shared=tile.shared,
            pdl=self._device.capability >= (9, 0),
        )
        return out


# --- few rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Few:
    """How kernels/gemv.cu is cut."""

    columns: int
    """channels a warp computes"""

    def __str__(self) -> str:
        return f"gemv<columns={self.columns}>"

    def defines(self, dtype: torch.dtype, activation: str, rows: int) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "ACTIVATION": ACTIVATIONS[activation],
            "ROWS": rows,
            "COLUMNS": self.columns,
        }


def _few_rows(device: Device, call: Call) -> Iterator[Tactic]:
    x = matrix(call.x)
    residual = None if call.residual is None else matrix(call.residual)
    if x is None or (residual is None) != (call.residual is None) or call.x2 is not None or call.activation == "geglu":
        return
    if call.group:
        return
    if not 0 < call.rows <= FEW_ROWS or x.dtype not in ELEMENTS or not call.weight.is_contiguous():
        return
    if not aligned(x, x.stride(0), x.shape[1]) or not aligned(call.weight):
        return
    for columns in (1, 2, 4) if call.rows <= 4 else (1, 2):
        if call.n % columns == 0:
            few = Few(columns)
            yield Tactic(str(few), partial(_run_few, device, few, call, x, residual), (), call.flag is not None)


def _run_few(device: Device, few: Few, call: Call, x: Tensor, residual: Tensor | None) -> Tensor:
    out = call.result()
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    kernel("gemv.cu", "gemv", few.defines(x.dtype, call.activation, call.rows))(
        (-(-call.n // (4 * few.columns)),),
        128,
        (x, call.weight, out, call.bias, residual, call.flag, call.n, x.shape[1], *strides),
        pdl=device.capability >= (9, 0),
    )
    return out


VARIANTS = [
    *(
        ("gemm_sm90.cu", "gemm_sm90", tile.defines(torch.float16, activation), (9, 0), "90a")
        for tile, activation in (
            (Tile(128, 160, 6), "none"),
            (Tile(128, 160, 6, pingpong=True, multicast=True), "gelu"),
            (Tile(128, 192, 5, pingpong=True), "none"),
            (Tile(128, 256, 4, multicast=True), "geglu"),
            (Tile(128, 128, 7, split=4), "silu"),
            (Tile(256, 160, 4), "quick_gelu"),
        )
    ),
    *(
        (MMA_FILE, "gemm_sm80", tile.defines(dtype, activation), (8, 0))
        for tile, dtype, activation in (
            (MMA_TILES[0], torch.float16, "none"),
            (MMA_TILES[1], torch.bfloat16, "geglu"),
            (MMA_TILES[2], torch.float16, "geglu"),
            (MMA_TILES[3], torch.bfloat16, "gelu"),
            (MMA_TILES[4], torch.float16, "silu"),
        )
    ),
    *(("gemv.cu", "gemv", Few(2).defines(torch.bfloat16, "silu", rows), (7, 5)) for rows in (2, 16)),
]
