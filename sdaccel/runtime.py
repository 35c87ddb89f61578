"""Runs engines for a host program: chooses engine and profile for each call, and keeps the report of what ran.

A host (diffusers, a WebUI) owns the torch module. It hands inputs to `ExecutionContext.run`; if that raises one of
`FALLBACK_ERRORS` the host runs torch and notes the reason in its `RunReport`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from sdaccel.backends.base import Backend, LoadedEngine
from sdaccel.engine.manifest import TensorSpec
from sdaccel.engine.patch import NOTHING, Patches, adapters_of
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import BackendError, EngineBroken, EngineNotFound, OutOfMemory, ProfileError, UnsupportedCall
from sdaccel.profile import OptimizationProfile, choose

# As many values as BLAS sums in one thread.
SMALL = 10_000

FALLBACK_ERRORS = (UnsupportedCall, ProfileError, EngineBroken, EngineNotFound, BackendError)


@dataclass
class ComponentRun:
    """What ran of one component: calls through engines and through torch, in milliseconds of wall-clock time.

    Of engines on a GPU it is the GPU's time: a call returns when its work is enqueued.
    """

    engines: dict[str, list[str]] = field(default_factory=dict)
    """engine id → the profiles that ran"""
    backend: str = ""
    calls: int = 0
    milliseconds: float = 0.0
    torch_calls: int = 0
    torch_milliseconds: float = 0.0
    adapters: list[str] = field(default_factory=list)


@dataclass
class Fallback:
    component: str
    reason: str
    calls: int = 1


class GpuTime:
    """How long a GPU is at the work between two calls, which need not wait for it."""

    def __init__(self) -> None:
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> GpuTime:
        self._end.record()
        return self

    def milliseconds(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


class RunReport:
    """What really ran. `fallbacks` is empty when engines ran it all. Safe to write from several threads."""

    def __init__(self) -> None:
        self.components: dict[str, ComponentRun] = {}
        self.fallbacks: list[Fallback] = []
        self.notes: list[str] = []
        self.failed: list[str] = []
        """Outputs that stayed unusable (NaN, infinite or constant) after the retry: not an image to keep."""
        self._lock = threading.Lock()
        self._running: list[tuple[str, GpuTime]] = []

    @property
    def ok(self) -> bool:
        return not self.failed

    def ran_engine(
        self,
        component: str,
        engine: str,
        backend: str,
        profile: str,
        milliseconds: float | GpuTime,
        adapters: Sequence[str] = (),
    ) -> None:
        with self._lock:
            run = self.components.setdefault(component, ComponentRun())
            profiles = run.engines.setdefault(engine, [])
            if profile not in profiles:
                profiles.append(profile)
            run.backend = backend
            run.calls += 1
            if adapters:
                run.adapters = sorted({*run.adapters, *adapters})
            if isinstance(milliseconds, GpuTime):
                self._running.append((component, milliseconds))
            else:
                run.milliseconds += milliseconds

    def settle(self) -> None:
        """Waits for calls that a GPU is still at, and adds their times."""
        with self._lock:
            running, self._running = self._running, []
            for component, time_on_gpu in running:
                self.components[component].milliseconds += time_on_gpu.milliseconds()

    def ran_torch(self, component: str, milliseconds: float, adapters: Sequence[str] = ()) -> None:
        with self._lock:
            run = self.components.setdefault(component, ComponentRun())
            run.torch_calls += 1
            run.torch_milliseconds += milliseconds
            run.adapters = sorted({*run.adapters, *adapters})

    def fell_back(self, component: str, reason: str) -> None:
        with self._lock:
            for known in self.fallbacks:
                if (known.component, known.reason) == (component, reason):
                    known.calls += 1
                    return
            self.fallbacks.append(Fallback(component, reason))

    def note(self, text: str) -> None:
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def fail(self, text: str) -> None:
        with self._lock:
            if text not in self.failed:
                self.failed.append(text)

    def to_json(self) -> dict[str, Any]:
        self.settle()
        with self._lock:
            return {
                "ok": self.ok,
                "components": {name: asdict(run) for name, run in self.components.items()},
                "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
                "notes": list(self.notes),
                "failed": list(self.failed),
            }

    def __str__(self) -> str:
        self.settle()
        lines = []
        with self._lock:
            for name, run in self.components.items():
                parts = []
                if run.calls:
                    ids = ", ".join(key[:12] for key in run.engines)
                    parts.append(f"engine {ids} ({run.backend}) {_calls(run.calls)}, {run.milliseconds:.0f} ms")
                if run.torch_calls:
                    parts.append(f"torch {_calls(run.torch_calls)}, {run.torch_milliseconds:.0f} ms")
                with_adapters = f" with {', '.join(run.adapters)}" if run.adapters else ""
                lines.append(f"{name}{with_adapters}: {'; '.join(parts)}")
            lines += [f"in torch: {f.component}, {_calls(f.calls)}: {f.reason}" for f in self.fallbacks]
            return "\n".join([*lines, *self.notes, *(f"failed: {text}" for text in self.failed)])


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


Shapes = tuple[tuple[str, torch.Size], ...]
"""Of a call's inputs by name."""


@dataclass(frozen=True)
class Candidate:
    """An engine and one of its profiles."""

    entry: Entry
    index: int
    profile: OptimizationProfile
    label: str
    plan: tuple[str, ...]
    """Engines that differ in their profiles alone share it."""


class ExecutionContext:
    """The engines of one component, ready to be chosen from. Engines are verified and loaded when first needed.

    A call runs in the profile that contains its shapes and whose opt is nearest; of equally near ones, in that of the
    newest engine, then the first of its profiles. One lock guards a context: calls from several threads run one after
    the other.
    """

    def __init__(self, component: str, store: Store, backend: Backend, engines: Sequence[Entry]):
        self.component = component
        self.store = store
        self.backend = backend
        self.device = backend.device_type()
        self.engines = list(engines)
        self.candidates = [
            Candidate(entry, index, profile, str(profile), _plan(entry))
            for entry in self.engines
            for index, profile in enumerate(entry.engine.profiles)
        ]
        self._specs = {spec.name: spec for entry in self.engines[:1] for spec in entry.engine.inputs}
        self._chosen: dict[Shapes, Candidate] = {}
        self._loaded: dict[tuple[str, ...], LoadedEngine] = {}
        self._broken: dict[str, Exception] = {}
        self._patches: dict[tuple[str, ...], Patches] = {}
        """What each loaded engine holds."""
        self._adapters: dict[tuple[str, ...], list[str]] = {}
        self._full: dict[Any, OutOfMemory] = {}
        """Engines and shapes that found too little memory since the last `renew`."""
        self._lock = threading.RLock()
        self.shared: Callable[[], Mapping[str, torch.nn.Parameter]] | None = None
        """The host's module's parameters, whose memory an engine may use for its weights."""
        self.on_load: Callable[[LoadedEngine], None] | None = None
        """Told when an engine has been loaded, and may have moved them."""
        self.on_own: Callable[[Collection[str]], None] | None = None
        """Told which of them an engine keeps in memory of its own from now on."""

    @property
    def precision(self) -> str:
        """Of the engines, the first one's; empty without any."""
        return self.engines[0].engine.precision if self.engines else ""

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        report: RunReport,
        outputs: Collection[str] | None = None,
        patches: Patches = NOTHING,
    ) -> dict[str, torch.Tensor]:
        """The outputs of the engine and profile that contain these shapes (see `sdaccel.profile.choose`).

        The engine computes with its base weights and ``patches``; the same mapping as before is not looked into again.
        Raises one of `FALLBACK_ERRORS`; the host then runs torch.
        """
        if not self.candidates:
            raise UnsupportedCall(f"no engine of {self.component} is in the store.", hint="Run: sdaccel build")
        with self._lock:
            shapes = _shapes(inputs)
            candidate, engine = self._ready(inputs, shapes)
            for key, error in self._broken.items():
                report.note(f"{self.component}: the engine {key[:12]} is left out: {error}")
            clock = GpuTime() if self.device == "cuda" else None
            start = time.perf_counter()
            try:
                self._refuse_if_full(shapes)
                self._refit(candidate.plan, engine, patches)
                results = engine.run(inputs, outputs, candidate.index)
            except OutOfMemory as error:
                self._full[shapes] = error
                raise
            elapsed = (time.perf_counter() - start) * 1e3 if clock is None else clock.stop()
            adapters = self._adapters[candidate.plan]
        name, key, label = self.backend.name, candidate.entry.key, candidate.label
        report.ran_engine(self.component, key, name, label, elapsed, adapters)
        return results

    def _refit(self, plan: tuple[str, ...], engine: LoadedEngine, patches: Patches) -> None:
        if self._patches.get(plan) is patches:
            return
        shared = engine.shared
        self._patches.pop(plan, None)
        engine.refit(patches)
        self._patches[plan] = patches
        self._adapters[plan] = adapters_of(patches)
        if self.on_own is not None and engine.shared != shared:
            self.on_own(shared - engine.shared)

    def renew(self) -> None:
        """The host's module may have been edited: engines keep nothing that they computed before.

        One whose module's weights are elsewhere now (moved to the CPU, and back) is let go of, and with it the memory
        that the two shared; it is loaded again when it is next needed.
        """
        with self._lock:
            self._full.clear()
            parameters = self.shared() if self.shared is not None else {}
            for plan, engine in list(self._loaded.items()):
                if engine.shares_no_longer(parameters):
                    del self._loaded[plan]
                    self._patches.pop(plan, None)
                else:
                    engine.renew()

    def _ready(self, inputs: Mapping[str, torch.Tensor], shapes: Shapes) -> tuple[Candidate, LoadedEngine]:
        """The engine to run, loaded. One that turns out to be broken is left out from then on."""
        while True:
            candidate = self._choose(inputs, shapes)
            try:
                self._refuse_if_full(candidate.plan)
                return candidate, self._load(candidate)
            except OutOfMemory as error:
                self._full[candidate.plan] = error
                raise
            except (EngineBroken, EngineNotFound, BackendError) as error:
                self._broken[candidate.entry.key] = error
            except OSError as error:
                self._broken[candidate.entry.key] = EngineBroken(f"{candidate.entry.path} cannot be read: {error}.")

    def _refuse_if_full(self, what: Any) -> None:
        """Raises at once what ``what`` raised before: to try again at every step would cost more than torch."""
        if self._full and what in self._full:
            raise self._full[what]

    def _choose(self, inputs: Mapping[str, torch.Tensor], shapes: Shapes) -> Candidate:
        known = self._chosen.get(shapes)
        if known is None or known.entry.key in self._broken:
            sizes = axis_sizes(self.component, self._specs, inputs)
            alive = [candidate for candidate in self.candidates if candidate.entry.key not in self._broken]
            if not alive:
                raise next(iter(self._broken.values()))
            known = self._chosen[shapes] = alive[choose([candidate.profile for candidate in alive], sizes)]
        return known

    def _load(self, candidate: Candidate) -> LoadedEngine:
        """The engine, verified and loaded."""
        entry = candidate.entry
        if candidate.plan not in self._loaded:
            self.store.open_engine(entry.key)
            shared = self.shared() if self.shared is not None else {}
            self._loaded[candidate.plan] = self.backend.load(
                entry.path, self.store.root / "weights", entry.engine.inputs, shared
            )
            for key in {other.entry.key for other in self.candidates if other.plan == candidate.plan}:
                self.store.note_use(key)
            self._patches[candidate.plan], self._adapters[candidate.plan] = NOTHING, []
            if self.on_load is not None:
                self.on_load(self._loaded[candidate.plan])
        return self._loaded[candidate.plan]


def _shapes(inputs: Mapping[str, torch.Tensor]) -> Shapes:
    return tuple((name, tensor.shape) for name, tensor in inputs.items())


def _plan(entry: Entry) -> tuple[str, ...]:
    return tuple(digest for _, info in sorted(entry.files.items()) for digest in info.sha256)


def axis_sizes(component: str, specs: Mapping[str, TensorSpec], inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The size of each axis in ``inputs``. Raises UnsupportedCall where they do not fit what ``specs`` declares."""
    sizes: dict[str, int] = {}
    for name, tensor in inputs.items():
        if name not in specs:
            raise UnsupportedCall(f"the engine of {component} has no input {name}.")
        expected = specs[name].shape
        fits = len(expected) == tensor.dim() and all(
            sizes.setdefault(dim, size) == size if isinstance(dim, str) else dim == size
            for dim, size in zip(expected, tensor.shape, strict=True)
        )
        if not fits:
            raise UnsupportedCall(f"{name} is {list(tensor.shape)}; the engine takes {list(expected)}.")
    missing = [spec.name for spec in specs.values() if not spec.optional and spec.name not in inputs]
    if missing:
        raise UnsupportedCall(f"the engine of {component} needs {', '.join(missing)}.")
    return sizes


def unusable(tensor: torch.Tensor) -> str | None:
    """Why ``tensor`` cannot be a result (NaN, infinite, constant); None if it can."""
    size = tensor.numel()
    if size < 2:
        return None
    if size <= SMALL and tensor.is_cpu and tensor.dtype is torch.float32 and not tensor.requires_grad:
        # One sum tells that all is finite; torch takes longer over a few values.
        values = tensor.numpy()
        if math.isfinite(np.vdot(values, values)) and values.item(0) != values.item(-1):
            return None
    return fault_between(*torch.stack(tensor.detach().aminmax()).tolist())


def fault_between(low: float, high: float) -> str | None:
    """Why a result whose least and largest value are these is none; None if it is one."""
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    if math.isinf(low) or math.isinf(high):
        return "infinite values"
    return f"the constant {low:g}" if low == high else None
