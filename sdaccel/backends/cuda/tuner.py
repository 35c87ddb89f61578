"""Times tactics on the device: the fastest that is right wins."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.backends.cuda.timing_cache import FULL, Measured, Signature, TacticTable
from sdaccel.errors import BackendError
from sdaccel.float32 import without_tf32

TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
"""Largest |out - ref| / |ref| of a tactic (Euclidean norms): three roundings of the type, for the input of the last
product, its output and the activation; sums are in float32 everywhere."""

WARMUP, REPEATS = 2, 9
# The device must be busy so many µs when a call is timed, so that launching it from Python costs nothing.
AHEAD = 250.0
# A tactic this much slower than the best at its first timing is not timed again.
HOPELESS = 1.5

_log = logging.getLogger("sdaccel.cuda")


class Tuner:
    """Chooses and remembers tactics. What ``cache`` knows is not measured again."""

    def __init__(self, device: Device, cache: TacticTable):
        self.device = device
        self.cache = cache
        self.measured = 0
        self._flush: Tensor | None = None
        self._fills = 1

    def choose(
        self,
        signature: Signature,
        op: Any,
        tactics: Sequence[Tactic],
        tensors: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
    ) -> Measured:
        """The fastest correct tactic for these tensors. Raises BackendError when none is correct."""
        known = self.cache.get(signature)
        names = {tactic.name for tactic in tactics}
        if known is not None and known.tactic in names:
            return known
        found = self._measure(signature, op, tactics, tensors, attributes)
        self.cache.put(signature, found)
        self.measured += 1
        return found

    def _measure(
        self,
        signature: Signature,
        op: Any,
        tactics: Sequence[Tactic],
        tensors: Sequence[Tensor | None],
        attributes: Mapping[str, Any],
    ) -> Measured:
        exact, slack = _reference(op, tensors, attributes)
        refused: dict[str, str] = {}
        times: dict[str, float] = {}
        for tactic in tactics:
            reason = self._wrong(tactic, exact, slack)
            if reason is None:
                times[tactic.name] = self._time(tactic.run, min(times.values(), default=float("inf")))
            else:
                refused[tactic.name] = reason
                _log.debug("%s: %s is out: %s", signature, tactic.name, reason)
        if not times:
            raise BackendError(f"no tactic of {signature} is right: {refused}")
        best = min(times, key=times.__getitem__)
        _log.debug("%s: %s, %.1f µs of %s", signature, best, times[best], times)
        return Measured(best, times[best], times, refused)

    def _wrong(self, tactic: Tactic, exact: tuple[Tensor, ...], slack: float = 1.0) -> str | None:
        _poison(exact)
        try:
            found = _tuple(tactic.run())
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return FULL
        except (RuntimeError, BackendError) as problem:
            return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        for value, expected in zip(found, exact, strict=True):
            limit = slack * TOLERANCE[value.dtype]
            error = relative_error(value, expected)
            if not error <= limit:
                return f"its error is {error:.2g}, more than {limit:g}"
        return None

    def _time(self, run: Callable[[], Any], best: float) -> float:
        """Median µs of one call with a cold L2."""
        if self._flush is None:
            self._flush = torch.empty(2 * self.device.l2_bytes, dtype=torch.uint8, device="cuda")
            self._fills = self._fills_for(AHEAD)
        times: list[float] = []
        for rounds in (WARMUP, REPEATS):
            events = []
            for _ in range(rounds):
                for _ in range(self._fills):
                    self._flush.zero_()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            times = [1e3 * begin.elapsed_time(end) for begin, end in events]
            if min(times) > HOPELESS * best:
                break
        return statistics.median(times)

    def ceilings(self, dtype: torch.dtype) -> dict[str, float]:
        """What the device reaches: operations a second in a large product, bytes (read and written) in a copy."""
        side = 4096
        a, b = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
        product = self._time(lambda: a @ b, float("inf"))
        source = torch.empty(4 * self.device.l2_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copied = self._time(lambda: target.copy_(source), float("inf"))
        return {"operations": 2e6 * side**3 / product, "bytes": 2e6 * source.numel() / copied}

    def _fills_for(self, microseconds: float) -> int:
        """How often the buffer must be filled for the device to be busy so long."""
        assert self._flush is not None
        times = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                self._flush.zero_()
            end.record()
            torch.cuda.synchronize()
            times.append(100 * begin.elapsed_time(end))
        return max(1, math.ceil(microseconds / min(times)))


def _poison(results: Sequence[Tensor]) -> None:
    """Leaves NaN in the free memory that results of this size will get, as far as there is so much: what a kernel does
    not write must not pass."""
    for nbytes in {result.numel() * 2 for result in results}:
        blocks: list[Tensor] = []
        with suppress(torch.cuda.OutOfMemoryError):
            for _ in range(4):
                blocks.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda").fill_(0xFF))
        del blocks


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, Euclidean; infinite where anything is not finite."""
    difference = torch.linalg.vector_norm(found.float() - expected.float())
    error = float(difference / torch.linalg.vector_norm(expected.float()).clamp_min(1e-20))
    return error if error == error else float("inf")


def _reference(
    op: Any, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]
) -> tuple[tuple[Tensor, ...], float]:
    """What is right, in float32, and 1. Where memory does not do: rounded as tactics are, and by how much more these
    may differ from it than `TOLERANCE` says."""
    with suppress(torch.cuda.OutOfMemoryError):
        return _in_float32(op.reference, tensors, attributes), 1.0
    torch.cuda.empty_cache()
    return _tuple(op.reference(*tensors, **attributes)), 2.0


def _in_float32(reference: Callable[..., Any], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Any:
    with without_tf32():
        return _tuple(reference(*map(_float, tensors), **{name: _float(value) for name, value in attributes.items()}))


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
