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
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from sdaccel.backends.base import Backend, pick_backend
from sdaccel.builder import BuilderConfig, build_engines, buildable_components, engines_here
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import BackendError, SettingError, UnsupportedCall
from sdaccel.export.components import residual_layout, source_of
from sdaccel.integrations.watch import ModuleWatch
from sdaccel.models.checkpoint import COMPONENTS, Checkpoint, open_checkpoint
from sdaccel.profile import ImageProfile
from sdaccel.progress import terminal_progress
from sdaccel.runtime import FALLBACK_ERRORS, ExecutionContext, RunReport, unusable

BUILD = ("if-missing", "never")
HALF = (torch.float16, torch.bfloat16)


def accelerate(
    pipe: Any,
    *,
    store: Store | str | None = None,
    backend: str = "auto",
    components: Collection[str] | None = None,
    profiles: Sequence[ImageProfile] = (),
    build: str = "if-missing",
    fallback: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> Any:
    """Swaps engines into a Stable Diffusion pipeline of diffusers, in place, and returns it.

    store: where engines are kept (default: SDACCEL_STORE, else the user's data folder).
    components: of unet, vae_decoder, vae_encoder, text_encoder, text_encoder_2; default: all that the pipeline has.
    profiles: shapes to be covered; default: whatever engines there are, or the model's native range if none.
    build: "if-missing" builds what the store lacks, "never" runs in torch what has no engine.
    fallback: False raises instead of running a call in torch.

    One call of the pipeline runs at a time: a lock serialises threads, since pipelines and schedulers hold state.
    ``pipe.sdaccel.last_report`` is the `RunReport` of this thread's last call. Raises SettingError, ModelError,
    ExportError, BackendError, StoreError; the pipeline is then as it was.
    """
    if build not in BUILD:
        raise SettingError(f"build={build!r} is not one of {', '.join(BUILD)}.")
    place = store if isinstance(store, Store) else Store(store)
    chosen_backend = pick_backend(backend)
    checkpoint = open_checkpoint(pipe)
    wanted = buildable_components(checkpoint, components)
    engines, notes = _engines(checkpoint, wanted, tuple(profiles or ()), chosen_backend, place, build, progress)
    restore(pipe)
    accelerated = Accelerated(pipe, fallback, notes, {} if components else _left_out(pipe, checkpoint))
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


def _left_out(pipe: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Parts of the pipeline that no engine can stand for, and why."""
    parts = [name for name in COMPONENTS if getattr(pipe, name, None) is not None]
    notes = {name: note for note in checkpoint.notes for name in parts if note.startswith(name)}
    return {
        name: notes.get(name, f"no engine can be built of a {type(getattr(pipe, name)).__name__}")
        for name in parts
        if name not in checkpoint.components
    }


def _engines(
    checkpoint: Checkpoint,
    components: Sequence[str],
    profiles: tuple[ImageProfile, ...],
    backend: Backend,
    store: Store,
    build: str,
    progress: Callable[[str, float], None] | None,
) -> tuple[dict[str, list[Entry]], list[str]]:
    """The engines of each component that run here, built where that is asked for; and notes for the report."""

    def covered(entries: Sequence[Entry]) -> bool:
        have = {profile for entry in entries for profile in entry.engine.image_profiles}
        return bool(entries) and have.issuperset(profiles)

    found = {component: engines_here(checkpoint, component, backend, store) for component in components}
    missing = [component for component, entries in found.items() if not covered(entries)]
    if missing and build == "if-missing":
        config = BuilderConfig(tuple(missing), profiles, None, backend.name)
        with terminal_progress() as bar:
            build_engines(checkpoint, config, store, progress or bar)
        found = {component: engines_here(checkpoint, component, backend, store) for component in components}
        missing = []
    return found, [f"{component} has no engine for all that was asked for." for component in missing]


# --- the pipeline -----------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """Where one call goes: an accelerated pipeline's engines, its report, and what it wants of torch."""

    context: ExecutionContext
    report: RunReport
    fallback: bool
    careful: bool
    """Other code runs between the calls (callbacks)."""
    running: bool
    """The pipeline is in a call, which began with a close look at its modules."""

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        return self.context.run(inputs, self.report, outputs)


_running = threading.local()
"""``stack``: the accelerated pipelines that this thread is in a call of, outermost first."""


def _stack() -> list[Accelerated]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    return _running.stack


class Accelerated:
    """What `accelerate` leaves on a pipeline as ``pipe.sdaccel``."""

    def __init__(self, pipe: Any, fallback: bool, notes: Sequence[str] = (), left_out: Mapping[str, str] | None = None):
        self.pipe = pipe
        self._class = type(pipe)
        self.fallback = fallback
        self.careful = False
        self.notes = list(notes)
        self.left_out = dict(left_out or {})
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
        module = getattr(self.pipe, source_of(component))
        kind = _SWAPS.get(component, TextSwap)
        swap = find_swap(module, kind.method)
        if swap is None:
            watch = next((other.watch for other in _swaps_of(module)), None) or self._watch_of(module)
            swap = kind(component, module, watch or ModuleWatch(module))
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

    def engines(self) -> dict[str, list[str]]:
        """Component → ids of the engines that calls can be dispatched to."""
        return {name: [entry.key for entry in context.engines] for name, context in self.contexts.items()}

    def generate(self, call: Callable[[], Any], careful: bool = True) -> Any:
        """One call of the pipeline under the locks, with a report of its own.

        careful: other code may change the modules between their calls (callbacks).
        """
        with ExitStack() as held:
            held.enter_context(self._lock)
            held.enter_context(_lock_of(self.pipe.scheduler))
            report = RunReport()
            outer = getattr(self._reports, "running", None)
            self._reports.last = self._reports.running = self._latest = report
            _stack().append(self)
            self.careful, before = careful, self.careful
            try:
                for note in self.notes:
                    report.note(note)
                for component, reason in self.left_out.items():
                    report.fell_back(component, reason)
                for watch in {id(swap.watch): swap.watch for swap in self.swaps.values()}.values():
                    with watch.lock:
                        watch.look_closer()
                        watch.unsettle()  # pipelines change modules before they first call them
                result = call()
                self._check_in_place(report)
                return result
            finally:
                _stack().pop()
                self.careful = before
                self._reports.running = outer
                if outer is not None:
                    self._reports.last = outer

    def _check_in_place(self, report: RunReport) -> None:
        """Reports swaps that other code took out, so that their engines were never asked."""
        for component, swap in self.swaps.items():
            source = source_of(component)
            if getattr(self.pipe, source, None) is not swap.module:
                report.fell_back(component, f"pipe.{source} was replaced after accelerate()")
            elif component not in report.components and not swap.in_place():
                report.fell_back(component, f"{source}.{swap.method} was replaced after accelerate()")


def _blank(cls: type) -> Any:
    return cls.__new__(cls)  # type: ignore[call-overload]


@functools.cache
def _accelerated_class(cls: type) -> type:
    """``cls`` under its own name, whose calls are reported; diffusers looks pipelines up by the name of their class."""

    @functools.wraps(cls.__call__)  # type: ignore[operator]
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        careful = any(map(callable, (*args, *kwargs.values())))
        return self.sdaccel.generate(lambda: cls.__call__(self, *args, **kwargs), careful)  # type: ignore[operator]

    def reduce(self: Any, protocol: Any) -> Any:
        return _blank, (cls,), {key: value for key, value in self.__dict__.items() if key != "sdaccel"}

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {"__call__": call, "__reduce_ex__": reduce, **names})


_scheduler_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()  # type: ignore[valid-type]
_scheduler_locks_guard = threading.Lock()


def _lock_of(scheduler: Any) -> Any:
    """The lock of a scheduler: pipelines made by ``from_pipe`` share theirs."""
    with _scheduler_locks_guard:
        return _scheduler_locks.setdefault(scheduler, threading.RLock())


# --- one method of one module -----------------------------------------------------------------------------------------


class Replacement:
    """What stands in a module where its method stood. Copies of the module get the method itself."""

    __slots__ = ("__dict__", "swap")

    def __init__(self, swap: Swap):
        self.swap = swap
        functools.update_wrapper(self, swap.original())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.swap(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        swap, copied = self.swap, memo.get(id(self.swap.module))
        if copied is None:
            return self
        return _plain_method(copied, swap.method) if swap.before is None else copy.deepcopy(swap.before, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        swap = self.swap
        return (_plain_method, (swap.module, swap.method)) if swap.before is None else (_itself, (swap.before,))


def _itself(value: Any) -> Any:
    return value


def _plain_method(module: nn.Module, method: str) -> Any:
    return MethodType(getattr(type(module), method), module)


def find_swap(module: nn.Module, method: str) -> Swap | None:
    """The swap that stands in ``module`` for ``method``, also inside a hook of the accelerate library."""
    for place in (method, "_old_forward"):
        found = module.__dict__.get(place)
        if isinstance(found, Replacement) and found.swap.method == method:
            return found.swap
    return None


def _swaps_of(module: nn.Module) -> Iterator[Swap]:
    for method in ("forward", "decode", "encode"):
        swap = find_swap(module, method)
        if swap is not None:
            yield swap


class Swap:
    """One method of one module, replaced on the instance. Subclasses translate its arguments and results.

    Pipelines that share the module share its swap. A call goes to the engines of the pipeline that is running in this
    thread; outside of one, to those of the pipeline accelerated last.
    """

    method = "forward"

    def __init__(self, component: str, module: nn.Module, watch: ModuleWatch):
        self.component = component
        self.module = module
        self.watch = watch
        self._owners: list[tuple[Accelerated, ExecutionContext]] = []
        self._bypass = threading.local()
        # Inside a hook that moves weights, as the method itself is.
        hooked = hasattr(module, "_hf_hook") and "_old_forward" in module.__dict__ and self.method == "forward"
        self._place = "_old_forward" if hooked else self.method
        self.before = module.__dict__.get(self._place)
        self._replacement = Replacement(self)

    def original(self) -> Callable[..., Any]:
        return _plain_method(self.module, self.method) if self.before is None else self.before

    def install(self, owner: Accelerated, context: ExecutionContext) -> None:
        if not self._owners:
            self.module.__dict__[self._place] = self._replacement
        self._owners.append((owner, context))

    def remove(self, owner: Accelerated) -> None:
        self._owners = [pair for pair in self._owners if pair[0] is not owner]
        if self._owners:
            return
        state = self.module.__dict__
        for place in (self.method, "_old_forward"):
            if state.get(place) is not self._replacement:
                continue
            if self.before is None and place == self._place:
                del state[place]
            else:
                state[place] = self.original()
        hook = state.get(self.method)
        if getattr(hook, "__wrapped__", None) is self._replacement:
            hook.__wrapped__ = self.original()  # type: ignore[union-attr]

    @property
    def context(self) -> ExecutionContext:
        """The engines of the pipeline accelerated last."""
        return self._owners[-1][1]

    def in_place(self) -> bool:
        return find_swap(self.module, self.method) is self

    def _target(self) -> Target | None:
        owners = self._owners
        if not owners:
            return None
        running = next((pair for owner in reversed(_stack()) for pair in owners if pair[0] is owner), None)
        owner, context = running or owners[-1]
        return Target(context, owner.last_report, owner.fallback, owner.careful, running is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = self._target()
        if target is None or getattr(self._bypass, "on", False):
            return self.original()(*args, **kwargs)
        with self.watch.lock:
            try:
                reason = self._changed(target)
                if reason:
                    raise UnsupportedCall(f"{reason}.")
                self._check(target, args, kwargs)
                result = self.run(target, *args, **kwargs)
            except FALLBACK_ERRORS as error:
                if not target.fallback:
                    raise
                target.report.fell_back(self.component, str(error))
                result = self._run_torch(target, args, kwargs)
                exact = not _has_half((args, kwargs)) and not any(p.dtype in HALF for p in self.module.parameters())
                return self._usable(target, result, args, kwargs, final=exact)
            return self._usable(target, result, args, kwargs)

    def _changed(self, target: Target) -> str | None:
        """Why engines no longer stand for the module."""
        if not target.running:
            return self.watch.look()
        module = self.module
        hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        wrapped = module.__dict__.get(self.method) is not self._replacement
        return self.watch.reason(careful=target.careful or hooked or wrapped)

    def run(self, target: Target, /, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, computed by an engine. Raises one of `FALLBACK_ERRORS`."""
        raise NotImplementedError

    def tensor(self, result: Any) -> torch.Tensor:
        """The tensor of a result that must be finite and not constant."""
        return result[0]

    def cast(self, result: Any, dtype: torch.dtype) -> Any:
        """A result of torch in another dtype."""
        for key, value in result.items() if isinstance(result, dict) else ():
            result[key] = _cast(value, dtype)
        return result if isinstance(result, dict) else _cast(result, dtype)

    def _check(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch, wanted = self.watch, target.context.device
        if watch.device != wanted:
            name = target.context.backend.name
            raise UnsupportedCall(f"the pipeline is on {watch.device}, the backend {name} on {wanted}.")
        if watch.dtype == torch.float64:
            raise UnsupportedCall("the module is float64, more than an engine computes in.")
        if torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in _tensors((args, kwargs)))
            or any(parameter.requires_grad for parameter in self.module.parameters())
        ):
            raise UnsupportedCall("gradients are wanted, engines give none (use torch.no_grad()).")
        if torch.is_autocast_enabled(wanted):
            target.report.note("torch.autocast is on: engines compute in their own precision.")

    def _run_torch(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        result = self.original()(*args, **kwargs)
        target.report.ran_torch(self.component, (time.perf_counter() - start) * 1e3, self.watch.adapters())
        return result

    def _usable(
        self, target: Target, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, final: bool = False
    ) -> Any:
        """``result``, or what torch gives in float32 where it holds NaN, infinite values or one constant.

        ``final``: it came from torch in float32 already.
        """
        output = self.tensor(result)
        fault = unusable(output)
        if fault is None:
            return result
        if not final:
            if not target.fallback:
                raise BackendError(f"the output of {self.component} was {fault}, and fallback=False forbids torch.")
            target.report.fell_back(self.component, f"the output was {fault}: computed again by torch in float32.")
            with self._float32():
                result = self._run_torch(target, _cast(args, torch.float32), _cast(kwargs, torch.float32))
            fault = unusable(self.tensor(result))
            if output.dtype in HALF:
                result = self.cast(result, output.dtype)
        if fault:
            target.report.fail(f"{self.component} gives {fault}, in torch and float32 too.")
        return result

    @contextmanager
    def _float32(self):
        """Holds the module in float32 and lets its calls through to torch."""
        halves = [(p, p.data) for p in self.module.parameters() if p.dtype in HALF]
        self._bypass.on = True
        try:
            for parameter, data in halves:
                parameter.data = data.float()
            yield
        finally:
            for parameter, data in halves:
                parameter.data = data
            self._bypass.on = False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _has_half(value: Any) -> bool:
    return any(tensor.dtype in HALF for tensor in _tensors(value))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it as ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


class UNetSwap(Swap):
    def run(
        self,
        target: Target,
        /,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Any] | None = None,
        down_block_additional_residuals: Sequence[torch.Tensor] | None = None,
        mid_block_additional_residual: torch.Tensor | None = None,
        down_intrablock_additional_residuals: Sequence[torch.Tensor] | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
        **unknown: Any,
    ) -> Any:
        refused = {
            "class_labels": class_labels,
            "attention_mask": attention_mask,
            "down_intrablock_additional_residuals (T2I-Adapter)": down_intrablock_additional_residuals,
            "encoder_attention_mask": encoder_attention_mask,
            **unknown,
        }
        # Without adapters the LoRA scale changes nothing.
        refused.update({k: v for k, v in (cross_attention_kwargs or {}).items() if k != "scale"})
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedCall(f"the UNet was called with {name}, which engines do not take.")
        _need_tensors(sample=sample, encoder_hidden_states=encoder_hidden_states)
        batch = sample.shape[0]
        inputs = {
            "sample": sample,
            "timestep": _timesteps(timestep, batch, sample.device),
            "encoder_hidden_states": encoder_hidden_states,
        }
        vector = self._vector(added_cond_kwargs or {})
        if vector is not None:
            inputs["y"] = vector
        if timestep_cond is not None:
            inputs["timestep_cond"] = timestep_cond
        inputs |= self._residuals(down_block_additional_residuals, mid_block_additional_residual)
        out = _like(target.run(inputs)["sample_out"], sample)
        if not return_dict:
            return (out,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=out)

    def _residuals(self, down: Sequence[torch.Tensor] | None, mid: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """ControlNet's residuals: all or none. Down residuals alone mean a T2I-Adapter to the UNet."""
        if down is None and mid is None:
            return {}
        if down is None or mid is None:
            raise UnsupportedCall("the UNet was called with residuals of the down path or of the middle alone.")
        wanted = len(residual_layout(self.module.config)) - 1  # type: ignore[arg-type]
        if len(down) != wanted:
            raise UnsupportedCall(f"the UNet was called with {len(down)} down residuals; engines take {wanted}.")
        return {"mid_residual": mid} | {f"down_residual_{index}": residual for index, residual in enumerate(down)}

    def _vector(self, added: Mapping[str, Any]) -> torch.Tensor | None:
        """SDXL's vector: pooled text, then Fourier features of the time ids, as the UNet's own forward joins them."""
        text_time = getattr(self.module.config, "addition_embed_type", None) == "text_time"
        known = {"text_embeds", "time_ids"} if text_time else set()
        for name in added:
            if name not in known:
                raise UnsupportedCall(f"the UNet was called with {name} (IP-Adapter), which engines do not take.")
        if not text_time:
            return None
        if set(added) != known:
            raise UnsupportedCall("the UNet needs text_embeds and time_ids.")
        text, ids = added["text_embeds"], added["time_ids"]
        features = self.module.add_time_proj(ids.flatten()).reshape(text.shape[0], -1)  # type: ignore[operator]
        return torch.cat([text.float(), features.float()], dim=-1)


def _timesteps(timestep: torch.Tensor | float | int, batch: int, device: torch.device) -> torch.Tensor:
    """float32 [batch] on ``device``."""
    number = not isinstance(timestep, torch.Tensor) or (timestep.is_cpu and not timestep.dim())
    if number and device.type == "cpu":
        return _constant(float(timestep), batch)
    return torch.as_tensor(timestep, device=device).float().expand(batch)


@functools.lru_cache(maxsize=4096)
def _constant(value: float, batch: int) -> torch.Tensor:
    """Schedulers come back to the same timesteps in every generation. Not to be written to."""
    return torch.full((batch,), value)


def _like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the device and in the dtype of ``other``, without a call into torch where it is so already."""
    same = tensor.dtype is other.dtype and tensor.device == other.device
    return tensor if same else tensor.to(other.device, other.dtype)


def _need_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedCall(f"{name} is a {type(value).__name__}; engines take tensors.")


class TextSwap(Swap):
    def run(
        self,
        target: Target,
        /,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unknown: Any,
    ) -> Any:
        refused = {"attention_mask": attention_mask, "position_ids": position_ids, **unknown}
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedCall(f"the text encoder was called with {name}, which engines do not take.")
        config = self.module.config
        maps = getattr(config, "output_attentions", False) if output_attentions is None else output_attentions
        if input_ids is None or maps:
            raise UnsupportedCall("engines of text encoders take token ids and give no attention maps.")
        _need_tensors(input_ids=input_ids)
        hidden_wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        names = ["last_hidden_state", "pooled"]
        if hidden_wanted:
            names += [f"hidden_{layer}" for layer in range(config.num_hidden_layers + 1)]  # type: ignore[operator]
        ids = input_ids.view(-1, input_ids.shape[-1])
        results = target.run({"input_ids": ids}, names)
        dtype = next(self.module.parameters()).dtype
        results = {name: value.to(input_ids.device, dtype) for name, value in results.items()}
        hidden = tuple(results[name] for name in names[2:]) if hidden_wanted else None
        return self._output(results, hidden, return_dict)

    def _output(
        self, results: dict[str, torch.Tensor], hidden: tuple[torch.Tensor, ...] | None, return_dict: bool | None
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        from transformers.models.clip.modeling_clip import CLIPTextModelOutput

        last, pooled = results["last_hidden_state"], results["pooled"]
        if hasattr(self.module, "text_projection"):
            output = CLIPTextModelOutput(text_embeds=pooled, last_hidden_state=last, hidden_states=hidden)
        else:
            output = BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, hidden_states=hidden)
        plain = return_dict is False or (return_dict is None and not getattr(self.module.config, "return_dict", True))
        return output.to_tuple() if plain else output


class _VaeSwap(Swap):
    """A half of the VAE. Slicing is honoured; tiling blends tiles in torch, so such calls run there."""

    input = ""

    def _through_engine(self, target: Target, tensor: torch.Tensor, output: str) -> torch.Tensor:
        vae: Any = self.module
        _need_tensors(**{self.input: tensor})
        limit = vae.tile_latent_min_size if self.component == "vae_decoder" else vae.tile_sample_min_size
        if vae.use_tiling and max(tensor.shape[-2:]) > limit:
            raise UnsupportedCall("VAE tiling is on, which engines do not do (pipe.vae.disable_tiling()).")
        pieces = tensor.split(1) if vae.use_slicing else (tensor,)
        results = [target.run({self.input: piece})[output] for piece in pieces]
        if next(vae.parameters()).dtype in HALF:
            target.report.note(f"{self.component} ran in float32, where half precision can overflow.")
        return torch.cat(results).to(tensor.device, tensor.dtype) if len(results) > 1 else results[0].to(tensor)


class DecoderSwap(_VaeSwap):
    method = "decode"
    input = "latents"

    def run(self, target: Target, /, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        image = self._through_engine(target, z, "image")
        if not return_dict:
            return (image,)
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=image)


class EncoderSwap(_VaeSwap):
    method = "encode"
    input = "image"

    def run(self, target: Target, /, x: torch.Tensor, return_dict: bool = True) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        posterior = DiagonalGaussianDistribution(self._through_engine(target, x, "moments"))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def tensor(self, result: Any) -> torch.Tensor:
        return result[0].parameters

    def cast(self, result: Any, dtype: torch.dtype) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        posterior = DiagonalGaussianDistribution(self.tensor(result).to(dtype))
        return (posterior,) if isinstance(result, tuple) else AutoencoderKLOutput(latent_dist=posterior)


_SWAPS: dict[str, type[Swap]] = {"unet": UNetSwap, "vae_decoder": DecoderSwap, "vae_encoder": EncoderSwap}

__all__ = ["Accelerated", "accelerate", "restore"]
