"""Weights of a plan: from the store's files, or from the model's own parameters, laid out as the kernels read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdaccel.backends.cuda.plan import ExecutionPlan, WeightPlace
from sdaccel.engine.weights import DTYPES, FILE
from sdaccel.errors import EngineBroken

Parameters = Mapping[str, torch.nn.Parameter]

_ALIGNMENT = 16
"""bytes of a load; parameters of a host that cuts them out of one buffer may begin anywhere"""


def load_weights(
    plan: ExecutionPlan, folder: Path, dtype: torch.dtype, device: torch.device, shared: Parameters | None = None
) -> dict[str, Tensor]:
    """Every weight of ``plan`` by name in ``dtype``, convolutions' channels last ([O, kh, kw, I] in memory).

    ``folder`` is the store's folder of weights entries. Weights that are joined lie below each other in one tensor, of
    which each is a view. ``shared``: parameters of the torch module by name, known to hold the same values. Those of
    the same type and device that the plan does not scale are not loaded: engine and module share one memory from then
    on, tensor by tensor, so that at no time they are there twice. Every weight begins on 16 bytes, as kernels read it.
    Raises EngineBroken for a file that is missing or too short.
    """
    given = {
        name: parameter
        for name, parameter in (shared or {}).items()
        if name in plan.weights and name not in plan.exponents
        if parameter.dtype == dtype and parameter.device == device
        if tuple(parameter.shape) == plan.weights[name].shape
    }
    weights: dict[str, Tensor] = {}

    def value(name: str) -> Tensor:
        if name in given:
            return given[name].data
        stored = _read(folder, plan.weights[name])
        power = plan.exponents.get(name, 0)
        return (stored.to(device, torch.float32) * 2.0**power).to(dtype) if power else stored

    def use(name: str, tensor: Tensor) -> None:
        weights[name] = tensor
        if name in given:
            given[name].data = tensor

    for name, parts in plan.joined.items():
        whole = _adjacent([given[part].data for part in parts]) if given.keys() >= set(parts) else None
        rows = [plan.weights[part].shape[0] for part in parts]
        if whole is None:
            whole = torch.empty((sum(rows), *plan.weights[parts[0]].shape[1:]), dtype=dtype, device=device)
            for part, view in zip(parts, whole.split(rows), strict=True):
                view.copy_(value(part))
                use(part, view)
        weights.update(zip(parts, whole.split(rows), strict=True))
        weights[name] = whole
    for name in plan.weights:
        if name not in weights:
            tensor = value(name).to(device, dtype)
            order = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
            tensor = tensor.contiguous(memory_format=order)
            use(name, tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone(memory_format=order))
    return weights


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """The one tensor that ``parts`` are consecutive rows of, if an engine has joined them already."""
    first = parts[0]
    end = first.data_ptr()
    if end % _ALIGNMENT:
        return None
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _read(folder: Path, place: WeightPlace) -> Tensor:
    path = folder / place.entry / FILE
    dtype = DTYPES[place.dtype]
    if place.nbytes != math.prod(place.shape) * dtype.itemsize:
        raise EngineBroken(f"{path}: {place.nbytes} bytes are no {place.dtype} of {list(place.shape)}.")
    if not place.nbytes:
        return torch.empty(place.shape, dtype=dtype)
    try:
        data = np.memmap(path, np.uint8, "c", place.offset, (place.nbytes,))
    except (OSError, ValueError) as error:
        raise EngineBroken(f"{path} does not hold {place.nbytes} bytes at {place.offset}: {error}.") from error
    return torch.from_numpy(data).view(dtype).view(place.shape)
