"""Models that were used last and may be used again, kept in RAM within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sdaccel import settings
from sdaccel.upload import upload

GIB = 1 << 30


class Keepable(Protocol):
    """What `ModelCache` keeps."""

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes while it is kept."""
        ...

    def park(self) -> None:
        """Lets go of all memory of a GPU."""
        ...

    def close(self) -> None: ...


Model = TypeVar("Model", bound=Keepable)


class ModelCache(Generic[Model]):
    """The models that are not in use, the least recently used first. For one thread at a time."""

    def __init__(self, budget: int | None = None):
        """``budget``: bytes of RAM for all of them; None: SDACCEL_MODEL_CACHE. Raises SettingError."""
        self.budget = budget_by_setting() if budget is None else budget
        self._models: OrderedDict[Hashable, tuple[Model, int]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._models.values())

    def keys(self) -> list[Hashable]:
        """The least recently used first."""
        return list(self._models)

    def keep(self, key: Hashable, model: Model) -> None:
        """Parks a model that was in use until now, and closes those that have no room beside it, perhaps itself."""
        nbytes = model.nbytes
        if nbytes > self.budget:
            model.close()
            return
        model.park()
        self._models[key] = model, nbytes
        while self.nbytes > self.budget:
            _, (oldest, _) = self._models.popitem(last=False)
            oldest.close()

    def take(self, key: Hashable) -> Model | None:
        """The model, no longer kept: it is in use from now on."""
        found = self._models.pop(key, None)
        return None if found is None else found[0]

    def clear(self) -> None:
        while self._models:
            _, (model, _) = self._models.popitem(last=False)
            model.close()


def budget_by_setting() -> int:
    """Bytes, by SDACCEL_MODEL_CACHE; a quarter of this machine's RAM where it says nothing. Raises SettingError."""
    import psutil

    chosen = settings.MODEL_CACHE.value()
    return psutil.virtual_memory().total // 4 if chosen is None else int(chosen * GIB)


class HostWeights:
    """A pipeline's weights as they are on the host before it goes to a GPU, and where it goes back to.

    Weights that are mapped from a file stay so: they cost no RAM but the file's own pages.
    """

    def __init__(self, pipe: Any):
        """``pipe``: on the CPU."""
        self._pipe = pipe
        self._tensors = [(places, name, tensor.data) for places, name, tensor in _tensors(pipe)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, _, tensor in self._tensors)

    def move(self, device: str) -> Any:
        """Takes the pipeline to ``device``. Returns it. Raises torch.cuda.OutOfMemoryError, and it stays."""
        target = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        if target.type != "cpu":
            copies = upload([tensor for _, _, tensor in self._tensors], target)
            for (places, name, _), copy in zip(self._tensors, copies, strict=True):
                places[name].data = copy
        return self._pipe

    def leave(self) -> None:
        """Puts every weight back to what it was on the host; on the GPU nothing of them is left."""
        for places, name, tensor in self._tensors:
            places[name].data = tensor


def _tensors(pipe: Any) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(where it stands, its name there, tensor) of every parameter and buffer."""
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            for part in module.modules():
                for places in (part._parameters, part._buffers):
                    yield from ((places, name, tensor) for name, tensor in places.items() if tensor is not None)
