"""Which model a command works on: the one named, else SDACCEL_MODEL, else the demo model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdaccel import settings
from sdaccel.errors import ModelError
from sdaccel.resources import expanded

if TYPE_CHECKING:
    from sdaccel.models.checkpoint import Checkpoint

DEMO_NAME = "sdaccel-demo"


@dataclass(frozen=True)
class ModelChoice:
    path: Path
    because: str
    """ "named", "SDACCEL_MODEL" or "demo"."""

    def __str__(self) -> str:
        why = {"named": "", "SDACCEL_MODEL": " (from SDACCEL_MODEL)", "demo": " (the demo model: none was named)"}
        return f"{self.path}{why[self.because]}"

    @property
    def is_demo(self) -> bool:
        from sdaccel.models.demo import demo_model_path

        return self.path.resolve() == demo_model_path().resolve()


def choose_model(named: str | Path | None = None) -> ModelChoice:
    """Raises ModelError if there is no such model."""
    setting = settings.MODEL.value()
    if named is not None:
        choice = ModelChoice(expanded(named), "named")
    elif setting:
        choice = ModelChoice(expanded(setting), "SDACCEL_MODEL")
    else:
        choice = demo_model()
    try:
        there = choice.path.exists()
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise ModelError(f"{choice}: cannot be opened ({error.strerror or error}).") from None
    if not there:
        raise ModelError(f"{choice}: no such file or folder.", hint="Name a diffusers folder or a .safetensors file.")
    return choice


def demo_model() -> ModelChoice:
    """The model that the package ships. Raises ModelError if this installation lacks it."""
    from sdaccel.models.demo import demo_model_path

    path = demo_model_path()
    if not path.is_dir():
        raise ModelError(
            f"the demo model is missing from this installation ({path}).",
            hint="Run: python -m pip install --force-reinstall sdaccel",
        )
    return ModelChoice(path, "demo")


def open_model(choice: ModelChoice, **options: Any) -> Checkpoint:
    """The checkpoint, the demo model's under a name of its own. ``options`` are those of `open_checkpoint`.

    Raises ModelError, PickleRefused.
    """
    from sdaccel.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(choice.path, **options)
    return replace(checkpoint, name=DEMO_NAME) if choice.is_demo else checkpoint
