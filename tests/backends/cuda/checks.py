"""Runs every tactic of an op against its reference in float64, into memory full of NaN; and times them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sdaccel.backends.cuda.launch import Device

DTYPES = (torch.float16, torch.bfloat16)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors of floats hold NaN: what a kernel does not write shows."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **keywords: Any) -> Tensor:
            found = make(*args, **keywords)
            return found.fill_(math.nan) if found.is_floating_point() else found

        return made

    with mock.patch("torch.empty", fill(torch.empty)), mock.patch("torch.empty_like", fill(torch.empty_like)):
        yield


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def check(
    op: Any, *tensors: Tensor | None, limit: Mapping[torch.dtype, float], ours: bool = False, **attributes: Any
) -> list[str]:
    """Returns the names of the tactics. limit: relative error by the result's type. ours: torch need not keep it."""
    expected = _tuple(op.reference(*map(_double, tensors), **attributes))
    tactics = op.tactics(Device.current(), *tensors, **attributes)
    names = [tactic.name for tactic in tactics]
    assert names[-1] == "torch" and len(set(names)) == len(names), names
    wrong = []
    for tactic in tactics:
        with poisoned():
            found = _tuple(tactic.run())
        torch.cuda.synchronize()
        for value, right in zip(found, expected, strict=True):
            assert value.shape == right.shape, tactic.name
            error = relative_error(value, right)
            if not error <= limit[value.dtype] and not (ours and tactic.name == "torch"):
                wrong.append(f"{tactic.name}: {error:.2e}")
    assert not wrong, wrong
    return names


def image(batch: int, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random, channels innermost."""
    return torch.randn(batch, height, width, channels, device="cuda", dtype=dtype).movedim(-1, 1)


def microseconds(run: Callable[[], object], flush: Tensor, calls: int = 20) -> float:
    """Median of ``calls`` with a cold L2."""
    run()
    events = []
    for _ in range(calls):
        flush.zero_()
        torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host launches all that follows
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * begin.elapsed_time(end) for begin, end in events)


def flush_buffer() -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def report(label: str, moved: float, op: Any, *tensors: Tensor | None, flush: Tensor, **attributes: Any) -> None:
    """One line: the best of our tactics, its bandwidth for ``moved`` bytes, the ratio to torch's; then all others."""
    times: dict[str, float] = {}
    for tactic in op.tactics(Device.current(), *tensors, **attributes):
        times[tactic.name] = microseconds(tactic.run, flush)
    ours = {name: time for name, time in times.items() if name != "torch"}
    best = min(ours or times, key=times.__getitem__)
    rest = ", ".join(f"{name.removeprefix('ours')} {time:.1f}" for name, time in ours.items() if name != best)
    print(
        f"{label:34s} {times[best]:8.1f} us {moved / times[best] / 1e6:5.2f} TB/s "
        f"{times[best] / times['torch']:5.2f} of torch's {times['torch']:.1f}  {best}; {rest}",
        flush=True,
    )


def copy_bandwidth(flush: Tensor) -> float:
    """TB/s of a large copy, bytes read and written: the ceiling that the others are compared with."""
    source = torch.randn(256 << 20, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    return 2 * 2 * source.numel() / microseconds(lambda: target.copy_(source), flush) / 1e6
