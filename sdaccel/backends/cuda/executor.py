"""Runs an ExecutionPlan: step by step, or as a CUDA graph of the shapes at hand.

A CUDA graph is captured the first time a shape is run and kept among the last few. All graphs of a process share one
memory pool, so replays on a device take turns: each waits, on the device, for the one before it, whatever the stream.
The prologue (what depends on the prompt alone) has a graph and memory of its own; its outputs stay from call to call.

Thread safety: any number of threads may call `Executor.run`; one lock a device orders them. A call returns when its
work is enqueued on the caller's current stream. Outputs are fresh tensors.
"""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdaccel.backends.cuda.launch import CACHE, Device, dependent_launches
from sdaccel.backends.cuda.ops import elementwise, upsample_conv
from sdaccel.backends.cuda.ops.registry import OPS
from sdaccel.backends.cuda.plan import ExecutionPlan, Step
from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.backends.cuda.timing_cache import Measured, Signature, TacticTable
from sdaccel.backends.cuda.tuner import Tuner, relative_error
from sdaccel.backends.cuda.work import work
from sdaccel.errors import BackendError, OutOfMemory, UnsupportedCall

Values = dict[str, Tensor | None]


@dataclass(frozen=True)
class StepChoice:
    """What ran a step: for inspection."""

    step: str
    signature: Signature
    tactic: str
    microseconds: float | None
    """as the tuner measured it; None where there was nothing to choose"""
    operations: float = 0.0
    nbytes: int = 0


class Chooser:
    """Picks a tactic for each operator, by the tuner while building, else by what it found."""

    def __init__(self, device: Device, dtype: torch.dtype, table: TacticTable, weights: Iterable[Tensor]):
        self.device = device
        self.dtype = dtype
        self.table = table
        self.tuner: Tuner | None = None
        self.step = ""
        self.flag: Tensor | None = None
        """Where it holds 0, the step's result of the last call still stands."""
        self.choices: list[StepChoice] = []
        """What the tuner chose."""
        self.scouted: list[tuple[str, Mapping[str, Any]]] | None = None
        """While it is a list: the sources of tactics are collected here, and torch runs."""
        self.known = TacticTable()
        """What need not be measured: of the others alone sources are wanted."""
        self.know(weights)
        self._moved: dict[Any, Tensor] = {}

    def know(self, weights: Iterable[Tensor]) -> None:
        """Tensors at these places are weights."""
        self._weights = {weight.data_ptr() for weight in weights}

    def on_device(self, value: Tensor) -> Tensor:
        key = (value.dtype, tuple(value.shape), tuple(value.reshape(-1).tolist()))
        if key not in self._moved:
            self._moved[key] = value.to(torch.device("cuda", self.device.index))
        return self._moved[key]

    def run(self, op: Any, *tensors: Tensor | None, **attributes: Any) -> Any:
        tactics = op.tactics(self.device, *tensors, **attributes)
        signature = self._signature(op, tensors, attributes)
        if self.scouted is not None:
            known = self.known.get(signature)
            wanted = [tactic for tactic in tactics if known is None or tactic.name == known.tactic] or tactics
            self.scouted += [source for tactic in wanted for source in tactic.sources]
            return next((tactic for tactic in tactics if tactic.name == "torch"), tactics[-1]).run()
        if self.tuner is None:
            measured = self.table.get(signature) or self.table.nearest(signature)
        elif len(tactics) == 1:
            measured = None
        else:
            measured = self.tuner.choose(signature, op, tactics, tensors, attributes)
            self.table.put(signature, measured)
        tactic = _named(tactics, measured)
        if self.tuner is not None:
            same = measured is not None and measured.tactic == tactic.name
            microseconds = measured.microseconds if measured is not None and same else None
            result = tactic.run()
            operations, nbytes = work(signature.op, tensors, attributes, result)
            self.choices.append(StepChoice(self.step, signature, tactic.name, microseconds, operations, nbytes))
            return result
        if self.flag is not None:
            tactic = _skipping(op.tactics(self.device, *tensors, flag=self.flag, **attributes), measured) or tactic
        return tactic.run()

    def _signature(self, op: Any, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Signature:
        fixed: list[str] = []
        sizes: list[int] = []
        keywords = [(name, value) for name, value in sorted(attributes.items())]
        for value in (*tensors, *(value for _, value in keywords if isinstance(value, Tensor))):
            if value is None:
                fixed.append("-")
                continue
            kind = str(value.dtype).removeprefix("torch.") + _layout(value)
            if value.data_ptr() in self._weights:
                fixed.append(f"{kind}w{'x'.join(map(str, value.shape))}")
            else:
                channels = value.shape[1 if value.dim() == 4 else -1] if value.dim() else 1
                fixed.append(f"{kind}{value.dim()}d{channels}")
                sizes += [
                    size
                    for axis, size in enumerate(value.shape)
                    if axis != (1 if value.dim() == 4 else value.dim() - 1)
                ]
        for name, value in keywords:
            if isinstance(value, tuple):
                sizes += value
            elif not isinstance(value, Tensor):
                fixed.append(f"{name}={value}")
        return Signature(op.__name__.rpartition(".")[2], " ".join(fixed).replace("|", "/"), tuple(sizes))


def _layout(value: Tensor) -> str:
    if value.is_contiguous():
        return ""
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return "n"
    return "s"


def _skipping(tactics: Sequence[Tactic], measured: Measured | None) -> Tactic | None:
    """The fastest of those that can skip: they run once a prompt, others at every step."""
    tried = measured.tried if measured is not None else {}
    able = [tactic for tactic in tactics if tactic.skips and (not tried or tactic.name in tried)]
    return min(able, key=lambda tactic: tried.get(tactic.name, 0.0), default=None)


def _named(tactics: Sequence[Tactic], measured: Measured | None) -> Tactic:
    """The one that was chosen; where a shape does not offer it, the first that was not found wrong."""
    if measured is None:
        return tactics[0]
    right = [tactic for tactic in tactics if tactic.name not in measured.refused] or tactics
    return next((tactic for tactic in right if tactic.name == measured.tactic), right[0])


# --- one device, shared by all engines of the process -----------------------------------------------------------------


class _Pool:
    """Memory of graphs. It lives as long as they: torch captures nothing into a pool whose last graph is gone."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class _Turns:
    """The lock, the memory pool and the last replay of one device."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: torch.cuda.Event | None = None
        self._pool: weakref.ref[_Pool] | None = None

    def pool(self) -> _Pool:
        """That of the graphs there are."""
        pool = self._pool() if self._pool is not None else None
        if pool is None:
            pool = _Pool()
            self._pool = weakref.ref(pool)
        return pool


_turns: dict[int, _Turns] = {}
_turns_guard = threading.Lock()


def _turns_of(index: int) -> _Turns:
    with _turns_guard:
        return _turns.setdefault(index, _Turns())


@contextmanager
def plain_torch(device: torch.device) -> Iterator[None]:
    """On ``device``, without gradients, and nothing of what the host may have set: autocast, a default device,
    inference mode, whose tensors could not be written to outside of it."""
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        if device.type == "cuda":
            modes.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            modes.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


@dataclass
class _Captured:
    """The graphs of one shape."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    main: Any
    pool: _Pool
    prologue: Any = None
    prompt: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the prologue → the flag that says whether the last call changed them"""
    kept: Any = None
    """What the prologue made, so that its memory stays"""
    age: int = 0

    def forget_prompt(self) -> None:
        """The next call finds the prompt changed, whatever it is."""
        for name in self.prompt:
            self.inputs[name].view(torch.uint8).fill_(0xFF)


# --- the executor -----------------------------------------------------------------------------------------------------


class Executor:
    """A plan with its weights on one device.

    weights: every weight of the plan by name, joined ones too. On a CPU the plan runs step by step, in torch.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        table: TacticTable | None = None,
        graphs: int = 8,
        dependent: bool = True,
    ):
        self.plan = plan
        self.dtype = dtype
        self.device = device
        self.weights = dict(weights)
        self._base: dict[str, Tensor] = {}
        """Of the weights that lie in buffers of their own since they were first written: what they were before."""
        self.graphs = graphs
        self.dependent = dependent
        """Whether kernels of a graph may start before the one before them ends."""
        self._constants = {
            name: value if not value.is_floating_point() else value.to(device) for name, value in plan.constants.items()
        }
        self._described = Device.at(device.index or 0) if device.type == "cuda" else Device.cpu()
        self._chooser = Chooser(self._described, dtype, table or TacticTable(), self.weights.values())
        self._captured: OrderedDict[Any, _Captured] = OrderedDict()
        self._age = 0
        self._last_use = _last_uses(plan)
        self._turns = _turns_of(device.index or 0) if device.type == "cuda" else None

    @property
    def table(self) -> TacticTable:
        return self._chooser.table

    def run(self, inputs: Mapping[str, Tensor], outputs: Collection[str] | None = None) -> dict[str, Tensor]:
        """Outputs by name, fresh tensors of the engine's type on its device. Raises UnsupportedCall, BackendError."""
        for name in inputs:
            if name not in self.plan.inputs and name not in self.plan.optional:
                raise UnsupportedCall(f"the plan has no input {name}.")
        wanted = tuple(self.plan.outputs if outputs is None else outputs)
        with plain_torch(self.device):
            if self._turns is None:
                return self._step_by_step(self._given(inputs), wanted)
            with self._turns.lock:
                try:
                    return self._replay(self._given(inputs), wanted)
                except torch.cuda.OutOfMemoryError as error:
                    traceback.clear_frames(error.__traceback__)  # torch runs next and needs what they hold
                    self.forget()
                    raise OutOfMemory(f"out of GPU memory at {_shapes(inputs)}: {error}".split("\n")[0]) from error
                except RuntimeError as error:
                    traceback.clear_frames(error.__traceback__)
                    self._wait()
                    self._captured.clear()
                    raise BackendError(f"the GPU did not run {_shapes(inputs)}: {error}".split("\n")[0]) from error

    def _given(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the device; optional ones in the engine's type too, since they are added as they are."""
        return {
            name: value.to(self.device, self.dtype) if name in self.plan.optional else value.to(self.device)
            for name, value in inputs.items()
            if name in self.plan.inputs
        }

    def renew(self) -> None:
        """The prologue computes anew at the next call: weights may have been edited since."""
        self._age += 1

    # refit

    @property
    def own(self) -> Collection[str]:
        """Weights in buffers that nobody shares."""
        return self._base.keys()

    def base(self, name: str) -> Tensor:
        return self._base.get(name, self.weights[name])

    def write(self, values: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
        """Each weight's new values, in place: graphs stay valid. A weight's first time moves it to a buffer of its own.

        Raises OutOfMemory; weights before the one that raised are written.
        """
        with plain_torch(self.device), self._turns.lock if self._turns else nullcontext():
            try:
                self._write(list(values))
            except torch.cuda.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)
                self.forget()
                raise OutOfMemory(f"out of GPU memory for changed weights: {error}".split("\n")[0]) from error

    def _write(self, values: Sequence[tuple[str, Callable[[], Tensor]]]) -> None:
        if not values:
            return
        self._move_out([name for name, _ in values])
        self._take_turn()
        for name, value in values:
            found, held = value(), self.weights[name]
            if found.shape != held.shape:
                self.forget()
                self.weights[name] = found.to(self.device, self.dtype, copy=True)
                self._chooser.know(self.weights.values())
            else:
                held.copy_(found)
                upsample_conv.refresh(held)
        self._give_turn()

    def remake(self, names: Collection[str]) -> None:
        """What is made of these weights once, after they have been written to where they are."""
        if names:
            with plain_torch(self.device), self._turns.lock if self._turns else nullcontext():
                self._take_turn()
                for name in names:
                    upsample_conv.refresh(self.weights[name])
                self._give_turn()

    def _take_turn(self) -> None:
        """The device is to end the replay under way first."""
        if self._turns is not None and self._turns.last is not None:
            torch.cuda.current_stream().wait_event(self._turns.last)

    def _give_turn(self) -> None:
        if self._turns is not None:
            self._turns.last = torch.cuda.Event()
            self._turns.last.record()
        self.renew()

    def _move_out(self, names: Iterable[str]) -> None:
        """Buffers of their own for these weights and those that they are joined with."""
        whole = {part: joined for joined, parts in self.plan.joined.items() for part in parts}
        new = list(dict.fromkeys(whole.get(name, name) for name in names if name not in self._base))
        if not new:
            return
        self._wait()
        self._captured.clear()
        for name, buffer in zip(new, _copies([self.weights[name] for name in new]), strict=True):
            parts = self.plan.joined.get(name)
            self._base.update((part, self.weights[part]) for part in parts or (name,))
            self.weights[name] = buffer
            if parts:
                rows = [self.weights[part].shape[0] for part in parts]
                self.weights.update(zip(parts, buffer.split(rows), strict=True))
        self._chooser.know(self.weights.values())

    def tune(self, inputs: Mapping[str, Tensor], tuner: Tuner) -> list[StepChoice]:
        """Runs once, measuring the tactics of every step; returns what was chosen. Raises BackendError."""
        given = self._given(inputs)
        with plain_torch(self.device), self._turns.lock if self._turns else threading.Lock():
            try:
                self._chooser.scouted, self._chooser.known = [], tuner.cache
                self._step_by_step(given, self.plan.outputs)
                if self._chooser.scouted:
                    CACHE.compile_all(self._chooser.scouted, self._described.arch)
                self._chooser.scouted, self._chooser.tuner, self._chooser.choices = None, tuner, []
                self._step_by_step(given, self.plan.outputs)
                return list(self._chooser.choices)
            finally:
                self._chooser.scouted = self._chooser.tuner = None

    def replay_error(self, inputs: Mapping[str, Tensor], replays: int = 3) -> float:
        """The largest difference of any output between the steps, one by one, and replays of their graph.

        |a - b| / |b|. In a graph kernels follow each other at once and may overlap: what one reads too early shows here
        alone.
        """
        given = self._given(inputs)
        with plain_torch(self.device), self._turns.lock if self._turns else threading.Lock():
            expected = self._step_by_step(given, self.plan.outputs)
            found = [self.run(given) for _ in range(replays)]
        return max(relative_error(each[name], expected[name]) for each in found for name in expected)

    def _wait(self) -> None:
        """Until no replay is under way, on whatever stream: its memory may go then."""
        if self._turns is not None and self._turns.last is not None:
            with suppress(RuntimeError):  # of a GPU that is in error for good
                self._turns.last.synchronize()

    def __del__(self) -> None:
        if hasattr(self, "_turns"):
            self._wait()

    def forget(self) -> None:
        """Lets go of all graphs and their memory."""
        if self._turns is not None:
            with suppress(RuntimeError):  # of a GPU that is in error for good
                torch.cuda.synchronize(self.device)
            self._captured.clear()
            gc.collect()
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    # step by step

    def _step_by_step(
        self, inputs: Mapping[str, Tensor], wanted: Sequence[str], flags: Mapping[str, Tensor] = {}
    ) -> dict[str, Tensor]:
        values: Values = {**self._constants, **self.weights, **dict.fromkeys(self.plan.optional), **_laid_out(inputs)}
        keep = set(wanted)
        self._run(self.plan.prologue, values, keep, flags)
        self._run(self.plan.steps, values, keep)
        return {name: _plain(values[name]) for name in wanted}

    def _run(
        self, steps: Sequence[Step], values: Values, keep: Collection[str], flags: Mapping[str, Tensor] = {}
    ) -> None:
        for step in steps:
            self._chooser.step = step.name
            self._chooser.flag = flags.get(step.inputs[0]) if _may_skip(step) else None
            arguments = [values[name] if name else None for name in step.inputs]
            results = OPS[step.op](self._chooser, step.attributes, *arguments)
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip(step.outputs, results, strict=False))
            del arguments, results
            for name in self._last_use.get(step.name, ()):
                if name not in keep:
                    values.pop(name, None)
        self._chooser.flag = None

    # CUDA graphs

    def _replay(self, inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Tensor]:
        key = (wanted, tuple(sorted((name, tuple(value.shape), value.dtype) for name, value in inputs.items())))
        turns, stream = self._turns, torch.cuda.current_stream()
        assert turns is not None
        captured = self._captured.get(key)
        if captured is None:
            with torch.cuda.stream(stream):  # a capture that fails leaves its own stream the current one
                captured = self._captured[key] = self._capture(inputs, wanted)
            while len(self._captured) > self.graphs:
                torch.cuda.synchronize(self.device)
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        if turns.last is not None:
            stream.wait_event(turns.last)
        if captured.age != self._age:
            captured.age = self._age
            captured.forget_prompt()
        for name, value in inputs.items():
            flag = captured.prompt.get(name)
            if flag is None:
                captured.inputs[name].copy_(value, non_blocking=True)
            else:
                elementwise.changed(value, captured.inputs[name], flag)
        if captured.prologue is not None:
            captured.prologue.replay()
        captured.main.replay()
        results = {name: value.clone() for name, value in captured.outputs.items()}
        turns.last = torch.cuda.Event()
        turns.last.record(stream)
        return results

    def _capture(self, inputs: Mapping[str, Tensor], wanted: tuple[str, ...]) -> _Captured:
        assert self._turns is not None
        static = {name: value.clone() if value.dim() == 4 else _dense(value) for name, value in inputs.items()}
        first = {name for step in self.plan.prologue for name in step.inputs if name in static}
        prompt = {name: torch.ones(1, dtype=torch.int32, device=self.device) for name in first}
        with dependent_launches(self.dependent):  # compiles kernels and makes handles and plans: a capture may not
            self._step_by_step(static, wanted, prompt)
        side = torch.cuda.Stream()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        values: Values = {**self._constants, **self.weights, **dict.fromkeys(self.plan.optional)}
        pool, prologue = self._turns.pool(), None
        lasting = {*_skippable(self.plan, prompt), *wanted, *(name for step in self.plan.steps for name in step.inputs)}
        try:
            if self.plan.prologue:
                prologue = torch.cuda.CUDAGraph()
                with self._recording(prologue, pool, side):
                    values.update(_laid_out(static))
                    self._run(self.plan.prologue, values, lasting, prompt)
            lasting_values = dict(values)
            main = torch.cuda.CUDAGraph()
            with self._recording(main, pool, side):
                values.update(_laid_out(static))
                self._run(self.plan.steps, values, set(wanted))
                outputs = {name: _plain(values[name]) for name in wanted}
        finally:
            _free_workspaces()
        captured = _Captured(static, outputs, main, pool, prologue, prompt, lasting_values, self._age)
        captured.forget_prompt()
        return captured

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: _Pool, stream: torch.cuda.Stream) -> Iterator[None]:
        with (
            torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"),
            dependent_launches(self.dependent),
        ):
            yield


def _skippable(plan: ExecutionPlan, prompt: Collection[str]) -> set[str]:
    """What the prologue does not compute again for the same prompt, so that nothing else may lie in its memory."""
    return {name for step in plan.prologue if _may_skip(step) and step.inputs[0] in prompt for name in step.outputs}


def _may_skip(step: Step) -> bool:
    """Whether it has a way to do nothing, and nothing but weights beside its first input."""
    return step.op == "Linear" and not any(step.inputs[3:])


def _free_workspaces() -> None:
    """Those of cuBLAS, one a stream. Made while a graph is recorded they lie in the graphs' memory, which the next
    uses too, since graphs take turns; kept, they would be another 70 MB a graph."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of the same layouts, in one piece of memory: hundreds of allocations would take longer than what is copied."""
    sizes = [-(-tensor.numel() // _APART) * _APART for tensor in tensors]
    arena = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    places = zip(tensors, arena.split(sizes), strict=True)
    found = [place[: tensor.numel()].as_strided(tensor.shape, tensor.stride()) for tensor, place in places]
    torch._foreach_copy_(found, list(tensors))
    return found


_APART = 256
"""Elements, of two bytes or more: as far as allocations lie apart."""


def _laid_out(inputs: Mapping[str, Tensor]) -> Values:
    """Images channels last, as every operator wants them."""
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in inputs.items()
    }


def _dense(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _plain(value: Tensor | None) -> Tensor:
    if value is None:
        raise BackendError("an output of the plan depends on an input that was left out.")
    return value.contiguous()


def _last_uses(plan: ExecutionPlan) -> dict[str, tuple[str, ...]]:
    """Step → the values that nothing reads after it."""
    uses: dict[str, str] = {}
    for step in (*plan.prologue, *plan.steps):
        for name in (*step.inputs, *step.outputs):
            uses[name] = step.name
    kept = {*plan.outputs, *plan.constants, *plan.weights, *plan.joined, ""}
    found: dict[str, list[str]] = {}
    for name, last in uses.items():
        if name not in kept:
            found.setdefault(last, []).append(name)
    return {last: tuple(names) for last, names in found.items()}


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())


def summary(choices: Iterable[StepChoice]) -> list[dict[str, Any]]:
    """Equal steps together, those that take the longest first: for people.

    Each with op, tactic, shape, count, and of one call: microseconds, operations, bytes.
    """
    alike = Counter((choice.signature, choice.tactic) for choice in choices)
    one = {(choice.signature, choice.tactic): choice for choice in choices}
    rows = [
        {
            "op": choice.signature.op,
            "tactic": choice.tactic,
            "shape": f"{choice.signature.fixed} {','.join(map(str, choice.signature.sizes))}",
            "count": alike[key],
            "microseconds": choice.microseconds,
            "operations": choice.operations,
            "bytes": choice.nbytes,
        }
        for key, choice in one.items()
    ]
    return sorted(rows, key=lambda row: -row["count"] * (row["microseconds"] or 0.0))
