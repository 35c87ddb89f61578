"""What the WebUIs have in common: a model loaded from a single file, in the original layout, by another program.

A host's UNet call is ``forward(x, timesteps, context, y=…)``, its VAE has ``encode`` and ``decode``; engines take the
same tensors. Every call is dispatched on its own: an engine runs it, or torch does and the report says why. Which
engines belong to a model is decided by the content of its file; that the torch module still computes what the file says
is compared with the file once and watched from then on. Knows no host: they are `sdaccel.integrations.webui`, `.forge`.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sdaccel.engine.patch import NOTHING, Patches
from sdaccel.engine.store import Store
from sdaccel.errors import ProfileError, SdaccelError, UnsupportedCall
from sdaccel.integrations.host_engines import SOURCES, ModelEngines, file_stamp, run_in_parts
from sdaccel.integrations.host_shapes import OFTEN, Offer, WantedShapes
from sdaccel.integrations.host_watch import Kept, Watched, swapped
from sdaccel.integrations.late_checks import LateChecks
from sdaccel.runtime import FALLBACK_ERRORS, RunReport, unusable

SWITCHED_OFF = "sdaccel is switched off in Settings."

T = TypeVar("T")

_kept: dict[tuple[str, str], Any] = {}


def kept(name: str, of: str, make: Callable[[], T]) -> T:
    """What is made once and outlives a reload of the host's scripts."""
    if (name, of) not in _kept:
        _kept[name, of] = make()
    return _kept[name, of]


@dataclass(frozen=True)
class Loaded:
    """What the host has in memory now."""

    path: Path
    vae_path: Path | None
    """A VAE file that the host uses instead of the checkpoint's own."""
    unet: nn.Module
    vae: nn.Module
    device: str
    """Where the host computes: cpu or cuda."""


@dataclass
class _Run:
    """One generation."""

    report: RunReport
    checks: LateChecks
    batch: int = 1
    steps: int = 0
    """Of the UNet, where the host tells them: so many calls it made at least."""
    missing: set[tuple[Path, int, int, int]] = field(default_factory=set)
    """(checkpoint, width, height, tokens) that no engine had."""
    made: set[tuple[Path, int, int]] = field(default_factory=set)
    """(checkpoint, width, height) that engines ran."""


class WebHost:
    """A WebUI: what it has loaded, its options, the report of its generation. Subclasses know how to ask it."""

    name = ""
    components = ("unet", "vae_decoder", "vae_encoder")
    """What engines can run of a checkpoint here."""

    def __init__(self, host: Any) -> None:
        """``host``: its modules, ``shared`` and ``sd_models`` among them."""
        self.host = host
        self._engines: dict[tuple[Any, ...], ModelEngines] = {}
        self._unusable: dict[tuple[Any, ...], str] = {}
        self._watched: dict[str, Watched] = {}
        self._lock = threading.RLock()
        self._stores: dict[str, Store] = {}
        self.run = _Run(RunReport(), LateChecks())

    # asked of subclasses

    def loaded(self) -> Loaded | None:
        """The model in memory; None without one, or for one that is no Stable Diffusion UNet."""
        raise NotImplementedError

    def hindrance(self, part: str) -> str | None:
        """What of the host itself keeps engines from standing for "unet" or "vae" now."""
        return None

    def networks(self, part: str) -> list[str]:
        """Names of the networks (LoRA and its kin) that the host applies to "unet" or "vae" now."""
        return []

    def patches(self, part: str, engines: ModelEngines) -> Patches:
        """What they do to the weights of ``engines``: the same object as long as nothing changes.

        Raises UnsupportedCall for what engines cannot hold.
        """
        return NOTHING

    def kept(self, part: str) -> Kept:
        """Weights that the host keeps aside, by their names in the module, while networks are merged into it."""
        return {}

    # options

    def option(self, name: str, default: Any) -> Any:
        """A value of the host's settings page."""
        return getattr(self.host.shared.opts, name, default)

    def settings(self) -> None:
        """on_ui_settings: the extension's section of the settings page.

        Where others reach it without a password, it offers no paths of the server: what is saved stays in force.
        """
        from sdaccel.integrations.routes import refusal

        add, info = self.host.shared.opts.add_option, self.host.shared.OptionInfo
        section = ("sdaccel", "sdaccel")
        store = info("", "Engine store (a folder; empty: SDACCEL_STORE or the user's data folder)", section=section)
        python = info(
            "", "Python that builds engines (empty: the one of this web UI); counts after Reload UI", section=section
        )
        paths = {} if refusal(self.host.shared.cmd_opts) else {"sdaccel_store": store, "sdaccel_python": python}
        for name, text in paths.items():
            text.restrict_api = True
            add(name, text)
        for name, label in (
            ("sdaccel_enabled", "Run engines"),
            ("sdaccel_fallback", "Run in torch what no engine can take (off: an error instead)"),
            ("sdaccel_offers", f"Offer to build sizes that were made in torch {OFTEN} times"),
        ):
            add(name, info(True, label, section=section))

    @property
    def store(self) -> Store:
        text = str(self.option("sdaccel_store", "") or "").strip()
        if text not in self._stores:
            self._stores[text] = Store(text or None)
        return self._stores[text]

    @property
    def enabled(self) -> bool:
        return bool(self.option("sdaccel_enabled", True))

    @property
    def fallback(self) -> bool:
        return bool(self.option("sdaccel_fallback", True))

    @property
    def report(self) -> RunReport:
        """Of the last generation, or of the one under way."""
        return self.run.report

    def offers(self) -> list[Offer]:
        """Sizes that were made often in torch, for the tab to offer builds of."""
        return WantedShapes(self.store).offers() if self.option("sdaccel_offers", True) else []

    # models

    def models(self) -> list[tuple[str, str]]:
        """(title, path) of the host's checkpoints, for the tab to choose from."""
        infos = self.host.sd_models.checkpoints_list
        return [(str(getattr(info, "name", title)), os.fspath(info.filename)) for title, info in infos.items()]

    def engines(self, loaded: Loaded) -> ModelEngines:
        """The engines of what is loaded. Raises UnsupportedCall with the reason why none can be."""
        key = (self.store.root, loaded.path, str(file_stamp(loaded.path)), loaded.vae_path, loaded.device)
        with self._lock:
            if key in self._unusable:
                raise UnsupportedCall(self._unusable[key])
            if key not in self._engines:
                try:
                    self._engines[key] = ModelEngines(loaded.path, loaded.vae_path, self.store, loaded.device)
                except SdaccelError as error:
                    self._unusable[key] = str(error)
                    raise UnsupportedCall(str(error)) from error
                # As many as the host keeps models in the GPU's memory; of the CPU's there is enough for a refiner too.
                most = 2 if loaded.device == "cpu" else max(1, int(self.option("sd_checkpoints_limit", 1) or 1))
                while len(self._engines) > most:
                    self._engines.pop(next(iter(self._engines)))
            return self._engines[key]

    def model_loaded(self) -> None:
        """The host has loaded or changed weights: they are compared with their file again."""
        with self._lock:
            self._watched.clear()
            self._unusable.clear()

    def _watch(self, part: str, module: nn.Module, engines: ModelEngines) -> Watched:
        with self._lock:
            found = self._watched.get(part)
            if found is None or found.module is not module or found.component is not engines.component(part):
                kept = functools.partial(self.kept, part)
                found = self._watched[part] = Watched(engines.component(part), module, kept)
            return found

    # a generation

    def begin(self, p: Any) -> None:
        """The host begins a generation."""
        self.run = _Run(RunReport(), LateChecks(), int(getattr(p, "batch_size", 1) or 1))
        with self._lock:
            for engines in self._engines.values():
                engines.refresh()
            for watched in self._watched.values():
                watched.begin()

    def never_asked(self, reason: str) -> None:
        """The host's UNet ran without a call of ours."""
        for _ in range(max(1, self.run.steps)):
            self.report.fell_back("unet", reason)
        self.run.steps = 0

    def describe(self, p: Any) -> None:
        """Writes into the infotext what ran; called when a batch of images has been decoded."""
        run = self.run
        for component, fault in run.checks.faults().items():
            run.report.fail(f"{component} gives {fault}")
        parameters = getattr(p, "extra_generation_params", None)
        if not self.enabled or not isinstance(parameters, dict):
            return
        loaded = self.loaded()
        folders = [self.store.root, Path.home(), *([loaded.path.parent] if loaded else ())]
        engines, in_torch = infotext(run.report, folders)
        for key, text in (("sdaccel", engines), ("sdaccel in torch", in_torch)):
            if text:
                parameters[key] = text
            else:
                parameters.pop(key, None)
        comment = getattr(p, "comment", None)
        if callable(comment) and loaded is not None and self._has_engines(loaded):
            for fallback in run.report.fallbacks:
                comment(f"sdaccel: {fallback.component} ran in torch: {fallback.reason}")
            for text in run.report.failed:
                comment(f"sdaccel: {text}")

    def lacking(self, loaded: Loaded) -> str | None:
        """Why there is no engine for the UNet of this model; None if there is one."""
        try:
            self.engines(loaded).context("unet")
        except SdaccelError as error:
            return str(error)
        return None

    def _has_engines(self, loaded: Loaded) -> bool:
        """Whether somebody has built any for this model: else torch is what they expect."""
        try:
            return self.engines(loaded).has("unet")
        except SdaccelError:
            return False

    def finish(self, processed: Any = None) -> None:
        """The generation is done: counts the sizes that no engine had, and offers to build what is made often.

        processed: the host's result, whose comments are shown beside the images.
        """
        run, shapes = self.run, WantedShapes(self.store)
        for path, width, height in run.made:
            shapes.drop(path, width, height)
        for path, width, height, tokens in sorted(run.missing):
            if (path, width, height) in run.made:
                continue
            times = shapes.add(path, width, height, run.batch, tokens)
            if times >= OFTEN and self.option("sdaccel_offers", True) and hasattr(processed, "comments"):
                offer = Offer(str(path), width, height, run.batch, tokens, times)
                processed.comments = f"{processed.comments or ''}sdaccel: {offer} See the sdaccel tab.\n"
        run.missing, run.made = set(), set()

    # calls

    def _dispatch(
        self, component: str, engine: Callable[[], T], plain: Callable[[], T], tensor: Callable[[T], torch.Tensor]
    ) -> T:
        """What an engine gives, or torch with the reason in the report."""
        report = self.run.report
        try:
            if not self.enabled:
                raise UnsupportedCall(SWITCHED_OFF)
            result = engine()
            fault = self._fault(component, tensor(result))
            if fault is None:
                return result
            raise UnsupportedCall(f"the output of the engine was {fault}.")
        except FALLBACK_ERRORS as error:
            if not self.fallback:
                raise
            report.fell_back(component, str(error))
        start = time.perf_counter()
        result = plain()
        report.ran_torch(component, (time.perf_counter() - start) * 1e3, self.networks(SOURCES[component]))
        return result

    def _fault(self, component: str, output: torch.Tensor) -> str | None:
        """What is wrong with an output. Steps on a GPU are looked at when the batch ends: asked at once, it waits."""
        if output.is_cuda and component == "unet":
            self.run.checks.add(component, output)
            return None
        return unusable(output)

    def _ready(
        self, component: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[ModelEngines, Patches]:
        """The engines for a call and what to patch them with, all reasons against them looked at.

        Raises UnsupportedCall.
        """
        loaded = self.loaded()
        if loaded is None or module not in (loaded.unet, loaded.vae):
            raise UnsupportedCall("the model that runs is not the one that the host has loaded.")
        part = SOURCES[component]
        reason = self.hindrance(part)
        if reason:
            raise UnsupportedCall(reason)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            raise UnsupportedCall("gradients are wanted (training), engines give none.")
        engines = self.engines(loaded)
        context = engines.context(component)
        for name, tensor in tensors.items():
            if tensor.device.type != context.device:
                backend = context.backend.name
                raise UnsupportedCall(f"{name} is on {tensor.device.type}, the backend {backend} on {context.device}.")
        watched = self._watch(part, module, engines)
        reason = watched.reason()
        if reason:
            raise UnsupportedCall(f"{reason}.")
        return engines, watched.patches(self.patches(part, engines))

    def call_unet(
        self,
        module: nn.Module,
        plain: Callable[[], torch.Tensor],
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """One call of the UNet through an engine, see `run_unet`, or through ``plain``, the same call in torch."""
        engine = functools.partial(self.run_unet, module, x, timesteps, context, y, **options)
        return self._dispatch("unet", engine, plain, lambda result: result)

    def run_unet(
        self,
        module: nn.Module,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None,
        *,
        refused: Mapping[str, Any],
        whole: bool,
        residuals: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """What an engine gives: (batch, channels, height, width) like ``x``, in its dtype and on its device.

        timesteps: (batch,). context: (batch, tokens, width). y: (batch, vector) of SDXL.
        refused: further arguments by name, all of which must be None or empty.
        whole: sides that the UNet halves unevenly are computed otherwise by the host than by engines.
        residuals: of a ControlNet, as inputs of an engine, for the UNet's config.
        Raises one of `FALLBACK_ERRORS`.
        """
        for name, value in refused.items():
            if value is not None and not (isinstance(value, (dict, list, tuple)) and not value):
                raise UnsupportedCall(f"the UNet was called with {name}, which engines do not take.")
        inputs = {"sample": x, "timestep": timesteps, "encoder_hidden_states": context, "y": y}
        tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedCall(f"{name} is a {type(tensor).__name__}; engines take tensors.")
        tensors["timestep"] = timesteps.float().expand(len(x)) if timesteps.dim() < 2 else timesteps
        engines, patches = self._ready("unet", module, tensors)
        height, width = x.shape[-2:]
        size = width * engines.factor, height * engines.factor
        step = 2 ** (engines.levels - 1)
        if whole and (height % step or width % step):
            raise UnsupportedCall(
                f"{size[0]}x{size[1]} is no multiple of {step * engines.factor} pixels: the host resizes skip "
                "connections there, which engines do otherwise."
            )
        if residuals is not None:
            tensors |= residuals(engines.component("unet").config)
        unet = engines.context("unet")
        try:
            out = run_in_parts(unet, tensors, self.run.report, engines.factor, patches)["sample_out"]
        except ProfileError:
            self.run.missing.add((engines.path, *size, context.shape[1]))
            raise
        self.run.made.add((engines.path, *size))
        return out.to(x.device, x.dtype)

    def call_decode(self, module: nn.Module, plain: Callable[[], T], z: torch.Tensor) -> Any:
        """The image of latents, (batch, 3, height, width) in -1…1, in their dtype; ``plain`` is torch's decode."""

        def engine() -> Any:
            engines, patches = self._ready("vae_decoder", module, {"latents": z})
            context = engines.context("vae_decoder")
            out = run_in_parts(context, {"latents": z}, self.run.report, engines.factor, patches)["image"]
            return out.to(z.device, z.dtype)

        return self._dispatch("vae_decoder", engine, plain, lambda result: result)

    def call_encode(self, module: Any, plain: Callable[[], T], x: torch.Tensor) -> T:
        """What the host's encode makes of an image: distribution, sample or regulated, from an engine's moments.

        Runs the host's own encode with its two networks answered by the engine.
        """
        moments: list[torch.Tensor] = []

        def engine() -> T:
            engines, patches = self._ready("vae_encoder", module, {"image": x})
            context = engines.context("vae_encoder")
            out = run_in_parts(context, {"image": x}, self.run.report, patches=patches)["moments"]
            moments.append(out.to(x.device, x.dtype))
            changes: list[tuple[Any, str, Any]] = [(module.encoder, "forward", lambda *_: moments[0])]
            if isinstance(getattr(module, "quant_conv", None), nn.Module):
                changes.append((module.quant_conv, "forward", lambda tensor: tensor))
            with self._watch("vae", module, engines).lock, swapped(*changes):
                return plain()

        return self._dispatch("vae_encoder", engine, plain, lambda result: moments[0])


def infotext(report: RunReport, folders: Iterable[Path] = ()) -> tuple[str, str]:
    """What ran, for an image's parameters: the engines of each component; what torch ran, and why. Either may be "".

    folders: names of these are left out, since images travel.
    """
    engines = [
        f"{name} {' '.join(key[:12] for key in run.engines)}" for name, run in report.components.items() if run.calls
    ]
    in_torch = [f"{f.component} {_calls(f.calls)}: {f.reason}" for f in report.fallbacks] + report.failed
    text = "; ".join(in_torch)
    for folder in sorted({str(folder) for folder in folders}, key=len, reverse=True):
        text = text.replace(folder, "…")
    return "; ".join(engines), text


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


__all__ = ["SWITCHED_OFF", "Loaded", "WebHost", "infotext", "kept"]
