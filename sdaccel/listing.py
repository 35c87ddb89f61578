"""What engines the store holds and in which state they are: what ``sdaccel list`` and ``inspect`` tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from sdaccel.engine.store import Entry, Store
from sdaccel.errors import SdaccelError, StoreError
from sdaccel.profile import Range

READY, STALE, BROKEN = "ready", "stale", "broken"


@dataclass(frozen=True)
class Listed:
    """An engine of the store. ``entry`` is None for one so broken that its manifest cannot be read."""

    key: str
    state: str
    """"ready"; "stale" (made for another device or by other versions than now); "broken"."""
    reason: str
    entry: Entry | None
    nbytes: int
    """Bytes of its own files."""
    shared: int
    """Bytes of the weights and the graph that it may share with other engines."""

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": self.key, "state": self.state, "reason": self.reason}
        if self.entry is not None:
            engine = self.entry.engine
            facts |= {
                "component": engine.component,
                "model": engine.model,
                "origin": engine.origin,
                "family": engine.family,
                "precision": engine.precision,
                "backend": engine.backend,
                "profiles": [profile.to_json() for profile in engine.profiles],
                "image_profiles": [profile.to_json() for profile in engine.image_profiles],
                "created": engine.created,
                "build_seconds": engine.build_seconds,
                "device": engine.device,
                "versions": engine.versions,
                "error": check_error(self.entry),
                "adopted_from": adopted_from(self.entry),
            }
        return facts | {"bytes": self.nbytes, "shared_bytes": self.shared}


def list_engines(store: Store) -> list[Listed]:
    """Every engine of ``store``, newest first, the broken ones last. Files are not read, only their sizes checked."""
    found = [listed(store, entry) for entry in store.list()]
    found += [
        Listed(item.key, BROKEN, item.reason, None, _folder_bytes(item.path), 0) for item in store.broken("engines")
    ]
    return sorted(found, key=lambda item: item.state == BROKEN)


def listed(store: Store, entry: Entry) -> Listed:
    """``entry`` with its state now."""
    shared, broken = _shared(store, entry)
    stale = None if broken else stale_reason(entry)
    state = BROKEN if broken else STALE if stale else READY
    return Listed(entry.key, state, broken or stale or "", entry, entry.nbytes, shared)


def _shared(store: Store, entry: Entry) -> tuple[int, str | None]:
    """Bytes of what an engine shares with others; and what of it is missing or damaged."""
    total = 0
    links = [("weights", key) for key in entry.engine.weights_entries] + [("graphs", entry.engine.architecture)]
    for kind, key in links:
        try:
            found = store.get(kind, key)
        except StoreError as error:
            return total, str(error)
        if found is not None:
            total += found.nbytes
        elif kind == "weights":
            return total, f"its weights {key[:12]} are missing"
    return total, None


def lacking(store: Store, entry: Entry) -> str | None:
    """What is missing or damaged of the weights and the graph that an engine stands on; None if nothing is."""
    return _shared(store, entry)[1]


def stale_reason(entry: Entry) -> str | None:
    """Why an engine will not be used on this machine now; None if it will."""
    engine = entry.engine
    now = _backend_now(engine.backend)
    if isinstance(now, str):
        return now
    device, versions = now
    changes = _changes(engine.versions, versions, "") + _changes(engine.device, device, "the device's ")
    return f"built with {', '.join(changes)}" if changes else None


def _changes(then: dict[str, str], now: dict[str, str], what: str) -> list[str]:
    names = sorted(then.keys() | now.keys())
    return [
        f"{what}{name} {then.get(name, 'unknown')} (now {now.get(name, 'unknown')})"
        for name in names
        if then.get(name) != now.get(name)
    ]


@cache
def _backend_now(name: str) -> tuple[dict[str, str], dict[str, str]] | str:
    """(device, versions) of a backend on this machine, or why it does not run here."""
    from sdaccel.backends.base import pick_backend

    try:
        backend = pick_backend(name)
    except SdaccelError as error:
        return str(error)
    return backend.device(), backend.versions()


def check_error(entry: Entry) -> float | None:
    """The largest error against torch that the build measured; None if it was not checked."""
    check = entry.engine.details.get("check")
    return check.get("largest_error") if isinstance(check, dict) else None


def adopted_from(entry: Entry) -> str | None:
    """The engine of another checkpoint whose plan and tactics it has taken over; None if it was built itself."""
    return entry.engine.details.get("adopted_from")


def select(store: Store, ids: Iterable[str]) -> list[str]:
    """Full keys of engines from ids, which may be cut short to four characters and more. Raises StoreError."""
    return list(dict.fromkeys(store.find(prefix) for prefix in ids))


def unused(store: Store) -> list[Listed]:
    """Engines that nothing on this machine will use as it is now: the stale ones and the broken ones."""
    return [item for item in list_engines(store) if item.state != READY]


def _folder_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir()) if path.is_dir() and not path.is_symlink() else 0


# ---- words for people


def profile_text(entry: Entry) -> list[str]:
    """Each profile of an engine as ``512-1024 x 768, batch 1-4, tokens 77``, in the words of the command line.

    A text encoder has no size, and its batch counts prompts.
    """
    if entry.engine.component.startswith("text_encoder"):
        return [f"{side_text(p['batch'])} prompts, tokens {side_text(p['tokens'])}" for p in entry.engine.profiles]
    lines = []
    for image in entry.engine.image_profiles:
        size = (
            side_text(image.width)
            if image.width == image.height
            else f"{side_text(image.width)} x {side_text(image.height)}"
        )
        lines.append(f"{size}, batch {side_text(image.batch)}, tokens {side_text(image.tokens)}")
    return lines or [str(profile) for profile in entry.engine.profiles]


def side_text(numbers: Range) -> str:
    return str(numbers.min) if numbers.min == numbers.max else f"{numbers.min}-{numbers.max}"


def size_text(nbytes: float) -> str:
    """``1.5 GB`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit in ("B", "kB") else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def age_text(created: str, now: Callable[[], float] = time.time) -> str:
    """How long ago an ISO 8601 time was: ``5 min``, ``3 h``, ``12 d``."""
    then = datetime.fromisoformat(created.replace("Z", "+00:00"))
    seconds = max(0.0, now() - then.astimezone(timezone.utc).timestamp())
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "now"


def short(key: str, keys: Sequence[str] = ()) -> str:
    """The first 12 characters of a key, more where another key begins with the same."""
    length = 12
    while length < len(key) and any(other != key and other.startswith(key[:length]) for other in keys):
        length += 4
    return key[:length]
