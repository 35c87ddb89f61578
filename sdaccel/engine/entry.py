"""An entry of the store, read and checked: a flat folder of plain files and the sealed manifest that lists them.

Every file's SHA-256 stands in the manifest, one digest for each 64 MiB, so that big files are verified on several
threads.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sdaccel.engine import disk
from sdaccel.engine.manifest import MAX_BYTES, EngineManifest, unseal
from sdaccel.errors import EngineBroken

CHUNK = 64 << 20
MANIFESTS = {"graphs": "graph.json", "weights": "weights.json", "engines": "engine.json"}
AGAIN = "Build again: what is broken is made anew."

MOST_THREADS = 16

_READ = 4 << 20
_HASH = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")

# Big files verified and manifests read before in this process, by their status. A status counts once it has been still
# for a while, because a file system's clock may not tell two changes within a few milliseconds apart.
_verified: dict[tuple[int, ...], tuple[str, ...]] = {}
_manifests: dict[Path, tuple[tuple[int, ...], Entry]] = {}
_STILL_NS = 3_000_000_000


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
        plain_file(self.path / name, self.files[name].size)
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
        engine = EngineManifest.from_json(self.manifest, self.path / MANIFESTS["engines"])
        if engine.key != self.key:
            raise EngineBroken(f"{self.path}: its manifest belongs to the engine {engine.key}.")
        return engine


# Reading


def read_entry(path: Path, kind: str, key: str) -> Entry:
    """The entry in the folder ``path`` by its manifest alone. Raises EngineBroken."""
    where = path / MANIFESTS[kind]
    status = _status(where)
    known = _manifests.get(where)
    if known is not None and (known[0], known[1].kind, known[1].key) == (status, kind, key):
        return known[1]
    document = unseal(_read_plain(where), where)
    if document.keys() != {"kind", "key", "manifest", "files"}:
        raise EngineBroken(f"{where}: it is not a manifest of the store.")
    if (document["kind"], document["key"]) != (kind, key):
        raise EngineBroken(f"{where}: it belongs to another entry.")
    if not isinstance(document["manifest"], dict):
        raise EngineBroken(f"{where}: manifest is not an object.")
    entry = Entry(kind, key, path, document["manifest"], _files(document["files"], where))
    if is_still(status) and _status(where) == status:
        _manifests[where] = status, entry
    return entry


def whole_entry(path: Path, kind: str, key: str) -> Entry | None:
    """The entry in the folder ``path`` with every file there, plain, of the right size and no other; None without one.

    Raises EngineBroken.
    """
    while True:
        before = _identity(path)
        try:
            return _whole_entry(path, kind, key)
        except EngineBroken as error:
            if _identity(path) == before:  # else it was removed or replaced while we looked
                raise EngineBroken(str(error), hint=AGAIN) from error


def _whole_entry(path: Path, kind: str, key: str) -> Entry | None:
    if not _plain_folder(path):
        return None
    entry = read_entry(path, kind, key)
    try:
        found = set(disk.names(path))
    except FileNotFoundError:
        raise EngineBroken(f"{path} is missing.") from None
    for extra in sorted(found - {*entry.files, MANIFESTS[kind]}):
        raise EngineBroken(f"{path}: {extra[:60]!a} does not belong to this entry.")
    for name in entry.files:
        entry.file(name)
    if kind == "engines":
        _ = entry.engine
    return entry


def _files(document: Any, where: Path) -> dict[str, FileInfo]:
    """The ``files`` of a manifest. Raises EngineBroken for anything that `Draft.finish` would not have written."""
    if not isinstance(document, dict):
        raise EngineBroken(f"{where}: files is not an object.")
    files = {}
    for name, info in document.items():
        if not safe_name(name) or name == where.name:
            raise EngineBroken(f"{where}: {name[:60]!a} is no name that a file of the store can have.")
        if not isinstance(info, dict) or info.keys() != {"size", "sha256"}:
            raise EngineBroken(f"{where}: {name} has no size and SHA-256.")
        size, digests = info["size"], info["sha256"]
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
            raise EngineBroken(f"{where}: {name} has no size.")
        if not isinstance(digests, list) or len(digests) != max(1, -(-size // CHUNK)):
            raise EngineBroken(f"{where}: {name} does not have one SHA-256 for each {CHUNK >> 20} MiB.")
        if not all(isinstance(text, str) and _HASH.fullmatch(text) for text in digests):
            raise EngineBroken(f"{where}: {name} has a SHA-256 that is none.")
        files[name] = FileInfo(size, tuple(digests))
    if len({name.lower() for name in files}) != len(files):
        raise EngineBroken(f"{where}: two files differ in upper and lower case alone.")
    return files


def _read_plain(path: Path) -> bytes:
    status = plain_file(path)
    if status.st_size > MAX_BYTES:
        raise EngineBroken(f"{path} has {status.st_size:,} bytes, too many for a manifest (the most is {MAX_BYTES:,}).")
    try:
        with path.open("rb") as file:
            if not os.path.samestat(status, os.fstat(file.fileno())):
                raise EngineBroken(f"{path} changed while it was opened.")
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise EngineBroken(f"{path} is missing.") from None


def plain_file(path: Path, size: int | None = None) -> os.stat_result:
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


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _is_junction(status: os.stat_result) -> bool:
    return getattr(status, "st_reparse_tag", 0) == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)


def safe_name(name: str) -> bool:
    """Whether a file may have this name: plain on every system, so neither a path nor a device nor a hidden file."""
    return bool(_FILE.fullmatch(name)) and not name.endswith(".") and not _RESERVED.fullmatch(name)


# Verifying


def verify_files(entry: Entry) -> None:
    """Compares every file of ``entry`` with its SHA-256. Raises EngineBroken naming the file.

    A file above 64 MiB that this process has verified is not read again while its inode, size and times stay.
    """
    before = {name: _state(entry, name) for name in entry.files}
    fresh = [name for name, info in entry.files.items() if _verified.get(before[name]) != info.sha256]
    work = [(name, index) for name in fresh for index in range(len(entry.files[name].sha256))]
    for (name, index), digest in zip(work, _map_digests([(entry.file(n), i) for n, i in work]), strict=True):
        if digest != entry.files[name].sha256[index]:
            raise EngineBroken(
                f"{entry.path / name} has changed since it was built: its SHA-256 from byte {index * CHUNK:,} on is "
                "another.",
                hint=AGAIN,
            )
    for name, info in entry.files.items():
        state = _state(entry, name)
        if state != before[name]:
            raise EngineBroken(f"{entry.path / name} changed while it was verified.")
        if info.size > CHUNK and is_still(state):
            _verified[state] = info.sha256


def file_info(path: Path, size: int) -> FileInfo:
    return FileInfo(size, tuple(_map_digests([(path, index) for index in range(max(1, -(-size // CHUNK)))])))


def _state(entry: Entry, name: str) -> tuple[int, ...]:
    return _status(entry.path / name, entry.files[name].size)


def _status(path: Path, size: int | None = None) -> tuple[int, ...]:
    status = plain_file(path, size)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_still(state: Sequence[int]) -> bool:
    """Whether a file whose times, in ns, are the last two of ``state`` has not changed for a while."""
    return time.time_ns() - max(state[-2:]) > _STILL_NS


def _map_digests(work: Sequence[tuple[Path, int]]) -> list[str]:
    """The SHA-256 of each (path, which 64 MiB of it)."""
    pool = hashers(len(work))
    try:
        return list(pool.map(digest_of, *zip(*work, strict=True))) if work else []
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C need not wait for gigabytes


def hashers(work: int = MOST_THREADS) -> ThreadPoolExecutor:
    """Threads for `digest_of`: as many as the machine has cores, up to where its memory is the limit."""
    return ThreadPoolExecutor(max(1, min(MOST_THREADS, os.cpu_count() or 1, work)), "sdaccel-hash")


def digest_of(path: Path, index: int) -> str:
    """SHA-256 of the ``index``-th 64 MiB of a file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ))
    left = CHUNK
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(index * CHUNK)
            while left and (count := file.readinto(buffer[: min(left, _READ)])):
                digest.update(buffer[:count])
                left -= count
    except FileNotFoundError:
        raise EngineBroken(f"{path} is missing.") from None
    return digest.hexdigest()
