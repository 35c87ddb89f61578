"""Where images go: a folder. A file appears there whole or not at all, and none that was there is ever overwritten."""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sdaccel import metadata
from sdaccel.engine.disk import FULL
from sdaccel.errors import SettingError, StoreError
from sdaccel.resources import expanded

OWN = ".sdaccel"
"""The folder of what a run keeps for itself: its journal, files being written."""
MAKE_ROOM = "Make room, then run the same command with --resume."
ABANDONED = 3600.0
"""Seconds after which a file is no longer being written."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EINVAL)
"""What systems say of a disk without links; EINVAL is Windows of FAT and exFAT."""


class DiskFull(StoreError):
    """Nothing more can be written: the run stops, and goes on where it was when there is room."""


class Storage(Protocol):
    def write(self, name: str, data: bytes, ours: Callable[[Path], bool]) -> str:
        """Writes a new file and returns its name: ``name``, or that with -2, -3, … where another file has it.

        ours: whether what lies there already is this very file, written by an attempt that was cut off; it stays then.
        Raises DiskFull, StoreError.
        """

    def names(self) -> set[str]:
        """Of all files there."""


def is_address(text: object) -> bool:
    """Whether it is for fsspec: s3://, gs://, …"""
    return "://" in str(text)


def open_storage(out: str) -> Storage:
    """Raises StoreError, SettingError."""
    if is_address(out):
        from sdaccel.jobs.remote import open_folder

        return open_folder(out)
    return Folder(expanded(out))


class Folder:
    """A folder on a local or network disk."""

    def __init__(self, path: Path):
        self.path = path
        self._parts = path / OWN / "parts"
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be made a folder of images: {error.strerror or error}.") from None
        self._clear_away()

    def _clear_away(self) -> None:
        """What was being written by processes that were killed."""
        for part in self._parts.iterdir():
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > ABANDONED:
                    part.unlink()

    def names(self) -> set[str]:
        return {path.name for path in self.path.iterdir()}

    def write(self, name: str, data: bytes, ours: Callable[[Path], bool]) -> str:
        part = self._parts / uuid.uuid4().hex
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return self._publish(part, name, ours)
        except OSError as error:
            raise _told(error, self.path / name) from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _publish(self, part: Path, name: str, ours: Callable[[Path], bool]) -> str:
        for free in numbered(name):
            final = self.path / free
            try:
                _link(part, final)
            except FileExistsError:
                if final.is_file() and ours(final):
                    return free
            else:
                return free
        raise AssertionError  # the names never end


def _link(part: Path, final: Path) -> None:
    """``part`` under its final name. Raises FileExistsError where there is such a file."""
    try:
        os.link(part, final)
    except OSError as error:
        if isinstance(error, FileExistsError) or error.errno not in _NO_LINKS:
            raise
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # a disk without links: the name first
        try:
            part.replace(final)
        except OSError:
            final.unlink(missing_ok=True)
            raise


def has_key(path: Path, key: str) -> bool:
    """Whether a file, an image or its sidecar, is the one of this key."""
    try:
        if path.suffix != ".json":
            return metadata.read(path).key[:32] == key[:32]  # no format holds less
        found = json.loads(path.read_text(encoding="utf-8"))
    except (SettingError, OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("key") == key


def numbered(name: str) -> Iterator[str]:
    """``name``, then with -2, -3, … before its suffix."""
    yield name
    stem, dot, suffix = name.rpartition(".")
    for number in range(2, 1_000_000):
        yield f"{stem}-{number}{dot}{suffix}"


def _told(error: OSError, path: Path) -> StoreError:
    if error.errno in FULL:
        return DiskFull(
            f"the disk of {path.parent} is full ({path.name} could not be written).",
            hint=MAKE_ROOM,
        )
    return StoreError(f"{path} cannot be written: {error.strerror or error}.")
