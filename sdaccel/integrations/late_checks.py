"""Outputs on a GPU, looked at when their call of the pipeline ends: asked at once, the GPU would wait at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sdaccel.runtime import fault_between


class LateChecks:
    """The least and the largest value of outputs, on their way to the host."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, torch.Tensor, torch.cuda.Event]] = []

    def add(self, component: str, output: torch.Tensor) -> None:
        """Enqueues the question on the current stream."""
        if output.numel() < 2:
            return
        extremes = torch.stack(output.detach().aminmax()).float()
        found = torch.empty(2, dtype=torch.float32, device="cpu", pin_memory=True).copy_(extremes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((component, found, event))

    def faults(self) -> dict[str, str]:
        """Component → what was wrong with an output of it. Waits for the GPU; asks each output once."""
        waiting, self._waiting = self._waiting, []
        found: dict[str, str] = {}
        for component, extremes, event in waiting:
            event.synchronize()
            fault = fault_between(*extremes.tolist())
            if fault is not None:
                found.setdefault(component, fault)
        return found


def random_state(arguments: Any) -> Callable[[], None]:
    """A function that puts random generators, torch's own and those in ``arguments``, back to where they are now."""
    own = [(generator, generator.get_state()) for generator in _generators(arguments)]
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        for generator, state in own:
            generator.set_state(state)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore


def _generators(value: Any) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _generators(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _generators(item)
