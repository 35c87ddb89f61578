"""The one orchestrator of a build: checkpoint → graph → weights → engine, checked against torch, published."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from sdaccel.backends.base import Backend, BuildJob, Built, LoadedEngine, pick_backend
from sdaccel.engine.hashes import content_hash
from sdaccel.engine.manifest import EngineManifest, TensorSpec, engine_key
from sdaccel.engine.store import Draft, Entry, Store
from sdaccel.engine.weights import FILE, layout, publish_weights
from sdaccel.errors import BackendError, EngineBroken, EngineNotFound, ExportError, ModelError, SettingError, StoreError
from sdaccel.models.checkpoint import Checkpoint, open_checkpoint
from sdaccel.profile import ImageProfile, OptimizationProfile

Progress = Callable[[str, float], None]

_log = logging.getLogger("sdaccel")


@dataclass(frozen=True)
class BuilderConfig:
    """How engines are built. ``components`` None: all the model has; ``profiles`` empty: the model's native range."""

    components: tuple[str, ...] | None = None
    profiles: tuple[ImageProfile, ...] = ()
    precision: str | None = None
    backend: str = "auto"
    check: bool = True
    """Compare each engine with torch before it is published."""
    timing_cache: Path | None = None
    """A file of times that another build has exported, for a backend that measures; it gets this build's times too."""


def build(
    source: Any,
    *,
    components: Collection[str] | None = None,
    profiles: Sequence[ImageProfile] = (),
    precision: str | None = None,
    backend: str = "auto",
    store: Store | None = None,
    progress: Progress | None = None,
    allow_pickle: bool = False,
    check: bool = True,
) -> list[Entry]:
    """Builds the engines of a model that the store does not hold yet, and returns all that were asked for.

    Where the store has an engine of another checkpoint that differs in its weights alone, a backend may adopt it:
    nothing is exported, fused or measured then, and the build takes as long as the weights.
    source: a diffusers folder, a single .safetensors file, a live pipeline or an opened `Checkpoint`.
    progress: gets a stage and the fraction of the whole that is done; may raise Cancelled.
    Raises ModelError, ExportError, BackendError, StoreError, SettingError.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, allow_pickle=allow_pickle)
    config = BuilderConfig(
        None if components is None else tuple(components), tuple(profiles), precision, backend, check
    )
    return build_engines(checkpoint, config, store or Store(), progress)


def build_engines(
    checkpoint: Checkpoint, config: BuilderConfig, store: Store, progress: Progress | None = None
) -> list[Entry]:
    """The engines of ``config``, one a component. See `build`."""
    chosen = buildable_components(checkpoint, config.components)
    backend = pick_backend(config.backend)
    if config.timing_cache is not None and not backend.tunes:
        raise SettingError(f"the backend {backend.name} measures nothing, so it has no use for a timing cache.")
    if config.timing_cache is not None and not config.timing_cache.absolute().parent.is_dir():
        raise SettingError(f"the folder of the timing cache {config.timing_cache} is not there.", hint="Make it first.")
    report = progress or (lambda stage, fraction: None)
    entries = []
    for index, component in enumerate(chosen):
        part = _part(report, index / len(chosen), 1 / len(chosen))
        entries.append(_build_component(checkpoint, component, config, backend, store, part))
    report("done", 1.0)
    return entries


def buildable_components(checkpoint: Checkpoint, wanted: Collection[str] | None = None) -> list[str]:
    """The engine components that ``checkpoint`` has weights for; ``controlnet`` asks for every ControlNet.

    Raises ModelError for one it has no weights for.
    """
    from sdaccel.export.components import COMPONENTS, kind_of, source_of

    for component in wanted or ():
        if source_of(component) not in checkpoint.components:
            have = ", ".join(checkpoint.components)
            raise ModelError(f"{checkpoint.name} has no weights for {component}: it has {have}.")
    further = (name for name in checkpoint.components if kind_of(name) != name)
    return [
        component
        for component in (*COMPONENTS, *further)
        if source_of(component) in checkpoint.components
        and (not wanted or component in wanted or kind_of(component) in wanted)
    ]


def engines_here(checkpoint: Checkpoint, component: str, backend: Backend, store: Store) -> list[Entry]:
    """The engines of ``component`` that run on this machine, of any precision and profiles, newest first.

    They are what a build would make today: of these weights, by this exporter, for this device and these versions.
    Raises ExportError for a component that no build takes.
    """
    return store.find_engines(**_identity(checkpoint, component, backend, store))


def _identity(checkpoint: Checkpoint, component: str, backend: Backend, store: Store) -> dict[str, Any]:
    """The part of an engine's identity that nobody chooses."""
    from sdaccel.export.components import kind_of, source_of
    from sdaccel.export.to_onnx import architecture_hash

    source = checkpoint.components[source_of(component)]
    return {
        "component": kind_of(component),
        "architecture": architecture_hash(component, source.config),
        "weights": content_hash(source, store),
        "backend": backend.name,
        "device": backend.device(),
        "versions": backend.versions(),
    }


def _build_component(
    checkpoint: Checkpoint, component: str, config: BuilderConfig, backend: Backend, store: Store, progress: Progress
) -> Entry:
    import onnx

    from sdaccel.export.components import source_of
    from sdaccel.export.to_onnx import GRAPH_FILE, bind_weights, publish_graph

    source = checkpoint.components[source_of(component)]
    image_profiles = config.profiles or (ImageProfile.native(checkpoint.native_side),)
    profiles = tuple(dict.fromkeys(image.for_component(component, checkpoint.vae_factor) for image in image_profiles))
    precision = backend.check_precision(config.precision)
    progress(f"{component}: reading weights", 0.0)
    identity = _identity(checkpoint, component, backend, store) | {"precision": precision, "profiles": profiles}

    def fill(draft: Draft) -> dict[str, Any]:
        start = time.monotonic()
        graph = publish_graph(store, component, source.config, progress=_part(progress, 0.05, 0.4))
        weights = publish_weights(
            store,
            source,
            precision,
            progress=lambda done, total: progress(f"{component}: storing weights", 0.45 + 0.2 * done / max(total, 1)),
        )
        weightless = onnx.load(str(graph.file(GRAPH_FILE)), load_external_data=False)
        model = bind_weights(weightless, layout(weights), _STORED[precision])
        job = BuildJob(
            component,
            model,
            graph.key,
            weights,
            precision,
            profiles,
            store,
            _part(progress, 0.65, 0.2, component),
            config.timing_cache,
        )
        inputs, outputs = (_specs(graph.manifest[name]) for name in ("inputs", "outputs"))
        loaded: list[LoadedEngine] = []

        def checked(built: Built, shapes: Sequence[Mapping[str, int]] | None) -> Built:
            if not config.check:
                return built
            progress(f"{component}: comparing with torch", 0.85)
            limit = COMPONENT_LIMITS[precision]
            check = _check(component, source.config, backend, draft, weights, inputs, limit, loaded, shapes)
            return replace(built, details={**built.details, "check": check})

        with _kept(store, weights):
            built = None if config.timing_cache else _adopted(identity, backend, job, draft.path)
            if built is not None:
                try:
                    built = checked(built, [_smallest(component, source.config)])
                except ExportError as error:
                    _log.warning("%s is built after all: what was adopted is wrong: %s", component, error)
                    built = None
                    loaded.clear()
                    gc.collect()
                    for path in draft.path.iterdir():
                        path.unlink()
            if built is None:
                built = checked(backend.build(job, draft.path), None)
                if config.check and backend.device_type() == "cuda":
                    progress(f"{component}: measuring against torch", 0.95)
                    speed = _speed(component, source.config, weights, precision, profiles[0], loaded)
                    built.details.update({"speed": speed} if speed else {})
        loaded.clear()
        manifest = EngineManifest(
            **identity,
            source=source.name,
            family=checkpoint.family.value,
            model=checkpoint.name,
            origin=checkpoint.origin,
            weights_entries=(weights.key, *built.weights),
            image_profiles=tuple(image_profiles),
            inputs=inputs,
            outputs=outputs,
            config=dict(source.config),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            build_seconds=round(time.monotonic() - start, 3),
            details=built.details,
        )
        return manifest.to_json()

    def waiting(who: str) -> None:
        progress(f"{component}: {who}", 0.0)

    return store.publish("engines", engine_key(**identity), fill, waiting=waiting)


@contextmanager
def _kept(store: Store, weights: Entry) -> Iterator[None]:
    """Tells what fails inside because ``weights`` were removed from the store meanwhile. Raises StoreError."""
    try:
        yield
    except (BackendError, EngineBroken, ModelError, OSError) as error:
        if store.get("weights", weights.key) is not None:
            raise
        raise StoreError(
            f"the weights {weights.key} were removed from {store.root} while an engine was built of them.",
            hint="Build again.",
        ) from error


def _adopted(identity: Mapping[str, Any], backend: Backend, job: BuildJob, folder: Path) -> Built | None:
    """What ``backend`` makes of an engine of other weights that is else the same; None where it has to build."""
    same = {name: value for name, value in identity.items() if name != "weights"}
    for entry in job.store.find_engines(**same):
        if entry.engine.weights == identity["weights"]:
            continue  # the very engine that is made anew
        try:
            job.store.verify(entry)
            built = backend.adopt(entry, job, folder)
        except (EngineBroken, EngineNotFound) as error:
            _log.warning("not adopted, because %s", error)
            continue
        if built is not None:
            facts = {name: value for name, value in entry.engine.details.items() if name != "check"}
            origin = facts.get("adopted_from", entry.key)
            return replace(built, details={**facts, **built.details, "adopted_from": origin})
    return None


def _smallest(component: str, config: Mapping[str, Any]) -> Mapping[str, int]:
    """The least work that shows whether the weights are where the engine reads them."""
    from sdaccel.export.components import component_spec

    return min(component_spec(component, config).shapes, key=lambda shape: math.prod(shape.values()))


_STORED = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

# Largest difference from torch in float32 that an engine may have at any value, over the largest value: in float32 the
# order of additions, in half precision one rounding a layer, which random inputs carry through all of them.
COMPONENT_LIMITS = {"fp32": 1e-4, "fp16": 3e-2, "bf16": 2e-1}


def _specs(items: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(i["name"], i["dtype"], tuple(i["shape"]), i["optional"]) for i in items)


def _check(
    component: str,
    config: dict[str, Any],
    backend: Backend,
    draft: Draft,
    weights: Entry,
    inputs: tuple[TensorSpec, ...],
    limit: float,
    loaded: list[LoadedEngine],
    shapes: Sequence[Mapping[str, int]] | None,
) -> dict[str, Any]:
    """The engine against torch at several shapes, before it is published. Leaves it loaded. Raises ExportError."""
    from sdaccel.export.to_onnx import check_graph

    def run(feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not loaded:  # only now: torch has let go of its own copy
            loaded.append(backend.load(draft.path, weights.path.parent, inputs))
        return loaded[0].run(feed)

    results = check_graph(
        run,
        component,
        config,
        weights.file(FILE),
        layout(weights),
        shapes=shapes,
        limit=limit,
        device=check_device(backend, component, weights),
    )
    gc.collect()
    return {
        "reference": f"torch {torch.__version__}, float32",
        "largest_error": max(result.error for result in results),
        "shapes": [{**result.shape, "error": result.error} for result in results],
    }


def _speed(
    component: str,
    config: dict[str, Any],
    weights: Entry,
    precision: str,
    profile: OptimizationProfile,
    loaded: Sequence[LoadedEngine],
) -> dict[str, Any] | None:
    """Milliseconds of engine and torch on the GPU at the opt of ``profile``; None where both do not fit."""
    from sdaccel import eager
    from sdaccel.export.components import component_spec
    from sdaccel.export.to_onnx import load_module

    if torch.cuda.mem_get_info()[0] < 3 * weights.nbytes:
        return None
    dtype = eager.TYPES[precision]
    spec = component_spec(component, config)
    module = load_module(spec, weights.file(FILE), layout(weights))
    try:
        eager.as_used_on_a_gpu(module, dtype)
        with torch.device("cpu"):
            inputs = eager.inputs_on_a_gpu(spec.random_inputs(profile.opt()), dtype)
        plain = eager.calls(module, component)
        with torch.no_grad():
            times = {
                "engine": eager.gpu_milliseconds(lambda: loaded[0].run(inputs)),
                "torch": eager.gpu_milliseconds(lambda: plain(inputs)),
            }
    except (RuntimeError, BackendError):  # out of memory, or a GPU that torch cannot use for this
        return None
    finally:
        del module
        gc.collect()
        torch.cuda.empty_cache()
    milliseconds = {name: round(value, 4) for name, value in times.items()}
    return {"milliseconds": milliseconds, "slower": times["engine"] > times["torch"]}


def slower_than_torch(entry: Entry) -> str | None:
    """The reason why an engine is not chosen by default; None for one that was faster when it was built."""
    speed = entry.engine.details.get("speed")
    if not isinstance(speed, dict) or speed.get("slower") is not True:
        return None
    times = speed["milliseconds"]
    return f"the engine {entry.key[:12]} is slower than torch ({times['engine']} ms against {times['torch']} ms)"


def built_elsewhere(checkpoint: Checkpoint, component: str, backend: Backend, store: Store) -> str | None:
    """What the nearest engine of these weights that does not run here was built for, and what differs here."""
    here = _identity(checkpoint, component, backend, store)
    others = store.find_engines(component=here["component"], weights=here["weights"], backend=backend.name)
    if not others:
        return None
    engine = others[0].engine
    then, now = ({**item["device"], **item["versions"]} for item in (engine.to_json(), here))
    different = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if not different:
        return None
    changes = ", ".join(f"{name} {then.get(name, 'none')} (now {now.get(name, 'none')})" for name in different)
    return f"the engine {others[0].key[:12]} of {component} was built for {changes}"


def check_device(backend: Backend, component: str, weights: Entry) -> str:
    """The backend's device if it has room for torch in float32, else the CPU, where text encoders are fast enough."""
    device = backend.device_type()
    if device == "cuda" and not component.startswith("text") and torch.cuda.mem_get_info()[0] > 4 * weights.nbytes:
        return device
    return "cpu"


def _part(progress: Progress, begin: float, share: float, prefix: str = "") -> Progress:
    """Reports the fractions of a part of the work as fractions of the whole."""

    def report(stage: str, fraction: float) -> None:
        progress(f"{prefix}: {stage}" if prefix else stage, begin + share * fraction)

    return report


__all__ = [
    "BuilderConfig",
    "build",
    "build_engines",
    "buildable_components",
    "built_elsewhere",
    "engines_here",
    "slower_than_torch",
]
