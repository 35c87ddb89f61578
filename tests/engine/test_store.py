import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import filelock
import pytest

from sdaccel.engine import disk, draft, entry, locks
from sdaccel.engine.manifest import seal, unseal
from sdaccel.engine.store import Store
from sdaccel.errors import Cancelled, EngineBroken, EngineNotFound, StoreError
from tests.engine.small import MANIFEST, build, child_command, child_environment, digest, sha


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def leftovers(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir())


# What is in it


def test_an_empty_store_is_empty_and_stays_unmade(store):
    assert store.list() == store.list("weights") == store.broken() == []
    assert store.get("engines", sha("x")) is None
    assert not store.root.exists()
    with pytest.raises(EngineNotFound, match="sdaccel list"):
        store.open_engine(sha("x"))
    with pytest.raises(EngineNotFound):
        store.remove(sha("x"))


def test_what_is_published_can_be_opened(store):
    key = build(store)
    engine, weights, graph = store.open_engine(key)
    assert engine.engine == replace(MANIFEST, model="a", weights=sha("a"), weights_entries=(sha("weights a"),))
    assert engine.file("model.onnx").read_bytes() == b"optimized graph"
    assert engine.nbytes == len(b"optimized graph")
    (weights,) = weights
    assert weights.files["weights.safetensors"].sha256 == (
        hashlib.sha256(weights.file("weights.safetensors").read_bytes()).hexdigest(),
    )
    assert graph is not None and graph.manifest == {"nodes": 3}
    assert store.list() == store.find_engines(component="unet", weights=sha("a")) == [engine]
    assert store.find_engines(component="vae_decoder") == []
    assert store.find(key[:6]) == key
    assert leftovers(store) == []


def test_engines_are_listed_newest_first(store):
    old = build(store)
    manifest = replace(store.list()[0].engine, backend="other", created="2027-01-01T00:00:00+00:00")
    store.publish("engines", manifest.key, lambda d: manifest.to_json())
    assert [e.key for e in store.list()] == [manifest.key, old]


def test_the_place_comes_from_the_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("SDACCEL_STORE", str(tmp_path / "elsewhere"))
    assert Store().root == tmp_path / "elsewhere"


@pytest.mark.parametrize("key", ["", "abc", "../" + "a" * 61, "A" * 64, "g" * 64, "a" * 65, "a" * 63 + "\n", None])
def test_a_key_is_a_hash(store, key):
    for call in (store.remove, store.open_engine, lambda k: store.get("weights", k)):
        with pytest.raises(StoreError, match="no key"):
            call(key)
    with pytest.raises(StoreError, match="no key"):
        store.publish("graphs", key, lambda d: {})
    with pytest.raises(StoreError, match="not kept"):
        store.get("../engines", sha("x"))


def test_find_by_prefix(store):
    for key in ("abcd" + "0" * 60, "abcd" + "1" * 60):
        store.publish("graphs", key, lambda d: {})
    assert store.find("abcd0", "graphs") == "abcd" + "0" * 60
    with pytest.raises(StoreError, match="2 of the graphs begin"):
        store.find("abcd", "graphs")
    with pytest.raises(EngineNotFound):
        store.find("abce", "graphs")
    with pytest.raises(StoreError, match="no key"):
        store.find("..")


# Publishing


def test_fill_is_not_called_for_what_is_there(store):
    key = build(store)
    before = digest(store)

    def fill(_):
        pytest.fail("fill was called")

    assert store.publish("engines", key, fill) == store.get("engines", key)
    assert digest(store) == before


def test_what_fill_raises_comes_through_and_leaves_nothing(store):
    def fill(draft):
        (draft.path / "half.bin").write_bytes(b"half")
        raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        store.publish("graphs", sha("g"), fill)
    assert store.list("graphs") == [] and leftovers(store) == []

    def interrupted(draft):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish("graphs", sha("g"), interrupted)
    with pytest.raises(FileNotFoundError):  # the host's own errors are not the store's
        store.publish("graphs", sha("g"), lambda d: Path("/no/such/checkpoint").read_bytes())
    assert store.list("graphs") == [] and leftovers(store) == []


def folder(draft):
    (draft.path / "folder").mkdir()
    return {}


def link(draft):
    (draft.path / "link").symlink_to("/etc/hostname")
    return {}


def hidden(draft):
    (draft.path / ".hidden").write_bytes(b"")
    return {}


def own(draft):
    (draft.path / "graph.json").write_bytes(b"")
    return {}


@pytest.mark.parametrize(
    "fill",
    [
        folder,
        pytest.param(link, marks=pytest.mark.skipif(os.name == "nt", reason="needs a right on Windows")),
        hidden,
        own,
        lambda d: None,
        lambda d: [1],
        lambda d: {"x": float("nan")},
        lambda d: {"x": object()},
        lambda d: {"x": "\ud800"},
        lambda d: d.create("../x"),
        lambda d: d.create("nul.txt"),
    ],
)
def test_a_draft_that_cannot_be_an_entry_is_refused(store, fill):
    with pytest.raises(StoreError):
        store.publish("graphs", sha("g"), fill)
    assert store.list("graphs") == store.broken() == [] and leftovers(store) == []


def test_an_engine_must_have_its_own_key_and_its_weights(store):
    manifest = store.get("engines", build(store)).engine
    other = replace(manifest, backend="other")
    with pytest.raises(StoreError, match="another key"):
        store.publish("engines", sha("wrong"), lambda d: other.to_json())
    lost = replace(manifest, weights=sha("lost"), weights_entries=(sha("weights lost"),))
    with pytest.raises(StoreError, match="removed while it was built"):
        store.publish("engines", lost.key, lambda d: lost.to_json())
    with pytest.raises(StoreError, match="precision"):
        store.publish("engines", other.key, lambda d: {**other.to_json(), "precision": 16})
    assert len(store.list()) == 1 and leftovers(store) == []


def test_a_broken_entry_is_made_anew(store, caplog):
    key = build(store)
    before = digest(store)
    (store.root / "engines" / key / "model.onnx").write_bytes(b"0ptimized graph")  # of the same size
    with pytest.raises(EngineBroken, match=r"model\.onnx has changed"):
        store.open_engine(key)
    assert build(store) == key and digest(store) == before
    assert "made anew" in caplog.text
    store.open_engine(key)


def test_all_is_on_the_disk_before_it_gets_its_name(store, monkeypatch):
    calls: list[tuple[str, str]] = []

    def noting(name, subject):
        real = getattr(disk, name)

        def call(*arguments):
            calls.append((name, subject(*arguments)))
            return real(*arguments)

        monkeypatch.setattr(disk, name, call)

    noting("fsync", lambda file: Path(file.name).name)
    noting("fsync_folder", lambda path: path.name if path.name in store.KINDS else "draft")
    noting("rename", lambda old, new: new.parent.name)
    build(store)
    for kind, names in (
        ("weights", {"weights.safetensors", "weights.json"}),
        ("graphs", {"graph.onnx", "graph.json"}),
        ("engines", {"model.onnx", "empty.bin", "engine.json"}),
    ):
        end = calls.index(("fsync_folder", kind))
        *files, folder, rename = calls[:end]
        assert {name for call, name in files if call == "fsync"} == names
        assert len(files) == len(names) and files[-1][1].endswith(".json")  # the manifest last
        assert (folder, rename) == (("fsync_folder", "draft"), ("rename", kind))
        del calls[: end + 1]
    assert calls == []


def test_a_file_changed_after_its_writer_closed_is_hashed_again(store):
    def fill(draft):
        with draft.create("a.bin") as file:
            file.write(b"first")
        os.utime(draft.path / "a.bin", ns=(0, 0))
        (draft.path / "a.bin").write_bytes(b"other")
        return {}

    store.verify(store.publish("graphs", sha("g"), fill))


def test_big_files_have_a_digest_for_each_chunk(store, monkeypatch):
    monkeypatch.setattr(entry, "CHUNK", 1000)
    monkeypatch.setattr(draft, "CHUNK", 1000)
    data = random.Random(0).randbytes(4000)

    def fill(draft):
        for size in (0, 1, 999, 1000, 1001, 3999, 4000):
            with draft.create(f"written-{size}") as file:
                for start in range(0, size, 700):
                    file.write(data[start : min(start + 700, size)])
                assert file.tell() == size
            (draft.path / f"plain-{size}").write_bytes(data[:size])
        return {}

    published = store.publish("graphs", sha("g"), fill)
    for name, info in published.files.items():
        size = int(name.split("-")[1])
        parts = [data[start : min(start + 1000, size)] for start in range(0, max(size, 1), 1000)]
        assert info == entry.FileInfo(size, tuple(hashlib.sha256(part).hexdigest() for part in parts))
    for name in ("written-3999", "plain-4000"):
        for position in (0, 999, 1000, 2500, 3998):
            with flipped(published.file(name), position), pytest.raises(EngineBroken, match=name):
                store.verify(published)
    store.verify(published)


def test_a_manifest_is_read_once_while_it_stays(store, monkeypatch):
    published = store.publish("graphs", sha("g"), lambda d: {"n": 1})
    read, plain = [], entry.unseal
    monkeypatch.setattr(entry, "unseal", lambda data, where: (read.append(where), plain(data, where))[1])
    for still, reads in ((60 * 10**9, 2), (-1, 1)):
        monkeypatch.setattr(entry, "_STILL_NS", still)
        del read[:]
        assert [store.get("graphs", sha("g")) for _ in range(2)] == [published] * 2
        assert len(read) == reads
    path = published.path / "graph.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"n": 1', b'"n": 2'))
    with pytest.raises(EngineBroken, match="its bytes have changed"):
        store.get("graphs", sha("g"))
    path.write_bytes(data)
    assert store.get("graphs", sha("g")) == published


def test_a_big_file_is_read_once_a_process_unless_it_is_touched(store, monkeypatch):
    monkeypatch.setattr(entry, "CHUNK", 1000)
    monkeypatch.setattr(draft, "CHUNK", 1000)
    monkeypatch.setattr(entry, "_STILL_NS", 0)
    published = store.publish("graphs", sha("g"), lambda d: {"n": (d.path / "big").write_bytes(bytes(5000))})
    read = []
    monkeypatch.setattr(
        entry, "digest_of", lambda path, index, real=entry.digest_of: read.append(index) or real(path, index)
    )
    time.sleep(0.02)
    store.verify(published)
    store.verify(published)
    assert sorted(read) == [0, 1, 2, 3, 4]
    with flipped(published.file("big"), 4999), pytest.raises(EngineBroken, match="from byte 4,000"):
        store.verify(published)
    store.verify(published)
    with (published.path / "big").open("r+b") as file:
        status = os.fstat(file.fileno())
        file.write(b"x")
        file.flush()
        os.utime(published.path / "big", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(EngineBroken, match="big has changed"):
        store.verify(published)


def test_a_real_chunk(store):
    def fill(draft):
        with draft.create("big.bin", size=(64 << 20) + 5) as file:
            file.write(bytearray(64 << 20))
            file.write(b"tail!")
        return {}

    published = store.publish("graphs", sha("g"), fill)
    assert published.files["big.bin"].sha256 == (
        hashlib.sha256(bytes(64 << 20)).hexdigest(),
        hashlib.sha256(b"tail!").hexdigest(),
    )
    store.verify(published)
    with flipped(published.file("big.bin"), (64 << 20) + 4), pytest.raises(EngineBroken, match="67,108,864"):
        store.verify(published)


# Damage


@contextmanager
def flipped(path: Path, position: int, mask: int = 1) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))
        yield
        file.seek(position)
        file.write(bytes([byte]))


def test_one_flipped_byte_in_any_file_is_refused(store):
    key = build(store)
    chance = random.Random(1)
    opened = store.open_engine(key)
    files = [path for part in (opened.engine, *opened.weights, opened.graph) for path in part.path.iterdir()]
    assert len(files) == 7
    count = 0
    for path in files:
        for position in range(path.stat().st_size):
            with flipped(path, position, chance.randrange(1, 256)), pytest.raises(EngineBroken):
                store.open_engine(key)
            count += 1
    assert count > 3000
    assert store.open_engine(key) == opened


def test_a_changed_space_in_a_manifest_is_refused(store):
    key = build(store)
    path = store.root / "engines" / key / "engine.json"
    data = path.read_bytes()
    for changed in (data + b"\n", data.replace(b"\n  ", b"\n\t ", 1), data.replace(b": ", b":", 1), data[:-1]):
        path.write_bytes(changed)
        with pytest.raises(EngineBroken, match="changed since"):
            store.get("engines", key)


def test_an_entry_must_stay_as_it_was_verified(store):
    key = build(store)
    opened = store.get("engines", key)
    store.remove(key)
    with pytest.raises(EngineBroken, match="missing or has been replaced"):
        store.verify(opened)
    with pytest.raises(EngineBroken, match="missing"):
        opened.file("model.onnx")
    with pytest.raises(EngineBroken, match="no file"):
        opened.file("../../graphs")


def missing_file(path):
    (path / "model.onnx").unlink()


def missing_manifest(path):
    (path / "engine.json").unlink()


def extra_file(path):
    (path / "extra").write_bytes(b"")


def extra_folder(path):
    (path / "extra").mkdir()


def shorter(path):
    (path / "model.onnx").write_bytes(b"")


def longer(path):
    (path / "empty.bin").write_bytes(b"x")


def symlinked_file(path):
    (path / "model.onnx").rename(path.parent / "aside")
    (path / "model.onnx").symlink_to(path.parent / "aside")


def symlinked_manifest(path):
    (path / "engine.json").rename(path.parent / "aside")
    (path / "engine.json").symlink_to(path.parent / "aside")


def symlinked_folder(path):
    path.rename(path.parent / "aside")
    path.symlink_to(path.parent / "aside", target_is_directory=True)


def dangling(path):
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


def hardlinked_file(path):
    os.link(path / "model.onnx", path.parent / "aside")


def hardlinked_manifest(path):
    os.link(path / "engine.json", path.parent / "aside")


def folder_for_file(path):
    (path / "model.onnx").unlink()
    (path / "model.onnx").mkdir()


def file_for_folder(path):
    shutil.rmtree(path)
    path.write_bytes(b"")


def pipe_for_file(path):
    (path / "model.onnx").unlink()
    os.mkfifo(path / "model.onnx")


def pipe_for_manifest(path):
    (path / "engine.json").unlink()
    os.mkfifo(path / "engine.json")


def zero_bytes(path):
    (path / "engine.json").write_bytes(b"")


def huge_manifest(path):
    with (path / "engine.json").open("wb") as file:
        file.truncate(1 << 40)


def moved(path):
    path.rename(path.parent / sha("another"))


POSIX_ONLY = {symlinked_file, symlinked_manifest, symlinked_folder, dangling, pipe_for_file, pipe_for_manifest}
DAMAGES = [value for value in list(globals().values()) if getattr(value, "__code__", None)]
DAMAGES = [f for f in DAMAGES if f.__code__.co_varnames[:1] == ("path",) and f.__code__.co_argcount == 1]


@pytest.mark.parametrize(
    "damage",
    [pytest.param(f, marks=pytest.mark.skipif(f in POSIX_ONLY and os.name == "nt", reason="POSIX")) for f in DAMAGES],
)
def test_unsafe_and_incomplete_folders_are_refused(store, damage):
    key = build(store)
    reference = digest(store)
    damage(store.root / "engines" / key)
    key = sha("another") if damage is moved else key
    for call in (store.open_engine, lambda k: store.get("engines", k)):
        with pytest.raises(EngineBroken):
            call(key)
    assert store.list() == store.find_engines() == []  # and does not raise
    (broken,) = store.broken()
    assert (broken.kind, broken.key) == ("engines", key) and broken.reason
    if damage is not moved:  # the next build needs no cleaning
        aside = store.root / "engines" / "aside"
        assert build(store) == key
        if aside.is_symlink() or aside.is_file():
            aside.unlink()
        elif aside.exists():
            shutil.rmtree(aside)
        assert digest(store) == reference
        assert leftovers(store) == []


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "C:\\x", "C:x", "a\\b", "a/b", "..", ".", "", "a\x00b", "nul", "COM1.txt"),
        *("engine.json", ".hidden", "dot.", " ", "a b", "é", "\u202e", "x" * 101),
    ],
)
def test_unsafe_names_in_a_sealed_manifest_are_refused(store, name):
    key = build(store)
    path = store.root / "engines" / key / "engine.json"
    document = unseal(path.read_bytes())
    document["files"][name] = document["files"].pop("empty.bin")
    path.write_bytes(seal(document))
    with pytest.raises(EngineBroken, match="no name that a file"):
        store.get("engines", key)


# Removing


def test_remove_frees_what_nothing_else_uses(store):
    first, second = build(store, "a"), build(store, "b")
    size = sum(p.stat().st_size for p in store.root.glob("*/*/*") if p.parent.parent.name in store.KINDS)
    freed = store.remove(first)
    assert [e.key for e in store.list()] == [second]
    assert [w.key for w in store.list("weights")] == [sha("weights b")]
    assert len(store.list("graphs")) == 1
    store.open_engine(second)
    freed += store.remove(second)
    assert freed == size
    assert all(store.list(kind) == [] for kind in store.KINDS) and leftovers(store) == []


def test_an_engine_may_read_several_weights_entries(store):
    engine = store.get("engines", build(store)).engine
    store.publish("weights", sha("packed"), lambda d: {"n": (d.path / "packed.bin").write_bytes(b"packed")})
    packed = replace(engine, backend="packing", weights_entries=(*engine.weights_entries, sha("packed")))
    store.publish("engines", packed.key, lambda d: packed.to_json())
    opened = store.open_engine(packed.key)
    assert [w.key for w in opened.weights] == [sha("weights a"), sha("packed")]
    with flipped(opened.weights[1].file("packed.bin"), 0), pytest.raises(EngineBroken, match=r"packed\.bin"):
        store.open_engine(packed.key)
    store.remove(engine.key)
    assert store.open_engine(packed.key) == opened
    shutil.rmtree(opened.weights[1].path)
    with pytest.raises(EngineBroken, match=f"weights {sha('packed')} .* missing"):
        store.open_engine(packed.key)
    store.remove(packed.key)
    assert store.list("weights") == store.list("graphs") == []


def test_weights_of_a_build_that_is_under_way_stay(store):
    key = build(store)
    store.publish("weights", sha("of a build under way"), lambda d: {})
    store.remove(key)
    assert [w.key for w in store.list("weights")] == [sha("of a build under way")]
    old = time.time() - 2 * 24 * 3600
    os.utime(store.list("weights")[0].path, (old, old))
    store.collect()
    assert store.list("weights") == []


def test_a_broken_engine_can_be_removed(store):
    key = build(store)
    (store.root / "engines" / key / "engine.json").write_bytes(b"")
    assert store.remove(key) > 0
    assert store.broken() == []


@pytest.mark.skipif(os.name == "nt", reason="the twin of the next test")
def test_an_open_file_does_not_hold_up_removing(store):
    key = build(store)
    with store.get("engines", key).file("model.onnx").open("rb") as file:
        store.remove(key)
        assert file.read() == b"optimized graph"


def test_what_cannot_be_renamed_is_in_use(store, monkeypatch):
    key = build(store)

    def rename(old, new):
        raise PermissionError(errno.EACCES, "Access is denied", str(old))

    monkeypatch.setattr(disk, "rename", rename)
    with pytest.raises(StoreError, match="Close the programs"):
        store.remove(key)
    monkeypatch.undo()
    store.open_engine(key)


# Locks


def test_eight_processes_make_one_entry(tmp_path):
    arguments = ("together", tmp_path / "store", tmp_path / "go", tmp_path / "calls")
    children = [
        subprocess.Popen(child_command(*arguments), env=child_environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    results = [child.communicate(timeout=60)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 8
    assert len((tmp_path / "calls").read_text(encoding="utf-8").split()) == 1
    assert len(set(results)) == 1 and results[0]
    assert leftovers(Store(tmp_path / "store")) == []


def test_eight_threads_make_one_entry(store):
    calls = []

    def fill(draft):
        calls.append(1)
        time.sleep(0.2)
        return {}

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(store.publish("graphs", sha("g"), fill))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and results == [results[0]] * 8


def test_readers_beside_a_writer_see_whole_entries_or_none(store):
    key = build(store)
    stop, seen, faults = threading.Event(), {"there": 0, "gone": 0}, []

    def read():
        while not stop.is_set():
            try:
                assert store.open_engine(key).engine.key == key
                seen["there"] += 1
            except EngineNotFound:
                seen["gone"] += 1
            except Exception as error:  # noqa: BLE001 - a thread's, told below
                faults.append(error)
            faults.extend(store.broken())
            assert [e.key for e in store.list()] in ([], [key])

    reader = threading.Thread(target=read)
    reader.start()
    begin, rounds = time.monotonic(), 0
    while (rounds < 12 or min(seen.values()) < 2) and time.monotonic() - begin < 30:
        store.remove(key)
        assert build(store) == key
        time.sleep(0.02 * (rounds % 2))
        rounds += 1
    stop.set()
    reader.join()
    assert faults == []
    assert min(seen.values()) >= 2


@contextmanager
def holder(store: Store, key: str, what: str = "hold") -> Iterator[subprocess.Popen]:
    """Another process that is building ``key``, killed at the end."""
    child = subprocess.Popen(
        child_command(what, store.root, key), env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()


def test_waiting_says_for_whom_and_ends(store):
    heard: list[str] = []

    def waiting(message):
        heard.append(message)
        raise Cancelled("enough")

    with holder(store, sha("g")) as child:
        begin = time.monotonic()
        with pytest.raises(StoreError, match=f"process {os.getpid()} waited .*process {child.pid} on ") as caught:
            store.publish("graphs", sha("g"), lambda d: {}, timeout=0.3)
        assert isinstance(caught.value, locks.Busy) and time.monotonic() - begin < 5
        with pytest.raises(Cancelled):
            store.publish("graphs", sha("g"), lambda d: {}, waiting=waiting)
        assert f"process {os.getpid()} waits for process {child.pid}" in heard[0]
        assert store.list("graphs") == store.broken() == []  # readers see no half entry
        assert store.sweep() == 0 and len(leftovers(store)) == 1  # nor is a living build swept
        store.publish("graphs", sha("other"), lambda d: {}, timeout=0)  # other keys are free
        child.kill()
        child.wait()
        begin = time.monotonic()
        assert store.publish("graphs", sha("g"), lambda d: {"mine": 1}, timeout=30).manifest == {"mine": 1}
        assert time.monotonic() - begin < 5
    assert leftovers(store) == []


def test_abandoned_drafts_are_swept(store):
    key = build(store)
    with holder(store, sha("g")):
        pass
    assert len(leftovers(store)) == 1
    store.publish("engines", key, lambda d: {})
    assert leftovers(store) == []


@pytest.mark.skipif(os.name == "nt" or filelock.__version__ < "4", reason="flock, and what filelock 4 does without it")
def test_a_dead_holder_is_recovered_where_there_are_no_locks(store):
    command = child_command("once-without-flock", store.root, sha("g"))
    with holder(store, sha("g"), "hold-without-flock"):
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(command, env=child_environment(), capture_output=True, check=False, timeout=1)
        assert len(leftovers(store)) == 1
    begin = time.monotonic()
    finished = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert time.monotonic() - begin < 30


def test_a_lock_file_left_behind_means_nothing(store):
    store.publish("graphs", sha("other"), lambda d: {})
    (store.root / "locks" / f"graphs-{sha('g')}.lock").write_text("4194304\nanother-host\n", encoding="utf-8")
    (store.root / "locks" / f"graphs-{sha('g')}.owner").write_bytes(b"\xff\x00\x1b[31m" * 1000)
    begin = time.monotonic()
    store.publish("graphs", sha("g"), lambda d: {}, timeout=30)
    assert time.monotonic() - begin < 5


@pytest.mark.skipif(os.name == "nt", reason="needs a right on Windows")
def test_a_planted_link_is_not_written_through(store, tmp_path):
    store.publish("graphs", sha("other"), lambda d: {})
    (tmp_path / "precious").write_bytes(b"precious")
    (store.root / "locks" / f"graphs-{sha('g')}.owner").symlink_to(tmp_path / "precious")
    (store.root / "tmp" / f"graphs-{sha('g')}-{'0' * 16}").symlink_to(tmp_path, target_is_directory=True)
    store.publish("graphs", sha("g"), lambda d: {})
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert leftovers(store) == []


# Disks


def test_a_full_disk_names_the_file_and_the_room(store, monkeypatch):
    real = disk.write
    for kind, room in (("weights", 2), ("weights", 4), ("graphs", 0), ("engines", 0)):
        left = [room]

        def write(file, data, kind=kind, left=left):
            if kind in str(file.name):
                if not left[0]:
                    raise OSError(errno.ENOSPC, "No space left on device")
                left[0] -= 1
            real(file, data)

        shutil.rmtree(store.root, ignore_errors=True)
        monkeypatch.setattr(disk, "write", write)
        pattern = rf"disk is full: .*{kind}-.* needs [\d,]+ bytes and [\d,]+ are free\. .*SDACCEL_STORE"
        with pytest.raises(StoreError, match=pattern) as caught:
            build(store)
        if (kind, room) == ("weights", 2):
            assert "needs 56 bytes" in str(caught.value)
        monkeypatch.undo()
        assert leftovers(store) == [] and store.broken() == []
        store.open_engine(build(store))


def test_a_full_disk_is_noticed_before_and_outside_of_our_own_writing(store):
    with pytest.raises(StoreError, match="needs 1,000,000,000,000,000,000 bytes"):
        store.publish("graphs", sha("g"), lambda d: d.create("big", size=10**18))

    def fill(draft):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match="disk is full"):
        store.publish("graphs", sha("g"), fill)
    assert leftovers(store) == []


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreError, match="--store FOLDER or SDACCEL_STORE"):
            build(Store(root))


def test_a_store_that_cannot_be_written_can_be_read(store, monkeypatch):
    key = build(store)
    for path in [*store.root.rglob("*"), store.root]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert store.open_engine(key).engine.key == key and len(store.list()) == 1
        if getattr(os, "geteuid", lambda: 1)() == 0:  # root may write all the same

            def refuse(*_, **__):
                raise PermissionError(errno.EROFS, "Read-only file system")

            monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(StoreError, match="--store FOLDER or SDACCEL_STORE"):
            build(store, "b")
    finally:
        for path in [store.root, *store.root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize(
    "name",
    ["Jürgen Müller", "日本語 ストア", "dots.in..names.d", "-dash", "a'b\"c" if os.name != "nt" else "a'b", "long"],
)
def test_every_kind_of_path(tmp_path, name):
    root = tmp_path / name
    if name == "long":
        root = tmp_path.joinpath(*[f"{i}" + "long" * 25 for i in range(3)])
        assert len(str(root)) > 260
    store = Store(root)
    key = build(store)
    store.open_engine(key)
    assert store.list()[0].file("model.onnx").read_bytes() == b"optimized graph"
    for path in root.rglob("*"):
        assert path.name.isascii() and " " not in path.name
    assert store.remove(key) > 0


def test_a_root_that_is_not_utf_8_is_refused():
    with pytest.raises(StoreError, match=r"st\\udce8.*is not UTF-8.*--store"):
        Store(os.fsdecode(b"st\xe8"))


def test_a_relative_root_is_fixed_when_it_is_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("there")
    key = build(store)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    store.open_engine(key)


def test_long_paths_on_windows():
    long = "C:\\" + "\\".join(["long" * 20] * 3)
    assert disk.long_path(long, windows=True) == "\\\\?\\" + long
    assert disk.long_path(long.replace("\\", "/"), windows=True) == "\\\\?\\" + long
    assert disk.long_path("\\\\?\\" + long, windows=True) == "\\\\?\\" + long
    assert disk.long_path("\\\\host\\share\\" + long[3:], windows=True) == "\\\\?\\UNC\\host\\share\\" + long[3:]
    assert disk.long_path("C:\\store", windows=True) == "C:\\store"
    assert disk.long_path("/" + "long/" * 60, windows=False) == "/" + "long/" * 60


def test_the_store_needs_no_torch():
    code = "import sys, sdaccel.engine.store; print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(finished.stdout) == []
