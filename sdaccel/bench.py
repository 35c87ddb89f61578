"""Speed, side by side in one run: our engine against torch, same inputs, same threads, one call of each in turn.

Medians and their ratio are what counts; absolute times depend on the machine and on what else it does.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sdaccel import eager, settings
from sdaccel.backends.base import Backend, LoadedEngine, pick_backend
from sdaccel.doctor import cpu_name
from sdaccel.engine.store import Entry, Store
from sdaccel.engine.weights import FILE, layout
from sdaccel.errors import EngineNotFound, ProfileError, SettingError
from sdaccel.export.components import component_spec
from sdaccel.profile import ImageProfile, choose

Progress = Callable[[str, float], None]

PACKAGES = ("torch", "onnxruntime", "diffusers", "transformers", "onnx", "onnxscript", "numpy")


SHORT = 1.0
"""Seconds."""


@dataclass(frozen=True)
class Times:
    """Wall-clock milliseconds of single calls."""

    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def to_json(self) -> dict[str, Any]:
        calls = [round(value, 4) for value in self.milliseconds]
        return {"median": round(self.median, 4), "min": min(calls), "max": max(calls), "calls": calls}


@dataclass
class ComponentBench:
    """One component at one shape. ``times`` has "engine", "torch" and, when asked for, "compile"."""

    component: str
    engine: str
    shape: dict[str, int]
    times: dict[str, Times]
    error: float
    """The largest difference between engine and torch over max(1, largest reference value)."""
    overhead: dict[str, Times] | None = None
    """The UNet alone: "swap" (through the pipeline's module) and "session" (the engine called directly)."""

    @property
    def ratio(self) -> float:
        """How many times faster the engine is than torch."""
        return self.times["torch"].median / self.times["engine"].median

    @property
    def overhead_percent(self) -> float | None:
        if self.overhead is None:
            return None
        return 100 * (self.overhead["swap"].median / self.overhead["session"].median - 1)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "component": self.component,
            "engine": self.engine,
            "shape": self.shape,
            "milliseconds": {name: times.to_json() for name, times in self.times.items()},
            "ratio": round(self.ratio, 3),
            "error": self.error,
        }
        if self.overhead is not None:
            found["overhead"] = {name: times.to_json() for name, times in self.overhead.items()}
            found["overhead_percent"] = round(self.overhead_percent or 0.0, 2)
        return found


@dataclass
class BenchReport:
    machine: dict[str, Any]
    results: list[ComponentBench] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**self.machine, "results": [result.to_json() for result in self.results]}


def machine_facts(threads: int, device: str = "cpu") -> dict[str, Any]:
    """What a result must carry to mean anything later."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = {}
    if device == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **gpu,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def default_threads() -> int:
    """SDACCEL_THREADS, else two, else as many as there are."""
    return settings.THREADS.value() or min(2, os.cpu_count() or 1)


def bench(
    checkpoint: Any,
    store: Store,
    *,
    profile: ImageProfile | None = None,
    components: Sequence[str] = (),
    backend: str = "auto",
    repeats: int = 5,
    warmup: int = 1,
    threads: int | None = None,
    compiled: bool = False,
    overhead: bool = True,
    progress: Progress | None = None,
) -> BenchReport:
    """Times the engines that ``store`` has of ``checkpoint`` at the opt of ``profile`` (default: the model's native).

    Raises EngineNotFound for a component without an engine for that shape.
    """
    from sdaccel.builder import buildable_components

    if repeats < 1 or warmup < 0:
        raise SettingError(f"repeats {repeats} and warm-up {warmup}: at least 1 and 0.")
    image = profile or ImageProfile.native(checkpoint.native_side)
    wanted = buildable_components(checkpoint, components or None)
    report = progress or (lambda stage, fraction: None)
    chosen = pick_backend(backend)
    count = threads or default_threads()
    found = [(name, find_engine(checkpoint, store, chosen, name, image)) for name in wanted]
    results = BenchReport(machine_facts(count, chosen.device_type()))
    with using_threads(count):
        for index, (name, (entry, number, shape)) in enumerate(found):
            report(f"{name}: timing", index / len(found))
            result = _bench_component(
                store, chosen, entry, number, shape, repeats, warmup, compiled, overhead and name == "unet"
            )
            results.results.append(result)
            if compiled:
                torch._dynamo.reset()  # its graphs hold memory too
            gc.collect()  # the engine and the module go before the next ones come
    report("done", 1.0)
    return results


def find_engine(
    checkpoint: Any, store: Store, backend: Backend, component: str, image: ImageProfile
) -> tuple[Entry, int, dict[str, int]]:
    """(engine, profile number, axis sizes) that runs the opt of ``image``, chosen as at run time."""
    from sdaccel.builder import engines_here

    entries = engines_here(checkpoint, component, backend, store)
    shape = image.for_component(component, checkpoint.vae_factor).opt()
    candidates = [(entry, number) for entry in entries for number in range(len(entry.engine.profiles))]
    try:
        at = choose([entry.engine.profiles[number] for entry, number in candidates], shape)
    except ProfileError as error:
        sides = f"{image.width.opt}x{image.height.opt}"
        raise EngineNotFound(
            f"no engine of {component} for {sides} is in {store.root}: {error}",
            hint=f'Run: sdaccel build "{checkpoint.origin}" --res {sides} --batch {image.batch.opt}',
        ) from None
    return (*candidates[at], shape)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """torch and engines that are loaded inside use ``count`` threads each."""
    before, name = torch.get_num_threads(), settings.THREADS.name
    outside = os.environ.get(name)
    torch.set_num_threads(count)
    os.environ[name] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        os.environ.pop(name)
        if outside is not None:
            os.environ[name] = outside


def _bench_component(
    store: Store,
    backend: Backend,
    entry: Entry,
    number: int,
    shape: Mapping[str, int],
    repeats: int,
    warmup: int,
    compiled: bool,
    overhead: bool,
) -> ComponentBench:
    opened = store.open_engine(entry.key)
    engine = entry.engine
    device = backend.device_type()
    inputs = component_spec(engine.component, engine.config).random_inputs(shape)
    module = torch_module(entry, opened.weights[0])
    if device == "cuda":
        dtype = eager.TYPES[engine.precision]
        eager.as_used_on_a_gpu(module, dtype)
        inputs = eager.inputs_on_a_gpu(inputs, dtype)
    loaded = backend.load(entry.path, store.root / "weights", engine.inputs)
    plain = eager.calls(module, engine.component)
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: plain(inputs),
        "engine": lambda: loaded.run(inputs, None, number),
    }
    if compiled:
        faster = eager.calls(_compiled(module, engine.component, device), engine.component)
        calls["compile"] = lambda: faster(inputs)
    finish = torch.cuda.synchronize if device == "cuda" else None
    with torch.no_grad() if device == "cuda" else torch.inference_mode():
        error = _difference(calls["torch"](), calls["engine"](), [spec.name for spec in engine.outputs])
        times = interleaved(calls, repeats, warmup, finish)
        often = max(repeats, min(100, int(5000 / times["engine"].median)))
        ratios = _overhead(module, loaded, entry, store, backend, inputs, often) if overhead else None
    return ComponentBench(engine.component, entry.key, dict(shape), times, error, ratios)


def torch_module(entry: Entry, weights: Entry) -> torch.nn.Module:
    """The component in torch and float32, on weights mapped from the store rather than copied."""
    from sdaccel.export.to_onnx import load_module

    spec = component_spec(entry.engine.component, entry.engine.config)
    return load_module(spec, weights.file(FILE), layout(weights))


def _compiled(module: Any, component: str, device: str) -> Any:
    """The module after torch.compile, in the mode that is fastest on the device."""
    if device == "cpu":
        return torch.compile(module)
    if component != "unet":
        return torch.compile(module, mode="reduce-overhead")
    return SimpleNamespace(unet=torch.compile(module.unet, mode="reduce-overhead"))


def _difference(expected: Sequence[torch.Tensor], found: Mapping[str, torch.Tensor], names: Sequence[str]) -> float:
    pairs = [(found[name].float(), value.float()) for name, value in zip(names, expected, strict=True)]
    return max(float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in pairs)


def interleaved(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int, finish: Callable[[], Any] | None = None
) -> dict[str, Times]:
    """Milliseconds of each call; they take turns, each round beginning with another one.

    finish: waits for work that a call leaves under way on a device. On a CPU a short call runs once more before it is
    timed: threads of the one before it still look out for work for a while, and would take the cores from it.
    """
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            calls[name]()
            if finish is not None:
                finish()
            elif time.perf_counter() - start < SHORT:
                start = time.perf_counter()
                calls[name]()
            elapsed = (time.perf_counter() - start) * 1e3
            if number >= warmup:
                found[name].append(elapsed)
    return {name: Times(tuple(values)) for name, values in found.items()}


class _Host:
    """As much of a pipeline as a swap needs."""

    def __init__(self, unet: Any):
        self.unet = unet
        self.scheduler = self  # it is only locked


def _overhead(
    module: Any,
    loaded: LoadedEngine,
    entry: Entry,
    store: Store,
    backend: Backend,
    inputs: Mapping[str, torch.Tensor],
    repeats: int,
) -> dict[str, Times] | None:
    """The UNet called from inside a call of its pipeline, against its ONNX Runtime session called directly."""
    from sdaccel.integrations.diffusers import Accelerated
    from sdaccel.runtime import ExecutionContext

    session = getattr(loaded, "session", None)
    if session is None or "y" in inputs:
        return None
    host = Accelerated(_Host(module.unet), fallback=False)
    context = ExecutionContext("unet", store, _Loaded(backend, loaded), [entry])  # type: ignore[arg-type]
    host.swap("unet", context)
    sample, text = inputs["sample"], inputs["encoder_hidden_states"]
    timestep = inputs["timestep"][0]
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    host.attach()
    try:
        calls = {
            "swap": lambda: module.unet(sample, timestep, encoder_hidden_states=text, return_dict=False),
            "session": lambda: session.run(None, arrays),
        }
        return host.generate(lambda: interleaved(calls, repeats, 1), careful=False)
    finally:
        host.detach()


class _Loaded:
    """A backend that hands out an engine that is loaded already."""

    def __init__(self, backend: Backend, loaded: LoadedEngine):
        self._backend = backend
        self._loaded = loaded

    def load(self, *_: Any) -> LoadedEngine:
        return self._loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


# ---- where the time goes inside an engine


@dataclass(frozen=True)
class OpTime:
    op: str
    count: int
    milliseconds: float
    """Of one call."""


def op_times(entry: Entry, store: Store, *, repeats: int = 1) -> tuple[dict[str, int], list[OpTime]] | None:
    """(axis sizes, time by operator, the most first) of one call at the first profile's opt.

    Measured here and now by ONNX Runtime's profiler, one image at once; of a CUDA engine what the tuner measured when
    it was built. None for a backend that has neither. Raises EngineBroken.
    """
    if entry.engine.backend == "cuda":
        return entry.engine.profiles[0].opt(), tuned_times(entry.engine.details)
    if entry.engine.backend != "onnxruntime":
        return None
    from sdaccel.backends.onnxruntime import OnnxRuntime

    store.open_engine(entry.key)
    profile = entry.engine.profiles[0]
    shape = {**profile.opt(), "batch": profile["batch"].min}
    inputs = component_spec(entry.engine.component, entry.engine.config).random_inputs(shape)
    with tempfile.TemporaryDirectory(prefix="sdaccel-") as folder:

        class Profiled(OnnxRuntime):
            def _options(self, weights: Path, level: Any) -> Any:
                options = super()._options(weights, level)
                options.enable_profiling = True
                options.profile_file_prefix = str(Path(folder) / "profile")
                return options

        engine: Any = Profiled().load(entry.path, store.root / "weights", entry.engine.inputs)
        for _ in range(1 + repeats):
            engine.run(inputs)
        events = json.loads(Path(engine.session.end_profiling()).read_text(encoding="utf-8"))
    return shape, _sum_ops(events, repeats)


def tuned_times(details: Mapping[str, Any]) -> list[OpTime]:
    """Time by operator and tactic of a CUDA engine at its first profile's opt, from the ``details`` of its manifest."""
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for step in details["profiles"][0]["steps"]:
        name = f"{step['op']}: {step['tactic'].partition('<')[0]}"
        counts[name] += step["count"]
        sums[name] += step["count"] * (step["microseconds"] or 0.0) / 1e3
    found = [OpTime(name, counts[name], round(value, 4)) for name, value in sums.items()]
    return sorted(found, key=lambda item: -item.milliseconds)


def _sum_ops(events: Sequence[Mapping[str, Any]], repeats: int) -> list[OpTime]:
    """Kernel times by operator. The first call of each node is a warm-up and left out."""
    durations: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            durations[name].append((str(event["args"]["op_name"]), float(event["dur"]) / 1e3))
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for calls in durations.values():
        each = max(1, len(calls) // (repeats + 1))  # nodes may share a name
        for op, milliseconds in calls[each:] or calls:
            sums[op] += milliseconds / repeats
        counts[calls[0][0]] += each
    found = [OpTime(op, counts[op], round(value, 4)) for op, value in sums.items()]
    return sorted(found, key=lambda item: -item.milliseconds)
