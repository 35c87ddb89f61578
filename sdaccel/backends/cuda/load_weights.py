"""Weights of a plan: from the store's files to the device, laid out as the kernels read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdaccel.backends.cuda.plan import ExecutionPlan, WeightPlace
from sdaccel.engine.weights import DTYPES, FILE
from sdaccel.errors import EngineBroken


def load_weights(plan: ExecutionPlan, folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every weight of ``plan`` by name in ``dtype``, convolutions' channels last ([O, kh, kw, I] in memory).

    ``folder`` is the store's folder of weights entries. Weights that are joined lie below each other in one tensor, of
    which each is a view. Raises EngineBroken for a file that is missing or too short.
    """
    weights: dict[str, Tensor] = {}
    for name, parts in plan.joined.items():
        places = [plan.weights[part] for part in parts]
        rows = [place.shape[0] for place in places]
        whole = torch.empty((sum(rows), *places[0].shape[1:]), dtype=dtype, device=device)
        for part, place, view in zip(parts, places, whole.split(rows), strict=True):
            view.copy_(_read(folder, place))
            weights[part] = view
        weights[name] = whole
    for name, place in plan.weights.items():
        if name not in weights:
            value = _read(folder, place).to(device, dtype)
            weights[name] = value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
    return weights


def _read(folder: Path, place: WeightPlace) -> Tensor:
    path = folder / place.entry / FILE
    try:
        data = np.memmap(path, np.uint8, "c", place.offset, (place.nbytes,)) if place.nbytes else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise EngineBroken(f"{path} does not hold {place.nbytes} bytes at {place.offset}: {error}.") from error
    dtype = DTYPES[place.dtype]
    if place.nbytes != math.prod(place.shape) * dtype.itemsize:
        raise EngineBroken(
            f"{path}: {place.nbytes} bytes at {place.offset} are no {place.dtype} of {list(place.shape)}."
        )
    return torch.from_numpy(data).view(dtype).view(place.shape)


def by_parameter(weights: Mapping[str, Tensor], plan: ExecutionPlan) -> dict[str, Tensor]:
    """The weights that the model's own parameters can share memory with."""
    return {name: weights[name] for name in plan.weights}
