"""Workers in processes of their own: what they draw, and what is left when one of them ends."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest

from sdaccel.errors import BackendError, SettingError, StoreError
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Crashed, Drawn, Gone, Processes, _places
from sdaccel.jobs.run import Run
from sdaccel.jobs.task import BatchTask, ImageTask, Options
from tests.jobs.drawing import pixels

JOB = Job("a red circle", seed=3, steps=2, guidance=5.0, width=64, height=64)


@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a worker as POSIX systems do")
def test_a_killed_worker_costs_nothing_but_time(tiny_store, tmp_path):
    jobs = [replace(JOB, seed=i, prompt=f"a circle {i}", steps=20) for i in range(16)]
    usual = {"model": str(tiny_store.model), "store": str(tiny_store.store), "build": "never"}
    options = Options(str(tmp_path / "out"), **usual)
    pool = Processes(options, 2)
    first = {child._process.pid for child in pool._children}
    run = Run(jobs, options, workers=pool)
    seen: Counter[str] = Counter()
    for result in run:
        if not seen:
            os.kill(min(first), signal.SIGKILL)
        assert result.ok
        seen[result.key] += 1
    assert set(seen.values()) == {1} and len(seen) == 16 and run.summary.ok
    assert [note for note in run.summary.notes if "killed by SIGKILL), another takes its place" in note]
    whole = Run(jobs, replace(options, out=str(tmp_path / "whole")), workers=2)
    assert len(list(whole)) == 16
    assert pixels(tmp_path / "out") == pixels(tmp_path / "whole")


def dies(*args):
    os._exit(7)


def test_workers_that_cannot_start_are_told_and_not_tried_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.jobs.pool._serve", dies)
    pool = Processes(Options(str(tmp_path)), 2)
    while pool._children:
        time.sleep(0.05)
    with pytest.raises(BackendError, match=r"no worker could start: exit code 7.*sdaccel doctor"):
        list(Run([JOB], Options(str(tmp_path)), workers=pool))


def ends_at_prepare(pipe, options, place):
    pipe.send(("ready", None))
    pipe.recv()
    os._exit(9)


def test_a_model_that_ends_its_worker_twice_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.jobs.pool._serve", ends_at_prepare)
    with pytest.raises(BackendError, match=r"opened the model big ended twice: exit code 9"):
        list(Run([JOB], Options(str(tmp_path), model="big"), workers=1))


def idle_end(pipe, options, place):
    pipe.send(("ready", None))
    os._exit(0)


def test_a_worker_that_ends_idle_is_not_replaced_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.jobs.pool._serve", idle_end)
    pool = Processes(Options(str(tmp_path)), 1)
    gone = pool.events.get(timeout=60)
    assert isinstance(gone, Gone) and "no worker is left" in str(gone.error)


def ends_at(pipe, options, place):
    """A worker that draws nothing, has two batches at once, and ends when one of them has the prompt "deadly"."""
    pipe.send(("ready", None))
    held = []
    while True:
        _, (number, batch) = pipe.recv()
        held.append((number, batch))
        while pipe.poll(0.3):
            held.append(pipe.recv()[1])
        if any(batch.images[0].job.prompt == "deadly" for _, batch in held):
            os._exit(5)
        for each in held:
            pipe.send(("drawn", (each[0], Drawn(each[1], []))))
        held.clear()


def test_of_two_batches_the_one_that_ends_its_worker_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.jobs.pool._serve", ends_at)
    pool = Processes(Options(str(tmp_path)), 1)
    good, deadly = (
        BatchTask(i, None, (ImageTask(f"{i:064x}", replace(JOB, prompt=prompt), i),), (0,))
        for i, prompt in enumerate(("good", "deadly"), 1)
    )
    for expected in ([Crashed(good, ""), Crashed(deadly, "")], [Crashed(deadly, "its worker ended: exit code 5")]):
        for batch in (good, deadly):
            pool.submit(batch)
        events = [pool.events.get(timeout=60) for _ in range(2)]
        assert [event for event in events if isinstance(event, Crashed)] == expected
    assert Drawn(good, []) in events
    pool.close(now=True)


def test_a_folder_that_one_process_sees_alone_is_refused():
    with pytest.raises(SettingError, match="memory://images is seen by one process alone"):
        Processes(Options("memory://images"), 1)


def test_a_model_that_is_not_there_is_told_before_anything_is_drawn(tmp_path):
    options = Options(str(tmp_path / "out"), model=str(tmp_path / "no model"))
    with pytest.raises(Exception, match="no such file or folder"):
        list(Run([JOB], options, workers=1))


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert [place.gpu for place in _places(3)] == ["2", "GPU-7", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [place.threads for place in _places(3)] == [2, 2, 2] and _places(1)[0].threads is None
    assert [place.workers for place in _places(3)] == [3, 3, 3] and _places(1)[0].workers == 1


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_workers_has_bounds(tmp_path, count):
    with pytest.raises(SettingError, match="not between 1 and 64"):
        Run([JOB], Options(str(tmp_path)), workers=count)


def test_a_folder_that_is_a_file_is_told_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.jobs.pool._Child", lambda *args: pytest.fail("a process was started"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be made a folder of images"):
        Processes(Options(str(tmp_path / "file")), 1)
