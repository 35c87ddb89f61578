"""Attention: every tactic against plain torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import attention
from tests.shapes import TOKENS
from tests.tolerances import ATTENTION_REL

H200 = Device(0, "an H200", (9, 0), 132, 50 << 20, 227 << 10)
DTYPES = (torch.float16, torch.bfloat16)

# (batch, heads, queries, keys, head dim)
CROSS = [
    *((2, 2, 96, keys, head_dim) for keys in TOKENS for head_dim in attention.HEAD_DIMS),
    (2, 10, 4096, 77, 64),
    (2, 20, 1024, 77, 64),
    (2, 8, 4096, 77, 40),
    (2, 8, 256, 77, 160),
    (2, 8, 64, 154, 160),
    (1, 3, 1, 77, 40),
    (3, 2, 1000, 1, 64),
    (5, 3, 33, 16, 80),
    (17, 2, 130, 256, 64),
    (7, 1, 15, 97, 160),
    (1, 1, 4097, 240, 40),
]
SELF = [
    *((2, 3, 320, 320, head_dim) for head_dim in attention.HEAD_DIMS),
    (2, 10, 4096, 4096, 64),
    (2, 8, 4096, 4096, 40),
    (2, 8, 1024, 1024, 80),
    (2, 20, 1024, 1024, 64),
    (2, 8, 256, 256, 160),
    (1, 2, 1, 1, 40),
    (3, 2, 63, 257, 64),
    (17, 1, 65, 129, 80),
    (1, 5, 117, 117, 160),
    (5, 2, 1023, 1025, 40),
    (2, 2, 2040, 2041, 64),
    (5, 9, 1100, 400, 64),
    (3, 11, 1025, 300, 40),
]
ONE_HEAD = [(1, 1, 1024, 1024, 512), (2, 1, 1000, 1000, 512), (1, 1, 4096, 4096, 512), (1, 1, 1, 1, 512)]
CAUSAL = [(2, 12, 77, 77, 64), (5, 20, 77, 77, 64)]


@pytest.fixture(autouse=True)
def _no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDACCEL_SPIN_LIMIT", "2000")


def make(shape: tuple[int, ...], dtype: torch.dtype, fused: bool = False) -> tuple[torch.Tensor, ...]:
    """Random q, k, v on the GPU. fused: views of one row that holds all three."""
    batch, heads, queries, keys, head_dim = shape
    width = heads * head_dim
    if fused:
        row = torch.randn(batch, queries, 3 * width, device="cuda", dtype=dtype)
        return row.split(width, -1)
    return tuple(torch.randn(batch, rows, width, device="cuda", dtype=dtype) for rows in (queries, keys, keys))


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def check(tensors: tuple[torch.Tensor, ...], heads: int, scale: float, causal: bool = False) -> list[str]:
    """Runs every tactic and returns their names."""
    q = tensors[0]
    expected = attention.reference(*(x.double() for x in tensors), heads=heads, scale=scale, causal=causal)
    found = attention.tactics(Device.current(), *tensors, heads=heads, scale=scale, causal=causal)
    assert "torch" in [tactic.name for tactic in found]
    wrong = {}
    for tactic in found:
        poison = [torch.full(q.shape, math.nan, device="cuda", dtype=q.dtype) for _ in range(3)]
        del poison
        result = tactic.run()
        torch.cuda.synchronize()
        assert result.shape == q.shape and result.dtype == q.dtype and result.is_contiguous(), tactic.name
        off = error(result, expected)
        if not off < ATTENTION_REL[q.dtype]:
            wrong[tactic.name] = off
    assert not wrong
    return [tactic.name for tactic in found]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CROSS + SELF + ONE_HEAD, ids=str)
def test_every_tactic(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make(shape, dtype), shape[1], shape[-1] ** -0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", CAUSAL, ids=str)
def test_causal(shape: tuple[int, ...]) -> None:
    check(make(shape, torch.float16), shape[1], shape[-1] ** -0.5, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
@pytest.mark.parametrize("rows", (200, 1024))
def test_views_of_a_fused_row(rows: int, head_dim: int) -> None:
    check(make((2, 4, rows, rows, head_dim), torch.float16, fused=True), 4, head_dim**-0.5)


@pytest.mark.gpu
def test_a_slice_of_more_rows() -> None:
    q, k, v = make((3, 2, 640, 154, 64), torch.float16)
    check((q[:, 128:500], k[:, :77], v[:, 77:]), 2, 0.125)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2, 4, 512, 77, 64), (2, 4, 512, 512, 40), (1, 4, 512, 512, 64), (1, 4, 500, 231, 160)], ids=str
)
def test_large_and_shifted_scores(shape: tuple[int, ...]) -> None:
    """Weights near one-hot, and scores all far below zero: what a softmax without its maximum would get wrong."""
    q, k, v = make(shape, torch.float16)
    check((4 * q, 4 * k, v), shape[1], shape[-1] ** -0.5)
    q, k = q + 3, k - 3
    check((q, k, v), shape[1], shape[-1] ** -0.5)


@pytest.mark.gpu
def test_an_unusual_scale() -> None:
    check(make((2, 4, 300, 77, 80), torch.float16), 4, 0.02)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    tensors = make((2, 8, 1024, 77, 40), torch.float16)
    for tactic in attention.tactics(Device.current(), *tensors, heads=8, scale=0.1):
        tactic.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = tactic.run()
        tensors[0].normal_()
        graph.replay()
        expected = attention.reference(*(x.double() for x in tensors), heads=8, scale=0.1)
        assert error(result, expected) < ATTENTION_REL[torch.float16], tactic.name


@pytest.mark.parametrize("memory", [attention.SCORES_BYTES, 1000, 200, 1])
def test_reference_is_sdpa(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", memory)
    q, k, v = torch.randn(2, 5, 24).double(), torch.randn(2, 7, 24).double(), torch.randn(2, 7, 24).double()
    by_head = [x.unflatten(-1, (3, 8)).transpose(1, 2) for x in (q, k, v)]
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(*by_head, scale=0.3, is_causal=causal)
        result = attention.reference(q, k, v, heads=3, scale=0.3, causal=causal)
        torch.testing.assert_close(result, expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "head_dim"), [(20, 4096, 77, 64), (16, 64, 77, 160), (40, 1, 231, 40)]
)
def test_launch_parameters(heads: int, queries: int, keys: int, head_dim: int) -> None:
    """Every warp of every block has a tile to begin with, and blocks fit into the GPU's shared memory."""
    for parameters in attention.cross_parameters(head_dim, keys, queries):
        shared = parameters.shared(head_dim, keys)
        blocks = parameters.blocks_a_head(H200, heads, queries, shared)
        assert blocks >= 1 and (blocks - 1) * parameters.warps < -(-queries // (16 * parameters.tiles))
        assert shared <= H200.shared_per_block
    offered = attention.cross_sm90_parameters(H200, head_dim, keys)
    assert offered
    for how in offered:
        assert 1 <= how.blocks_a_head(H200, heads, queries) <= -(-queries // 64)
        assert how.keys - 32 < keys <= how.keys and how.blocks >= 1
        assert how.blocks * (how.shared(head_dim) + 1024) <= 228 << 10


@pytest.mark.parametrize("head_dim", attention.HEAD_DIMS)
def test_flash_fits_a_block(head_dim: int) -> None:
    for queries in (64, 4096):
        for parameters in attention.flash_sm90_parameters(H200, head_dim, 16, queries, queries):
            assert parameters.shared(head_dim) <= H200.shared_per_block


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (130, 130), (16384, 16384), (65536, 65536), (1000, 9999)])
def test_scores_of_one_wide_head_stay_bounded(queries: int, keys: int) -> None:
    for limit in (attention.SCORES_BYTES, attention.SCORES_BYTES // 8):
        rows = attention._rows_at_a_time(queries, 4 * keys, limit)
        assert 1 <= rows <= queries
        assert rows * 4 * keys < limit + 128 * 4 * keys
