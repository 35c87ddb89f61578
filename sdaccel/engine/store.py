"""The engine store: content-addressed folders that are whole or not there.

    <root>/engines/<key>/    engine.json and the files a backend made
    <root>/graphs/<key>/     graph.json and a weightless ONNX graph, one an architecture
    <root>/weights/<key>/    weights.json and a .safetensors file, one a checkpoint component and precision
    <root>/tmp/              entries being written or deleted, named <kind>-<key>-<random>
    <root>/locks/            one lock a key

A key is the SHA-256 of everything that shapes the entry. An entry is written under tmp/, synced to the disk and
renamed into place; readers take no lock and need no right to write. Every file's SHA-256 stands in the entry's sealed
manifest: one digest for each 64 MiB, so that big files are verified on several threads.

Locks are the operating system's (flock, LockFileEx): they end with the process that holds them, however it ends, so a
dead builder's key is free at once and what it left under tmp/ is swept by the next publish. The lock files themselves
stay and mean nothing. Where a file system has no such locks, filelock falls back to a marker that names its process,
and removes the marker of a dead one when it next looks, several times a second.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from sdaccel import settings
from sdaccel.engine.manifest import EngineManifest, seal, unseal
from sdaccel.errors import EngineBroken, EngineNotFound, StoreError

CHUNK = 64 << 20
DAY = 24 * 3600.0

_log = logging.getLogger("sdaccel")

_READ = 1 << 20
_KEY = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_TMP = re.compile(r"(graphs|weights|engines)-([0-9a-f]{64})-[0-9a-f]{16}")
_MANIFESTS = {"graphs": "graph.json", "weights": "weights.json", "engines": "engine.json"}
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_AGAIN = "Build again: what is broken is made anew."
_WHERE = "Choose another place with --store FOLDER or SDACCEL_STORE."


# The few calls that change the disk


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _fsync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    """Makes the names in a folder durable; Windows does so by itself and cannot open a folder."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def _rename(old: Path, new: Path) -> None:
    """A virus scanner may hold a file that was just written: on Windows it is tried again for two seconds."""
    for pause in (0.1, 0.2, 0.4, 0.6, 0.8):
        try:
            old.rename(new)
            return
        except PermissionError:
            if os.name != "nt":
                raise
        time.sleep(pause)
    old.rename(new)


def long_path(path: str, *, windows: bool = os.name == "nt") -> str:
    r"""An absolute path in a form that leaves room for the store's names below it.

    Windows has a limit of 260 characters for all but the form with ``\\?\``; elsewhere ``path`` is fine as it is.
    """
    if not windows or len(path) + 200 < 260 or path.startswith("\\\\?\\"):
        return path
    path = path.replace("/", "\\")
    return "\\\\?\\UNC\\" + path[2:] if path.startswith("\\\\") else "\\\\?\\" + path


# Entries


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and the SHA-256 (hex) of each 64 MiB; a smaller file has just its ordinary SHA-256."""

    size: int
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A whole entry of the store. ``manifest`` is what its ``fill`` returned; ``files`` leaves the manifest out."""

    kind: str
    key: str
    path: Path
    manifest: dict[str, Any]
    files: dict[str, FileInfo]

    def file(self, name: str) -> Path:
        """The path of a file of this entry, checked to be there, plain and of the right size. Raises EngineBroken."""
        if name not in self.files:
            raise EngineBroken(f"{self.path}: there is no file {name!r} in this entry.")
        _plain_file(self.path / name, self.files[name].size)
        return self.path / name

    @property
    def nbytes(self) -> int:
        """Bytes of its files, without the manifest."""
        return sum(info.size for info in self.files.values())

    @cached_property
    def engine(self) -> EngineManifest:
        """The manifest of an engine. Raises EngineBroken if this is none, or one that belongs to another key."""
        if self.kind != "engines":
            raise EngineBroken(f"{self.path} is not an engine but one of {self.kind}.")
        engine = EngineManifest.from_json(self.manifest, self.path / _MANIFESTS["engines"])
        if engine.key != self.key:
            raise EngineBroken(f"{self.path}: its manifest belongs to the engine {engine.key}.")
        return engine


class OpenEngine(NamedTuple):
    """An engine with the entries it stands on, every file of them verified. ``graph`` is None if it was removed."""

    engine: Entry
    weights: Entry
    graph: Entry | None


class Broken(NamedTuple):
    """An entry that cannot be used, and why."""

    kind: str
    key: str
    path: Path
    reason: str


# Writing an entry


class Writer:
    """A binary file of a draft that is hashed while it is written, front to back. A context manager."""

    def __init__(self, draft: Draft, name: str, size: int | None):
        self.path = draft.path / name
        self.name = name
        self.size = 0
        self._draft = draft
        self._expected = size or 0
        self._digests: list[str] = []
        self._hash = hashlib.sha256()
        self._file: BinaryIO = self.path.open("xb", buffering=0)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends ``data`` (any contiguous buffer) and returns its length in bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            self._write(view[start : start + CHUNK])
        return len(view)

    def _write(self, view: memoryview) -> None:
        while view:
            part = view[: CHUNK - self.size % CHUNK]
            self._draft._writing(self.path, max(self._expected - self.size, len(part)))
            with _clear_errors(self._draft):
                _write(self._file, part)
            self._hash.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % CHUNK == 0:
                self._digests.append(self._hash.hexdigest())
                self._hash = hashlib.sha256()

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """Syncs the file to the disk and notes its digests."""
        if self._file.closed:
            return
        with self._file, _clear_errors(self._draft):
            _fsync(self._file)
        if self.size % CHUNK or not self._digests:
            self._digests.append(self._hash.hexdigest())
        self._draft._written(self.name, FileInfo(self.size, tuple(self._digests)))

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


class Draft:
    """A folder that becomes an entry. Write flat, plain files into ``path``, big ones through `create`."""

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[str, tuple[FileInfo, int]] = {}
        self._doing = (path, 0)

    def create(self, name: str, size: int | None = None) -> Writer:
        """A new file, hashed while it is written.

        ``size``: its length in bytes where that is known; StoreError at once if the disk has no room for it.
        """
        _check_name(name)
        path = self.path / name
        free = shutil.disk_usage(self.path).free
        if size is not None and size > free:
            raise StoreError(_no_room(path, size, free), hint=_WHERE)
        self._writing(path, size or 0)
        return Writer(self, name, size)

    def _writing(self, path: Path, needed: int) -> None:
        self._doing = (path, needed)

    def _written(self, name: str, info: FileInfo) -> None:
        self._known[name] = (info, (self.path / name).stat().st_mtime_ns)

    def filled_by(self, fill: Callable[[Draft], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What ``fill`` returns and raises, but for a full disk, which is a StoreError."""
        try:
            return fill(self)
        except OSError as error:
            if error.errno in _FULL:
                raise self.out_of_room() from error
            raise

    def out_of_room(self) -> StoreError:
        path, needed = self._doing
        return StoreError(_no_room(path, needed, shutil.disk_usage(self.path).free), hint=_WHERE)

    def files(self) -> dict[str, FileInfo]:
        """Every file with its digests, all synced to the disk. Raises StoreError for what an entry cannot hold."""
        files = {}
        for path in sorted(self.path.iterdir()):
            _check_name(path.name)
            try:
                status = _plain_file(path)
            except EngineBroken as error:
                raise StoreError(f"this cannot be stored: {error}") from None
            info, time_ns = self._known.get(path.name, (None, 0))
            if info is None or (info.size, time_ns) != (status.st_size, status.st_mtime_ns):
                self._writing(path, status.st_size)
                with path.open("r+b" if os.name == "nt" else "rb") as file:
                    _fsync(file)
                info = FileInfo(status.st_size, tuple(_digests(path, status.st_size)))
            files[path.name] = info
        if len({name.lower() for name in files}) != len(files):
            raise StoreError("this cannot be stored: two of its files differ in upper and lower case alone.")
        return files

    def finish(self, kind: str, key: str, manifest: Mapping[str, Any]) -> None:
        files = {name: {"size": info.size, "sha256": list(info.sha256)} for name, info in self.files().items()}
        path = self.path / _MANIFESTS[kind]
        if not isinstance(manifest, Mapping):
            raise StoreError(f"a draft of {kind} returned no manifest but {type(manifest).__name__}.")
        if path.name in files:
            raise StoreError(f"{path.name} is the store's own file; a draft of {kind} cannot hold one.")
        document = {"kind": kind, "key": key, "manifest": manifest, "files": files}
        try:
            data = seal(json.loads(json.dumps(document | {"manifest": dict(manifest)}, allow_nan=False)))
            unseal(data, path.name)
        except (TypeError, ValueError, RecursionError, EngineBroken) as error:
            raise StoreError(f"the manifest of a draft of {kind} cannot be stored: {error}.") from error
        self._writing(path, len(data))
        with path.open("xb", buffering=0) as file:
            _write(file, data)
            _fsync(file)
        _fsync_folder(self.path)


def _no_room(path: Path, needed: int, free: int) -> str:
    return f"the disk is full: {path} needs {max(needed, 0):,} bytes and {free:,} are free."


def _check_name(name: str) -> None:
    if not _safe_name(name):
        raise StoreError(f"{name!r} cannot be a file's name in the store: letters, digits and _.- (at most 100) can.")


def _safe_name(name: str) -> bool:
    return bool(_FILE.fullmatch(name)) and not name.endswith(".") and not _RESERVED.fullmatch(name)


# Reading an entry


def _plain_file(path: Path, size: int | None = None) -> os.stat_result:
    """The status of a plain file with one name and ``size`` bytes; EngineBroken for anything else."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise EngineBroken(f"{path} is missing.") from None
    if not stat.S_ISREG(status.st_mode) or _is_junction(status):
        raise EngineBroken(f"{path} is not a plain file.")
    if status.st_nlink > 1:
        raise EngineBroken(f"{path} has {status.st_nlink} names (hard links): it can be changed from elsewhere.")
    if size is not None and status.st_size != size:
        raise EngineBroken(f"{path} has {status.st_size:,} bytes, not {size:,}.")
    return status


def _plain_folder(path: Path) -> bool:
    """Whether there is a folder; EngineBroken if there is anything else."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISDIR(status.st_mode) or _is_junction(status):
        raise EngineBroken(f"{path} is not a plain folder.")
    return True


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _is_junction(status: os.stat_result) -> bool:
    return getattr(status, "st_reparse_tag", 0) == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)


def _read_plain(path: Path) -> bytes:
    status = _plain_file(path)
    try:
        with path.open("rb") as file:
            _same_file(path, status, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        raise EngineBroken(f"{path} is missing.") from None


def _same_file(path: Path, before: os.stat_result, opened: os.stat_result) -> None:
    if not os.path.samestat(before, opened) or opened.st_size != before.st_size:
        raise EngineBroken(f"{path} changed while it was opened.")


def _digests(path: Path, size: int) -> Iterable[str]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda start: _digest(path, start), range(0, max(size, 1), CHUNK)))


def _digest(path: Path, start: int) -> str:
    """SHA-256 of the 64 MiB of a file from ``start`` on."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ))
    left = CHUNK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _READ)])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def _files(document: Any, where: Path) -> dict[str, FileInfo]:
    """The ``files`` of a manifest. Raises EngineBroken for anything that `Draft.finish` would not have written."""
    if not isinstance(document, dict):
        raise EngineBroken(f"{where}: files is not an object.")
    files = {}
    for name, info in document.items():
        if not _safe_name(name) or name == where.name:
            raise EngineBroken(f"{where}: {name[:60]!a} is no name that a file of the store can have.")
        if not isinstance(info, dict) or info.keys() != {"size", "sha256"}:
            raise EngineBroken(f"{where}: {name} has no size and SHA-256.")
        size, digests = info["size"], info["sha256"]
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
            raise EngineBroken(f"{where}: {name} has no size.")
        if not isinstance(digests, list) or len(digests) != max(1, -(-size // CHUNK)):
            raise EngineBroken(f"{where}: {name} does not have one SHA-256 for each {CHUNK >> 20} MiB.")
        if not all(isinstance(text, str) and _KEY.fullmatch(text) for text in digests):
            raise EngineBroken(f"{where}: {name} has a SHA-256 that is none.")
        files[name] = FileInfo(size, tuple(digests))
    if len({name.lower() for name in files}) != len(files):
        raise EngineBroken(f"{where}: two files differ in upper and lower case alone.")
    return files


# Big files verified before in this process: status → digests. A status counts once it has been still for a while,
# because a file system's clock may not tell two changes within a few milliseconds apart.
_verified: dict[tuple[int, ...], tuple[str, ...]] = {}
_STILL_NS = 3_000_000_000


# The store


class Store:
    """The store in the folder ``root`` (default: SDACCEL_STORE, else the user's data folder).

    Reading never writes. A store that is not there yet is empty; `publish` makes it.
    """

    KINDS = ("graphs", "weights", "engines")

    def __init__(self, root: Path | str | None = None):
        chosen = Path(settings.STORE.value() if root is None else root).expanduser()
        self.root = Path(long_path(os.path.abspath(chosen)))  # noqa: PTH100 - without following symlinks

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    # reading

    def get(self, kind: str, key: str) -> Entry | None:
        """The entry, or None if there is none. Its manifest and file sizes are checked; `verify` checks the contents.

        Raises EngineBroken if something is missing, changed or unsafe, StoreError if the store cannot be read.
        """
        path = self._path(kind, key)
        with _clear_errors(self.root):
            while True:
                before = _identity(path)
                try:
                    return self._whole(kind, key)
                except EngineBroken:
                    if _identity(path) == before:  # else it was removed or replaced while we looked
                        raise

    def _whole(self, kind: str, key: str) -> Entry | None:
        path = self._path(kind, key)
        if not _plain_folder(path):
            return None
        entry = self._read(kind, key)
        for extra in sorted(set(_names(path)) - {*entry.files, _MANIFESTS[kind]}):
            raise EngineBroken(f"{path}: {extra[:60]!a} does not belong to this entry.")
        for name in entry.files:
            entry.file(name)
        if kind == "engines":
            _ = entry.engine
        return entry

    def _read(self, kind: str, key: str) -> Entry:
        """The entry by its manifest alone."""
        path = self._path(kind, key)
        where = path / _MANIFESTS[kind]
        document = unseal(_read_plain(where), where)
        if document.keys() != {"kind", "key", "manifest", "files"}:
            raise EngineBroken(f"{where}: it is not a manifest of the store.")
        if (document["kind"], document["key"]) != (kind, key):
            raise EngineBroken(f"{where}: it belongs to another entry.")
        if not isinstance(document["manifest"], dict):
            raise EngineBroken(f"{where}: manifest is not an object.")
        return Entry(kind, key, path, document["manifest"], _files(document["files"], where))

    def verify(self, entry: Entry) -> None:
        """Compares every file with its SHA-256, and the manifest with ``entry``. Raises EngineBroken naming the file.

        A file above 64 MiB that this process has verified is not read again while its inode, size and times stay.
        """
        with _clear_errors(self.root):
            if self.get(entry.kind, entry.key) != entry:
                raise EngineBroken(f"{entry.path} is missing or has been replaced.")
            work: list[tuple[str, int]] = []
            states = {name: _state(_plain_file(entry.path / name, info.size)) for name, info in entry.files.items()}
            for name, info in entry.files.items():
                if _verified.get(states[name]) != info.sha256:
                    work += [(name, index) for index in range(len(info.sha256))]
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                found = pool.map(lambda item: _digest(entry.file(item[0]), item[1] * CHUNK), work)
                for (name, index), digest in zip(work, found, strict=True):
                    if digest != entry.files[name].sha256[index]:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise EngineBroken(
                            f"{entry.path / name} has changed since it was built: its SHA-256 from byte "
                            f"{index * CHUNK:,} on is another.",
                            hint=_AGAIN,
                        )
            for name, info in entry.files.items():
                state = _state(_plain_file(entry.path / name, info.size))
                if state != states[name]:
                    raise EngineBroken(f"{entry.path / name} changed while it was verified.")
                if info.size > CHUNK and time.time_ns() - max(state[-2:]) > _STILL_NS:
                    _verified[state] = info.sha256

    def open_engine(self, key: str) -> OpenEngine:
        """The engine with its weights and, if it is still there, its graph: all files verified.

        Raises EngineNotFound if there is no such engine, EngineBroken if any byte is not what was built.
        """
        engine = self.get("engines", key)
        if engine is None:
            raise EngineNotFound(f"there is no engine {key} in {self.root}.", hint="Run: sdaccel list")
        weights = self.get("weights", engine.engine.weights_entry)
        if weights is None:
            raise EngineBroken(
                f"the weights {engine.engine.weights_entry} of the engine {key} are missing.",
                hint=_AGAIN,
            )
        graph = self.get("graphs", engine.engine.architecture)
        for entry in (engine, weights, graph):
            if entry is not None:
                self.verify(entry)
        return OpenEngine(engine, weights, graph)

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
            except EngineBroken as error:
                broken.append(Broken(kind, key, self._path(kind, key), str(error)))
            else:
                whole += [entry] if entry else []
        if kind == "engines":
            whole.sort(key=lambda entry: entry.engine.created, reverse=True)
        return whole, broken

    def _keys(self, kind: str) -> builtins.list[str]:
        self._path(kind, "0" * 64)
        with _clear_errors(self.root):
            try:
                return sorted(name for name in _names(self.root / kind) if _KEY.fullmatch(name))
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
        and verifies; a broken one is replaced. Whatever ``fill`` raises comes through and leaves nothing behind.

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
                with _clear_errors(self.root):
                    draft.path.mkdir()
                manifest = draft.filled_by(fill)
                with _clear_errors(draft):
                    draft.finish(kind, key, manifest)
                    with self._lock("store"):
                        self._check_links(kind, key, draft)
                        if os.path.lexists(target):
                            _rename(target, old)
                        _rename(draft.path, target)
                    _fsync_folder(target.parent)
            finally:
                _delete(draft.path)
                _delete(old)
            entry = self.get(kind, key)
            if entry is None:
                raise StoreError(f"{target} was removed while it was published.", hint="Build again.")
            return entry

    def _verified(self, kind: str, key: str) -> Entry | None:
        try:
            entry = self.get(kind, key)
            if entry is not None:
                self.verify(entry)
            return entry
        except EngineBroken as error:
            _log.warning("made anew, because %s", error)
            return None

    def _check_links(self, kind: str, key: str, draft: Draft) -> None:
        """An engine is published only with its own key and with its weights in the store."""
        if kind != "engines":
            return
        where = draft.path / _MANIFESTS[kind]
        document = unseal(_read_plain(where), where)
        try:
            engine = EngineManifest.from_json(document["manifest"], "the manifest of a draft")
        except EngineBroken as error:
            raise StoreError(str(error)) from None
        if engine.key != key:
            raise StoreError(f"the manifest of the engine {key} has another key: {engine.key}.")
        if self.get("weights", engine.weights_entry) is None:
            raise StoreError(
                f"the weights {engine.weights_entry} of the engine {key} are not in {self.root}: they were removed "
                "while it was built.",
                hint="Build again.",
            )

    def remove(self, key: str) -> int:
        """Removes an engine, then the weights and graphs that no other engine uses. Returns the bytes freed.

        The engine goes at once and whole. Raises EngineNotFound if there is none, StoreError if it is in use (an open
        file on Windows, or a build).
        """
        path = self._path("engines", key)
        with _clear_errors(self.root):
            if not os.path.lexists(path):
                raise EngineNotFound(f"there is no engine {key} in {self.root}.", hint="Run: sdaccel list")
        self._prepare()
        used: set[tuple[str, str]] = set()
        with suppress(EngineBroken):
            used = _links(self._read("engines", key))
        with self._lock(f"engines-{key}", timeout=5.0):
            freed = self._discard("engines", key)
        return freed + self.collect(also=used)

    def collect(self, min_age: float = DAY, also: Iterable[tuple[str, str]] = ()) -> int:
        """Removes weights and graphs that no engine uses. Returns the bytes freed.

        Those made or asked for in the last ``min_age`` seconds stay, because a build may be about to use them, except
        the (kind, key) in ``also``. `publish` refuses an engine whose weights went meanwhile.
        """
        self._prepare()
        free, freed = set(also), 0
        with self._lock("store"):
            used: set[tuple[str, str]] = set()
            for key in self._keys("engines"):
                with suppress(EngineBroken):
                    used |= _links(self._read("engines", key))
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

    def _age(self, kind: str, key: str) -> float:
        try:
            return time.time() - self._path(kind, key).lstat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _discard(self, kind: str, key: str) -> int:
        """Takes an entry away in one rename, then deletes it. The caller holds its lock."""
        path, away = self._path(kind, key), self._tmp(kind, key)
        try:
            _rename(path, away)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StoreError(
                f"{path} cannot be removed: {error.strerror}.", hint="Close the programs that use it, then try again."
            ) from error
        freed = _nbytes(away)
        _delete(away)
        return freed

    def sweep(self) -> int:
        """Deletes what dead builds left under tmp/. Returns how many folders went. Never waits for a living build."""
        swept = 0
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(_names(self.root / "tmp")):
                match = _TMP.fullmatch(name)
                if match:
                    with suppress(_Busy), self._lock(f"{match[1]}-{match[2]}", timeout=0):
                        swept += _delete(self.root / "tmp" / name)
        return swept

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
        with _clear_errors(self.root):
            for name in (*self.KINDS, "tmp", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _lock(
        self, name: str, timeout: float | None = None, waiting: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        lock = FileLock(self.root / "locks" / f"{name}.lock")
        owner = self.root / "locks" / f"{name}.owner"
        began, told = time.monotonic(), 0.0
        while True:
            with _clear_errors(self.root), suppress(Timeout):
                lock.acquire(timeout=0)
                break
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise _Busy(
                    f"process {os.getpid()} waited {waited:.0f} s for {name} in {self.root}, held by {_owner(owner)}.",
                    hint="Wait for that process to end, then try again.",
                )
            if waited - told >= 1.0:
                told = waited
                message = f"waiting for {_owner(owner)}, which is working on {name[:24]}"
                _log.info(message)
                if waiting is not None:
                    waiting(message)
            time.sleep(0.05 if waited < 2 else 0.25)
        try:
            with suppress(OSError):
                owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
            yield
        finally:
            lock.release()


class _Busy(StoreError):
    """The lock is someone else's."""


def _owner(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return ascii(text[:200].strip())[1:-1] or "another process"


def _links(entry: Entry) -> set[tuple[str, str]]:
    """The weights and the graph that an engine uses."""
    return {("weights", entry.engine.weights_entry), ("graphs", entry.engine.architecture)}


def _state(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _nbytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.iterdir()) if path.is_dir() and not path.is_symlink() else 0


def _delete(path: Path) -> bool:
    """Deletes a folder under tmp/ as far as possible; what stays (an open file on Windows) is swept later."""
    if not os.path.lexists(path):
        return False
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not os.path.lexists(path)


@contextmanager
def _clear_errors(place: Path | Draft) -> Iterator[None]:
    """Turns the operating system's refusals into StoreErrors that say what to do."""
    root = place.path if isinstance(place, Draft) else place
    try:
        yield
    except NotImplementedError as error:
        raise StoreError(f"the file system of {root} has no locks.", hint=_WHERE) from error
    except OSError as error:
        if error.errno in _FULL:
            full = place.out_of_room() if isinstance(place, Draft) else StoreError(f"the disk of {root} is full.")
            raise full from error
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise StoreError(f"the store {root} cannot be used: {reason}.", hint=_WHERE) from error
