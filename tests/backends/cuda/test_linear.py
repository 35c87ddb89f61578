"""Linear layers: every tactic, and every kind of tile, against plain torch in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from sdaccel.backends.cuda.gemm import Tile, best_tiles, cost
from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import linear
from tests.tolerances import GEMM_REL

DTYPES = (torch.float16, torch.bfloat16)
H200 = Device(0, "an H200", (9, 0), 132, 50 << 20, 227 << 10)

TILES = [
    Tile(128, 64, 8),
    Tile(128, 128, 7),
    Tile(128, 160, 6),
    Tile(128, 192, 5),
    Tile(128, 256, 4),
    Tile(256, 128, 4),
    Tile(256, 160, 4),
    Tile(64, 96, 4, pingpong=True),
    Tile(128, 128, 7, pingpong=True),
    Tile(128, 160, 6, pingpong=True),
    Tile(128, 160, 6, multicast=True),
    Tile(128, 256, 4, multicast=True),
    Tile(128, 128, 7, pingpong=True, multicast=True),
    Tile(128, 128, 7, split=2),
    Tile(128, 160, 6, split=4),
    Tile(128, 64, 8, split=8),
    Tile(256, 128, 4, split=2),
]

# (rows, N, K), with N the width of the result
PUBLISHED = [
    (8192, 640, 640),
    (2048, 1280, 1280),
    (2048, 3840, 1280),
    (2048, 1280, 5120),
    (8192, 320, 320),
    (512, 1280, 5120),
    (128, 1280, 1280),
    (154, 2560, 2048),
    (77, 768, 3072),
    (2, 1280, 320),
    (2, 1280, 2816),
    (32, 20480, 1280),
]
AWKWARD = [
    (1, 320, 320),
    (1, 8, 8),
    (17, 1280, 1280),
    (16, 640, 1288),
    (3, 48, 72),
    (77, 96, 40),
    (129, 160, 264),
    (231, 1000, 320),
    (1000, 352, 88),
    (4097, 64, 136),
]


@pytest.fixture(autouse=True)
def _no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDACCEL_SPIN_LIMIT", "2000")


def make(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def layer(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (make(n, k, dtype=torch.float32) / k**0.5).to(dtype), make(n, dtype=dtype)


def where_wrong(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Which rows and columns of [rows, columns] are off, for errors that follow a pattern."""
    result, expected = result.double().flatten(0, -2), expected.flatten(0, -2)
    wrong = ~((result - expected).abs() < 0.02 * expected.abs().max())
    if not wrong.any():
        return "nothing far off"
    rows, columns = wrong.any(1).nonzero().flatten().tolist(), wrong.any(0).nonzero().flatten().tolist()
    first = wrong.nonzero()[0].tolist()
    return (
        f"{wrong.double().mean():.2%} off, {result.isnan().double().mean():.2%} NaN; "
        f"rows {len(rows)}: {rows[:12]}…{rows[-1]}; columns {len(columns)}: {columns[:12]}…{columns[-1]}; "
        f"at {first}: {result[tuple(first)]:.4f} for {expected[tuple(first)]:.4f}"
    )


def check(run: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """None, or what is wrong."""
    poison = [torch.full(expected.shape, math.nan, device="cuda", dtype=dtype) for _ in range(3)]
    del poison
    result = run()
    torch.cuda.synchronize()
    if result.shape != expected.shape or result.dtype != dtype or not result.is_contiguous():
        return f"{tuple(result.shape)}, strides {result.stride()}, {result.dtype}"
    off = float((result.double() - expected).norm() / expected.norm())
    return None if off < GEMM_REL[dtype] else f"{off:.1e}: {where_wrong(result, expected)}"


def assert_right(run: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype) -> None:
    if problem := check(run, expected, dtype):
        raise AssertionError(problem)


def check_all(*tensors: torch.Tensor | None, activation: str = "none") -> list[str]:
    """Runs every tactic and returns their names."""
    up = [None if x is None else x.double() for x in tensors[:5]]
    expected = linear.reference(*up, activation=activation)
    found = linear.tactics(Device.current(), *tensors, activation=activation)
    assert "torch" in [tactic.name for tactic in found]
    dtype = tensors[0].dtype
    wrong = {tactic.name: problem for tactic in found if (problem := check(tactic.run, expected, dtype))}
    assert not wrong
    return [tactic.name for tactic in found]


def launch(tile: Tile, *tensors: torch.Tensor | None, activation: str = "none") -> Callable[[], torch.Tensor]:
    call = linear.Call(*tensors, *[None] * (6 - len(tensors)), activation)
    matrices = [None if x is None else linear.matrix(x) for x in (call.x, call.x2, call.residual)]
    return linear._Launch(Device.current(), call, tile, *matrices)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="for sm_90a alone"
)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 320, 512), (256, 320, 64), (1000, 640, 840), (8192, 1280, 640)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: Tile, shape: tuple[int, int, int]) -> None:
    """Whole tiles, one step of K, edges in every direction, several tiles a block."""
    rows, n, k = shape
    if tile.split > -(-k // 64):
        pytest.skip("more parts than steps")
    x, (weight, bias) = make(rows, k), layer(n, k, torch.float16)
    residual = make(rows, n)
    for _ in range(3):
        assert_right(launch(tile, x, weight), linear.reference(x.double(), weight.double()), x.dtype)
    expected = linear.reference(*(t.double() for t in (x, weight, bias, residual)))
    assert_right(launch(tile, x, weight, bias, residual), expected, x.dtype)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.n % 64 == 0 and tile.m * tile.n <= 160 * 256], ids=str)
@pytest.mark.parametrize("shape", [(1000, 640, 840), (2048, 1280, 640)], ids=str)
def test_every_tile_geglu(tile: Tile, shape: tuple[int, int, int]) -> None:
    rows, n, k = shape
    x, (weight, bias) = make(rows, k), layer(2 * n, k, torch.float16)
    expected = linear.reference(x.double(), weight.double(), bias.double(), activation="geglu")
    assert_right(launch(tile, x, weight, bias, activation="geglu"), expected, x.dtype)


def launch_mma(
    tile: linear.MmaTile, *tensors: torch.Tensor | None, activation: str = "none"
) -> Callable[[], torch.Tensor]:
    call = linear.Call(*tensors, *[None] * (6 - len(tensors)), activation)
    parts = linear._matrices(call)
    assert parts is not None and linear.mma_can_run(Device.current(), call)
    return linear._LaunchMma(Device.current(), call, tile, *parts)


mma = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="for sm_80 and later"
)


@mma
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
def test_every_mma_tile(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Also on GPUs that are offered better ones."""
    rows, n, k = shape
    x, (weight, bias), residual = make(rows, k, dtype=dtype), layer(n, k, dtype), make(rows, n, dtype=dtype)
    expected = linear.reference(*(t.double() for t in (x, weight, bias, residual)))
    for tile in linear.MMA_TILES:
        if tile.shared <= Device.current().shared_per_block:
            assert_right(launch_mma(tile, x, weight, bias, residual), expected, dtype)


@mma
@pytest.mark.gpu
@pytest.mark.parametrize("tile", linear.MMA_TILES, ids=str)
def test_every_mma_tile_with_all_parts(tile: linear.MmaTile) -> None:
    if tile.shared > Device.current().shared_per_block:
        pytest.skip("too large for this GPU")
    for rows, n, k, k2 in ((1000, 640, 840, 320), (77, 40, 72, 40), (2048, 320, 64, 1280)):
        row = make(rows, k + 64)  # a view of wider rows
        x, x2, (weight, bias) = row[:, 32 : 32 + k], make(rows, k2), layer(n, k + k2, torch.float16)
        residual = make(rows, n + 8)[:, 8:]
        for activation in ("none", "silu", "gelu", "quick_gelu"):
            expected = linear.reference(*(t.double() for t in (x, weight, bias, residual, x2)), activation=activation)
            assert_right(launch_mma(tile, x, weight, bias, residual, x2, activation=activation), expected, x.dtype)
        weight, bias = layer(2 * n, k, torch.float16)
        for parts in ((x, weight, bias), (x, weight)):
            expected = linear.reference(*(t.double() for t in parts), activation="geglu")
            assert_right(launch_mma(tile, *parts, activation="geglu"), expected, x.dtype)
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        run = launch_mma(tile, x, weight[:n], None, None, None, flag)
        kept = torch.full((rows, n), 7.0, device="cuda", dtype=x.dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear.Call, "result", lambda _, kept=kept: kept)
            run()
            assert (kept == 7).all()
            flag.fill_(1)
            assert_right(run, linear.reference(x.double(), weight[:n].double()), x.dtype)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
def test_mma_tiles_are_offered(shape: tuple[int, int, int], capability: tuple[int, int]) -> None:
    rows, n, k = shape
    device = Device(0, "another GPU", capability, 84, 6 << 20, 99 << 10)
    x, weight = torch.empty(rows, k, dtype=torch.float16), torch.empty(n, k, dtype=torch.float16)
    names = [tactic.name for tactic in linear.ours(device, linear.Call(x, weight, None, None, None, None, "none"))]
    assert names and all(name.startswith("ours<mma,") for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
def test_every_tactic(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, n, k = shape
    weight, bias = layer(n, k, dtype)
    check_all(make(rows, k, dtype=dtype), weight, bias, make(rows, n, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "quick_gelu", "geglu"])
@pytest.mark.parametrize("rows", [2, 154, 2048])
def test_activations(rows: int, activation: str) -> None:
    n, k = 1280, 640
    weight, bias = layer(2 * n if activation == "geglu" else n, k, torch.float16)
    check_all(make(rows, k), weight, bias, activation=activation)
    check_all(make(rows, k), weight, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [(640, 320), (1280, 1280), (72, 40)], ids=str)
def test_two_inputs(k: tuple[int, int]) -> None:
    weight, bias = layer(640, sum(k), torch.float16)
    check_all(make(2, 500, k[0]), weight, bias, make(2, 500, 640), make(2, 500, k[1]))


@pytest.mark.gpu
def test_strided_inputs() -> None:
    weight, bias = layer(320, 640, torch.bfloat16)
    row = make(3, 300, 1920, dtype=torch.bfloat16)
    x, residual = row[..., 640:1280], make(3, 300, 640, dtype=torch.bfloat16)[..., :320]
    check_all(x, weight, bias, residual)
    check_all(row[:, :5, :640], weight, bias)  # rows of more than one stride
    check_all(row[..., 1:641], weight, bias)  # not aligned
    check_all(row[0, :2, :640], weight, bias)  # few rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 154, 2048])
def test_flag(rows: int) -> None:
    weight, bias = layer(640, 768, torch.float16)
    x, flag = make(rows, 768), torch.ones(1, dtype=torch.int32, device="cuda")
    for tactic in linear.tactics(Device.current(), x, weight, bias, None, None, flag):
        if tactic.name.startswith("torch"):
            continue
        tactic.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = tactic.run()
        flag.fill_(1)
        graph.replay()
        expected = linear.reference(x.double(), weight.double(), bias.double())
        assert_right(lambda result=result: result, expected, x.dtype)
        flag.fill_(0)
        result.fill_(7)
        graph.replay()
        assert (result == 7).all()


@pytest.mark.gpu
def test_a_chain_of_launches() -> None:
    """Each starts before the one before has ended; none may read too early."""
    weight, bias = layer(1280, 1280, torch.float16)
    x = make(2048, 1280)
    device = Device.current()
    names = [tactic.name for tactic in linear.tactics(device, x, weight, bias, x)]
    for index in range(len(names)):
        y, expected = x, x.double()
        for _ in range(6):
            y = linear.tactics(device, y, weight, bias, y)[index].run()
            expected = linear.reference(expected, weight.double(), bias.double(), expected)
        assert float((y.double() - expected).norm() / expected.norm()) < 4 * GEMM_REL[x.dtype], names[index]


def test_reference_is_a_concatenation() -> None:
    x, x2, weight = torch.randn(3, 5).double(), torch.randn(3, 2).double(), torch.randn(4, 7).double()
    expected = x @ weight[:, :5].T + x2 @ weight[:, 5:].T
    torch.testing.assert_close(linear.reference(x, weight, None, None, x2), expected)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 8), (24, 8, 1), (8, 1)),
        ((2, 3, 8), (48, 16, 1), (16, 1)),
        ((2, 3, 8), (64, 16, 1), None),
        ((1, 3, 8), (5, 16, 1), (16, 1)),
        ((2, 1, 8), (16, 3, 1), (16, 1)),
        ((3, 8), (1, 3), None),
        ((1, 1, 8), (5, 3, 1), (8, 1)),
    ],
)
def test_rows_of_one_stride(shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    x = torch.arange(400.0).as_strided(shape, strides, 3)
    found = linear.matrix(x)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.stride() == expected
        torch.testing.assert_close(found, x.reshape(-1, shape[-1]))


@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
@pytest.mark.parametrize("activation", ["none", "geglu"])
def test_tiles_fit(shape: tuple[int, int, int], activation: str) -> None:
    """What is offered compiles (sizes the engine asserts), fits into shared memory and splits no step of K."""
    rows, n, k = shape
    heights = {m: -(-rows // m) for m in (64, 128, 256)}
    for tile in best_tiles(H200, heights, n, -(-k // 64), activation=activation):
        assert tile.shared <= H200.shared_per_block and tile.stages >= 3
        assert tile.split <= -(-k // 64)
        assert tile.grid(H200, heights[tile.m], -(-n // tile.n)) % tile.cluster == 0


def test_one_wave_is_cheaper_than_two() -> None:
    """2048 x 1280 fills an H200 once with 128 x 160 and leaves half of a second wave empty with 128 x 128."""
    assert cost(H200, Tile(128, 160, 6), 16, 8, 20) < cost(H200, Tile(128, 128, 7), 16, 10, 20)


@pytest.mark.gpu
def test_geglu_where_no_product_has_it() -> None:
    """As on GPUs before Ampere: torch's product, then one kernel."""
    older = dataclasses.replace(Device.current(), capability=(7, 5))
    x, (weight, bias) = make(154, 320), layer(2560, 320, torch.float16)
    tactics = linear.tactics(older, x, weight, bias, activation="geglu")
    assert tactics[0].name == "torch, geglu"
    expected = linear.reference(x.double(), weight.double(), bias.double(), activation="geglu")
    assert_right(tactics[0].run, expected, x.dtype)
