"""Locks between processes, one file each.

They are the operating system's (flock, LockFileEx): they end with the process that holds them, however it ends, so a
dead holder's lock is free at once. The files stay and mean nothing by themselves. Where a file system has no such
locks, filelock 4 falls back to a marker that names its process, and takes the marker of a dead one away when it next
looks, several times a second; an older filelock refuses, which is a StoreError.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sdaccel.engine import disk
from sdaccel.errors import StoreError

_log = logging.getLogger("sdaccel")
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Busy(StoreError):
    """The lock is someone else's."""


@contextmanager
def hold(
    folder: Path, name: str, timeout: float | None = None, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds the lock ``name`` of ``folder``.

    ``waiting`` hears once a second who holds it and may raise to give up. Raises Busy, naming who waits for whom, after
    ``timeout`` seconds (None: never; 0: without waiting).
    """
    lock = FileLock(folder / f"{name}.lock")
    owner = folder / f"{name}.owner"
    began, told = time.monotonic(), 0.0
    while True:
        with disk.clear_errors(folder), suppress(Timeout):
            lock.acquire(timeout=0)
            break
        waited = time.monotonic() - began
        if timeout is not None and waited >= timeout:
            raise Busy(
                f"process {os.getpid()} waited {waited:.0f} s for {name} in {folder}: {_read_owner(owner)} holds it.",
                hint="Try again when that process has ended.",
            )
        if waited - told >= 1.0:
            told = waited
            message = f"process {os.getpid()} waits for {_read_owner(owner)}, which works on {name[:24]}"
            _log.info(message)
            if waiting is not None:
                waiting(message)
        time.sleep(0.05 if waited < 2 else 0.25)
    try:
        _write_owner(owner)
        yield
    finally:
        lock.release()


def _write_owner(path: Path) -> None:
    """Notes who holds the lock, for those who wait; nothing is decided by it."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")


def _read_owner(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(200)
    except OSError:
        text = ""
    return ascii(text.strip())[1:-1] or "another process"
