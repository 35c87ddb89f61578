"""Who executes a graph. A backend answers three calls: `Backend.build`, `Backend.load` and `LoadedEngine.run`."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdaccel.engine.manifest import TensorSpec
from sdaccel.engine.patch import Patches
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import BackendError, SettingError
from sdaccel.profile import OptimizationProfile

if TYPE_CHECKING:
    import onnx

Progress = Callable[[str, float], None]

_log = logging.getLogger("sdaccel")


@dataclass(frozen=True)
class BuildJob:
    """What a backend turns into the files of an engine."""

    component: str
    model: onnx.ModelProto
    """Its weights are external, each at its place in ``weights``."""
    architecture: str
    weights: Entry
    precision: str
    profiles: tuple[OptimizationProfile, ...]
    store: Store
    progress: Progress
    timing_cache: Path | None = None
    """Times measured before, here or on another machine of the same kind; gets what is measured now."""


@dataclass(frozen=True)
class Built:
    """What a build leaves beside its files: further weights entries it made, and facts for people."""

    weights: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class LoadedEngine(ABC):
    """An engine ready to run. One call at a time."""

    shared: frozenset[str] = frozenset()
    """Names of the host's parameters in whose memory it keeps its weights; those refitted since are its own."""

    @abstractmethod
    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None, profile: int = 0
    ) -> dict[str, torch.Tensor]:
        """Outputs by name (all, or those asked for) for inputs by name, as the manifest declares both.

        Inputs are cast to the declared types; optional ones may be missing. Outputs never alias an earlier call's.
        Raises BackendError.
        """

    @abstractmethod
    def refit(self, patches: Patches) -> None:
        """From now on it computes with base weights and exactly these patches. Names it has no use for change nothing.

        Going back to patches that it held before, or to none, gives the same bits. Raises UnsupportedCall, OutOfMemory.
        """

    def shares_no_longer(self, parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        """Whether the weights that it shared with the host's module are at other places of the memory now."""
        return False

    def renew(self) -> None:
        """Values kept from earlier calls are computed again: weights that the host shares may have been edited."""
        return


class Backend(ABC):
    name: str
    precisions: tuple[str, ...]
    """Precisions it builds, the default first."""
    tunes: bool = False
    """Whether a build measures tactics, and can use a timing cache."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, and what would change that; None if it can."""

    @abstractmethod
    def device(self) -> dict[str, str]:
        """What about this device shapes an engine: part of the engine key."""

    @abstractmethod
    def device_type(self) -> str:
        """torch's name for where inputs and outputs live: ``cpu`` or ``cuda``."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions that shape an engine: part of the engine key."""

    @abstractmethod
    def build(self, job: BuildJob, folder: Path) -> Built:
        """Writes the engine's files into ``folder``. Raises BackendError, or Cancelled from ``job.progress``."""

    def adopt(self, engine: Entry, job: BuildJob, folder: Path) -> Built | None:
        """Writes into ``folder`` what ``engine``, of other weights but else the same, becomes with those of ``job``.

        Nothing is fused or measured. None: it has to be built. Raises EngineBroken for an engine that cannot be read.
        """
        return None

    @abstractmethod
    def load(
        self,
        folder: Path,
        weights: Path,
        inputs: Sequence[TensorSpec],
        shared: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> LoadedEngine:
        """The engine in ``folder``; ``weights`` is the store's folder of weights entries.

        ``shared``: parameters of the torch module that the engine stands for, holding the weights it was built from. A
        backend may use their memory, and lay it out anew, instead of loading weights again. Raises BackendError.
        """

    def check_precision(self, precision: str | None) -> str:
        chosen = precision or self.precisions[0]
        if chosen not in self.precisions:
            raise SettingError(
                f"the backend {self.name} does not build {chosen}.", hint=f"It builds {', '.join(self.precisions)}."
            )
        return chosen


def backends() -> dict[str, Callable[[], Backend]]:
    """Every backend by name, the preferred first. Nothing of a backend is imported before it is asked for."""

    def onnxruntime() -> Backend:
        from sdaccel.backends.onnxruntime import OnnxRuntime

        return OnnxRuntime()

    def cuda() -> Backend:
        from sdaccel.backends.cuda.backend import Cuda

        return Cuda()

    return {"cuda": cuda, "onnxruntime": onnxruntime}


def gpu_left_out(wanted: str, chosen: Backend) -> str | None:
    """Why ``chosen`` is for the CPU though torch has a GPU, and ``wanted`` is auto; None where that is not so."""
    if wanted != "auto" or chosen.device_type() != "cpu" or not torch.cuda.is_available():
        return None
    reason = backends()["cuda"]().unavailable()
    return None if reason is None else f"the GPU is not used: {reason}"


@functools.cache
def _tell(reason: str) -> None:
    _log.warning("%s", reason)


def pick_backend(name: str = "auto", device: str | None = None) -> Backend:
    """The backend ``name``, or with ``auto`` the first that runs here, on ``device`` (cpu, cuda) if one does.

    Raises SettingError or BackendError.
    """
    found = _picked(name, device)
    reason = gpu_left_out(name, found)
    if reason is not None:
        _tell(reason)
    return found


def _picked(name: str, device: str | None) -> Backend:
    known = backends()
    if name != "auto" and name not in known:
        raise SettingError(f"there is no backend {name!r}.", hint=f"Backends: auto, {', '.join(known)}.")
    reasons, able = [], []
    for candidate in known if name == "auto" else [name]:
        backend = known[candidate]()
        reason = backend.unavailable()
        if reason is None and device in (None, backend.device_type()):
            return backend
        if reason is None:
            able.append(backend)
        else:
            reasons.append(f"{candidate}: {reason}")
    if able:
        return able[0]
    raise BackendError(f"no backend runs here. {' '.join(reasons)}", hint="Run: sdaccel doctor")
