"""Convolutions: every tactic, and every kind of tile, against plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from sdaccel.backends.cuda.gemm import Tile
from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import conv, upsample_conv
from sdaccel.errors import BackendError
from tests.backends.cuda.test_linear import DTYPES, H200, TILES, hopper, where_wrong
from tests.tolerances import GEMM_REL

# (batch, channels, height, width, channels of the result, kernel, stride)
PUBLISHED = [
    (2, 320, 128, 128, 320, 3, 1),
    (2, 640, 64, 64, 640, 3, 1),
    (2, 1280, 32, 32, 1280, 3, 1),
    (2, 320, 128, 128, 320, 3, 2),
    (2, 640, 64, 64, 640, 3, 2),
    (2, 320, 64, 64, 640, 1, 1),
    (2, 320, 64, 64, 320, 3, 1),
    (2, 1280, 16, 16, 1280, 3, 1),
    (2, 1280, 8, 8, 1280, 3, 1),
    (2, 1280, 16, 16, 1280, 3, 2),
    (1, 512, 128, 128, 512, 3, 1),
    (1, 256, 256, 256, 128, 3, 1),
]
AWKWARD = [
    (1, 8, 1, 1, 32, 3, 1),
    (1, 64, 1, 1, 64, 3, 2),
    (3, 40, 5, 7, 96, 3, 1),
    (3, 72, 13, 9, 64, 3, 2),
    (17, 64, 3, 3, 64, 3, 1),
    (1, 320, 125, 125, 320, 3, 1),
    (2, 64, 104, 152, 128, 3, 1),
    (2, 320, 63, 63, 320, 3, 2),
    (5, 128, 1, 40, 96, 3, 1),
    (2, 4, 64, 64, 320, 3, 1),
    (2, 9, 32, 32, 320, 3, 1),
    (2, 320, 64, 64, 4, 3, 1),
    (1, 128, 65, 33, 3, 3, 1),
    (2, 96, 9, 9, 40, 1, 1),
    (1, 8, 33, 31, 8, 1, 1),
]

Shape7 = tuple[int, int, int, int, int, int, int]


@pytest.fixture(autouse=True)
def _no_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDACCEL_SPIN_LIMIT", "2000")


def image(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)


def layer(out: int, channels: int, kernel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (channels * kernel**2) ** -0.5
    weight = (torch.randn(out, channels, kernel, kernel, device="cuda") * scale).to(dtype)
    return weight.contiguous(memory_format=torch.channels_last), torch.randn(out, device="cuda").to(dtype)


def exact(function: Callable[..., torch.Tensor], *tensors: torch.Tensor | None, **attributes: object) -> torch.Tensor:
    return function(*(None if x is None else x.double() for x in tensors), **attributes)


def check(run: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """None, or what is wrong."""
    poison = [torch.full(expected.shape, float("nan"), device="cuda", dtype=dtype) for _ in range(3)]
    del poison
    result = run()
    torch.cuda.synchronize()
    if result.shape != expected.shape or result.dtype != dtype:
        return f"{tuple(result.shape)}, {result.dtype}"
    if not result.is_contiguous(memory_format=torch.channels_last):
        return f"strides {result.stride()}"
    off = float((result.double() - expected).norm() / expected.norm())
    if off < GEMM_REL[dtype]:
        return None
    return f"{off:.1e}: {where_wrong(result.movedim(1, -1), expected.movedim(1, -1))}"


def assert_right(run: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype) -> None:
    if problem := check(run, expected, dtype):
        raise AssertionError(problem)


def check_all(*tensors: torch.Tensor | None, **attributes: object) -> list[str]:
    """Runs every tactic and returns their names."""
    expected = exact(conv.reference, *tensors, **attributes)
    found = conv.tactics(Device.current(), *tensors, **attributes)
    assert "torch" in [tactic.name for tactic in found]
    dtype = tensors[0].dtype
    wrong = {}
    for tactic in found:
        try:
            problem = check(tactic.run, expected, dtype)
        except BackendError as error:  # the tuner leaves it out
            problem = None if tactic.name.startswith("cudnn") else str(error)
        if problem:
            wrong[tactic.name] = problem
    assert not wrong
    return [tactic.name for tactic in found]


def launch(tile: Tile, *tensors: torch.Tensor | None, stride: int = 1, padding: int = 1) -> conv.Launch:
    call = conv.Call(*tensors, *[None] * (6 - len(tensors)), stride, padding)
    shape = conv.Shape(call.x.shape[0], *call.sides, call.kernel, stride, padding)
    return conv.Launch(Device.current(), tile, shape, call)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2, 64, 8, 8, 320), (2, 320, 64, 64, 320), (3, 200, 13, 21, 96), (2, 640, 32, 32, 640)], ids=str
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: Tile, shape: tuple[int, int, int, int, int]) -> None:
    batch, channels, height, width, out = shape
    x, (weight, bias) = image(batch, channels, height, width), layer(out, channels, 3, torch.float16)
    for stride in (1, 2):
        problem = check(
            launch(tile, x, weight, stride=stride), exact(conv.reference, x, weight, stride=stride), x.dtype
        )
        assert problem is None
    residual, add = image(batch, out, height, width), torch.randn(batch, 2 * out, device="cuda").half()[:, out:]
    tensors = (x, weight, bias, residual, None, add)
    assert_right(launch(tile, *tensors), exact(conv.reference, *tensors), x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
def test_every_tactic(shape: Shape7, dtype: torch.dtype) -> None:
    batch, channels, height, width, out, kernel, stride = shape
    x, (weight, bias) = image(batch, channels, height, width, dtype=dtype), layer(out, channels, kernel, dtype)
    padding = kernel // 2
    sides = [(side + 2 * padding - kernel) // stride + 1 for side in (height, width)]
    residual = image(batch, out, *sides, dtype=dtype)
    check_all(x, weight, bias, residual, stride=stride, padding=padding)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_terms(activation: str, kernel: int) -> None:
    x, (weight, bias) = image(2, 320, 24, 40), layer(640, 320, kernel, torch.float16)
    add, residual = torch.randn(2, 1920, device="cuda").half()[:, 640:1280], image(2, 640, 24, 40)
    for terms in product((None, bias), (None, residual), [None], (None, add)):
        check_all(x, weight, *terms, padding=kernel // 2, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels", [(1280, 640), (640, 320), (40, 72)], ids=str)
def test_two_inputs(channels: tuple[int, int], kernel: int) -> None:
    x, x2 = (image(2, width, 32, 32) for width in channels)
    weight, bias = layer(640, sum(channels), kernel, torch.float16)
    check_all(x, weight, bias, image(2, 640, 32, 32), x2, padding=kernel // 2)
    check_all(x, weight, None, None, x2, padding=kernel // 2)


@pytest.mark.gpu
def test_strided_inputs() -> None:
    weight, bias = layer(320, 320, 3, torch.bfloat16)
    x = image(2, 960, 40, 40, dtype=torch.bfloat16)
    check_all(x[:, 320:640], weight, bias)
    check_all(x[:, :320, 3:17, 5:30], weight, bias)
    check_all(x[:, 1:321], weight, bias)  # not aligned
    check_all(x[:, :320].contiguous(), weight, bias)  # channels outermost
    check_all(x[:, :320], weight.contiguous(), bias)


@pytest.mark.gpu
def test_no_padding() -> None:
    weight, bias = layer(320, 64, 3, torch.float16)
    check_all(image(2, 64, 33, 33), weight, bias, padding=0, stride=2)
    check_all(image(2, 64, 33, 20), weight, bias, padding=0)
    check_all(image(2, 64, 9, 9), weight, bias, padding=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 1280, 32, 32, 1280), (2, 640, 64, 64, 640), (2, 1280, 8, 8, 1280), (1, 512, 64, 64, 512), (3, 40, 5, 7, 96)],
    ids=str,
)
def test_upsample(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    batch, channels, height, width, out = shape
    x, (weight, bias) = image(batch, channels, height, width, dtype=dtype), layer(out, channels, 3, dtype)
    for sides in ((2 * height, 2 * width), (2 * height - 1, 2 * width), (2 * height - 1, 2 * width - 1)):
        expected = exact(upsample_conv.reference, x, weight, bias, sides=sides)
        found = upsample_conv.tactics(Device.current(), x, weight, bias, sides=sides)
        assert "torch" in [tactic.name for tactic in found]
        ours = [tactic for tactic in found if not tactic.name.startswith("cudnn")]
        assert not {tactic.name: problem for tactic in ours if (problem := check(tactic.run, expected, dtype))}


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_upsample(tile: Tile) -> None:
    x, (weight, bias) = image(3, 320, 20, 12), layer(320, 320, 3, torch.float16)
    expected = exact(upsample_conv.reference, x, weight, bias, sides=(40, 24))
    shape = conv.Shape(3, 20, 12, 2, 1, 1, upsample=True)
    call = conv.Call(x, upsample_conv.phase_weights(weight), bias)
    assert_right(conv.Launch(Device.current(), tile, shape, call), expected, x.dtype)


@pytest.mark.gpu
def test_changed_weights() -> None:
    """Phases follow the weight that they are made of."""
    x, (weight, bias) = image(1, 64, 16, 16), layer(64, 64, 3, torch.float16)
    for tactic in upsample_conv.tactics(Device.current(), x, weight, bias, sides=(32, 32)):
        weight.normal_().mul_(0.05)
        assert_right(tactic.run, exact(upsample_conv.reference, x, weight, bias, sides=(32, 32)), x.dtype)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    x, (weight, bias) = image(2, 640, 16, 16), layer(640, 640, 3, torch.float16)
    residual = image(2, 640, 16, 16)
    for tactic in conv.tactics(Device.current(), x, weight, bias, residual):
        if tactic.name in ("cudnn<plan=1>", "cudnn<plan=2>"):  # there may be but one
            continue
        tactic.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = tactic.run()
        x.normal_()
        graph.replay()
        expected = exact(conv.reference, x, weight, bias, residual)
        assert_right(lambda result=result: result, expected, x.dtype)


@pytest.mark.gpu
def test_the_reference_is_right_where_cudnn_is_not() -> None:
    torch.backends.cudnn.allow_tf32, before = False, torch.backends.cudnn.allow_tf32
    try:
        for channels in (1920, 2560):
            x = torch.randn(16, 32, 32, channels, device="cuda").movedim(-1, 1)
            weight = torch.randn(1280, 3, 3, channels, device="cuda").movedim(-1, 1)
            found, expected = conv.reference(x, weight), F.conv2d(x[:2].double(), weight.double(), padding=1)
            assert float((found[:2] - expected).norm() / expected.norm()) < 1e-5
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    "shape", [(2, 8, 6, 9, 5, 3, 1), (3, 4, 7, 5, 6, 3, 2), (1, 8, 1, 1, 4, 3, 1), (2, 8, 4, 3, 4, 1, 1)]
)
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_taps_are_the_convolution(shape: Shape7, padding: int) -> None:
    batch, channels, height, width, count, kernel, stride = shape
    if min(height, width) + 2 * padding < kernel:
        return
    x = torch.randn(batch, channels, height, width, dtype=torch.float64)
    weight = torch.randn(count, channels, kernel, kernel, dtype=torch.float64)
    for bias in (torch.randn(count, dtype=torch.float64), None):
        expected = F.conv2d(x, weight, bias, stride, padding)
        torch.testing.assert_close(conv.sum_of_taps(x, weight, bias, stride, padding), expected)


def test_phases_are_the_convolution_of_the_larger_image() -> None:
    x, weight, bias = torch.randn(2, 3, 4, 5).double(), torch.randn(6, 3, 3, 3).double(), torch.randn(6).double()
    phases = upsample_conv.phase_weights(weight).unflatten(0, (2, 2, 6))
    result = torch.empty(2, 6, 8, 10).double()
    for py, px in product((0, 1), (0, 1)):
        around = F.pad(x, (1 - px, px, 1 - py, py))
        result[:, :, py::2, px::2] = F.conv2d(around, phases[py, px], bias)
    expected = upsample_conv.reference(x, weight, bias, sides=(8, 10))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "height", "width", "rows", "count"),
    [(2, 8, 8, 128, 1), (2, 32, 32, 128, 16), (1, 1, 1, 64, 1), (17, 3, 3, 128, 3), (1, 125, 125, 128, 126)],
)
def test_boxes(batch: int, height: int, width: int, rows: int, count: int) -> None:
    shape = conv.Shape(batch, height, width, 3, 1, 1)
    box = shape.box(rows)
    assert sum(box) == rows.bit_length() - 1
    assert shape.tiles(box) <= count


@pytest.mark.parametrize("shape", PUBLISHED + AWKWARD, ids=str)
def test_offers(shape: Shape7) -> None:
    """Our tiles wherever channels allow, torch everywhere; no GPU is asked."""
    batch, channels, height, width, out, kernel, stride = shape
    x = torch.empty(batch, height, width, channels, dtype=torch.float16, device="meta").movedim(-1, 1)
    weight = torch.empty(out, kernel, kernel, channels, dtype=torch.float16, device="meta").movedim(-1, 1)
    names = [t.name for t in conv.tactics(H200, x, weight, stride=stride, padding=kernel // 2)]
    assert "torch" in names
    assert any(name.startswith("ours") for name in names) == (channels % 8 == 0 and out % 32 == 0)
