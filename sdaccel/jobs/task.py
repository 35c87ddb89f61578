"""What workers are given and give back. All of it is plain data, which travels between processes and machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdaccel import metadata
from sdaccel.draw import check_build
from sdaccel.errors import SettingError
from sdaccel.jobs.job import Job


@dataclass(frozen=True)
class Options:
    """How jobs are drawn, the same for every one; plain data too. Raises SettingError."""

    out: str
    """A folder, or an address that fsspec knows, such as s3://bucket/folder."""
    model: str | None = None
    """None: SDACCEL_MODEL, else the demo model."""
    store: str | None = None
    backend: str = "auto"
    engines: bool = True
    """False: plain torch."""
    build: str = "if-missing"
    fallback: bool = True
    batch_size: int | None = None
    """Images at once; None: as many as the engines' profiles take."""
    format: str = "png"
    quality: int = 95
    sidecar: bool = False
    """A JSON file beside each image; .jpg and .webp, which hold less text, always get one."""
    opening: Mapping[str, Any] = field(default_factory=dict)
    """Of `sdaccel.models.checkpoint.open_checkpoint`: allow_pickle, variant, vae, prediction_type."""
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        metadata.image_format(self.suffix)
        check_build(self.build)
        for name, value, most in (("quality", self.quality, 100), ("batch_size", self.batch_size or 1, 64)):
            if not 1 <= value <= most:
                raise SettingError(f"{name} {value} is not between 1 and {most}.")

    @property
    def suffix(self) -> str:
        return f".{self.format}"


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs to know of a model, told by a worker that has opened it."""

    model: str | None
    name: str
    content: str
    """Hash of all its weights and of its scheduler."""
    native: int
    guidance: float
    settings: Mapping[str, Any]
    """Backend and precision of its engines."""
    at_once: Mapping[tuple[int, int], int]
    """(width, height) → images at once."""
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """(width, height) → why no engine could be had for it."""


@dataclass(frozen=True)
class ImageTask:
    """One image. ``job`` has n=1, and its seed, guidance and sides are filled in."""

    key: str
    """64 hex digits: of what is drawn, the model and the engine settings."""
    job: Job
    index: int
    """Its place in the run, from 1."""
    name: str = ""
    """Of its file."""


@dataclass(frozen=True)
class BatchTask:
    """Images drawn by one call of the pipeline, always in this composition: so their values are the same again."""

    id: int
    model: str | None
    images: tuple[ImageTask, ...]
    wanted: tuple[int, ...]
    """Positions of those whose files are to be written."""

    @property
    def writing(self) -> list[ImageTask]:
        return [self.images[position] for position in self.wanted]


@dataclass(frozen=True)
class ImageResult:
    """What became of one image: a file, or an error."""

    key: str
    index: int
    name: str = ""
    seed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    """of its batch's drawing, divided by its images"""
    memory: int = 0
    """of the GPU, in bytes, taken at most"""
    engines: Mapping[str, str] = field(default_factory=dict)
    """component → what ran it, in words"""
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def image_key(job: Job, model: str, settings: Mapping[str, Any]) -> str:
    """Of one image: its job (files by their content, not their names), its model's hash, the engine settings."""
    found = job.to_json() | {"model": model, "settings": dict(settings)}
    found |= {name: _hash_of(path) for name, path in (("init_image", job.init_image), ("mask", job.mask)) if path}
    found["loras"] = [[_hash_of(lora.path), lora.scale] for lora in job.loras]
    if job.batch:
        found["batch"] = [job.position, [image_key(each, model, settings) for each in job.batch]]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


_hashes: dict[tuple[str, int, int], str] = {}


def _hash_of(path: Path) -> str:
    facts = path.stat()
    known = (str(path.absolute()), facts.st_size, facts.st_mtime_ns)
    if known not in _hashes:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        _hashes[known] = digest.hexdigest()
    return _hashes[known]
