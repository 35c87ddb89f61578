"""The weights of a checkpoint component in one precision: stored once, shared by every engine that runs them.

An entry holds one weights.safetensors in one exact form, so that equal weights give equal bytes wherever they came
from: tensors without gaps, widest elements first and by name among those (each tensor then lies on a multiple of its
element size), the header padded with spaces until the data start at a multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sdaccel.engine.manifest import canonical_json
from sdaccel.engine.store import Draft, Entry, Store
from sdaccel.errors import EngineBroken, ModelError

if TYPE_CHECKING:
    from sdaccel.models.checkpoint import Component

FILE = "weights.safetensors"
LAYOUT_VERSION = 1
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_ALIGN = 64
_PIECE = 1 << 20  # elements converted at a time: at most 16 MiB of copies
_MAX_HEADER = 100 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SIZES = {name: dtype.itemsize for dtype, name in _NAMES.items()}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a weights file: ``offset`` and ``nbytes`` in bytes, ``dtype`` as safetensors names it."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


def weights_key(content_hash: str, precision: str) -> str:
    """The key of the weights entry of a component with this content hash. Raises ModelError for another precision."""
    if precision not in PRECISIONS:
        raise ModelError(f"weights cannot be kept in {precision!r}: {', '.join(PRECISIONS)} can.")
    identity = {"content": content_hash, "precision": precision, "layout": LAYOUT_VERSION}
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def publish_weights(
    store: Store,
    component: Component,
    precision: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    timeout: float | None = None,
    waiting: Callable[[str], None] | None = None,
) -> Entry:
    """The weights of ``component`` in ``precision`` (fp32, fp16 or bf16), converted and stored unless they are there.

    Tensors are streamed in pieces: at most 256 MiB beside the memory-mapped checkpoint, whatever their size. Whole
    numbers keep their type. ``progress`` is told (bytes done, bytes in all) and may raise Cancelled. Raises ModelError,
    naming the tensor, when a finite value would become infinite, and StoreError (see `Store.publish`).
    """
    key = weights_key(component.content_hash, precision)

    def fill(draft: Draft) -> dict[str, Any]:
        types = {name: _stored_dtype(ref.dtype, precision, name) for name, ref in component.tensors.items()}
        total = _write(draft, component.name, types, component.tensors, precision, progress)
        return {"content": component.content_hash, "precision": precision, "tensors": len(types), "nbytes": total}

    return store.publish("weights", key, fill, timeout=timeout, waiting=waiting)


def publish_tensors(store: Store, key: str, tensors: Mapping[str, Readable], about: Mapping[str, Any]) -> Entry:
    """A weights entry of tensors that a backend laid out in its own way, as they are. ``about`` is its manifest."""

    def fill(draft: Draft) -> dict[str, Any]:
        total = _write(draft, "packed", {name: tensor.dtype for name, tensor in tensors.items()}, tensors)
        return {**about, "tensors": len(tensors), "nbytes": total}

    return store.publish("weights", key, fill)


class Readable(Protocol):
    """A tensor to be stored; ``dtype`` as safetensors names it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> torch.Tensor: ...


def _write(
    draft: Draft,
    owner: str,
    types: Mapping[str, str],
    tensors: Mapping[str, Readable],
    precision: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Streams ``tensors`` into the draft's weights file, each as its type in ``types``. Returns the bytes of data."""
    places, header = _plan(types, tensors)
    total = sum(place.nbytes for place in places.values())
    done = 0
    with draft.create(FILE, len(header) + total) as file:
        file.write(header)
        for name, place in places.items():
            for piece in _pieces(tensors[name].read()):
                done += file.write(_converted(piece, DTYPES[place.dtype], f"{owner} {name}", precision))
                if progress is not None:
                    progress(done, total)
    if done != total:
        raise ModelError(f"{owner}: its tensors have {done:,} bytes, not {total:,}.")
    return total


def _plan(types: Mapping[str, str], tensors: Mapping[str, Readable]) -> tuple[dict[str, TensorPlace], bytes]:
    """Each tensor's place in the order of the file, and the bytes before the first."""
    relative: dict[str, TensorPlace] = {}
    begin = 0
    for name in sorted(types, key=lambda name: (-_SIZES[types[name]], name)):
        shape = tuple(tensors[name].shape)
        relative[name] = TensorPlace(begin, math.prod(shape) * _SIZES[types[name]], shape, types[name])
        begin += relative[name].nbytes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, place in relative.items():
        offsets = (place.offset, place.offset + place.nbytes)
        header[name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    places = {name: replace(place, offset=8 + len(text) + place.offset) for name, place in relative.items()}
    return places, len(text).to_bytes(8, "little") + text


def _stored_dtype(dtype: str, precision: str, name: str) -> str:
    if dtype not in _SIZES:
        raise ModelError(f"{name} has the type {dtype}, which cannot be stored: {', '.join(_SIZES)} can.")
    return _NAMES[PRECISIONS[precision]] if DTYPES[dtype].is_floating_point else dtype


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """``tensor`` in row-major order, in views of at most `_PIECE` elements."""
    if tensor.numel() <= _PIECE:
        yield tensor
    elif tensor.is_contiguous() or tensor.dim() == 1:
        yield from tensor.view(-1).split(_PIECE)
    else:
        rows = _PIECE // (tensor.numel() // tensor.shape[0])
        if rows:
            yield from tensor.split(rows)
        else:
            for row in tensor.unbind():
                yield from _pieces(row)


def _converted(piece: torch.Tensor, dtype: torch.dtype, name: str, precision: str) -> memoryview:
    """The bytes of ``piece`` in ``dtype``. Raises ModelError if a finite value leaves the type's range."""
    piece = piece.detach().cpu()
    result = piece.to(dtype).contiguous()
    if _may_overflow(piece, dtype):
        lost = torch.isinf(result) & ~torch.isinf(piece)
        if lost.any():
            raise ModelError(
                f"{name} holds {piece[lost][0].item():g}, beyond the largest number of {precision} "
                f"({torch.finfo(dtype).max:g}).",
                hint="Build with --precision bf16 or fp32.",
            )
    flat = result.as_strided((result.numel(),), (1,))  # a dimension of 1 may have any stride, which view() refuses
    return memoryview(flat.view(torch.uint8).numpy())


def _may_overflow(piece: torch.Tensor, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not piece.numel() or torch.finfo(piece.dtype).max <= torch.finfo(dtype).max:
        return False
    low, high = (extreme.item() for extreme in torch.aminmax(piece))
    return not -torch.finfo(dtype).max <= low <= high <= torch.finfo(dtype).max  # NaN: look closer


def layout(entry: Entry) -> dict[str, TensorPlace]:
    """Each tensor's place in the entry's weights.safetensors, from its header. Raises EngineBroken if that is none."""
    path = entry.file(FILE)
    size = entry.files[FILE].size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise EngineBroken(f"{path}: a header of {length:,} bytes does not fit into {size:,}.")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        places = {}
        for name, info in header.items():
            begin, end = info["data_offsets"]
            places[name] = TensorPlace(8 + length + begin, end - begin, tuple(info["shape"]), info["dtype"])
        for name, place in places.items():
            inside = 8 + length <= place.offset <= place.offset + place.nbytes <= size
            if not inside or place.nbytes != math.prod(place.shape) * _SIZES[place.dtype]:
                raise ValueError(f"{name} does not lie in the file")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EngineBroken(f"{path}: its header cannot be read: {error}.") from None
    return places
