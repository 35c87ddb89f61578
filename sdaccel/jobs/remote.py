"""Images and models at addresses that fsspec knows: s3://, gs://, memory://, …"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from sdaccel.engine.disk import FULL
from sdaccel.errors import ModelError, SdaccelError, SettingError, StoreError
from sdaccel.jobs.storage import MAKE_ROOM, OWN, DiskFull, Folder, Storage, numbered

Progress = Callable[[str, float], None]
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
}
"""protocol → what has to be installed for it"""
_WHOLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Where an upload becomes visible in one piece, when it is complete."""
_STAMPS = ("ETag", "etag", "md5Hash", "ContentMD5", "mtime", "LastModified", "last_modified", "updated", "created")
"""Where filesystems say which version of a file they hold."""


def open_address(address: str) -> tuple[Any, str]:
    """The filesystem of an address, and the path in it.

    Raises SettingError for a protocol that is unknown or not installed, StoreError where it does not answer.
    """
    import fsspec

    protocol = address.partition("://")[0]
    if "::" in address:
        raise SettingError(f"{address}: chained addresses are not taken.", hint="Name one place, such as s3://…")
    try:
        fs, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        package = PACKAGES.get(protocol)
        hint = f'Run: python -m pip install "{package}"' if package else str(error)
        raise SettingError(f"{address}: {protocol}:// needs a package that is not installed.", hint=hint) from None
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az", "sftp", "file"))
        raise SettingError(f"{address}: {error}.", hint=f"Known are {known} and the others of fsspec.") from None
    except Exception as error:
        raise _told(error, address) from error
    return fs, path.rstrip("/")


def open_shared(address: str) -> tuple[Any, str]:
    """As `open_address`, where other processes see the same. Raises SettingError for memory:// too."""
    fs, path = open_address(address)
    if "memory" in protocols(fs):
        raise SettingError(f"{address} is seen by one process alone.", hint="Name a folder, or s3://…, gs://…")
    return fs, path


def protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def open_folder(address: str) -> Storage:
    """A folder of images. Raises SettingError, StoreError."""
    fs, path = open_address(address)
    return Folder(Path(path)) if "file" in protocols(fs) else Remote(address)


class Remote:
    """A folder at an address: `sdaccel.jobs.storage.Storage`.

    A file appears whole: object stores show an upload when it is complete; elsewhere it is written under another name
    and renamed. None is overwritten: S3 and Google Cloud Storage are asked to create and never replace ("If-None-Match:
    *" and "ifGenerationMatch=0"), so that of two writers one is refused; a service that cannot do this is asked for the
    name first, which leaves a moment in which two writers of one name may both find it free.
    """

    def __init__(self, address: str):
        """Raises SettingError, StoreError."""
        self.address = address.rstrip("/")
        self._fs, self._root = open_address(address)
        self._whole = not set(_WHOLE).isdisjoint(protocols(self._fs))
        self._creates = "mode" in inspect.signature(self._fs.pipe_file).parameters

    def names(self) -> set[str]:
        with self._clear():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return set()
        return {PurePosixPath(each["name"]).name for each in found if each["type"] == "file"}

    def write(self, name: str, data: bytes, ours: Callable[[Path], bool]) -> str:
        for free in numbered(name):
            path = f"{self._root}/{free}"
            with self._clear(free):
                try:
                    self._create(path, data)
                except FileExistsError:
                    if self._is(path, ours):
                        return free
                else:
                    return free
        raise AssertionError  # the names never end

    def _create(self, path: str, data: bytes) -> None:
        """Raises FileExistsError."""
        if self._exists(path):
            raise FileExistsError(path)
        if not self._whole:
            self._rename(path, data)
            return
        try:
            self._fs.pipe_file(path, data, **({"mode": "create"} if self._creates else {}))
        except FileExistsError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSYS and self._creates:
                self._fs.pipe_file(path, data)  # an S3 of another maker, without conditional writes
            elif self._exists(path):  # another's, or ours whose confirmation got lost
                raise FileExistsError(path) from None
            else:
                raise

    def _rename(self, path: str, data: bytes) -> None:
        part = f"{self._root}/{OWN}/parts/{uuid.uuid4().hex}"
        self._fs.makedirs(f"{self._root}/{OWN}/parts", exist_ok=True)
        try:
            self._fs.pipe_file(part, data)
            if self._exists(path):
                raise FileExistsError(path)
            self._fs.mv(part, path)
        except BaseException:
            with suppress(OSError):
                self._fs.rm_file(part)
            raise

    def _exists(self, path: str) -> bool:
        self._fs.invalidate_cache(path)
        return bool(self._fs.exists(path))

    def _is(self, path: str, ours: Callable[[Path], bool]) -> bool:
        if not self._fs.isfile(path):
            return False
        with tempfile.TemporaryDirectory(prefix="sdaccel-") as folder:
            copy = Path(folder) / PurePosixPath(path).name
            copy.write_bytes(self._fs.cat_file(path))
            return ours(copy)

    @contextmanager
    def _clear(self, name: str = "") -> Iterator[None]:
        """Whatever the filesystem raises, in our words."""
        try:
            yield
        except SdaccelError:
            raise
        except Exception as error:
            raise _told(error, f"{self.address}/{name}".rstrip("/")) from error


def _told(error: BaseException, address: str) -> StoreError:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, OSError) and error.errno in FULL:
        return DiskFull(
            f"there is no room left for {address}: {text}.",
            hint=MAKE_ROOM,
        )
    return StoreError(f"{address} cannot be used: {type(error).__name__}: {text}.")


# ---- models


def local_model(address: str, store_root: Path, progress: Progress | None = None) -> Path:
    """A copy of the model at ``address`` on this machine: <store>/models/<hash>/<its name>.

    It is made once, whoever asks; another version of the files at the address is another copy.
    Raises ModelError, SettingError, StoreError.
    """
    from filelock import FileLock

    fs, root = open_address(address)
    try:
        fs.invalidate_cache()
        files = _files(fs, root, address)
    except SdaccelError:
        raise
    except Exception as error:
        raise _told(error, address) from error
    key = hashlib.sha256(json.dumps([address.rstrip("/"), sorted(files.values())]).encode()).hexdigest()[:32]
    models = store_root / "models"
    final = models / key
    model = final / PurePosixPath(root).name
    if final.is_dir():
        return model
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{key}.lock"):
            if not final.is_dir():
                _fetch(fs, files, address, models / f"{key}.{uuid.uuid4().hex[:8]}", final, model.name, progress)
    except OSError as error:
        raise _told(error, str(final)) from None
    return model


_Version = tuple[str, int, str]


def _files(fs: Any, root: str, address: str) -> dict[str, _Version]:
    """Path → (path relative to the model, size in bytes, version)."""
    if fs.isfile(root):
        found = {root: fs.info(root)}
    else:
        found = {path: facts for path, facts in fs.find(root, detail=True).items() if facts["type"] == "file"}
    if not found:
        raise ModelError(f"{address}: there is no such file or folder.")
    return {path: (_inside(path, root, address), facts["size"], _version(facts)) for path, facts in found.items()}


def _inside(path: str, root: str, address: str) -> str:
    """``path`` relative to ``root``: "" for ``root`` itself. Raises ModelError if it would lie elsewhere here."""
    if path == root:
        return ""
    relative = path.removeprefix(f"{root}/")
    parts = relative.split("/")
    if relative == path or any(part in ("", ".", "..") or set(part) & set('\\:"<>|?*\0') for part in parts):
        raise ModelError(f"{address} holds {path!r}, which is no name for a file of a model.")
    return relative


def _version(facts: dict[str, Any]) -> str:
    return next((str(facts[name]) for name in _STAMPS if facts.get(name)), "")


def _fetch(
    fs: Any,
    files: dict[str, _Version],
    address: str,
    part: Path,
    final: Path,
    name: str,
    progress: Progress | None,
) -> None:
    from fsspec.callbacks import Callback

    total = sum(size for _, size, _ in files.values()) or 1
    before = 0

    def tick(size: int | None, value: int, **_: Any) -> None:
        if progress is not None:
            progress(f"fetching {name}", min((before + value) / total, 1.0))

    try:
        for path, (relative, size, _) in files.items():
            target = part / name / relative if relative else part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                fs.get_file(path, str(target), callback=Callback(hooks={"tick": tick}))
            except Exception as error:
                raise _told(error, address) from error
            got = target.stat().st_size
            if got != size:
                raise StoreError(f"{address}: {path} has {size} bytes, of which {got} arrived.", hint="Try again.")
            before += size
        os.replace(part, final)  # noqa: PTH105
    finally:
        shutil.rmtree(part, ignore_errors=True)
