"""Which initializers of an optimized graph are weights of the checkpoint, and how they are laid out.

ONNX Runtime's optimizer gives what it lays out anew (convolution weights in blocks of channels, biases that are padded
to a block, norms' scales with more axes) names of its own. They are found again by the node that reads them, and known
to be right because the weight, laid out so, gives the very bytes that the optimizer wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sdaccel.engine.weights import TensorPlace

if TYPE_CHECKING:
    import onnx

_BLOCKS = (16, 8, 4)
"""Channels in a block of MLAS: by AVX-512, AVX, and SSE or NEON"""
_VIEWS = frozenset({"Unsqueeze", "Reshape", "Squeeze", "Identity", "Flatten"})
_SUFFIX = "_nchwc"

Uses = dict[tuple[str, int], str]
"""(what a node gives, place among its inputs) → weight"""
Read = Callable[[str], np.ndarray]
"""Values by name"""


def uses(graph: onnx.GraphProto) -> Uses:
    """Who reads the external initializers of ``graph``, through views that the optimizer will fold away or not."""
    roots = {tensor.name: tensor.name for tensor in graph.initializer if tensor.data_location == tensor.EXTERNAL}
    found: Uses = {}
    for node in graph.node:
        if node.op_type in _VIEWS and node.input[0] in roots:
            roots.update((name, roots[node.input[0]]) for name in node.output)
            continue
        found.update({(node.output[0], place): roots[name] for place, name in enumerate(node.input) if name in roots})
    return found


def places(
    before: Uses, optimized: onnx.GraphProto, weight_of: Read, initializer_of: Read
) -> dict[str, tuple[str, str]]:
    """Initializers of ``optimized`` that can be written anew → (weight, layout).

    A weight is left out altogether when one of its readers has not been found again.
    """
    readers = Counter(before.values())
    weights = set(readers)
    names = {tensor.name for tensor in optimized.initializer}
    matches: dict[str, _Match] = {}
    seen: Counter[tuple[str, str]] = Counter()
    roots = {name: name for name in names}
    for node in optimized.node:
        if node.op_type in _VIEWS and node.input[0] in roots:
            roots.update((name, roots[node.input[0]]) for name in node.output)
            continue
        for place, name in enumerate(node.input):
            root = roots.get(name)
            if root is None:
                continue
            weight = root if root in weights else before.get((_gives(node), place))
            if weight is None:
                continue
            if root not in matches:
                base = weight_of(weight)
                layouts = _matching(base, initializer_of(root))
                matches[root] = _Match(weight, layouts, base.shape, node.name.endswith(_SUFFIX))
            seen[weight, root] += matches[root].weight == weight
    block = _block_in_use(matches.values())
    chosen = {root: match.layout(block) for root, match in matches.items()}
    found = {root: (matches[root].weight, layout) for root, layout in chosen.items() if layout is not None}
    read = Counter[str]()
    for (weight, root), count in seen.items():
        read[weight] += count if root in found else 0
    return {name: use for name, use in found.items() if read[use[0]] >= readers[use[0]]}


def _gives(node: onnx.NodeProto) -> str:
    """What a node gave before it worked in blocks of channels: its name tells."""
    return node.name.removesuffix(_SUFFIX) if node.name.endswith(_SUFFIX) else node.output[0]


def _matching(base: np.ndarray, written: np.ndarray) -> list[str]:
    """Layouts in which ``base`` gives ``written``: several, where it does not show, as in a weight of zeros."""
    if base.dtype != written.dtype:
        return []
    return [
        layout for layout in _layouts(base) if np.array_equal(laid_out(base, layout).reshape(-1), written.reshape(-1))
    ]


class _Match(NamedTuple):
    weight: str
    layouts: list[str]
    shape: tuple[int, ...]
    blocked: bool
    """Whether its reader works in blocks of channels."""

    def layout(self, block: int) -> str | None:
        """``block``: channels in a block on this machine, 0 if it does not show."""
        if len(self.layouts) < 2 or len(self.shape) != 4:
            return next(iter(self.layouts), None)
        kind = "both" if self.shape[1] >= block else "outputs"
        usual = f"{kind} {block}" if self.blocked else "plain"
        return usual if usual in self.layouts else None


def _block_in_use(matches: Iterable[_Match]) -> int:
    shown = Counter(
        int(match.layouts[0].partition(" ")[2])
        for match in matches
        if match.blocked and len(match.shape) == 4 and len(match.layouts) == 1
    )
    return max(shown, key=lambda block: shown[block], default=0)


def _layouts(base: np.ndarray) -> Iterator[str]:
    yield "plain"
    for block in _BLOCKS:
        if base.ndim == 1:
            yield f"padded {block}"
        elif base.ndim == 4:
            yield f"outputs {block}"
            yield f"both {block}"


def laid_out(weight: np.ndarray, layout: str) -> np.ndarray:
    """``weight``, [O] or [O, I, kh, kw], as MLAS reads it.

    "outputs B": [O/B, I, kh, kw, B]; "both B": [O/B, I/B, kh, kw, B of inputs, B of outputs]; channels are padded to B.
    """
    kind, _, number = layout.partition(" ")
    if kind == "plain":
        return weight
    block = int(number)
    padding = [(0, 0)] * weight.ndim
    for axis in (0, 1) if kind == "both" else (0,):
        padding[axis] = (0, -weight.shape[axis] % block)
    padded = np.pad(weight, padding)
    if kind == "padded":
        return padded
    outputs = padded.reshape(-1, block, *padded.shape[1:])
    if kind == "outputs":
        return np.ascontiguousarray(np.moveaxis(outputs, 1, -1))
    both = outputs.reshape(outputs.shape[0], block, -1, block, *outputs.shape[3:])
    return np.ascontiguousarray(both.transpose(0, 2, 4, 5, 3, 1))


def to_json(
    found: Mapping[str, tuple[str, str]], before: Uses, graph: onnx.GraphProto, stored: Mapping[str, TensorPlace]
) -> dict[str, Any]:
    """written: initializer → (weight, layout, shape); places: weight → where it lies in its entry; fixed: weights that
    are read and cannot be written."""
    weights = sorted({weight for weight, _ in found.values()})
    kept = {name: stored[name] for name in weights}
    return {
        "written": {
            tensor.name: [*found[tensor.name], list(tensor.dims)]
            for tensor in graph.initializer
            if tensor.name in found
        },
        "places": {name: [place.offset, place.nbytes, place.dtype, place.shape] for name, place in kept.items()},
        "fixed": sorted(set(before.values()).difference(weights)),
    }
