"""What one line of a job file asks for, and the images that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sdaccel.draw import Request
from sdaccel.errors import SettingError
from sdaccel.lora import Lora

MOST_IMAGES = 100_000


class JobError(SettingError):
    """A job that cannot be drawn as it is written. ``source`` is its place, such as ``jobs.jsonl:3``."""

    def __init__(self, message: str, source: str = "", *, hint: str | None = None):
        super().__init__(f"{source}: {message}" if source else message, hint=hint)
        self.source = source


@dataclass(frozen=True)
class Job:
    """One or several images of one description. Sides in pixels; None: what the model usually has.

    The i-th of ``n`` images has the seed ``seed + i``.
    """

    prompt: str
    negative_prompt: str = ""
    seed: int | None = None
    steps: int = 20
    guidance: float | None = None
    scheduler: str | None = None
    width: int | None = None
    height: int | None = None
    n: int = 1
    init_image: Path | None = None
    mask: Path | None = None
    strength: float = 0.8
    loras: tuple[Lora, ...] = ()
    model: str | None = None
    """A folder, file or address; None: the model of the run."""
    batch: tuple[Job, ...] = ()
    """The single images that it is drawn together with, itself among them; empty: whichever fit."""
    position: int = 0
    """Which of ``batch`` it is."""
    source: str = ""
    """Where it was written. Not part of what is drawn."""

    def request(self, native: int, guidance: float) -> Request:
        """For a model of this native side and usual guidance scale. Raises SettingError."""
        return Request(
            self.prompt,
            self.negative_prompt,
            self.width,
            self.height,
            self.steps,
            guidance if self.guidance is None else self.guidance,
            self.seed,
            self.n,
            self.scheduler,
            self.init_image,
            self.mask,
            self.strength,
            self.loras,
        )

    def to_json(self) -> dict[str, Any]:
        """As in a job file, without what is at its default."""
        found: dict[str, Any] = {"prompt": self.prompt}
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in ("source", "batch", "position") and value != field.default:
                found[field.name] = _plain(value)
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str = "") -> Job:
        """Of what `to_json` gave; a job file is read by `sdaccel.jobs.reading`, which checks it."""
        job = cls(**{**value, "source": source})
        return replace(
            job,
            init_image=None if job.init_image is None else Path(job.init_image),
            mask=None if job.mask is None else Path(job.mask),
            loras=tuple(map(Lora.parse, job.loras)),  # type: ignore[arg-type]
        )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [f"{lora.path}:{lora.scale!r}" for lora in value]
    return str(value) if isinstance(value, Path) else value
