"""A plan of one checkpoint → the plan of another of the same architecture: its weights, laid out in the same way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sdaccel.backends.base import BuildJob, Built
from sdaccel.backends.onnxruntime import PLAN, SAFETENSORS, WEIGHTS, entry_of, extent, external, place_at
from sdaccel.backends.onnxruntime_refit import laid_out
from sdaccel.engine import weights as weights_file
from sdaccel.engine.store import Entry
from sdaccel.engine.weights import DTYPES, TensorPlace
from sdaccel.errors import EngineBroken

if TYPE_CHECKING:
    import onnx

Pack = Callable[[Mapping[str, list[Any]], Mapping[str, Any], BuildJob], "Entry | None"]


@dataclass(frozen=True)
class _InFile:
    """A tensor of a file, to be laid out as a plan wants it in ``dims``."""

    path: Path
    place: TensorPlace
    layout: str
    dims: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.place.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dims

    def array(self) -> np.ndarray:
        data = torch.from_numpy(np.fromfile(self.path, np.uint8, self.place.nbytes, offset=self.place.offset))
        values = data.view(DTYPES[self.place.dtype]).view(self.place.shape).numpy()
        return np.ascontiguousarray(laid_out(values, self.layout))

    def read(self) -> torch.Tensor:
        return torch.from_numpy(self.array()).view(self.dims)


def adopt(engine: Entry, job: BuildJob, folder: Path, pack: Pack) -> Built | None:
    """None where the plan cannot be told to be right for other weights. See `Backend.adopt`.

    So it is where the optimizer has folded weights into others, where the new ones differ in shape or type, and where
    a weight has one value throughout, which hides how it is laid out.
    """
    import onnx

    job.store.open_engine(engine.key)  # its weights are read too
    try:
        document = json.loads(engine.file(WEIGHTS).read_text(encoding="utf-8"))
        known = {
            name: TensorPlace(o, n, tuple(shape), kind) for name, (o, n, kind, shape) in document["places"].items()
        }
        weights = job.store.root / "weights"
        old = weights / entry_of(document) / weights_file.FILE
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineBroken(f"{engine.path / WEIGHTS} cannot be read: {error}.") from error
    stored, file = weights_file.layout(job.weights), job.weights.file(weights_file.FILE)
    places = {name: stored[name] for name in known if name in stored}
    same = all(name in places and replace(places[name], offset=place.offset) == place for name, place in known.items())
    if document["fixed"] or not same or any(_hidden(old, place) for place in known.values()):
        return None
    model = onnx.load(str(engine.file(PLAN)), load_external_data=False)
    own: dict[str, list[onnx.TensorProto]] = {}
    tensors = {}
    for tensor in external(model):
        written = document["written"].get(tensor.name)
        if written is not None and written[1] == "plain":
            place_at(tensor, job.weights.key, places[written[0]].offset, places[written[0]].nbytes)
            continue
        value = _constant(tensor, weights) if written is None else _InFile(file, places[written[0]], *_how(written))
        name = hashlib.sha256(value.array().data).hexdigest()
        own.setdefault(name, []).append(tensor)
        tensors[name] = value
    job.progress("storing", 0.8)
    packed = pack(own, tensors, job)
    document["entry"] = job.weights.key
    document["places"] = {name: [p.offset, p.nbytes, p.dtype, p.shape] for name, p in places.items()}
    (folder / WEIGHTS).write_text(json.dumps(document, indent=1), encoding="utf-8")
    (folder / PLAN).write_bytes(model.SerializeToString(deterministic=True))
    return Built((packed.key,) if packed else ())


def _how(written: list[Any]) -> tuple[str, tuple[int, ...]]:
    _, layout, dims = written
    return layout, tuple(dims)


def _constant(tensor: onnx.TensorProto, weights: Path) -> _InFile:
    """Of the graph, and so of every checkpoint."""
    location = next(item.value for item in tensor.external_data if item.key == "location")
    dims = tuple(tensor.dims)
    return _InFile(weights / location, TensorPlace(*extent(tensor), dims, SAFETENSORS[tensor.data_type]), "plain", dims)


def _hidden(file: Path, place: TensorPlace) -> bool:
    """Whether every layout of a weight looks alike."""
    if len(place.shape) != 4:
        return False
    values = _InFile(file, place, "plain", place.shape).array()
    return bool(values.min() == values.max())
