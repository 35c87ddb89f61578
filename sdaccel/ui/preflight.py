"""What a build would need and whether it is needed at all: estimates, from the checkpoint's header alone.

That an engine was built from the very file is told from its path and its time of change, not by reading it: gigabytes
are hashed when it is built, and what turns out to be there is not built again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sdaccel.engine.store import Entry, Store
from sdaccel.errors import StoreError
from sdaccel.listing import READY, Listed, adopted_from, list_engines, size_text
from sdaccel.profile import OptimizationProfile
from sdaccel.resources import expanded
from sdaccel.ui import builder_python
from sdaccel.ui.requests import BuildRequest, open_checkpoint, parse

if TYPE_CHECKING:
    from sdaccel.backends.base import Backend
    from sdaccel.models.checkpoint import Checkpoint, Component

PAST, TABLE = "past builds here", "a table"

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_GB = 1e9

# Seconds on two cores: the export of a graph, for the component of a family, else of any.
_EXPORT = {
    "unet": 60.0,
    "sdxl unet": 230.0,
    "sdxl-refiner unet": 230.0,
    "vae_decoder": 8.0,
    "vae_encoder": 8.0,
    "text_encoder": 8.0,
    "text_encoder_2": 17.0,
}
# (seconds, seconds a GB of weights in float32, seconds a profile): reading, storing, optimizing, comparing.
_BUILD = {"onnxruntime": (2.0, 22.0, 0.0), "cuda": (8.0, 8.0, 20.0)}
# Bytes of an engine's own files, without weights.
_OWN = {"onnxruntime": 0.5e6, "cuda": 30e6}
# What the driver, its libraries and a memory pool take beside weights and activations.
_GPU_BASE = 0.8e9
_BUILD_BASE = 1.0e9
_KEEP_FREE = 2.0e9


@dataclass(frozen=True)
class Part:
    """The estimate for one component: what building it now adds."""

    component: str
    precision: str
    disk: int
    """Bytes. Weights that another part adds already are not counted again."""
    seconds: float
    seconds_from: str
    """"past builds here", "a table", or empty where nothing would be built."""
    covered_by: str | None
    """The engine that holds all of the profiles already."""
    exact: bool
    """That engine is the very one: nothing would be built."""


@dataclass(frozen=True)
class Preflight:
    """Every figure is an estimate. Bytes and seconds are of what would be built now, nothing of what is there."""

    model: str
    parts: tuple[Part, ...]
    disk: int
    """Bytes the store grows by; weights that engines share count once."""
    disk_free: int
    vram: int | None
    """Bytes of GPU memory at the largest profile: all weights and the largest activations. None on the CPU."""
    memory: int
    """Bytes of main memory that the build takes at most."""
    seconds: float
    seconds_from: str
    """"past builds here", "a table", "past builds here and a table", or empty."""
    device: str
    """What the engines would be for, in words."""
    covered: tuple[str, ...]
    """Engines that hold all of it already, one a component; empty unless every component has one."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What was assumed about the model."""

    def lines(self) -> list[str]:
        """The estimates in words, without warnings and notes."""
        to_build = [part.component for part in self.parts if not part.exact]
        lines = [f"{self.model}: engines for {self.device}"]
        if not to_build:
            return [*lines, "Nothing to build: the store holds these very engines."]
        if self.covered:
            lines.append("Engines in the store hold all of these sizes already. A build adds others for just these.")
        elif held := [part.component for part in self.parts if part.covered_by]:
            lines.append(f"Held by engines in the store already: {', '.join(held)}.")
        lines += [
            f"To build: {', '.join(to_build)}.",
            f"Disk: about {size_text(self.disk)} ({size_text(self.disk_free)} free).",
            f"Time: about {duration_text(self.seconds)} (an estimate from {self.seconds_from}).",
            f"Main memory while it builds: about {size_text(self.memory)}.",
        ]
        if self.vram is not None:
            lines.append(f"GPU memory at the largest size: about {size_text(self.vram)}.")
        return lines


def duration_text(seconds: float) -> str:
    """``40 s``, ``3 min``, ``1 h 20 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def preflight(request: BuildRequest, store: Store, python: str = "") -> Preflight:
    """What building ``request`` into ``store`` would need. Raises what `sdaccel.ui.requests.parse` raises.

    python: what builds instead of this Python, if it is another.
    """
    from sdaccel.backends.base import pick_backend
    from sdaccel.builder import buildable_components

    checkpoint = open_checkpoint(request)
    config = parse(request, checkpoint)
    backend = pick_backend(config.backend)
    known = _Known(checkpoint, backend, list_engines(store), store)
    parts, profiles, added = [], {}, set[tuple[str, str]]()
    for component in buildable_components(checkpoint, config.components):
        wanted = tuple(
            dict.fromkeys(image.for_component(component, checkpoint.vae_factor) for image in config.profiles)
        )
        precision = backend.check_precision(config.precision)
        profiles[component] = (precision, wanted)
        parts.append(_part(known, component, precision, wanted, added))
    disk = sum(part.disk for part in parts)
    disk_free = shutil.disk_usage(_existing(store.root)).free
    memory = _build_memory(checkpoint, [part.component for part in parts if not part.exact])
    vram = _vram(checkpoint, profiles) if backend.device_type() == "cuda" else None
    everything = tuple(part.covered_by for part in parts if part.covered_by is not None)
    warnings = [*_room(disk, disk_free, store), *_memory_warnings(memory, vram), *_device_warnings(request, backend)]
    warnings += known.stale(profiles)
    if not python and not builder_python.is_ready(store.root):
        warnings.append(
            f"This Python lacks what building needs ({', '.join(builder_python.lacking())}): the first build installs "
            f"it, about 0.4 GB, into {builder_python.folder(store.root)}. Nothing else changes."
        )
    sources = dict.fromkeys(part.seconds_from for part in parts if part.seconds_from)
    return Preflight(
        model=checkpoint.name,
        parts=tuple(parts),
        disk=disk,
        disk_free=disk_free,
        vram=vram,
        memory=memory,
        seconds=sum(part.seconds for part in parts),
        seconds_from=" and ".join(sorted(sources, reverse=True)),
        device=_device_name(backend),
        covered=everything if len(everything) == len(parts) else (),
        warnings=tuple(warnings),
        notes=checkpoint.notes,
    )


# ---- what is there


class _Known:
    """The store's engines, seen from one checkpoint and one backend."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, items: Sequence[Listed], store: Store):
        self.checkpoint, self.backend, self.store = checkpoint, backend, store
        self.all = [(item, item.entry) for item in items if item.entry is not None]
        self.of_this_model = [
            (item, entry)
            for item, entry in self.all
            if entry.engine.backend == backend.name and _built_from(entry, checkpoint)
        ]
        self.weights = {entry.key for entry in store.list("weights")}
        self.graphs = {entry.key: entry for entry in store.list("graphs")}

    def engines(self, component: str, precision: str) -> list[Entry]:
        """Of this model, usable on this machine now."""
        return [
            entry
            for item, entry in self.of_this_model
            if item.state == READY and (entry.engine.component, entry.engine.precision) == (component, precision)
        ]

    def has_weights(self, source: str, precision: str) -> bool:
        return any(
            entry.engine.weights_entries[0] in self.weights
            for _, entry in self.of_this_model
            if (entry.engine.source, entry.engine.precision) == (source, precision)
        )

    def graph_seconds(self, component: str, config: Mapping[str, Any]) -> float | None:
        """What exporting the graph took that such a component needs; None if no engine in the store has used it."""
        for _, entry in self.all:
            graph = self.graphs.get(entry.engine.architecture)
            if graph is not None and entry.engine.component == component and _same(entry.engine.config, config):
                return float(graph.manifest.get("seconds", 0.0))
        return None

    def past_seconds(self, component: str, source: Component, profiles: int) -> float | None:
        """How long building took without the export, from builds of such components on this device; None without any.

        Of a component of another size it counts by its bytes; where profiles are measured, by their number too.
        """
        device = self.backend.device()
        found = []
        for _, entry in self.all:
            engine = entry.engine
            same = (engine.component, engine.backend, engine.device) == (component, self.backend.name, device)
            if not same or engine.build_seconds <= 0.0 or adopted_from(entry):
                continue
            seconds = engine.build_seconds
            graph = self.graphs.get(engine.architecture)
            if graph is not None and self._first(entry):
                seconds = max(0.1 * seconds, seconds - float(graph.manifest.get("seconds", 0.0)))
            bytes_then = self._weight_bytes(entry)
            if bytes_then:
                seconds *= source.parameters * _BYTES[engine.precision] / bytes_then
            if self.backend.tunes:
                seconds *= profiles / len(engine.profiles)
            found.append(seconds)
        return median(found[:5]) if found else None

    def _first(self, entry: Entry) -> bool:
        """Whether it is the oldest engine of its graph, whose build exported it."""
        same = [other for _, other in self.all if other.engine.architecture == entry.engine.architecture]
        return min(same, key=lambda other: other.engine.created).key == entry.key

    def _weight_bytes(self, entry: Entry) -> int:
        try:
            weights = self.store.get("weights", entry.engine.weights_entries[0])
        except StoreError:
            return 0
        return weights.nbytes if weights is not None else 0

    def stale(self, wanted: Mapping[str, tuple[str, Sequence[OptimizationProfile]]]) -> Iterable[str]:
        """What would have done, had it been built for this machine as it is now."""
        for component, (precision, profiles) in wanted.items():
            if any(_covers(entry, profiles) for entry in self.engines(component, precision)):
                continue
            for item, entry in self.of_this_model:
                if item.state != READY and entry.engine.component == component and _covers(entry, profiles):
                    yield f"the engine {item.key[:12]} of {component} is {item.state}: {item.reason}"
                    break


def _built_from(entry: Entry, checkpoint: Checkpoint) -> bool:
    """Whether an engine was built from the very files of ``checkpoint``, which have not changed since."""
    engine = entry.engine
    source = checkpoint.components.get(engine.source)
    if source is None or checkpoint.path is None or not _same(engine.config, source.config):
        return False
    try:
        if expanded(engine.origin).resolve() != checkpoint.path.resolve():
            return False
        built = datetime.fromisoformat(engine.created.replace("Z", "+00:00")).timestamp() - engine.build_seconds
        files = {ref.source for ref in source.tensors.values() if isinstance(ref.source, Path)}
        return all(_changed(file) <= built + 1.0 for file in files)  # created is in whole seconds
    except OSError:
        return False


def _changed(file: Path) -> float:
    """When a file was last written or moved to its place, in seconds since 1970."""
    status = file.stat()
    return status.st_mtime if os.name == "nt" else max(status.st_mtime, status.st_ctime)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two configs are equal but for where they came from."""

    def plain(config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"
        }

    return plain(a) == plain(b)


def _covers(entry: Entry, wanted: Sequence[OptimizationProfile]) -> bool:
    return all(any(_holds(own, profile) for own in entry.engine.profiles) for profile in wanted)


def _holds(own: OptimizationProfile, wanted: OptimizationProfile) -> bool:
    mine, theirs = dict(own.axes), dict(wanted.axes)
    return mine.keys() == theirs.keys() and all(
        mine[axis].min <= theirs[axis].min and theirs[axis].max <= mine[axis].max for axis in mine
    )


# ---- what it takes


def _part(
    known: _Known,
    component: str,
    precision: str,
    wanted: tuple[OptimizationProfile, ...],
    added: set[tuple[str, str]],
) -> Part:
    from sdaccel.export.components import source_of

    source = known.checkpoint.components[source_of(component)]
    backend, family = known.backend.name, known.checkpoint.family.value
    here = known.engines(component, precision)
    exact = [entry.key for entry in here if entry.engine.profiles == wanted]
    covering = exact or [entry.key for entry in here if _covers(entry, wanted)]
    if exact:
        return Part(component, precision, 0, 0.0, "", exact[0], True)

    disk = _OWN.get(backend, 0.0)
    if (source.name, precision) not in added and not known.has_weights(source.name, precision):
        disk += source.parameters * _BYTES[precision]
        added.add((source.name, precision))
    if backend == "onnxruntime" and not here:
        disk += _laid_out_anew(component, source) * _BYTES[precision]

    export = known.graph_seconds(component, source.config)
    past = known.past_seconds(component, source, len(wanted))
    base, per_gb, per_profile = _BUILD.get(backend, (5.0, 20.0, 0.0))
    seconds = past if past is not None else base + per_gb * source.parameters * 4 / _GB + per_profile * len(wanted)
    if export is None:
        seconds += _EXPORT.get(f"{family} {component}", _EXPORT.get(component, 20.0))
    origin = PAST if past is not None else TABLE
    return Part(component, precision, int(disk), seconds, origin, covering[0] if covering else None, False)


def _laid_out_anew(component: str, source: Component) -> int:
    """Weights of convolutions, which ONNX Runtime keeps in blocks of channels beside the shared ones."""
    half = {"vae_decoder": "decoder.", "vae_encoder": "encoder."}.get(component, "")
    return sum(ref.count for name, ref in source.tensors.items() if len(ref.shape) == 4 and name.startswith(half))


def _build_memory(checkpoint: Checkpoint, components: Sequence[str]) -> int:
    """A build holds one component at a time, in float32, for the comparison with torch."""
    from sdaccel.export.components import source_of

    sizes = [checkpoint.components[source_of(component)].parameters * 4 for component in components]
    return int(1.1 * max(sizes) + _BUILD_BASE) if sizes else 0


def _vram(checkpoint: Checkpoint, wanted: Mapping[str, tuple[str, Sequence[OptimizationProfile]]]) -> int:
    """All weights of the model, and the activations of the component that has most of them."""
    from sdaccel.export.components import source_of

    precisions = {source_of(component): precision for component, (precision, _) in wanted.items()}
    weights = sum(
        part.parameters * _BYTES[precisions.get(name, "fp16")] for name, part in checkpoint.components.items()
    )
    activations = [
        _activations(component, checkpoint.components[source_of(component)].config, profile) * _BYTES[precision]
        for component, (precision, profiles) in wanted.items()
        for profile in profiles
    ]
    return int(_GPU_BASE + weights + max(activations, default=0.0))


def _activations(component: str, config: Mapping[str, Any], profile: OptimizationProfile) -> float:
    """Values that are alive at once, at most, at the largest shape of ``profile``."""
    size = {axis: sides.max for axis, sides in profile.axes}
    batch = size["batch"]
    if component.startswith("text_encoder"):
        return 20.0 * batch * size["tokens"] * int(config.get("hidden_size") or 768)
    channels = list(config.get("block_out_channels") or (320, 640, 1280, 1280))
    area = size["height"] * size["width"]
    if component == "vae_decoder":  # its last block, at the image's size
        return batch * area * 4.0 ** (len(channels) - 1) * 2 * (channels[0] + channels[min(1, len(channels) - 1)])
    if component == "vae_encoder":
        return batch * area * 4.0 * channels[0]
    layers = config.get("layers_per_block") or 2
    deep = max(layers) if isinstance(layers, (list, tuple)) else int(layers)
    levels = [width * area / 4**level for level, width in enumerate(channels)]
    skips = sum((deep + 1) * values for values in levels)
    return batch * (skips + 10 * max(levels))  # GEGLU has 8 times a level's channels between input and output


# ---- what may be in the way


def _room(disk: int, free: int, store: Store) -> Iterable[str]:
    if not disk:
        return
    if disk > free:
        yield (
            f"too little disk: about {size_text(disk)} are needed and {size_text(free)} are free in {store.root}. "
            "Delete engines, or set SDACCEL_STORE to a folder on another disk."
        )
    elif free - disk < _KEEP_FREE:
        yield f"about {size_text(free - disk)} of disk will be left."


def _memory_warnings(memory: int, vram: int | None) -> Iterable[str]:
    import psutil

    available = psutil.virtual_memory().available
    if memory > available:
        yield (
            f"the build takes about {size_text(memory)} of main memory and {size_text(available)} are free. "
            "Close other programs, or build one component at a time."
        )
    if vram is not None:
        import torch

        total = torch.cuda.mem_get_info()[1]
        if vram > total:
            yield (
                f"the largest profile takes about {size_text(vram)} of GPU memory and the GPU has {size_text(total)}. "
                "Choose smaller sizes, or fewer images at once."
            )


def _device_warnings(request: BuildRequest, backend: Backend) -> Iterable[str]:
    if backend.device_type() == "cuda" or request.backend not in ("auto", "cuda"):
        return
    from sdaccel.backends.base import backends

    yield f"no GPU that engines could be built for, so they are for the CPU: {backends()['cuda']().unavailable()}"


def _device_name(backend: Backend) -> str:
    from sdaccel.doctor import cpu_name

    return backend.device().get("name") or f"the CPU ({cpu_name()})"


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
