"""What a build would need and whether it is needed at all: estimates, from the checkpoint's header alone."""

from __future__ import annotations

from dataclasses import dataclass

from sdaccel.engine.store import Store
from sdaccel.ui.requests import BuildRequest


@dataclass(frozen=True)
class Part:
    """The estimate for one component."""

    component: str
    precision: str
    disk: int
    seconds: float
    seconds_from: str
    """"past builds", "scaled past builds" or "table"."""
    covered_by: str | None
    """The engine that holds all of the profiles already."""
    exact: bool
    """That engine is the very one: nothing would be built."""


@dataclass(frozen=True)
class Preflight:
    """Every figure is an estimate. Bytes and seconds are of what would be built now, nothing of what is there."""

    parts: tuple[Part, ...]
    disk: int
    """Bytes the store grows by; weights that engines share count once."""
    disk_free: int
    vram: int | None
    """Bytes of GPU memory at the largest profile: weights and the largest component's activations. None on the CPU."""
    memory: int
    """Bytes of main memory that the build needs at most."""
    seconds: float
    seconds_from: str
    """"past builds here", "a table" or both, in words."""
    device: str
    """What the engines would be for, in words."""
    covered: tuple[str, ...]
    """Engines that hold all of it already, one a component, where every component has one; else empty."""
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """The estimates in words."""
        raise NotImplementedError


def preflight(request: BuildRequest, store: Store) -> Preflight:
    """Raises what `sdaccel.ui.requests.parse` raises."""
    raise NotImplementedError
