"""Images and models at addresses, on the filesystems that fsspec has without any other package."""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sdaccel.errors import ModelError, SettingError, StoreError
from sdaccel.jobs.job import Job
from sdaccel.jobs.remote import Remote, local_model
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import DiskFull, Folder, open_storage
from sdaccel.jobs.task import Options
from tests.jobs.drawing import Painters, jobs


class Renaming(MemoryFileSystem):
    """Memory in the manner of a disk that is reached over a network: what is written shows bit by bit."""

    protocol = "renaming"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in its base
    pseudo_dirs = [""]  # noqa: RUF012


class Blind(MemoryFileSystem):
    """Knows no exclusive creation, and says so as an S3 of another maker does."""

    protocol = ("blind", "s3")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        super().pipe_file(path, value, mode, **kwargs)


class Racing(MemoryFileSystem):
    """Another writer is always a moment faster."""

    protocol = ("racing", "s3")
    first = True

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if Racing.first:
            Racing.first = False
            super().pipe_file(path, b"theirs")
        super().pipe_file(path, value, mode, **kwargs)


class Broken(MemoryFileSystem):
    protocol = ("broken", "s3")
    error: Exception = OSError(errno.ENOSPC, "no space")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        raise Broken.error


KINDS = (Renaming, Blind, Racing, Broken)


@pytest.fixture(autouse=True)
def _kinds() -> Iterator[None]:
    for kind in KINDS:
        protocol = kind.protocol if isinstance(kind.protocol, str) else kind.protocol[0]
        fsspec.register_implementation(protocol, kind, clobber=True)
    yield
    MemoryFileSystem.store.clear()
    Renaming.store.clear()


def never(_: Path) -> bool:
    return False


def content(address: str) -> bytes:
    with fsspec.open(address, "rb") as file:
        return file.read()


@pytest.mark.parametrize("protocol", ["memory", "renaming", "blind"])
def test_a_file_is_written_and_never_overwritten(protocol):
    address = f"{protocol}://bucket/{uuid.uuid4().hex}/images"
    storage = open_storage(address + "/")
    assert isinstance(storage, Remote) and storage.names() == set()
    assert storage.write("a.b.png", b"one", never) == "a.b.png"
    assert storage.write("a.b.png", b"two", never) == "a.b-2.png"
    assert storage.write("a.b.png", b"three", never) == "a.b-3.png"
    assert content(f"{address}/a.b.png") == b"one" and content(f"{address}/a.b-2.png") == b"two"
    assert storage.names() == {"a.b.png", "a.b-2.png", "a.b-3.png"}


def test_what_an_attempt_that_was_cut_off_has_written_stays():
    storage = Remote(f"memory://{uuid.uuid4().hex}")
    seen: list[tuple[str, bytes]] = []

    def ours(path: Path) -> bool:
        seen.append((path.name, path.read_bytes()))
        return path.read_bytes() == b"ours"

    storage.write("a.png", b"another's", ours)
    assert storage.write("a.png", b"ours", ours) == "a-2.png"
    assert storage.write("a.png", b"ours", ours) == "a-2.png"
    assert seen == [("a.png", b"another's"), ("a.png", b"another's"), ("a-2.png", b"ours")]
    assert storage.names() == {"a.png", "a-2.png"}


def test_of_two_writers_of_one_name_the_later_gives_way():
    Racing.first = True
    address = f"racing://{uuid.uuid4().hex}"
    assert Remote(address).write("a.png", b"mine", never) == "a-2.png"
    assert content(f"{address}/a.png") == b"theirs" and content(f"{address}/a-2.png") == b"mine"


def test_of_many_writers_of_one_name_none_loses_anything(tmp_path):
    address = (tmp_path / "out").as_uri()
    written: dict[str, bytes] = {}

    def write(number: int) -> None:
        storage = open_storage(address)
        for i in range(5):
            data = f"{number} {i}".encode()
            written[storage.write("same.png", data, never)] = data

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 20
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")} == written


def test_a_file_address_is_a_folder(tmp_path):
    storage = open_storage((tmp_path / "images").as_uri())
    assert isinstance(storage, Folder) and storage.path == tmp_path / "images"


def test_a_disk_over_a_network_keeps_no_parts():
    address = f"renaming://{uuid.uuid4().hex}"
    Remote(address).write("a.png", b"x", never)
    assert [path for path in Renaming.store if "parts" in path] == []


@pytest.mark.parametrize(
    "error, kind, text",
    [
        (OSError(errno.ENOSPC, "no space"), DiskFull, "there is no room left for broken://x/a.png.*--resume"),
        (
            PermissionError(errno.EACCES, "Access Denied"),
            StoreError,
            "broken://x/a.png cannot be used: PermissionError",
        ),
        (RuntimeError("Unable to locate credentials"), StoreError, "Unable to locate credentials"),
    ],
)
def test_errors_are_told_in_our_words(error, kind, text):
    Broken.error = error
    with pytest.raises(kind, match=text) as told:
        Remote("broken://x").write("a.png", b"x", never)
    assert type(told.value) is kind


@pytest.mark.parametrize(
    "address, text",
    [
        ("nothing://x", "nothing://x: .*Known are s3://"),
        ("simplecache::memory://x", "chained addresses are not taken"),
    ],
)
def test_addresses_that_cannot_be_used(address, text):
    with pytest.raises(SettingError, match=text):
        open_storage(address)


def test_a_missing_package_is_named(monkeypatch):
    def missing(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(SettingError, match=r's3:// needs a package.*python -m pip install "s3fs"'):
        open_storage("s3://bucket/x")


def test_a_run_into_an_address_resumes_from_a_journal_in_the_store(tmp_path):
    address = f"memory://{uuid.uuid4().hex}/out"
    options = Options(out=address, store=str(tmp_path))

    def draw(count: int, **more: Any) -> Run:
        run = Run(jobs(count), options, workers=Painters(options), **more)
        list(run)
        return run

    first = draw(2)
    assert first.summary.ok and first.summary.drawn == 3
    assert {path.name for path in tmp_path.iterdir()} == {"jobs"}
    second = draw(3, resume=True)
    assert second.summary.before == 3 and second.summary.drawn == 3
    assert len(Remote(address).names()) == 6


# ---- models


def put(address: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        with fsspec.open(f"{address}/{name}" if name else address, "wb") as file:
            file.write(data)


def test_a_model_is_copied_once(tmp_path, monkeypatch):
    address = f"memory://{uuid.uuid4().hex}/my model"
    files = {"model_index.json": b"{}", "unet/weights.safetensors": b"x" * 1000}
    put(address, files)
    told: list[tuple[str, float]] = []
    found = local_model(address, tmp_path, lambda stage, fraction: told.append((stage, fraction)))
    assert found.name == "my model" and found.parent.parent == tmp_path / "models"
    assert {path.relative_to(found).as_posix(): path.read_bytes() for path in found.rglob("*.*")} == files
    assert told[-1] == ("fetching my model", 1.0)

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("it is here already")

    monkeypatch.setattr(MemoryFileSystem, "get_file", again)
    assert local_model(address + "/", tmp_path) == found


def test_another_version_is_another_copy(tmp_path):
    address = f"memory://{uuid.uuid4().hex}/model.safetensors"
    put(address, {"": b"one"})
    first = local_model(address, tmp_path)
    put(address, {"": b"two"})
    second = local_model(address, tmp_path)
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")
    assert first.name == second.name == "model.safetensors"


def test_several_at_once_make_one_copy(tmp_path):
    address = f"memory://{uuid.uuid4().hex}/model"
    put(address, {f"{i}.bin": bytes(1000) for i in range(5)})
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(local_model(address, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert sorted(path.suffix for path in (tmp_path / "models").iterdir()) in ([""], ["", ".lock"])


def test_a_copy_that_was_cut_off_is_none(tmp_path, monkeypatch):
    address = f"memory://{uuid.uuid4().hex}/model.safetensors"
    put(address, {"": b"0123456789"})
    get = MemoryFileSystem.get_file

    def half(self: Any, path: str, target: str, **_: Any) -> None:
        Path(target).write_bytes(b"01234")

    monkeypatch.setattr(MemoryFileSystem, "get_file", half)
    with pytest.raises(StoreError, match="has 10 bytes, of which 5 arrived"):
        local_model(address, tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []
    monkeypatch.setattr(MemoryFileSystem, "get_file", get)
    assert local_model(address, tmp_path).read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["a/../../b", "c:x", "a\\b"])
def test_names_that_would_lie_elsewhere_are_refused(name, tmp_path):
    root = f"/{uuid.uuid4().hex}"
    MemoryFileSystem.store[f"{root}/{name}"] = MemoryFileSystem().open(f"{root}/x", "wb")
    with pytest.raises(ModelError, match="which is no name for a file of a model"):
        local_model(f"memory:/{root}", tmp_path)


def test_no_model_there(tmp_path):
    with pytest.raises(ModelError, match="there is no such file or folder"):
        local_model(f"memory://{uuid.uuid4().hex}", tmp_path)


def test_images_of_a_model_at_an_address_are_those_of_its_files(tiny_model: Path, tmp_path):
    address = f"memory://{uuid.uuid4().hex}/tiny"
    fsspec.filesystem("memory").put(str(tiny_model), address, recursive=True)
    job = Job("a circle", seed=1, steps=2, width=64, height=64)
    found = {}
    for name, model in (("here", str(tiny_model)), ("there", address)):
        options = Options(out=str(tmp_path / name), model=model, store=str(tmp_path / "store"), engines=False)
        run = Run([job], options)
        (result,) = run
        found[name] = (result.key, (tmp_path / name / result.name).read_bytes())
    assert found["here"][0] == found["there"][0]
    assert found["there"][1].count(address.encode()) == 1
