"""The engine store: content-addressed folders that are whole or not there.

    <root>/engines/<key>/    engine.json and the files a backend made
    <root>/graphs/<key>/     graph.json and a weightless ONNX graph, one an architecture
    <root>/weights/<key>/    weights.json and a .safetensors file, one a checkpoint component and precision
    <root>/tmp/              entries being written or deleted, named <kind>-<key>-<random>
    <root>/locks/            one lock a key (see `locks`)
    <root>/used/<key>        an empty file, as old as the last load of that engine
    <root>/hashes.json       content hashes of checkpoints (see `hashes`)

A key is the SHA-256 of everything that shapes the entry. An entry is written under tmp/, synced to the disk and
renamed into place; readers take no lock and need no right to write. A builder that dies leaves its key's lock free and
its folder under tmp/, which the next publish sweeps.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from sdaccel import settings
from sdaccel.engine import disk
from sdaccel.engine.draft import Draft
from sdaccel.engine.entry import AGAIN, CHUNK, Entry, FileInfo, read_entry, verify_files, whole_entry
from sdaccel.engine.locks import Busy, hold
from sdaccel.engine.manifest import EngineManifest
from sdaccel.errors import EngineBroken, EngineNotFound, StoreError
from sdaccel.resources import expanded

__all__ = ["CHUNK", "Broken", "Draft", "Entry", "FileInfo", "OpenEngine", "Store"]

DAY = 24 * 3600.0

_log = logging.getLogger("sdaccel")

_KEY = re.compile(r"[0-9a-f]{64}")
_TMP = re.compile(r"(graphs|weights|engines)-([0-9a-f]{64})-[0-9a-f]{16}")


class OpenEngine(NamedTuple):
    """An engine with the entries it stands on, every file of them verified. ``graph`` is None if it was removed."""

    engine: Entry
    weights: tuple[Entry, ...]
    graph: Entry | None


class Broken(NamedTuple):
    """An entry that cannot be used, and why."""

    kind: str
    key: str
    path: Path
    reason: str


class Store:
    """The store in the folder ``root`` (default: SDACCEL_STORE, else the user's data folder).

    Reading never writes. A store that is not there yet is empty; `publish` makes it.
    """

    KINDS = ("graphs", "weights", "engines")

    def __init__(self, root: Path | str | None = None):
        chosen = expanded(settings.STORE.value() if root is None else root)
        self.root = Path(disk.long_path(os.path.abspath(chosen)))  # noqa: PTH100 - without following symlinks
        if str(self.root).encode(errors="ignore").decode() != str(self.root):  # runtimes take paths as UTF-8
            raise StoreError(f"the path of the store, {str(self.root)!a}, is not UTF-8.", hint=disk.ELSEWHERE)

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    # reading

    def get(self, kind: str, key: str) -> Entry | None:
        """The entry, or None if there is none. Its manifest and file sizes are checked; `verify` checks the contents.

        Raises EngineBroken if something is missing, changed or unsafe, StoreError if the store cannot be read.
        """
        path = self._path(kind, key)
        with disk.clear_errors(self.root):
            return whole_entry(path, kind, key)

    def verify(self, entry: Entry) -> None:
        """Compares every file with its SHA-256, and the manifest with ``entry``. Raises EngineBroken naming the file.

        A file above 64 MiB that this process has verified is not read again while its inode, size and times stay.
        """
        if self.get(entry.kind, entry.key) != entry:
            raise EngineBroken(f"{entry.path} is missing or has been replaced.", hint=AGAIN)
        with disk.clear_errors(self.root):
            verify_files(entry)

    def open_engine(self, key: str) -> OpenEngine:
        """The engine with its weights and, if it is still there, its graph: all files verified.

        Raises EngineNotFound if there is no such engine, EngineBroken if any byte is not what was built.
        """
        path = self._path("engines", key)
        try:
            engine = self.get("engines", key)
            if engine is not None:
                return self._open(engine)
        except EngineBroken:
            if os.path.lexists(path):  # else it was removed while we looked
                raise
        raise EngineNotFound(f"there is no engine {key} in {self.root}.", hint="Run: sdaccel list")

    def _open(self, engine: Entry) -> OpenEngine:
        weights = tuple(self._weights(key, engine.key) for key in engine.engine.weights_entries)
        graph = self.get("graphs", engine.engine.architecture)
        for entry in (engine, *weights, graph):
            if entry is not None:
                self.verify(entry)
        return OpenEngine(engine, weights, graph)

    def _weights(self, key: str, engine: str) -> Entry:
        weights = self.get("weights", key)
        if weights is None:
            raise EngineBroken(f"the weights {key} of the engine {engine} are missing.", hint=AGAIN)
        return weights

    def list(self, kind: str = "engines") -> list[Entry]:
        """Every whole entry, engines newest first. What is broken is left out here and stands in `broken`."""
        return self._scan(kind)[0]

    def broken(self, kind: str | None = None) -> builtins.list[Broken]:
        """Every entry that cannot be used, with the reason."""
        return [item for each in ([kind] if kind else self.KINDS) for item in self._scan(each)[1]]

    def _scan(self, kind: str) -> tuple[builtins.list[Entry], builtins.list[Broken]]:
        whole: list[Entry] = []
        broken: list[Broken] = []
        for key in self._keys(kind):
            try:
                entry = self.get(kind, key)
            except StoreError as error:
                broken.append(Broken(kind, key, self._path(kind, key), str(error)))
            else:
                whole += [entry] if entry else []
        if kind == "engines":
            whole.sort(key=lambda entry: entry.engine.created, reverse=True)
        return whole, broken

    def _keys(self, kind: str) -> builtins.list[str]:
        self._path(kind, "0" * 64)
        with disk.clear_errors(self.root):
            try:
                return sorted(name for name in disk.names(self.root / kind) if _KEY.fullmatch(name))
            except FileNotFoundError:
                return []

    def find_engines(self, **identity: Any) -> builtins.list[Entry]:
        """The whole engines whose manifest has these values, newest first; e.g. ``component="unet", weights=…``."""
        unknown = identity.keys() - {f.name for f in fields(EngineManifest)}
        if unknown:
            raise TypeError(f"an engine's manifest has no {', '.join(sorted(unknown))}")
        return [e for e in self.list() if all(getattr(e.engine, name) == value for name, value in identity.items())]

    def find(self, prefix: str, kind: str = "engines") -> str:
        """The full key that begins with ``prefix``, broken entries included.

        Raises EngineNotFound if there is none, StoreError if there are several.
        """
        if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
            raise StoreError(f"{prefix!r} is no key: it has 4 to 64 characters from 0-9a-f.", hint="Run: sdaccel list")
        keys = [key for key in self._keys(kind) if key.startswith(prefix)]
        if not keys:
            raise EngineNotFound(f"none of the {kind} in {self.root} begins with {prefix}.", hint="Run: sdaccel list")
        if len(keys) > 1:
            raise StoreError(f"{len(keys)} of the {kind} begin with {prefix}: {', '.join(k[:16] for k in keys[:8])}.")
        return keys[0]

    # writing

    def publish(
        self,
        kind: str,
        key: str,
        fill: Callable[[Draft], Mapping[str, Any]],
        *,
        timeout: float | None = None,
        waiting: Callable[[str], None] | None = None,
    ) -> Entry:
        """The entry ``key``, made by ``fill`` if it is not there yet.

        ``fill`` writes files into the draft and returns the manifest (JSON; for engines `EngineManifest.to_json`). It
        runs under the key's lock, so that two builds of one key make one entry, and not at all if the entry is there
        and verifies, an engine with all that it stands on; a broken one is replaced. Whatever ``fill`` raises comes
        through and leaves nothing behind.

        ``waiting`` hears once a second who is building the same key and may raise to give up; StoreError after
        ``timeout`` seconds of waiting (None: no limit), and when the disk is full or the store cannot be written.
        """
        target = self._path(kind, key)
        self._prepare()
        self.sweep()
        with self._lock(f"{kind}-{key}", timeout, waiting):
            entry = self._verified(kind, key)
            if entry is not None:
                with suppress(OSError):
                    os.utime(target)
                return entry
            draft = Draft(self._tmp(kind, key))
            old = self._tmp(kind, key)
            try:
                with disk.clear_errors(self.root):
                    draft.path.mkdir()
                manifest = draft.filled_by(fill)
                with disk.clear_errors(self.root, draft.out_of_room):
                    draft.finish(kind, key, manifest)
                    with self._lock("store"):
                        self._check_links(kind, key, draft)
                        if os.path.lexists(target):
                            disk.rename(target, old)
                        disk.rename(draft.path, target)
                    disk.fsync_folder(target.parent)
            finally:
                disk.delete(draft.path)
                disk.delete(old)
            entry = self.get(kind, key)
            if entry is None:
                raise StoreError(f"{target} was removed while it was published.", hint="Build again.")
            return entry

    def _verified(self, kind: str, key: str) -> Entry | None:
        try:
            entry = self.get(kind, key)
            if entry is not None and kind == "engines":
                self._open(entry)
            elif entry is not None:
                self.verify(entry)
            return entry
        except EngineBroken as error:
            _log.warning("made anew, because %s", error)
            return None

    def _check_links(self, kind: str, key: str, draft: Draft) -> None:
        """An engine is published only with its own key and with its weights in the store."""
        if kind != "engines":
            return
        try:
            engine = EngineManifest.from_json(read_entry(draft.path, kind, key).manifest, "the manifest of a draft")
        except EngineBroken as error:
            raise StoreError(str(error)) from None
        if engine.key != key:
            raise StoreError(f"the manifest of the engine {key} has another key: {engine.key}.")
        for weights in engine.weights_entries:
            if self.get("weights", weights) is None:
                raise StoreError(
                    f"the weights {weights} of the engine {key} are not in {self.root}: they were removed while it "
                    "was built.",
                    hint="Build again.",
                )

    def remove(self, key: str) -> int:
        """Removes an engine, then the weights and graphs that no other engine uses. Returns the bytes freed.

        The engine goes at once and whole. Raises EngineNotFound if there is none, StoreError if it is in use (an open
        file on Windows, or a build).
        """
        path = self._path("engines", key)
        if not os.path.lexists(path):
            raise EngineNotFound(f"there is no engine {key} in {self.root}.", hint="Run: sdaccel list")
        self._prepare()
        used = self._links(key)
        with self._lock(f"engines-{key}", timeout=5.0):
            freed = self._discard("engines", key)
        with suppress(OSError):
            self._used(key).unlink(missing_ok=True)
        return freed + self.collect(also=used)

    def collect(self, min_age: float = DAY, also: Iterable[tuple[str, str]] = ()) -> int:
        """Removes weights and graphs that no engine uses. Returns the bytes freed.

        Those made or asked for in the last ``min_age`` seconds stay, because a build may be about to use them, except
        the (kind, key) in ``also``. `publish` refuses an engine whose weights went meanwhile.
        """
        self._prepare()
        free, freed = set(also), 0
        with self._lock("store"):
            used = {link for key in self._keys("engines") for link in self._links(key)}
            for kind in ("weights", "graphs"):
                for key in self._keys(kind):
                    if (kind, key) in used or ((kind, key) not in free and self._age(kind, key) < min_age):
                        continue
                    try:
                        with self._lock(f"{kind}-{key}", timeout=0):
                            freed += self._discard(kind, key)
                    except StoreError as error:  # in use: it goes another time
                        _log.info("%s", error)
        return freed

    def _links(self, key: str) -> set[tuple[str, str]]:
        """The (kind, key) of the weights and the graph that an engine uses; none if its manifest is broken."""
        with disk.clear_errors(self.root), suppress(EngineBroken):
            engine = read_entry(self._path("engines", key), "engines", key).engine
            return {*(("weights", key) for key in engine.weights_entries), ("graphs", engine.architecture)}
        return set()

    def _age(self, kind: str, key: str) -> float:
        try:
            return time.time() - self._path(kind, key).lstat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _discard(self, kind: str, key: str) -> int:
        """Takes an entry away in one rename, then deletes it. The caller holds its lock."""
        path, away = self._path(kind, key), self._tmp(kind, key)
        try:
            disk.rename(path, away)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StoreError(
                f"{path} cannot be removed: {error.strerror}.", hint="Close the programs that use it, then try again."
            ) from error
        freed = _nbytes(away)
        disk.delete(away)
        return freed

    def sweep(self) -> int:
        """Deletes what dead builds left under tmp/. Returns how many folders went. Never waits for a living build."""
        swept = 0
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(disk.names(self.root / "tmp")):
                match = _TMP.fullmatch(name)
                if match:
                    with suppress(Busy), self._lock(f"{match[1]}-{match[2]}", timeout=0):
                        swept += disk.delete(self.root / "tmp" / name)
        return swept

    # use

    def note_use(self, key: str) -> None:
        """Notes that the engine has been loaded. Where the store cannot be written, nothing is noted."""
        with suppress(OSError):
            self._used(key).parent.mkdir(exist_ok=True)
            self._used(key).touch()

    def last_used(self, key: str) -> float | None:
        """When the engine was last loaded, in seconds since 1970; None if that is not known."""
        try:
            return self._used(key).lstat().st_mtime
        except OSError:
            return None

    def _used(self, key: str) -> Path:
        return self.root / "used" / self._path("engines", key).name

    # places and locks

    def _path(self, kind: str, key: str) -> Path:
        if kind not in self.KINDS:
            raise StoreError(f"{kind!r} is not kept in the store: {', '.join(self.KINDS)} are.")
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise StoreError(f"{key!r} is no key: a key is a SHA-256 in hex (64 characters).")
        return self.root / kind / key

    def _tmp(self, kind: str, key: str) -> Path:
        return self.root / "tmp" / f"{kind}-{key}-{secrets.token_hex(8)}"

    def _prepare(self) -> None:
        with disk.clear_errors(self.root):
            for name in (*self.KINDS, "tmp", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)

    def _lock(
        self, name: str, timeout: float | None = None, waiting: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        return hold(self.root / "locks", name, timeout, waiting)


def _nbytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir()) if path.is_dir() and not path.is_symlink() else 0
