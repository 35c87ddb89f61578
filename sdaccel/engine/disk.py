"""The calls through which the store changes the disk, and what it says when the disk refuses."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sdaccel.errors import StoreError

FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
ELSEWHERE = "Choose another place with --store FOLDER or SDACCEL_STORE."


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def fsync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
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


def rename(old: Path, new: Path) -> None:
    """A virus scanner may hold a file that was just written: on Windows it is tried again for two seconds."""
    _patiently(lambda: old.rename(new))


def overwrite(path: Path, data: bytes) -> None:
    """Writes a small file, new or in the place of an older one, so that readers see one of the two, whole.

    On Windows, where a reader may hold the older one, it is tried again for two seconds. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_bytes(data)
        _patiently(lambda: part.replace(path))
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _patiently(move: Callable[[], object]) -> None:
    for pause in (0.1, 0.2, 0.4, 0.6, 0.8):
        try:
            move()
            return
        except PermissionError:
            if os.name != "nt":
                raise
        time.sleep(pause)
    move()


def delete(path: Path) -> bool:
    """Deletes a folder under tmp/ as far as possible; what stays (an open file on Windows) is swept later."""
    if not os.path.lexists(path):
        return False
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
    return not os.path.lexists(path)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def long_path(path: str, *, windows: bool = os.name == "nt") -> str:
    r"""An absolute path in a form that leaves room for the store's names below it.

    Windows has a limit of 260 characters for all but the form with ``\\?\``; elsewhere ``path`` is fine as it is.
    """
    if not windows or len(path) + 200 < 260 or path.startswith("\\\\?\\"):
        return path
    path = path.replace("/", "\\")
    return "\\\\?\\UNC\\" + path[2:] if path.startswith("\\\\") else "\\\\?\\" + path


def no_room(path: Path, needed: int) -> StoreError:
    """The error for a full disk: ``path`` still needs ``needed`` bytes."""
    free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    return StoreError(f"the disk is full: {path} needs {needed:,} bytes and {free:,} are free.", hint=ELSEWHERE)


@contextmanager
def clear_errors(root: Path, full: Callable[[], StoreError] | None = None) -> Iterator[None]:
    """Turns the operating system's refusals into StoreErrors that say what to do (``full``: that of a full disk)."""
    try:
        yield
    except NotImplementedError as error:
        raise StoreError(f"the file system of {root} has no locks.", hint=ELSEWHERE) from error
    except OSError as error:
        if error.errno in FULL and full is not None:
            raise full() from error
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise StoreError(f"the store {root} cannot be used: {reason}.", hint=ELSEWHERE) from error
