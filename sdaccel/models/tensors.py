"""Weights on disk: a strict safetensors header reader, and tensors that are read only when asked for."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdaccel.errors import ModelError

MAX_HEADER = 100_000_000
CHUNK = 1 << 20

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in FLOATS.items()}


class HeaderEntry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the start of the file."""
    nbytes: int


# ---- the header


def read_header(path: Path | str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Tensors and metadata that a .safetensors file declares, each checked against the others and the file's size.

    The format: 8 bytes little-endian header length, a JSON object, the data without gaps
    (https://huggingface.co/docs/safetensors). Raises ModelError for anything else.
    """
    entries, metadata, _ = read_stamped_header(Path(path))
    return entries, metadata


def read_stamped_header(path: Path) -> tuple[dict[str, HeaderEntry], dict[str, str], tuple[int, int]]:
    """As read_header, with the file's size and time of change."""
    try:
        with path.open("rb") as file:
            opened = stamp(os.fstat(file.fileno()))
            start = file.read(512)
            length = _header_length(path, start, opened[0])
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    try:
        header = _parse(raw)
        metadata = _metadata(header.pop("__metadata__", {}))
        entries = {name: _entry(name, info, 8 + length) for name, info in header.items()}
    except _Malformed as fault:
        raise ModelError(f"{path}: broken safetensors header: {fault}.", hint=_AGAIN) from None
    _check_coverage(path, entries, 8 + length, opened[0])
    return entries, metadata, opened


_AGAIN = "Download it again."


class _Malformed(ValueError):
    pass


def _header_length(path: Path, start: bytes, size: int) -> int:
    if size == 0:
        raise ModelError(f"{path}: empty file (0 bytes).", hint=_AGAIN)
    looks = looks_like(start)
    if looks:
        kind, hint = looks
        raise ModelError(f"{path}: not a safetensors file, but {kind}.", hint=hint)
    if size < 10:
        raise ModelError(f"{path}: not a safetensors file ({size} bytes are too few for a header).", hint=_AGAIN)
    (length,) = struct.unpack("<Q", start[:8])
    if length > MAX_HEADER or start[8:9] != b"{":
        raise ModelError(f"{path}: not a safetensors file (it starts with {start[:12]!r}).", hint=_AGAIN)
    if 8 + length > size:
        raise ModelError(f"{path}: incomplete: {size} of at least {8 + length} bytes.", hint=_AGAIN)
    return length


def looks_like(start: bytes) -> tuple[str, str] | None:
    """What a file that starts so is instead of weights, and what to do about it; None when nothing familiar."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    lower = text[:256].lower()
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer", "Fetch the weights themselves: git lfs pull"
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--", b"<script", b"<body")):
        return (
            "an HTML page",
            "A download link often answers with a log-in or error page: log in and download the file itself.",
        )
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "a zip archive (a PyTorch .ckpt or .pt is one)", "If it is a checkpoint, name it .ckpt and allow pickle."
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[8:9] != b"{":
        return "a Python pickle", "If it is a checkpoint, name it .ckpt and allow pickle."
    if start.startswith(b"GGUF"):
        return "a GGUF file", "Use the .safetensors form of the model."
    if text[:1] in (b"{", b"[") and start[8:9] != b"{":
        return "a JSON text", "An error message of the server, perhaps: look into it, then download the file itself."
    if len(start) >= 9 and _is_text(start):
        return f"a text starting with {start[:40]!r}", "An error message of the server, perhaps: look into it."
    return None


def _is_text(start: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\r\n" for byte in start) and start[8:9] != b"{"


def _parse(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _Malformed("a name occurs twice")
        return found

    def whole(digits: str) -> int:
        if len(digits) > 19:
            raise _Malformed(f"the number {digits[:20]}… is too large")
        return int(digits)

    def refuse(text: str) -> Any:
        raise _Malformed(f"{text[:20]} is not a whole number")

    try:
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_int=whole, parse_float=refuse, parse_constant=refuse
        )
    except UnicodeDecodeError:
        raise _Malformed("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Malformed(f"no JSON at character {error.pos}") from None
    except RecursionError:
        raise _Malformed("it is nested too deeply") from None
    except MemoryError:
        raise _Malformed("it does not fit into memory") from None
    if not isinstance(header, dict):
        raise _Malformed("it is not an object")
    return header


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _Malformed("__metadata__ is not a table of texts")
    return found


def _entry(name: str, info: Any, data_start: int) -> HeaderEntry:
    label = repr(name[:120])
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(f"{label} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _Malformed(f"{label} has the unknown dtype {str(dtype)[:20]!r}")
    if not _sizes(shape) or len(shape) > 32:
        raise _Malformed(f"{label} has no valid shape")
    if not _sizes(offsets) or len(offsets) != 2:
        raise _Malformed(f"{label} has no valid data_offsets")
    begin, end = offsets
    nbytes = prod(shape) * ITEM_SIZES[dtype]
    if end - begin != nbytes:
        raise _Malformed(f"{label} needs {str(nbytes)[:30]} bytes but its data_offsets span {end - begin}")
    return HeaderEntry(dtype, tuple(shape), data_start + begin, nbytes)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_coverage(path: Path, entries: Mapping[str, HeaderEntry], data_start: int, size: int) -> None:
    ends = max((entry.offset + entry.nbytes for entry in entries.values()), default=data_start)
    if size < ends:
        raise ModelError(f"{path}: incomplete: {size} of {ends} bytes.", hint=_AGAIN)
    if size > ends:
        raise ModelError(
            f"{path}: {size - ends} bytes follow the last tensor, which the header does not explain.", hint=_AGAIN
        )
    ordered = sorted(((e.offset, e.offset + e.nbytes, name) for name, e in entries.items()))
    for (_, end, first), (begin, _, second) in pairwise([(0, data_start, "the header"), *ordered]):
        if begin != end:
            fault = "overlap" if begin < end else "leave a gap between them"
            raise ModelError(
                f"{path}: broken safetensors header: {first!r:.120} and {second!r:.120} {fault}.", hint=_AGAIN
            )


# ---- tensors


@dataclass(frozen=True, eq=False)
class TensorRef:
    """One weight, left where it is until read.

    ``shape`` is the one that its component's state_dict has. ``source`` is a file, then ``offset`` counts bytes from
    its start, or a live tensor. ``transposed``: the source holds the 2-D transpose, rows for columns.
    """

    name: str
    dtype: str
    """"F16", "BF16" or "F32"."""
    shape: tuple[int, ...]
    source: Path | torch.Tensor
    offset: int = 0
    transposed: bool = False
    stamp: tuple[int, int] | None = None
    """Size and time of change (ns) that the file had when it was opened."""

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_SIZES[self.dtype]

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, contiguous, in its own dtype.

        A file's pages are mapped, not copied, except when transposed or not aligned to the dtype. Writing into the
        result never reaches the file. Raises ModelError when the file is gone or has changed since.
        """
        if isinstance(self.source, torch.Tensor):
            tensor = self.source.detach().to("cpu")
            return (tensor.t() if self.transposed else tensor.reshape(self.shape)).contiguous()
        if not self.count:
            return torch.empty(self.shape, dtype=FLOATS[self.dtype])
        pages = _pages(self.source, self.stamp)
        if len(pages) < self.offset + self.nbytes:
            raise _changed(self.source)
        tensor = torch.frombuffer(pages, dtype=FLOATS[self.dtype], count=self.count, offset=self.offset)
        if self.transposed:
            return tensor.reshape(self.shape[::-1]).t().contiguous()
        if self.offset % ITEM_SIZES[self.dtype]:
            tensor = tensor.clone()
        return tensor.reshape(self.shape)

    def file(self) -> torch.Tensor:
        """All bytes of the file that it lies in, mapped. Raises ModelError as `read`."""
        if isinstance(self.source, torch.Tensor):
            raise ModelError(f"{self.name} is in no file.")
        return torch.frombuffer(_pages(self.source, self.stamp), dtype=torch.uint8)

    def chunks(self, nbytes: int = CHUNK) -> Iterator[torch.Tensor]:
        """The values in order as 1-D tensors of at most ``nbytes``, with no more than that of a file in memory."""
        size = ITEM_SIZES[self.dtype]
        step = max(nbytes // size, 1)
        if isinstance(self.source, torch.Tensor) or self.transposed:
            flat = self.read().reshape(-1)
            yield from (flat[start : start + step] for start in range(0, self.count, step))
            return
        try:
            with self.source.open("rb") as file:
                if self.stamp and self.stamp != stamp(os.fstat(file.fileno())):
                    raise _changed(self.source)
                file.seek(self.offset)
                for start in range(0, self.count, step):
                    buffer = bytearray(min(step, self.count - start) * size)
                    if file.readinto(buffer) != len(buffer):
                        raise _changed(self.source)
                    yield torch.frombuffer(buffer, dtype=FLOATS[self.dtype])
        except OSError as error:
            raise ModelError(f"{self.source}: cannot be read ({error.strerror or error}).") from None

    def rows(self, start: int, stop: int, name: str) -> TensorRef:
        """Rows of the stored matrix or vector (query, key and value are often kept as one)."""
        shape = (stop - start, *self.shape[1:])
        if isinstance(self.source, torch.Tensor):
            return replace(self, name=name, shape=shape, source=self.source[start:stop])
        offset = self.offset + start * prod(self.shape[1:]) * ITEM_SIZES[self.dtype]
        return replace(self, name=name, shape=shape, offset=offset)


_mappings: weakref.WeakValueDictionary[tuple, mmap.mmap] = weakref.WeakValueDictionary()


def stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _pages(path: Path, expected: tuple[int, int] | None) -> mmap.mmap:
    """The file mapped copy-on-write, shared by all its tensors: a stray write hits neither the file nor the process."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if expected and expected != stamp(found):
                raise _changed(path)
            key = (path, found.st_dev, found.st_ino, *stamp(found))
            pages = _mappings.get(key)
            if pages is None:
                try:
                    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, MemoryError):  # systems that reserve memory for private pages
                    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                pages = _mappings.setdefault(key, pages)
            return pages
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}).") from None


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path}: changed since it was opened.", hint="Open the model again.")


@dataclass(frozen=True, eq=False)
class Component:
    """A network of a checkpoint: its published config and its weights by state_dict name."""

    name: str
    """"unet", "vae", "text_encoder" or "text_encoder_2"."""
    config: dict[str, Any]
    tensors: dict[str, TensorRef]

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(ref.count for ref in self.tensors.values())

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) over every weight, the same for equal values however they are stored.

        Each tensor counts as name, shape and bytes in its canonical dtype: the first of fp16, bf16, fp32 that holds
        every value bit for bit. Computed once: a live module that changes afterwards needs opening again.
        """
        names = sorted(self.tensors)
        with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 16)) as pool:
            digests = list(pool.map(lambda name: _digest(self.tensors[name]), names))
        whole = hashlib.sha256()
        for name, digest in zip(names, digests, strict=True):
            head = json.dumps([name, list(self.tensors[name].shape), digest])
            whole.update(f"{head}\n".encode())
        return whole.hexdigest()

    @property
    def hashed(self) -> bool:
        """Whether `content_hash` is at hand."""
        return "content_hash" in self.__dict__

    def recall(self, content_hash: str) -> None:
        """Takes the hash as known, so that nothing is read for it."""
        self.__dict__["content_hash"] = content_hash

    @property
    def changed(self) -> bool:
        """Whether a file of it is gone, or another than when it was opened."""
        opened = {(ref.source, ref.stamp) for ref in self.tensors.values() if isinstance(ref.source, Path)}
        try:
            return any(known is not None and stamp(path.stat()) != known for path, known in opened)
        except OSError:
            return True

    def __repr__(self) -> str:
        return f"Component({self.name!r}, {len(self.tensors)} tensors, {self.parameters:,} parameters)"


def _digest(ref: TensorRef) -> str:
    dtype = canonical_dtype(ref)
    digest = hashlib.sha256(NAMES[dtype].encode())
    for chunk in ref.chunks():
        digest.update(chunk.to(dtype).view(torch.uint8).numpy())
    return digest.hexdigest()


def canonical_dtype(ref: TensorRef) -> torch.dtype:
    """The first of fp16, bf16, fp32 that holds every value of the tensor; with NaN in it, the one it is stored in."""
    for dtype in FLOATS.values():
        if dtype == FLOATS[ref.dtype] or all(_holds(dtype, chunk) for chunk in ref.chunks()):
            return dtype
    return torch.float32


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    return torch.equal(values.to(dtype).to(values.dtype), values)  # NaN equals nothing, and zero keeps its sign
