"""sdaccel: Stable Diffusion through engines that stay open to look into.

    import sdaccel
    pipe = sdaccel.accelerate(pipe)

Names are imported when they are first used, so that ``import sdaccel`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from sdaccel.builder import BuilderConfig, build
    from sdaccel.engine.store import Entry, Store
    from sdaccel.integrations.diffusers import accelerate, restore
    from sdaccel.jobs.run import generate
    from sdaccel.models.checkpoint import open_checkpoint
    from sdaccel.profile import ImageProfile, OptimizationProfile, parse_profiles
    from sdaccel.runtime import RunReport

_HOMES = {
    "BuilderConfig": "builder",
    "Entry": "engine.store",
    "ImageProfile": "profile",
    "OptimizationProfile": "profile",
    "RunReport": "runtime",
    "Store": "engine.store",
    "accelerate": "integrations.diffusers",
    "build": "builder",
    "generate": "jobs.run",
    "open_checkpoint": "models.checkpoint",
    "parse_profiles": "profile",
    "restore": "integrations.diffusers",
}
__all__ = ["BuilderConfig", "Entry", "ImageProfile", "OptimizationProfile", "RunReport", "Store"]
__all__ += ["accelerate", "build", "generate", "open_checkpoint", "parse_profiles", "restore"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sdaccel' has no attribute {name!r}")
    value = getattr(import_module(f"sdaccel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
