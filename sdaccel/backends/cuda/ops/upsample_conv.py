"""An image made larger by its nearest pixels, then a 3 x 3 convolution with padding 1.

x [B, C, H, W], weight [O, C, 3, 3], bias [O], result [B, O, *sides]; sides = (2 H or 2 H - 1, 2 W or 2 W - 1). Images
and weight with the channels innermost (torch.channels_last).

Where both sides double, output pixels of one parity (row, column) see x through a 2 x 2 kernel, the sums of those taps
that fall on the same pixel: four small convolutions of x, 4 / 9 of the arithmetic, and nothing in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import conv, elementwise
from sdaccel.backends.cuda.ops.conv import Call, Launch, Shape
from sdaccel.backends.cuda.tactic import Tactic


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sides: tuple[int, int]) -> Tensor:
    return conv.exact(F.interpolate(x, sides), weight, bias)


def tactics(
    device: Device, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sides: tuple[int, int]
) -> list[Tactic]:
    found = [*_phases(device, x, weight, bias)] if tuple(sides) == (2 * x.shape[2], 2 * x.shape[3]) else []
    large = torch.empty((x.shape[0], *sides, x.shape[1]), dtype=x.dtype, device="meta").movedim(-1, 1)
    for tactic in conv.tactics(device, large, weight, bias):  # the large image does not exist yet
        run = _Larger(device, x, weight, bias, sides, tactic.name)
        found.append(Tactic(tactic.name, run, tactic.sources))
    return found


def phase_weights(weight: Tensor) -> Tensor:
    """[O, I, 3, 3] → [4 O, I, 2, 2], phases (row parity, column parity) = (0, 0), (0, 1), (1, 0), (1, 1); channels
    innermost. Summed in float32. Even rows see pixel y - 1 through tap 0 and y through taps 1 and 2; odd rows y through
    taps 0 and 1 and y + 1 through tap 2; columns alike.
    """
    taps = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]], dtype=torch.float32, device=weight.device)
    sums = torch.einsum("pyk,qxl,oikl->pqoyxi", taps, taps, weight.float())
    return sums.flatten(0, 2).to(weight.dtype).movedim(-1, 1)


# Phases of weights that are in use, with the version of the weight they were made of.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _phases_of(weight: Tensor) -> Tensor:
    version = 0 if weight.is_inference() else weight._version
    known = _known.get(weight)
    if known is not None and known[0] == version:
        return known[1]
    made = phase_weights(weight)
    if not torch.cuda.is_current_stream_capturing():  # memory of a graph is not ours to keep
        _known[weight] = version, made
    return made


def refresh(weight: Tensor) -> None:
    """The weight has been written to: its phases, which graphs read, are made again where they are."""
    known = _known.get(weight)
    if known is not None:
        known[1].copy_(phase_weights(weight))
        _known[weight] = weight._version, known[1]


def _phases(device: Device, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tactic]:
    if weight.shape[2:] != (3, 3):
        return []
    shape = Shape(x.shape[0], x.shape[2], x.shape[3], 2, 1, 1, upsample=True)
    seen = torch.empty((4 * weight.shape[0], 2, 2, weight.shape[1]), dtype=weight.dtype, device="meta").movedim(-1, 1)
    tiles = conv.tiles(device, shape, x, None, seen, "none")
    launches = {f"phases<{tile}>": _Phases(device, tile, shape, x, weight, bias) for tile in tiles}
    return [Tactic(name, launch, ((conv.FILE, launch.defines),)) for name, launch in launches.items()]


class _Phases:
    def __init__(self, device: Device, tile: conv.Tile, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None):
        self._device, self._tile, self._shape = device, tile, shape
        self._x, self._weight, self._bias = x, weight, bias
        self._made: tuple[Tensor, Launch] | None = None
        self.defines = tile.defines(x.dtype, "none") | {"UPSAMPLE": 1}

    def __call__(self) -> Tensor:
        phases = _phases_of(self._weight)
        if self._made is None or self._made[0] is not phases:
            launch = Launch(self._device, self._tile, self._shape, Call(self._x, phases, self._bias))
            self._made = phases, launch
        return self._made[1]()


class _Larger:
    """The large image first, then the convolution's tactic of this name."""

    def __init__(
        self, device: Device, x: Tensor, weight: Tensor, bias: Tensor | None, sides: tuple[int, int], name: str
    ):
        self._device, self._x, self._weight, self._bias = device, x, weight, bias
        self._sides, self._name = sides, name

    def __call__(self) -> Tensor:
        large = elementwise.upsample.tactics(self._device, self._x, sides=self._sides)[0].run()
        found = conv.tactics(self._device, large, self._weight, self._bias)
        return next(tactic for tactic in found if tactic.name == self._name).run()
