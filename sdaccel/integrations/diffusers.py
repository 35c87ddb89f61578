"""diffusers: `accelerate` swaps engines into a pipeline, `restore` puts back exactly what was there.

The pipeline's modules stay the objects they are: config, dtype, device, save_pretrained, LoRA loaders and schedulers
see no difference. Only ``forward`` of the UNet and text encoders and ``decode`` and ``encode`` of the VAE are replaced,
on these instances. Every call is dispatched on its own: an engine runs it, or torch does and the report says why.

Copies (``copy.deepcopy``, pickle, ``save_pretrained``) of an accelerated pipeline or module are plain ones. A pipeline
made by ``from_pipe`` shares the modules, so engines run it too; `accelerate` it to get locks and reports of its own.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sdaccel.backends.base import Backend, gpu_left_out, pick_backend
from sdaccel.builder import (
    BuilderConfig,
    build_engines,
    buildable_components,
    built_elsewhere,
    engines_here,
    slower_than_torch,
)
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import BackendError, ExportError, SettingError, UnsupportedCall
from sdaccel.export.components import component_spec, kind_of, source_of
from sdaccel.integrations.components import swap_class
from sdaccel.integrations.late_checks import LateChecks, random_state
from sdaccel.integrations.swap import Swap, find_swap, running, swaps_of
from sdaccel.integrations.watch import ModuleWatch
from sdaccel.models.checkpoint import COMPONENTS, Checkpoint, controlnets, open_checkpoint
from sdaccel.profile import ImageProfile
from sdaccel.progress import terminal_progress
from sdaccel.runtime import ExecutionContext, RunReport

BUILD = ("if-missing", "never")


def accelerate(
    pipe: Any,
    *,
    store: Store | str | None = None,
    backend: str = "auto",
    components: Collection[str] | None = None,
    profiles: Sequence[ImageProfile] = (),
    build: str = "if-missing",
    precision: str | None = None,
    fallback: bool = True,
    progress: Callable[[str, float], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Any:
    """Swaps engines into a Stable Diffusion pipeline of diffusers, in place, and returns it.

    store: where engines are kept (default: SDACCEL_STORE, else the user's data folder).
    components: of unet, vae_decoder, vae_encoder, text_encoder, text_encoder_2, controlnet (all of them, or each by the
    name of its folder: controlnet_1, ..); default: all that the pipeline has.
    profiles: shapes to be covered; default: whatever engines there are, or the model's native range if none.
    build: "if-missing" builds what the store lacks, "never" runs in torch what has no engine.
    precision: of the engines: fp16, bf16 or fp32, as the backend has them; default: bf16 for a pipeline in bfloat16,
    else the backend's first.
    fallback: False raises instead of running a call in torch, and at once where a part has to stay in torch.
    checkpoint: the one that the pipeline's weights are of, as they are, if it is at hand: they are not hashed again.

    One call of the pipeline runs at a time: a lock serialises threads, since pipelines and schedulers hold state.
    ``pipe.sdaccel.last_report`` is the `RunReport` of this thread's last call. Raises SettingError, ModelError,
    ExportError, BackendError, StoreError, UnsupportedCall; the pipeline is then as it was.
    """
    if build not in BUILD:
        raise SettingError(f"build={build!r} is not one of {', '.join(BUILD)}.")
    place = store if isinstance(store, Store) else Store(store)
    device = _device_of(pipe)
    chosen_backend = pick_backend(backend, device)
    checkpoint = checkpoint or open_checkpoint(pipe)
    wanted = buildable_components(checkpoint, components)
    left_out = {} if components else _left_out(pipe, checkpoint, wanted)
    wanted = [component for component in wanted if component not in left_out]
    if left_out and not fallback:
        raise UnsupportedCall(
            f"{'; '.join(left_out.values()).rstrip('.')}, and fallback=False forbids torch.",
            hint=f"Name the components that engines are to run: components={wanted}.",
        )
    precision = precision or _precision_like(pipe, chosen_backend)
    config = BuilderConfig(tuple(wanted), tuple(profiles or ()), precision, chosen_backend.name)
    unused, no_use = _unused_gpu(backend, chosen_backend, device)
    if unused:
        warnings.warn(unused, stacklevel=2)
    if no_use:
        build = "never"
    engines, notes = _engines(checkpoint, config, chosen_backend, place, build, progress)
    notes += [unused] if unused else []
    restore(pipe)
    accelerated = Accelerated(pipe, fallback, notes, left_out)
    for component in wanted:
        accelerated.swap(component, ExecutionContext(component, place, chosen_backend, engines[component]))
    accelerated.install()
    return pipe


def restore(pipe: Any) -> Any:
    """Takes the engines out again and puts back exactly what `accelerate` found. Returns the pipeline."""
    accelerated = getattr(pipe, "sdaccel", None)
    if isinstance(accelerated, Accelerated):
        accelerated.remove()
    return pipe


def _left_out(pipe: Any, checkpoint: Checkpoint, wanted: Collection[str]) -> dict[str, str]:
    """Parts of the pipeline that no engine can stand for, those of ``wanted`` among them, and why."""
    parts = {name: getattr(pipe, name, None) for name in COMPONENTS} | controlnets(pipe)
    notes = {name: note for note in checkpoint.notes for name in parts if note.startswith(f"{name} ")}
    reasons = {
        name: notes.get(name, f"no engine can be built of a {type(module).__name__}")
        for name, module in parts.items()
        if module is not None and name not in checkpoint.components
    }
    for component in wanted:
        try:
            component_spec(component, checkpoint.components[source_of(component)].config)
        except ExportError as error:
            reasons[component] = str(error)
    return reasons


def _module_of(pipe: Any, source: str) -> Any:
    """The module of a pipeline that holds the weights of the checkpoint component ``source``."""
    return controlnets(pipe).get(source) if source.startswith("controlnet") else getattr(pipe, source, None)


def _as_made(module: Any) -> nn.Module | None:
    """What the module's class, of diffusers or transformers, makes of its config, without weights."""
    libraries = ("diffusers", "transformers")
    classes = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    kind: Any = next((kind for kind in classes if kind.__module__.partition(".")[0] in libraries), None)
    if kind is None:
        return None
    config = copy.deepcopy(module.config)
    with torch.device("meta"):
        return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def _device_of(pipe: Any) -> str | None:
    """Where the pipeline computes, its modules being elsewhere between calls or not."""
    device = getattr(pipe, "_execution_device", None)
    return getattr(device, "type", None)


def _unused_gpu(wanted: str, backend: Backend, device: str | None) -> tuple[str | None, bool]:
    """What to tell someone whose pipeline's GPU has no engines, or who left it on the CPU of a machine with a GPU; and
    whether engines of ``backend``, which chose itself, would be built in vain."""
    if wanted != "auto" or backend.device_type() != "cpu":
        return None, False
    left_out = gpu_left_out(wanted, backend)
    if device not in (None, "cpu", "meta"):
        told = f"no engine runs on {device}, where the pipeline is, so torch runs all of it"
        return f"{told}: {left_out}" if left_out else f"{told}.", True
    best = pick_backend().device_type()
    if best == "cpu":
        return left_out, False
    return f"the pipeline is on the CPU, so its engines are the CPU's. For the GPU's: pipe.to('{best}') first.", False


def _precision_like(pipe: Any, backend: Backend) -> str | None:
    """bf16 where the pipeline computes in it and the backend can."""
    unet = getattr(pipe, "unet", None)
    return "bf16" if getattr(unet, "dtype", None) is torch.bfloat16 and "bf16" in backend.precisions else None


def _engines(
    checkpoint: Checkpoint,
    config: BuilderConfig,
    backend: Backend,
    store: Store,
    build: str,
    progress: Callable[[str, float], None] | None,
) -> tuple[dict[str, list[Entry]], list[str]]:
    """The engines of each component that run here, built where that is asked for; and notes for the report."""

    notes: list[str] = []

    def fitting(component: str) -> list[Entry]:
        entries = engines_here(checkpoint, component, backend, store)
        return [entry for entry in entries if config.precision in (None, entry.engine.precision)]

    def chosen(component: str) -> list[Entry]:
        reasons = {entry.key: slower_than_torch(entry) for entry in found[component]}
        notes.extend(f"{component}: {reason}, so it is left out." for reason in reasons.values() if reason)
        return [entry for entry in found[component] if reasons[entry.key] is None]

    def covered(entries: Sequence[Entry]) -> bool:
        have = {profile for entry in entries for profile in entry.engine.image_profiles}
        return bool(entries) and have.issuperset(config.profiles)

    found = {component: fitting(component) for component in config.components or ()}
    missing = [component for component, entries in found.items() if not covered(entries)]
    for component in missing:
        other = None if found[component] else built_elsewhere(checkpoint, component, backend, store)
        if other is not None:
            notes.append(f"{other}{', so it was built again.' if build == 'if-missing' else '.'}")
    if missing and build == "if-missing":
        with terminal_progress() as bar:
            build_engines(checkpoint, replace(config, components=tuple(missing)), store, progress or bar)
        found = {component: fitting(component) for component in found}
        missing = []
    notes += [f"{component} has no engine for all that was asked for." for component in missing]
    return {component: chosen(component) for component in found}, notes


# --- the pipeline -----------------------------------------------------------------------------------------------------


class Accelerated:
    """What `accelerate` leaves on a pipeline as ``pipe.sdaccel``."""

    def __init__(self, pipe: Any, fallback: bool, notes: Sequence[str] = (), left_out: Mapping[str, str] | None = None):
        self.pipe = pipe
        self._class = type(pipe)
        self.fallback = fallback
        self.careful = False
        self.notes = list(notes)
        self.left_out = dict(left_out or {})
        self._controlnets = controlnets(pipe).keys()
        self.checks = LateChecks()
        self.exact: frozenset[str] = frozenset()
        self.upcast = False
        self.swaps: dict[str, Swap] = {}
        self.contexts: dict[str, ExecutionContext] = {}
        self._lock = threading.RLock()
        self._latest = RunReport()
        self._reports = threading.local()

    @property
    def last_report(self) -> RunReport:
        """Of this thread's last call (the present one during a call), or of any thread's if it made none."""
        return getattr(self._reports, "last", self._latest)

    def swap(self, component: str, context: ExecutionContext) -> None:
        module = _module_of(self.pipe, source_of(component))
        kind = swap_class(component)
        swap = find_swap(module, kind.method)
        if swap is None:
            watch = next((other.watch for other in swaps_of(module)), None) or self._watch_of(module)
            swap = kind(component, module, watch or ModuleWatch(module, _as_made(module)))
        self.swaps[component] = swap
        self.contexts[component] = context

    def _watch_of(self, module: nn.Module) -> ModuleWatch | None:
        return next((swap.watch for swap in self.swaps.values() if swap.module is module), None)

    def attach(self) -> None:
        for component, swap in self.swaps.items():
            swap.install(self, self.contexts[component])

    def detach(self) -> None:
        for swap in self.swaps.values():
            swap.remove(self)

    def install(self) -> None:
        self.attach()
        self.pipe.__class__ = _accelerated_class(self._class)  # type: ignore[arg-type]
        self.pipe.sdaccel = self

    def remove(self) -> None:
        self.detach()
        self.pipe.__class__ = self._class
        del self.pipe.sdaccel

    def beside(self, *components: str) -> Accelerated:
        """The engines of some components with a lock and reports of their own, for a thread that runs them by
        `Accelerated.generate` while another is in a call of the pipeline. `detach` ends it."""
        mine = [name for name in components if name in self.swaps]
        other = Accelerated(_Part({source_of(name): self.swaps[name].module for name in mine}), self.fallback)
        for name in mine:
            other.swap(name, self.contexts[name])
        other.attach()
        return other

    def engines(self) -> dict[str, list[str]]:
        """Component → ids of the engines that calls can be dispatched to."""
        return {name: [entry.key for entry in context.engines] for name, context in self.contexts.items()}

    def generate(self, call: Callable[[], Any], careful: bool = True, arguments: Any = ()) -> Any:
        """One call of the pipeline under the locks, with a report of its own.

        careful: other code may change the modules between their calls (callbacks). arguments: of the call; the random
        generators among them are set back should the call have to be repeated.
        """
        with ExitStack() as held:
            held.enter_context(self._lock)
            held.enter_context(_lock_of(self.pipe.scheduler))
            report = RunReport()
            outer = getattr(self._reports, "running", None)
            self._reports.last = self._reports.running = self._latest = report
            running.pipelines.append(self)
            self.careful, before = careful, self.careful
            self.checks, checks = LateChecks(), self.checks
            self.upcast, upcast = False, self.upcast
            try:
                for note in self.notes:
                    report.note(note)
                for component, reason in self.left_out.items():
                    report.fell_back(component, reason)
                for watch in {id(swap.watch): swap.watch for swap in self.swaps.values()}.values():
                    with watch.lock:
                        watch.look_closer()
                        watch.unsettle()  # pipelines change modules before they first call them
                for context in self.contexts.values():
                    context.renew()
                if not self.fallback:
                    self._refuse_replaced()
                on_gpu = any(context.device == "cuda" for context in self.contexts.values())
                restore = random_state(arguments) if on_gpu else None
                result = call()
                if restore is not None:
                    result = self._repeated(result, call, restore, report)
                self._check_in_place(report)
                report.settle()
                return result
            finally:
                running.pipelines.pop()
                self.careful, self.checks, self.upcast = before, checks, upcast
                self._reports.running = outer
                if outer is not None:
                    self._reports.last = outer

    def _repeated(self, result: Any, call: Callable[[], Any], restore: Callable[[], None], report: RunReport) -> Any:
        """``result``, or that of the same call once more where engines on the GPU gave something unusable."""
        faults = self.checks.faults()
        if not faults:
            return result
        if not self.fallback:
            text = ", ".join(f"that of {component} was {fault}" for component, fault in faults.items())
            raise BackendError(f"of the outputs {text}, and fallback=False forbids torch.")
        for component, fault in faults.items():
            reason = f"the output was {fault}: the whole call was repeated with torch in float32 for it."
            report.fell_back(component, reason)
        restore()
        self.exact = frozenset(faults)
        try:
            result = call()
        except torch.cuda.OutOfMemoryError:
            for component, fault in faults.items():
                report.fail(f"{component} gives {fault}, and in float32 it does not fit into the GPU's memory.")
            return result
        finally:
            self.exact = frozenset()
        for component, fault in self.checks.faults().items():
            report.fail(f"{component} gives {fault}, when the call is repeated too.")
        return result

    def decodes_in_half(self) -> bool:
        """Whether the VAE, wanted in float32 for torch, can stay as it is since an engine decodes: a trip to float32
        and back would touch all its weights. Where torch decodes after all, it does so in float32."""
        swap, context = self.swaps.get("vae_decoder"), self.contexts.get("vae_decoder")
        if swap is None or context is None or self not in running.pipelines:
            return False
        decodes = bool(context.engines) and swap.in_place() and self.pipe.vae is swap.module
        self.upcast = decodes and swap.component not in self.exact
        return self.upcast

    def _replaced(self, component: str, asked: bool = True) -> bool:
        """Whether the pipeline calls another module. ``asked``: one around ours is none, if its calls arrive."""
        ours, module = self.swaps[component].module, _module_of(self.pipe, source_of(component))
        if module is None or module is ours:
            return False
        inside = isinstance(module, nn.Module) and any(part is ours for part in module.modules())
        return not (asked and inside)

    def _refuse_replaced(self) -> None:
        for component in self.swaps:
            if self._replaced(component):
                name = kind_of(source_of(component))
                raise UnsupportedCall(
                    f"pipe.{name} was replaced after accelerate(), and fallback=False forbids torch.",
                    hint="Call sdaccel.accelerate(pipe) again.",
                )

    def _check_in_place(self, report: RunReport) -> None:
        """Reports swaps that other code took out, so that their engines were never asked."""
        for component, swap in self.swaps.items():
            source = source_of(component)
            asked = component in report.components
            if self._replaced(component, asked):
                report.fell_back(component, f"pipe.{kind_of(source)} was replaced after accelerate()")
            elif not asked and _module_of(self.pipe, source) is swap.module and not swap.in_place():
                report.fell_back(component, f"{source}.{swap.method} was replaced after accelerate()")
        for component in controlnets(self.pipe).keys() - self._controlnets:
            report.fell_back(component, "it was added to pipe.controlnet after accelerate()")


class _Part:
    """Stands for a pipeline of these modules alone."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.__dict__.update(modules)
        self.scheduler = self


def _blank(cls: type) -> Any:
    return cls.__new__(cls)  # type: ignore[call-overload]


@functools.cache
def _accelerated_class(cls: type) -> type:
    """``cls`` under its own name, whose calls are reported; diffusers looks pipelines up by the name of their class."""

    @functools.wraps(cls.__call__)  # type: ignore[operator]
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        careful = any(map(callable, (*args, *kwargs.values())))
        again = functools.partial(cls.__call__, self, *args, **kwargs)  # type: ignore[operator]
        return self.sdaccel.generate(again, careful, (args, kwargs))

    def upcast_vae(self: Any) -> None:
        if not self.sdaccel.decodes_in_half():
            cls.upcast_vae(self)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        return _blank, (cls,), {key: value for key, value in self.__dict__.items() if key != "sdaccel"}

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    methods = {"__call__": call, "__reduce_ex__": reduce}
    if hasattr(cls, "upcast_vae"):
        methods["upcast_vae"] = functools.wraps(cls.upcast_vae)(upcast_vae)
    return type(cls.__name__, (cls,), {**methods, **names})


_scheduler_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()  # type: ignore[valid-type]
_scheduler_locks_guard = threading.Lock()


def _lock_of(scheduler: Any) -> Any:
    """The lock of a scheduler: pipelines made by ``from_pipe`` share theirs."""
    with _scheduler_locks_guard:
        return _scheduler_locks.setdefault(scheduler, threading.RLock())


__all__ = ["Accelerated", "accelerate", "restore"]
