"""Content hashes of checkpoints, kept in the store for as long as their files are what they were.

A file counts as the same while its inode, size and times are; what of it belongs to a component is part of the key.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sdaccel.engine import disk
from sdaccel.engine.entry import is_still
from sdaccel.engine.manifest import canonical_json, seal, unseal
from sdaccel.errors import EngineBroken

if TYPE_CHECKING:
    from sdaccel.engine.store import Store
    from sdaccel.models.tensors import Component

FILE = "hashes.json"
MOST = 500
_HASH = re.compile(r"[0-9a-f]{64}")


def content_hash(component: Component, store: Store) -> str:
    """`Component.content_hash`, computed once for all programs that use ``store``. Raises ModelError."""
    if component.hashed:
        return component.content_hash
    key = _key(component)
    known = _read(store).get(key) if key else None
    if known is not None:
        component.recall(known)
        return known
    found = component.content_hash
    if key and _key(component) == key:
        _note(store, key, found)
    return found


def _key(component: Component) -> str | None:
    """Of all that the hash depends on; None where weights are not in files, or these have just been written."""
    files: dict[Path, int] = {}
    tensors = []
    for name, ref in sorted(component.tensors.items()):
        if not isinstance(ref.source, Path):
            return None
        place = files.setdefault(ref.source, len(files))
        tensors.append([name, ref.dtype, list(ref.shape), place, ref.offset, ref.transposed])
    states = []
    for path in files:
        try:
            found = path.stat()
        except OSError:
            return None
        states.append([found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns])
        if not is_still(states[-1]):
            return None
    return hashlib.sha256(canonical_json([tensors, states])).hexdigest()


def _read(store: Store) -> dict[str, str]:
    """What cannot be read is as good as absent."""
    try:
        found = unseal((store.root / FILE).read_bytes(), FILE)
    except (OSError, EngineBroken):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and _HASH.fullmatch(value)}


def _note(store: Store, key: str, value: str) -> None:
    """Where the store is not there or cannot be written, nothing is noted."""
    known = {name: old for name, old in _read(store).items() if name != key}
    kept = dict(sorted(known.items())[: MOST - 1])
    with suppress(OSError):
        if store.root.is_dir():
            disk.overwrite(store.root / FILE, seal({**kept, key: value}))
