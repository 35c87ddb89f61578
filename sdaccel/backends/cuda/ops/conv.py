"""Convolutions of images: activation(conv([x, x2], weight) + bias + add + residual).

x [B, C, H, W], x2 [B, C2, H, W] or None, weight [O, C + C2, k, k], bias [O], add [B, O] (rows may lie apart), residual
and result [B, O, H', W'] with H' = (H + 2 padding - k) / stride + 1, rounded down; images and weight with the channels
innermost (torch.channels_last).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.gemm import HEIGHTS, THREADS, Tile, aligned, best_tiles, can_run
from sdaccel.backends.cuda.launch import Device, Kernel, TensorMap, kernel
from sdaccel.backends.cuda.ops import conv_cudnn, linear
from sdaccel.backends.cuda.ops.layout import empty_image
from sdaccel.backends.cuda.tactic import Tactic

FILE = "conv_sm90.cu"


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    add: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 1,
    activation: str = "none",
) -> Tensor:
    y = exact(x if x2 is None else torch.cat((x, x2), 1), weight, bias, stride, padding)
    y = y if add is None else y + add[:, :, None, None]
    return linear.activate(y if residual is None else y + residual, activation)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 1) -> Tensor:
    """The convolution alone. Not cuDNN's in float32: without TF32 it may take its Fourier transform of 64 x 64, and
    that one is wrong by 70 % (cuDNN 9.19 on an H200; [16, 2560, 32, 32] with 1280 x 3 x 3 filters, for one)."""
    if x.is_cuda and x.dtype == torch.float32:
        return sum_of_taps(x, weight, bias, stride, padding)
    return F.conv2d(x, weight, bias, stride, padding)


def sum_of_taps(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, padding: int = 1) -> Tensor:
    """A matrix product for each place of the filter, one image after the other."""
    count, _, side, _ = weight.shape
    height, width = ((size + 2 * padding - side) // stride + 1 for size in x.shape[2:])
    y = x.new_empty(x.shape[0], height, width, count)
    for image, result in zip(F.pad(x.movedim(1, -1), (0, 0, *[padding] * 4)), y.flatten(1, 2), strict=True):
        result.copy_(bias) if bias is not None else result.zero_()
        for i, j in itertools.product(range(side), repeat=2):
            tap = image[i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
            result.addmm_(tap.flatten(0, 1), weight[:, :, i, j].T)
    return y.movedim(-1, 1)


def tactics(
    device: Device,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    add: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 1,
    activation: str = "none",
) -> list[Tactic]:
    call = Call(x, weight, bias, residual, x2, add, stride, padding, activation)
    return [*_as_linear(device, call), *_ours(device, call), *conv_cudnn.tactics(call), *_torch(call)]


@dataclass(frozen=True, eq=False)
class Call:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    x2: Tensor | None = None
    add: Tensor | None = None
    stride: int = 1
    padding: int = 1
    activation: str = "none"

    @property
    def kernel(self) -> int:
        return self.weight.shape[-1]

    @property
    def sides(self) -> tuple[int, int]:
        """height and width of the result"""
        height, width = ((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in self.x.shape[2:])
        return height, width

    def result(self) -> Tensor:
        return empty_image(self.x, self.weight.shape[0], self.sides)


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch(call: Call) -> Iterator[Tactic]:
    yield Tactic("torch", partial(_torch_conv, call, own_bias=False))
    if call.bias is not None:
        yield Tactic("torch<bias>", partial(_torch_conv, call, own_bias=True))


def _torch_conv(call: Call, own_bias: bool) -> Tensor:
    """own_bias: the convolution adds it; otherwise it comes with the other terms, in as few passes as torch has."""
    x = call.x if call.x2 is None else torch.cat((call.x, call.x2), 1)
    x = x.contiguous(memory_format=torch.channels_last)
    bias = call.bias if own_bias else None
    y = F.conv2d(x, call.weight, bias, call.stride, call.padding)
    shift = call.add
    if call.bias is not None and not own_bias:
        shift = call.bias[None] if shift is None else shift + call.bias
    if shift is not None:
        y.add_(shift[:, :, None, None])
    if call.residual is not None:
        y.add_(call.residual)
    return linear.activate_in_place(y, call.activation).contiguous(memory_format=torch.channels_last)


# --- sm_90a -----------------------------------------------------------------------------------------------------------


def _as_linear(device: Device, call: Call) -> Iterator[Tactic]:
    """A 1 x 1 convolution is a linear layer of the pixels."""
    if call.weight.shape[2:] != (1, 1) or call.stride != 1 or call.padding or call.add is not None:
        return
    residual, x2 = (None if x is None else x.movedim(1, -1) for x in (call.residual, call.x2))
    weight = call.weight.flatten(1)
    inner = linear.Call(call.x.movedim(1, -1), weight, call.bias, residual, x2, None, call.activation)
    for tactic in linear.ours(device, inner):
        yield Tactic(tactic.name, _Pixels(tactic), tactic.sources)


class _Pixels:
    def __init__(self, tactic: Tactic):
        self._run = tactic.run

    def __call__(self) -> Tensor:
        return self._run().movedim(-1, 1)


def _ours(device: Device, call: Call) -> Iterator[Tactic]:
    if _as_matrix(call.weight) is None or call.weight.shape[2] != call.weight.shape[3]:
        return
    if call.weight.shape[2:] == (1, 1) and call.stride == 1 and call.add is None:
        return
    if call.residual is not None and not call.residual.is_contiguous(memory_format=torch.channels_last):
        return
    if call.add is not None and (call.add.stride(1) != 1 or not aligned(call.add, call.add.stride(0))):
        return
    height, width = call.sides
    shape = Shape(call.x.shape[0], height, width, call.kernel, call.stride, call.padding)
    for tile in tiles(device, shape, call.x, call.x2, call.weight, call.activation):
        launch = Launch(device, tile, shape, call)
        yield Tactic(f"ours<{tile}>", launch, ((FILE, launch.defines),))


@dataclass(frozen=True)
class Shape:
    """What conv_sm90.cu is told. height, width: of the result; with ``upsample``, of one of its four phases."""

    batch: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int
    upsample: bool = False

    @property
    def phases(self) -> int:
        return 4 if self.upsample else 1

    def box(self, rows: int) -> tuple[int, int, int]:
        """Logarithms of width, height and images of the box of ``rows`` pixels that covers the result with the fewest
        boxes; the squarest of them, whose taps reach least beyond it."""
        log = rows.bit_length() - 1
        boxes = [(w, h, log - w - h) for w in range(log + 1) for h in range(log - w + 1)]

        def cost(box: tuple[int, int, int]) -> tuple[int, int]:
            width, height, images = (1 << side for side in box)
            return self.tiles(box), images * (width + self.kernel - 1) * (height + self.kernel - 1)

        return min((box for box in boxes if max(1 << box[0], 1 << box[1]) * self.stride <= 256), key=cost)

    def tiles(self, box: tuple[int, int, int]) -> int:
        return _pieces(self.width, box[0]) * _pieces(self.height, box[1]) * _pieces(self.batch, box[2])


def _pieces(size: int, log: int) -> int:
    return (size + (1 << log) - 1) >> log


def _as_matrix(weight: Tensor) -> Tensor | None:
    """[O, I, k, k] with the inputs innermost as [O, k k I]."""
    moved = weight.permute(0, 2, 3, 1)
    return moved.view(weight.shape[0], -1) if moved.is_contiguous() else None


def tiles(device: Device, shape: Shape, x: Tensor, x2: Tensor | None, weight: Tensor, activation: str) -> list[Tile]:
    """Those that should be fastest; none where the engine cannot do it."""
    inputs = [t for t in (x, x2) if t is not None]
    n = weight.shape[0] // shape.phases
    if not can_run(device, x.dtype, n) or activation == "geglu" or min(shape.height, shape.width, shape.batch) < 1:
        return []
    if any(t.shape[1] % 8 or not aligned(t, *_strides(t)) or (t.stride(1) != 1 and t.shape[1] > 1) for t in inputs):
        return []
    if not aligned(weight):
        return []
    heights = {m: shape.tiles(shape.box(m)) for m in HEIGHTS}
    blocks = shape.kernel**2 * sum(-(-t.shape[1] // 64) for t in inputs)
    return best_tiles(device, heights, n, blocks, activation=activation, phases=shape.phases)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of columns, rows and images, in elements; where there is but one, what it would be."""
    column = x.stride(3) if x.shape[3] > 1 else x.shape[1]
    row = x.stride(2) if x.shape[2] > 1 else column * x.shape[3]
    image = x.stride(0) if x.shape[0] > 1 else row * x.shape[2]
    return column, row, image


class Launch:
    """One tile; its kernel and maps are made at the first run. ``call.weight`` [O, I, k, k], with ``shape.upsample`` of
    all phases [4 O, I, 2, 2]."""

    def __init__(self, device: Device, tile: Tile, shape: Shape, call: Call):
        self._device, self._tile, self._shape, self._call = device, tile, shape, call
        self.defines = tile.defines(call.x.dtype, call.activation) | {"UPSAMPLE": int(shape.upsample)}
        self._made: tuple[Kernel, tuple[TensorMap, ...]] | None = None

    def __call__(self) -> Tensor:
        call, tile, shape = self._call, self._tile, self._shape
        box = shape.box(tile.m)
        if self._made is None:
            weight = _as_matrix(call.weight)
            assert weight is not None
            x = self._image_map(call.x, box)
            x2 = x if call.x2 is None else self._image_map(call.x2, box)
            self._made = (
                kernel(FILE, "conv_sm90", self.defines),
                (x, x2, tile.weight_map(weight, call.activation)),
            )
        run, maps = self._made
        n = call.weight.shape[0] // shape.phases
        scale = 2 if shape.upsample else 1
        out = empty_image(call.x, n, (scale * shape.height, scale * shape.width))
        numbers = (shape.batch, shape.height, shape.width, call.x.shape[1], 0 if call.x2 is None else call.x2.shape[1])
        more = (n, shape.kernel, shape.stride, shape.padding, box[0], box[1])
        add_stride = 0 if call.add is None else call.add.stride(0)
        run(
            (tile.grid(self._device, shape.tiles(box), shape.phases * -(-n // tile.n)),),
            THREADS,
            (*maps, out, call.bias, call.residual, call.add, *numbers, *more, add_stride),
            shared=tile.shared,
            cluster=tile.cluster,
            pdl=True,
        )
        return out

    def _image_map(self, x: Tensor, box: tuple[int, int, int]) -> TensorMap:
        batch, channels, height, width = x.shape
        stride = self._shape.stride
        return TensorMap.tiled(
            x,
            (channels, width, height, batch),
            [step * x.element_size() for step in _strides(x)],
            (64, stride << box[0], stride << box[1], 1 << box[2]),
            element_strides=(1, stride, stride, 1),
        )


VARIANTS = [
    (
        "conv_sm90.cu",
        "conv_sm90",
        tile.defines(torch.float16, activation) | {"UPSAMPLE": upsample},
        (9, 0),
        "90a",
    )
    for tile, activation, upsample in (
        (Tile(128, 160, 6), "none", 0),
        (Tile(128, 160, 6, pingpong=True, multicast=True), "silu", 0),
        (Tile(128, 256, 4, multicast=True), "none", 0),
        (Tile(256, 128, 4), "none", 1),
        (Tile(128, 96, 8, split=8), "none", 0),
    )
]
