"""What is done to a weight of an engine: by an adapter, or by whoever edited the module that the engine stands for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """Base weight → effective weight."""

    key: Hashable
    """Equal keys and an equal base give equal results."""
    apply: Callable[[Tensor], Tensor]
    """Takes the base on the engine's device in the engine's type, which it must not change, and returns a tensor of the
    same shape (of an embedding: with any number of rows) in any floating type on any device."""
    adapters: tuple[str, ...] = ()
    """Names of what changes it."""
    edit: bool = False
    """It is the module's own parameter as it is now: an engine that shares the memory has it already."""


Patches = Mapping[str, Patch]
"""state_dict name → patch"""

NOTHING: Patches = MappingProxyType({})


def changes(held: Mapping[str, Hashable], wanted: Patches) -> tuple[dict[str, Patch], list[str]]:
    """Patches to write, and names to set back to the base, where ``held`` are the keys of what is written."""
    new = {name: patch for name, patch in wanted.items() if name not in held or held[name] != patch.key}
    return new, [name for name in held if name not in wanted]


def adapters_of(patches: Patches) -> list[str]:
    return sorted({name for patch in patches.values() for name in patch.adapters})
