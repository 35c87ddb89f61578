"""One method of one module, replaced on the instance: every call of it goes to an engine, or to torch with a reason."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from sdaccel.engine.patch import NOTHING, Patches
from sdaccel.errors import BackendError, UnsupportedCall
from sdaccel.integrations.late_checks import LateChecks
from sdaccel.integrations.watch import ModuleWatch
from sdaccel.runtime import FALLBACK_ERRORS, ExecutionContext, RunReport, unusable

if TYPE_CHECKING:
    from sdaccel.integrations.diffusers import Accelerated

HALF = (torch.float16, torch.bfloat16)


class _Running(threading.local):
    def __init__(self) -> None:
        self.pipelines: list[Accelerated] = []
        """The accelerated pipelines that this thread is in a call of, outermost first."""


running = _Running()


class Target(NamedTuple):
    """Where one call goes: an accelerated pipeline's engines, its report, and what it wants of torch."""

    context: ExecutionContext
    report: RunReport
    fallback: bool
    careful: bool
    """Other code runs between the calls (callbacks)."""
    running: bool
    """The pipeline is in a call, which began with a close look at its modules."""
    checks: LateChecks | None
    """Where outputs on a GPU are looked at later; None: at once."""
    exact: frozenset[str]
    """Components whose engines gave something unusable in this call: torch in float32 runs them."""
    upcast: bool
    """The pipeline wants its VAE in float32 for torch; it was left in half precision, since an engine decodes."""
    patches: Patches = NOTHING
    """What makes the engines' weights those of the module."""

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        return self.context.run(inputs, self.report, outputs, self.patches)


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


def swaps_of(module: nn.Module) -> Iterator[Swap]:
    """All swaps that stand in ``module``."""
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
        context.shared = self.watch.parameters
        context.on_load = lambda engine: self.watch.share(engine.shared)
        context.on_own = self.watch.unshare
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
        found = next((pair for pipe in reversed(running.pipelines) for pair in owners if pair[0] is pipe), None)
        owner, context = found or owners[-1]
        running_now = found is not None
        checks = owner.checks if running_now and context.device == "cuda" else None
        exact = owner.exact if running_now else frozenset()
        upcast = running_now and owner.upcast
        return Target(context, owner.last_report, owner.fallback, owner.careful, running_now, checks, exact, upcast)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = self._target()
        if target is None or getattr(self._bypass, "on", False):
            return self.original()(*args, **kwargs)
        with self.watch.lock:
            if self.component in target.exact:
                return self._in_float32(target, args, kwargs)
            try:
                reason = self._changed(target)
                if reason:
                    raise UnsupportedCall(f"{reason}.")
                self._check(target, args, kwargs)
                result = self.run(target._replace(patches=self.watch.patches()), *args, **kwargs)
                self._tell_edits(target)
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
            target.context.renew()
            return self.watch.look()
        module = self.module
        hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        wrapped = module.__dict__.get(self.method) is not self._replacement
        return self.watch.reason(careful=target.careful or hooked or wrapped)

    def _tell_edits(self, target: Target) -> None:
        edits = self.watch.edits
        if edits:
            what = edits[0] if len(edits) == 1 else f"{len(edits)} weights, {edits[0]} first,"
            target.report.note(f"{self.component}: {what} changed since the build; the engine has taken that over.")

    def at_scale(self, target: Target, attention: Mapping[str, Any] | None) -> Target:
        """``target`` with adapters at the scale that ``cross_attention_kwargs`` of a call give."""
        scale = (attention or {}).get("scale")
        return target if scale is None or scale == 1 else target._replace(patches=self.watch.patches(float(scale)))

    def run(self, target: Target, /, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, computed by an engine. Raises one of `FALLBACK_ERRORS`."""
        raise NotImplementedError

    def tensor(self, result: Any) -> torch.Tensor:
        """The tensor of a result that must be finite and not constant."""
        return result[0]

    def cast(self, result: Any, dtype: torch.dtype) -> Any:
        """A result of torch in another dtype."""
        for key, value in result.items() if isinstance(result, dict) else ():
            result[key] = in_dtype(value, dtype)
        return result if isinstance(result, dict) else in_dtype(result, dtype)

    def _check(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch, wanted = self.watch, target.context.device
        if wanted == "cuda" and _offloads(self.module):
            raise UnsupportedCall(
                "the pipeline offloads its modules to the CPU, engines keep their weights on the GPU (pipe.to('cuda'))."
            )
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
        if target.checks is not None and output.is_cuda and not final:
            target.checks.add(self.component, output)
            return result
        fault = unusable(output)
        if fault is None:
            return result
        if not final:
            if not target.fallback:
                raise BackendError(f"the output of {self.component} was {fault}, and fallback=False forbids torch.")
            target.report.fell_back(self.component, f"the output was {fault}: computed again by torch in float32.")
            return self._in_float32(target, args, kwargs)
        target.report.fail(f"{self.component} gives {fault}, in torch and float32 too.")
        return result

    def _in_float32(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch gives in float32, in the type that was asked in."""
        half = next((tensor.dtype for tensor in _tensors((args, kwargs)) if tensor.dtype in HALF), None)
        wanted = half or next((p.dtype for p in self.module.parameters() if p.dtype in HALF), None)
        with self._float32():
            result = self._run_torch(target, in_dtype(args, torch.float32), in_dtype(kwargs, torch.float32))
        fault = unusable(self.tensor(result))
        if fault:
            target.report.fail(f"{self.component} gives {fault}, in torch and float32 too.")
        return result if wanted is None else self.cast(result, wanted)

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


def _offloads(module: nn.Module) -> bool:
    """Whether a hook of the accelerate library moves the module's weights between its calls."""
    hook = getattr(module, "_hf_hook", None)
    return type(hook).__name__ == "CpuOffload" or bool(getattr(hook, "offload", False))


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


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating tensor in it as ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(in_dtype(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: in_dtype(item, dtype) for key, item in value.items()}
    return value
