"""An entry being written: a folder under tmp/ that the store renames into place once it is whole and on the disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sdaccel.engine import disk
from sdaccel.engine.entry import CHUNK, MANIFESTS, FileInfo, digest_of, file_info, hashers, plain_file, safe_name
from sdaccel.engine.manifest import seal, unseal
from sdaccel.errors import EngineBroken, StoreError


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
        self.doing(self.path / name, size or 0)
        if size is not None and size > shutil.disk_usage(self.path).free:
            raise self.out_of_room()
        return Writer(self, name, size or 0)

    def doing(self, path: Path, needed: int) -> None:
        """Notes which file is being written and how many bytes it still needs, for the error of a full disk."""
        self._doing = (path, needed)

    def out_of_room(self) -> StoreError:
        return disk.no_room(*self._doing)

    def written(self, name: str, info: FileInfo) -> None:
        self._known[name] = (info, (self.path / name).stat().st_mtime_ns)

    def filled_by(self, fill: Callable[[Draft], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Runs ``fill``. Whatever it raises comes through, but a full disk is a StoreError."""
        try:
            return fill(self)
        except OSError as error:
            if error.errno in disk.FULL:
                raise self.out_of_room() from error
            raise

    def finish(self, kind: str, key: str, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, last; all is on the disk then. Raises StoreError for what an entry cannot hold."""
        if not isinstance(manifest, Mapping):
            raise StoreError(f"a draft of {kind} gave no manifest but {type(manifest).__name__}.")
        path = self.path / MANIFESTS[kind]
        files = self._files()
        if path.name in files:
            raise StoreError(f"{path.name} is the store's own file; a draft of {kind} cannot hold one.")
        document = {
            "kind": kind,
            "key": key,
            "manifest": dict(manifest),
            "files": {name: {"size": info.size, "sha256": list(info.sha256)} for name, info in files.items()},
        }
        try:
            data = seal(json.loads(json.dumps(document, allow_nan=False)))
            unseal(data, path.name)
        except (TypeError, ValueError, RecursionError, EngineBroken) as error:
            raise StoreError(f"the manifest of a draft of {kind} cannot be stored: {error}.") from error
        self.doing(path, len(data))
        with path.open("xb", buffering=0) as file:
            disk.write(file, data)
            disk.fsync(file)
        disk.fsync_folder(self.path)

    def _files(self) -> dict[str, FileInfo]:
        """Every file with its digests, all of them on the disk."""
        files = {}
        for path in sorted(self.path.iterdir()):
            _check_name(path.name)
            try:
                status = plain_file(path)
            except EngineBroken as error:
                raise StoreError(f"this cannot be stored: {error}") from None
            info, time_ns = self._known.get(path.name, (None, 0))
            if info is None or (info.size, time_ns) != (status.st_size, status.st_mtime_ns):
                self.doing(path, status.st_size)
                with path.open("r+b" if os.name == "nt" else "rb") as file:
                    disk.fsync(file)
                info = file_info(path, status.st_size)
            files[path.name] = info
        if len({name.lower() for name in files}) != len(files):
            raise StoreError("this cannot be stored: two of its files differ in upper and lower case alone.")
        return files


class Writer:
    """A binary file of a draft, written front to back; other threads hash what is written. A context manager."""

    def __init__(self, draft: Draft, name: str, expected: int):
        self.path = draft.path / name
        self.size = 0
        self._draft = draft
        self._expected = expected
        self._hashers = hashers()
        self._digests: list[Future[str]] = []
        with self._clear_errors():
            self._file: BinaryIO = self.path.open("xb", buffering=0)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends ``data`` (any contiguous buffer) and returns its length in bytes."""
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        start = 0
        while start < len(view):
            part = view[start : start + CHUNK - self.size % CHUNK]
            self._draft.doing(self.path, max(self._expected - self.size, len(part)))
            with self._clear_errors():
                disk.write(self._file, part)
            self.size += len(part)
            start += len(part)
            if self.size % CHUNK == 0:
                self._hash_next()
        return len(view)

    def _hash_next(self) -> None:
        self._digests.append(self._hashers.submit(digest_of, self.path, len(self._digests)))

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing waits in a buffer."""

    def close(self) -> None:
        """Syncs the file to the disk and notes its digests."""
        if self._file.closed:
            return
        if self.size % CHUNK or not self._digests:
            self._hash_next()
        with self._file, self._hashers, self._clear_errors():
            disk.fsync(self._file)
        self._draft.written(self.path.name, FileInfo(self.size, tuple(digest.result() for digest in self._digests)))

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._hashers.shutdown(cancel_futures=True)
            self._file.close()

    def _clear_errors(self) -> AbstractContextManager[None]:
        return disk.clear_errors(self.path, self._draft.out_of_room)


def _check_name(name: str) -> None:
    if not safe_name(name):
        raise StoreError(f"{name!r} cannot be a file's name in the store: letters, digits and _.- (at most 100) can.")
