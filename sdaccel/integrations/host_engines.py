"""The engines of a checkpoint file that a WebUI has loaded: found by the file's content, run at any batch."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sdaccel import settings
from sdaccel.backends.base import Backend, pick_backend
from sdaccel.builder import slower_than_torch
from sdaccel.engine import disk
from sdaccel.engine.hashes import content_hash
from sdaccel.engine.patch import NOTHING, Patches
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import ModelError, ProfileError, UnsupportedCall
from sdaccel.models.checkpoint import Checkpoint, open_checkpoint
from sdaccel.models.tensors import Component
from sdaccel.profile import OptimizationProfile, choose
from sdaccel.runtime import ExecutionContext, RunReport, axis_sizes

_log = logging.getLogger("sdaccel")

SOURCES = {"unet": "unet", "vae_decoder": "vae", "vae_encoder": "vae"}
"""Engine component → the part of a checkpoint that it is made of."""

# --- facts that outlive the host --------------------------------------------------------------------------------------


class Notes:
    """A small JSON table in the store's folder. What cannot be read or written is as good as absent."""

    def __init__(self, store: Store, name: str):
        self.path = store.root / "hosts" / name
        self.lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, table: Mapping[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.overwrite(self.path, json.dumps(table, indent=1).encode())
        except OSError as error:
            _log.info("%s could not be written: %s", self.path, error)


class ContentHashes:
    """Content hashes of checkpoint files, read once as long as path, size and time of change stay."""

    def __init__(self, store: Store):
        self._store = store
        self._notes = Notes(store, "hashes.json")

    def known(self, path: Path, part: str) -> str | None:
        """The hash of a part ("unet", "vae") of a file if it has been read before."""
        found = self._notes.read().get(str(path.absolute()))
        stamp = file_stamp(path)
        if not isinstance(found, dict) or stamp is None or found.get("stamp") != stamp:
            return None
        value = found.get(part)
        return value if isinstance(value, str) else None

    def of(self, component: Component, path: Path) -> str:
        """The content hash of ``component``, whose weights are in ``path``. Raises ModelError."""
        known = self.known(path, component.name)
        if known is not None:
            return known
        stamp = file_stamp(path)
        value = content_hash(component, self._store)
        with self._notes.lock:
            table = self._notes.read()
            entry = table.get(str(path.absolute()))
            if not isinstance(entry, dict) or entry.get("stamp") != stamp:
                entry = {"stamp": stamp}
            table[str(path.absolute())] = {**entry, component.name: value}
            self._notes.write(table)
        return value


def file_stamp(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


# --- a model's engines ------------------------------------------------------------------------------------------------


class ModelEngines:
    """The engines that belong to one checkpoint file, with the VAE of another file where one is named.

    Opens headers at once and hashes a file when its engines are first asked for. Raises ModelError.
    """

    def __init__(self, path: Path, vae: Path | None, store: Store, device: str):
        self.path = path
        self.store = store
        self.backend: Backend = pick_backend(settings.BACKEND.value(), device)
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self._parts = {name: (self.checkpoint.components[name], path) for name in ("unet", "vae")}
        self._refused: dict[str, str] = {}
        if vae is not None:
            try:
                self._parts["vae"] = (open_checkpoint(path, vae=vae).components["vae"], vae)
            except ModelError as error:
                self._refused["vae"] = str(error)
        self._hashes = ContentHashes(store)
        self._contexts: dict[str, ExecutionContext] = {}
        self._absent: dict[str, str] = {}
        self._seen: list[str] | None = None
        self._lock = threading.RLock()

    def component(self, part: str) -> Component:
        """ "unet" or "vae", as the file has it."""
        return self._parts[part][0]

    @property
    def levels(self) -> int:
        """How many resolutions the UNet works at."""
        return len(self.component("unet").config["block_out_channels"])

    @property
    def factor(self) -> int:
        """Pixels a latent."""
        return self.checkpoint.vae_factor

    def context(self, component: str) -> ExecutionContext:
        """The engines of ``component``. Raises UnsupportedCall if there are none, with the reason."""
        with self._lock:
            if self._seen is None:
                self.refresh()
            if component not in self._contexts and component not in self._absent:
                self._find(component)
            if component in self._absent:
                raise UnsupportedCall(self._absent[component])
            return self._contexts[component]

    def nbytes(self, component: str) -> int:
        """Bytes of the weights that an engine of ``component`` holds; 0 without one."""
        if not self.has(component):
            return 0
        keys = self.context(component).engines[0].engine.weights_entries
        return sum(entry.nbytes for entry in (self.store.get("weights", key) for key in keys) if entry is not None)

    def has(self, component: str) -> bool:
        try:
            return bool(self.context(component).engines)
        except (UnsupportedCall, ModelError):
            return False

    def refresh(self) -> None:
        """Looks whether engines have come or gone since the last look."""
        with self._lock:
            try:
                names = sorted(item.name for item in (self.store.root / "engines").iterdir())
            except OSError:
                names = []
            if names != self._seen:
                self._seen = names
                self._contexts, self._absent = {}, {}

    def _find(self, component: str) -> None:
        part = SOURCES[component]
        if part in self._refused:
            self._absent[component] = self._refused[part]
            return
        source, path = self._parts[part]
        try:
            weights = self._hashes.of(source, path) if self._seen else ""
        except ModelError as error:
            self._absent[component] = str(error)
            return
        entries, reasons = engines_for(component, source, weights, self.backend, self.store)
        if entries:
            self._contexts[component] = ExecutionContext(component, self.store, self.backend, entries)
            return
        why = "; ".join(reasons) or f"the store has no engine of {component} for {self.checkpoint.name}"
        self._absent[component] = f"{why}. Build it in the sdaccel tab."


def engines_for(
    component: str, source: Component, weights: str, backend: Backend, store: Store
) -> tuple[list[Entry], list[str]]:
    """The engines of these weights that run here, newest first; and why others of the same weights are left out.

    Needs neither the exporter nor diffusers, which a host may not have.
    """
    fitting: list[Entry] = []
    reasons: list[str] = []
    here = {**backend.device(), **backend.versions()}
    for entry in store.find_engines(component=component, weights=weights, backend=backend.name):
        engine = entry.engine
        then = {**engine.device, **engine.versions}
        changed = sorted(name for name in then.keys() | here.keys() if then.get(name) != here.get(name))
        other = _other_network(engine.config, source.config)
        slower = slower_than_torch(entry)
        if changed:
            what = ", ".join(f"{name} {then.get(name, 'none')} (now {here.get(name, 'none')})" for name in changed)
            reasons.append(f"the engine {entry.key[:12]} was built for {what}")
        elif other:
            reasons.append(f"the engine {entry.key[:12]} was built for another {other}")
        elif slower:
            reasons.append(slower)
        else:
            fitting.append(entry)
    return fitting, reasons


# What the host applies around the component, and what only names it.
_AROUND = {"sample_size", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast"}


def _other_network(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The field in which two configs of the same weights describe different networks."""
    for key in sorted(first.keys() & second.keys()):
        if not key.startswith("_") and key not in _AROUND and _plain(first[key]) != _plain(second[key]):
            return key
    return None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def run_in_parts(
    context: ExecutionContext,
    inputs: Mapping[str, torch.Tensor],
    report: RunReport,
    pixels: int = 1,
    patches: Patches = NOTHING,
) -> dict[str, torch.Tensor]:
    """`ExecutionContext.run`, in several calls where only the batch is more than any profile holds.

    Every input's first axis must be the batch. pixels: of the image, for each of the inputs' height and width.
    Raises one of `FALLBACK_ERRORS`; a ProfileError names the image's size, and the sides before the batch.
    """
    try:
        return context.run(inputs, report, patches=patches)
    except ProfileError as error:
        step = _largest_part(context, inputs)
        if step is None:
            sizes = _sizes(context, inputs)
            why = _sides(context, sizes) or error
            raise ProfileError(f"{sizes['width'] * pixels}x{sizes['height'] * pixels} pixels: {why}") from None
    count = len(next(iter(inputs.values())))
    parts = [
        context.run({name: tensor[start : start + step] for name, tensor in inputs.items()}, report, patches=patches)
        for start in range(0, count, step)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _largest_part(context: ExecutionContext, inputs: Mapping[str, torch.Tensor]) -> int | None:
    """The largest batch that some profile holds of a call that is too large for all; None if the sides do not fit."""
    sizes = _sizes(context, inputs)
    best = None
    for candidate in context.candidates:
        allowed = candidate.profile["batch"]
        step = min(allowed.max, sizes["batch"] - 1)
        rest = sizes["batch"] % step if step else 0
        fits = step in allowed and (not rest or rest in allowed)
        if fits and candidate.profile.misfit({**sizes, "batch": step}) is None:
            best = max(best or 0, step)
    return best


def _sides(context: ExecutionContext, sizes: Mapping[str, int]) -> ProfileError | None:
    """Why no profile would hold a call at any batch; None if one would."""
    profiles = [
        OptimizationProfile(tuple((axis, allowed) for axis, allowed in candidate.profile.axes if axis != "batch"))
        for candidate in context.candidates
    ]
    try:
        choose(profiles, sizes)
    except ProfileError as error:
        return error
    return None


def _sizes(context: ExecutionContext, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    specs = {spec.name: spec for spec in context.engines[0].engine.inputs}
    return axis_sizes(context.component, specs, inputs)
