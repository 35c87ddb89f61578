"""One way to run one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tactic:
    """``name`` is stable and says the parameters; ``run`` allocates and returns the op's result."""

    name: str
    run: Callable[[], Any]
    sources: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(file of kernels/, macros) of what takes long to compile, so that many can be compiled at once"""
    skips: bool = False
    """Leaves the result of the last run as it is where the op's flag holds 0; others compute it again."""
