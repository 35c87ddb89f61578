"""The queue with real builds, and with pretended ones for what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sdaccel.engine.store import Store
from sdaccel.errors import SettingError, StoreError
from sdaccel.models.demo import demo_model_path
from sdaccel.ui import process
from sdaccel.ui.history import History, Pace
from sdaccel.ui.process import BuildProcess, describe_exit
from sdaccel.ui.queue import BuildQueue, Job, open_queue
from sdaccel.ui.requests import BuildRequest

posix = pytest.mark.skipif(os.name == "nt", reason="signals")

ONE, TWO, THREE = (BuildRequest(resolutions=(side,)) for side in ("64", "128", "256"))

SPEAK = """
import json, os, signal, subprocess, sys, time
task = json.loads(sys.stdin.readline())
def say(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)
say("opened", model="m", family="sd1", components=["unet"], backend="pretended", notes=["a note"])
"""
DONE = """
say("stage", stage="unet: fusing", fraction=0.5)
print("no event")
print("[]")
say("stage", stage="unet: storing", fraction=0.8)
print("ein Wort für das Protokoll", file=sys.stderr)
say("done", engines=["a" * 64, "b" * 64], built=["a" * 64])
"""
HANG = """
say("stage", stage="unet: tracing", fraction=0.25)
while True:
    time.sleep(60)
"""
# Deaf to everything but SIGKILL, with a child that is so too, and a draft in the store.
DEAF = """
draft = os.path.join(task["store"], "tmp", "engines-" + "0" * 64 + "-" + "1" * 16)
os.makedirs(draft)
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
say("stage", stage=f"child {child.pid}", fraction=0.25)
while True:
    time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "Speicher für Ümläute")


@pytest.fixture
def queue(store: Store):
    queues: list[BuildQueue] = []

    def make(body: str = DONE) -> BuildQueue:
        pretending = type("Pretending", (BuildQueue,), {"command": (sys.executable, "-c", SPEAK + body)})
        queues.append(pretending(store))
        return queues[-1]

    yield make
    for each in queues:
        each.close()


def until(queue: BuildQueue, job: Job, stage: str, seconds: float = 60.0) -> Job:
    """The build once it is at a stage whose name begins so."""
    deadline = time.monotonic() + seconds
    while not (now := queue.job(job.id)).stage.startswith(stage):
        assert not now.ended and time.monotonic() < deadline, f"{now}\n{queue.log(job.id)}"
        time.sleep(0.02)
    return now


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def leftovers(store: Store) -> list[str]:
    folder = store.root / "tmp"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ---- real builds

BUILD = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "onnxscript" or name.startswith(("torch.onnx", "sdaccel.export.to_onnx")):
            raise ImportError(f"{name} is imported by the process of the page")
sys.meta_path.insert(0, Blocked())

import json
from sdaccel.engine.store import Store
from sdaccel.ui import requests, rows
from sdaccel.ui.preflight import preflight
from sdaccel.ui.queue import open_queue

store = Store(sys.argv[1])
request = requests.BuildRequest(components=("text_encoder",), resolutions=("64",), batches=("1",))
before = preflight(request, store)
queue = open_queue(store)
job = queue.submit(request)
stages, lefts = [], []
while not (now := queue.job(job.id)).ended:
    stages.append(now.stage)
    lefts.append(now.seconds_left)
    queue.wait(job.id, 0.05)
after = preflight(request, store)
again = queue.wait(queue.retry(job.id).id)
listed = [row.key for row in rows.engine_rows(store)]
queue.close()
print(json.dumps({
    "job": now.to_json(), "again": again.to_json(), "stages": sorted(set(stages)), "log": queue.log(job.id),
    "before": before.covered, "after": after.covered, "exact": after.parts[0].exact, "rows": listed,
    "seconds": before.seconds, "left": [left for left in lefts if left is not None],
}))
"""


def test_a_real_build_without_the_exporter_in_this_process(tmp_path):
    store = Store(tmp_path / "größe x")
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, str(store.root)], capture_output=True, encoding="utf-8", timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    job = found["job"]
    assert (job["state"], job["fraction"], job["message"]) == ("done", 1.0, "1 engine built"), found["log"]
    (engine,) = store.list()
    assert job["engines"] == found["rows"] == found["after"] == [engine.key]
    assert found["before"] == [] and found["seconds"] > 0 and found["exact"]
    store.open_engine(engine.key)
    assert any(stage.startswith("text_encoder: ") for stage in found["stages"])
    assert found["left"] and all(left >= 0 for left in found["left"])
    assert "text_encoder: converting to ONNX" in found["log"] and "onnxruntime into" in found["log"]
    assert (found["again"]["state"], found["again"]["message"]) == ("done", "0 engines built, 1 there already")
    assert leftovers(store) == []


def test_cancelling_a_real_build(tmp_path):
    store = Store(tmp_path / "s")
    queue = BuildQueue(store)
    try:
        job = queue.submit(BuildRequest(components=("unet",), resolutions=("64",)))
        until(queue, job, "unet: tracing")
        assert any(name.startswith("engines-") for name in leftovers(store))
        pid = queue._running.process.pid
        start = time.monotonic()
        cancelled = queue.cancel(job.id)
        assert time.monotonic() - start < 5.0
        assert cancelled.state == "cancelled" and gone(pid, 0.1)
        assert leftovers(store) == [] and store.list() == [] and store.broken() == []
        assert queue.cancel(job.id) == cancelled
    finally:
        queue.close()


HOST = """
import sys, time
from sdaccel.engine.store import Store
from sdaccel.ui.queue import BuildQueue
from sdaccel.ui.requests import BuildRequest
queue = BuildQueue(Store(sys.argv[1]))
job = queue.submit(BuildRequest(components=("unet",), resolutions=("64",)))
queue.submit(BuildRequest(components=("unet",), resolutions=("128",)))
while queue.job(job.id).fraction < 0.05:
    time.sleep(0.02)
print(queue._running.process.pid, flush=True)
time.sleep(100)
"""


@posix
def test_a_worker_does_not_outlive_its_host_and_the_next_host_goes_on(store, queue):
    host = subprocess.Popen([sys.executable, "-c", HOST, str(store.root)], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(host.stdout.readline())
        looker = BuildQueue(store)
        first, second = looker.jobs()
        assert (first.state, second.state) == ("running", "waiting")
        assert not looker.runs_here and f"process {host.pid} on" in looker.elsewhere
        with pytest.raises(StoreError, match=rf"run by process {host.pid} on .*Build there, or close that program"):
            looker.submit(ONE)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    assert gone(pid)
    time.sleep(0.1)
    assert leftovers(store) == []
    then = queue()
    first, second = then.jobs()
    assert (first.state, first.stage) == ("interrupted", first.stage) and "Retry" in first.message
    assert then.wait(second.id, 20).state == "done"
    assert then.runs_here


def test_a_real_failure_comes_with_its_hint(tmp_path):
    log = tmp_path / "log"
    process = BuildProcess(BuildRequest(model=str(tmp_path / "fort")), tmp_path / "s", log)
    (*_, last) = process.events()
    assert process.wait() == 1
    assert last["event"] == "failed" and "no such file or folder" in last["message"]
    assert "Name a diffusers folder" in last["message"]
    assert "no such file or folder" in log.read_text(encoding="utf-8")


# ---- pretended builds


def test_one_after_the_other(queue):
    builds = queue(DONE)
    jobs = [builds.submit(request) for request in (ONE, TWO, THREE)]
    assert builds.submit(THREE).id == jobs[2].id  # a double click
    ended = [builds.wait(job.id, 20) for job in jobs]
    assert [job.state for job in ended] == ["done"] * 3
    assert ended == builds.jobs()
    assert ended[0].message == "1 engine built, 1 there already" and ended[0].engines == ("a" * 64, "b" * 64)
    assert ended[0].notes == ("a note",) and ended[0].seconds > 0 and ended[0].seconds_left is None
    assert builds.log(jobs[0].id) == "ein Wort für das Protokoll"
    assert builds.log(jobs[0].id, 0) == ""
    assert builds.submit(ONE).id not in [job.id for job in jobs]


def test_what_waits_and_what_runs(queue, store):
    builds = queue(HANG)
    first, second = builds.submit(ONE), builds.submit(TWO)
    running = until(builds, first, "unet: tracing")
    assert (running.state, running.fraction) == ("running", 0.25)
    assert builds.job(second.id).state == "waiting" and builds.log(second.id) == ""
    with pytest.raises(StoreError, match=r"is running\. Cancel it first"):
        builds.retry(first.id)
    assert builds.forget_finished() == 0
    assert builds.cancel(second.id).state == "cancelled"
    start = time.monotonic()
    assert builds.cancel(first.id).state == "cancelled"
    assert time.monotonic() - start < 2.0  # it needs no killing
    builds.command = (sys.executable, "-c", SPEAK + DONE)
    again = builds.wait(builds.retry(first.id).id, 20)
    assert (again.state, again.request) == ("done", ONE)
    assert builds.forget_finished() == 3 and builds.jobs() == []
    assert sorted(path.name for path in (store.root / "queue").iterdir()) == ["queue.lock", "queue.owner"]
    with pytest.raises(StoreError, match="no build"):
        builds.log(first.id)


@posix
def test_a_deaf_worker_is_killed_with_its_children(queue, store):
    builds = queue(DEAF)
    job = builds.submit(ONE)
    child = int(until(builds, job, "child ").stage.split()[1])
    pid = builds._running.process.pid
    assert leftovers(store) != []
    start = time.monotonic()
    assert builds.cancel(job.id).state == "cancelled"
    assert time.monotonic() - start < 5.0
    assert gone(pid, 0.5) and gone(child, 0.5)
    assert leftovers(store) == []


@posix
def test_a_killed_worker_is_a_failure_with_its_reason(queue, store):
    builds = queue(DEAF)
    job = builds.submit(ONE)
    child = int(until(builds, job, "child ").stage.split()[1])
    os.kill(builds._running.process.pid, signal.SIGKILL)
    failed = builds.wait(job.id, 10)
    assert failed.state == "failed" and "ended by SIGKILL (the system does this when memory runs out)" in failed.message
    assert gone(child) and leftovers(store) == []


@pytest.mark.parametrize(
    "body, why",
    [
        (
            "say('failed', message='the disk is full. Delete engines.')\nsys.exit(1)",
            "the disk is full. Delete engines.",
        ),
        ("sys.exit(7)", "exit code 7"),
        ("say('done', engines=[], built=[])\nos._exit(3)", "exit code 3"),
        ("say('stage', stage='x')\nsay('stage', fraction='much', stage='x')\nsys.exit(9)", "exit code 9"),
    ],
)
def test_failures(queue, body, why):
    builds = queue(body)
    failed = builds.wait(builds.submit(ONE).id, 20)
    assert failed.state == "failed" and why in failed.message


def test_a_process_that_cannot_start(queue, tmp_path):
    builds = queue()
    builds.command = (str(tmp_path / "no python"),)
    failed = builds.wait(builds.submit(ONE).id, 20)
    assert failed.state == "failed" and "cannot start: No such file" in failed.message
    builds.command = (sys.executable, "-c", SPEAK + DONE)
    assert builds.wait(builds.submit(ONE).id, 20).state == "done"


def test_exit_codes_in_words():
    assert "0xC0000005" in describe_exit(0xC0000005)
    assert "signal 99" in describe_exit(-99)


def test_what_is_wrong_is_refused_before_it_is_queued(queue):
    builds = queue()
    with pytest.raises(SettingError, match=r"resolutions: .*Try 96\. .*precision: "):
        builds.submit(BuildRequest(resolutions=("100",), precision="fp8"))
    assert builds.jobs() == []


def test_a_relative_path_is_the_hosts(queue, monkeypatch):
    builds = queue()
    monkeypatch.chdir(demo_model_path().parent)
    job = builds.submit(BuildRequest(model=demo_model_path().name))
    assert job.request.model == str(demo_model_path())
    assert builds.wait(job.id, 20).state == "done"


def test_closing_ends_the_build_and_the_next_owner_takes_what_waits(queue, store):
    first = queue(HANG)
    running, waiting = first.submit(ONE), first.submit(TWO)
    until(first, running, "unet: tracing")
    second = queue(DONE)
    assert [job.state for job in second.jobs()] == ["running", "waiting"]
    assert not second.runs_here and f"process {os.getpid()}" in second.elsewhere
    for refused in (lambda: second.submit(THREE), lambda: second.cancel(running.id), second.forget_finished):
        with pytest.raises(StoreError, match="are run by process"):
            refused()
    pid = first._running.process.pid
    first.close()
    assert gone(pid, 0.5)
    assert first.jobs()[0].state == "interrupted" and first.jobs()[0].message == "its program was closed."
    with pytest.raises(StoreError, match="has been closed"):
        first.submit(THREE)
    second._looked = -100.0  # it looks every few seconds
    assert second.wait(waiting.id, 20).state == "done"
    assert second.runs_here and second.retry(running.id).request == ONE


def test_one_queue_a_process(store):
    queue = open_queue(store)
    assert open_queue(Store(store.root)) is queue
    queue.close()
    assert open_queue(store) is not queue
    open_queue(store).close()
    assert not store.root.exists()  # looking writes nothing


DAMAGED = [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"format": 1}', b'{"format": 9}', b"[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_set_aside(queue, store, content):
    first = queue()
    done = first.wait(first.submit(ONE).id, 20)
    first.close()
    folder = store.root / "queue"
    damaged = folder / "20261130-120000-000000-abcd.json"
    damaged.write_bytes(content)
    swapped = folder / "20261130-120000-000001-abcd.json"
    swapped.write_bytes((folder / f"{done.id}.json").read_bytes())
    (folder / "history.json").write_bytes(content)
    second = queue()
    assert second.jobs() == [done]
    assert len(second.notes) == 2 and all("its file is now 2026" in note for note in second.notes)
    assert damaged.with_suffix(".damaged").read_bytes() == content and not damaged.exists()
    assert second.wait(second.submit(TWO).id, 20).state == "done"


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    queue = BuildQueue(Store(tmp_path / "file"))
    assert queue.jobs() == [] and queue.runs_here
    with pytest.raises(StoreError, match="--store FOLDER or SDACCEL_STORE"):
        queue.submit(ONE)
    queue.close()


def test_many_threads_submit_and_cancel(queue):
    builds = queue(HANG)
    sizes = [str(64 + 8 * at) for at in range(12)]
    threads = [
        threading.Thread(target=lambda size=size: builds.cancel(builds.submit(BuildRequest(resolutions=(size,))).id))
        for size in sizes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [job.state for job in builds.jobs()] == ["cancelled"] * 12


def test_the_child_finds_this_sdaccel_and_nothing_beside_it(monkeypatch, tmp_path):
    package = str(Path(process.sdaccel.__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert process.environment()["PYTHONPATH"] == f"{package}{os.pathsep}elsewhere"
    monkeypatch.setattr(process.site, "getsitepackages", lambda: [package])
    assert process.environment()["PYTHONPATH"] == "elsewhere"


# ---- how long it takes


def curve(*points: tuple[float, float]) -> list[tuple[float, float]]:
    pace = Pace()
    for fraction, seconds in points:
        pace.add(fraction, seconds)
    return pace.whole(points[-1][1])


def test_the_time_left_follows_the_latest_build_of_its_kind(tmp_path):
    history = History(tmp_path / "history.json")
    assert history.seconds_left("a", 0.01, 5.0) is None  # too early to tell
    assert history.seconds_left("a", 0.25, 10.0) == pytest.approx(30.0)  # at this pace
    history.add("a", curve((0.1, 1.0), (0.5, 101.0), (1.0, 111.0)))
    assert history.seconds_left("a", 0.0, 0.0) == pytest.approx(111.0)
    assert history.seconds_left("a", 0.3, 51.0) == pytest.approx(60.0)
    assert history.seconds_left("a", 0.5, 20.0) == pytest.approx(10.0)  # the slow part was there already
    assert history.seconds_left("a", 0.3, 102.0) == pytest.approx(120.0)  # twice as slow
    assert history.seconds_left("a", 1.0, 111.0) == pytest.approx(0.0)
    again = History(tmp_path / "history.json")
    assert again.curves == history.curves
    assert again.seconds_left("b", 0.25, 10.0) == pytest.approx(30.0)


def test_the_history_stays_small(tmp_path):
    history = History(tmp_path / "history.json")
    for kind in range(70):
        history.add(str(kind), curve(*((at / 2000, float(at)) for at in range(2001))))
    again = History(tmp_path / "history.json")
    assert len(again.curves) == 64 and "0" not in again.curves and "69" in again.curves
    assert all(len(points) <= 258 and points[-1] == (1.0, 2000.0) for points in again.curves.values())


def test_a_python_without_what_building_needs_is_named(tmp_path):
    """A web UI's own may be too old; another can be set."""
    blocked = "import sys; sys.modules['onnxscript'] = sys.modules['diffusers'] = None"
    code = f"{blocked}; from sdaccel.ui import worker; worker.main()"
    line = json.dumps({"store": str(tmp_path), "request": BuildRequest().to_json()})
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
        *_, said = map(json.loads, worker.stdout)
    assert said["event"] == "failed"
    assert sys.executable in said["message"] and "python -m sdaccel doctor" in said["message"]
