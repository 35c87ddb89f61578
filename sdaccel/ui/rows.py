"""The engines of a store as rows of a table, and what can be done with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sdaccel.engine.store import Entry, Store
from sdaccel.ui.requests import BuildRequest


@dataclass(frozen=True)
class EngineRow:
    """An engine of the store, in words and numbers for people. Of a broken one little is known."""

    key: str
    checkpoint: str
    component: str
    resolutions: tuple[str, ...]
    """One a profile, as ``--res`` takes it: "512-1024", "832x1216"; empty for text encoders."""
    batches: tuple[str, ...]
    tokens: tuple[str, ...]
    precision: str
    backend: str
    size: int
    """Bytes of its own files."""
    shared: int
    """Bytes of weights and graph that other engines may use too."""
    last_used: float | None
    """When it was last loaded for a host, in seconds since 1970; None: never since it was built."""
    speed: float | None
    """How many times as fast as torch, as measured when it was built; None where it was not measured."""
    state: str
    """"ready", "stale" or "broken"."""
    reason: str
    created: str = ""
    """ISO 8601, UTC."""


def engine_rows(store: Store) -> list[EngineRow]:
    """Every engine, newest first, the broken ones last."""
    raise NotImplementedError


def delete(store: Store, keys: Iterable[str]) -> int:
    """Removes engines, then what only they used. Returns the bytes freed.

    Raises StoreError after the others have gone if one could not be removed.
    """
    raise NotImplementedError


def rebuild_request(entry: Entry) -> BuildRequest:
    """The request that makes this engine again, for this machine as it is now.

    Raises SettingError for one that was built from a live pipeline.
    """
    raise NotImplementedError


def export_timing_cache(store: Store, path: Path) -> int:
    """Writes what builds have measured on this GPU into a file. Returns how many measurements.

    Raises BackendError without a GPU, SettingError if nothing has been measured or the file cannot be written.
    """
    raise NotImplementedError


def import_timing_cache(store: Store, path: Path) -> int:
    """Adds what was exported on another machine of the same kind. Returns how many measurements.

    Raises BackendError without a GPU, SettingError for a file that is none or is of another device.
    """
    raise NotImplementedError
