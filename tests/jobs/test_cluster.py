"""Workers on Ray: real clusters of this machine, of which an actor is killed; which clusters are not used."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sdaccel.errors import SettingError
from sdaccel.jobs import cluster
from sdaccel.jobs.cluster import Cluster
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Crashed, Drawn
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import OWN
from sdaccel.jobs.task import BatchTask, ImageTask, Options
from tests.jobs.drawing import pixels

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)

JOB = Job("a red circle on a blue background", seed=1, n=12, steps=2, width=64, height=64)
HEAD = """
import sys, ray
ray.init(address="local", num_cpus=3, num_gpus=0, object_store_memory=100 << 20, include_dashboard=False)
print("AT", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test sees the user's cluster or tokens, or leaves anything of its own."""
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the actors have on two cores: so that values are the same to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(out: Path) -> Options:
    """The demo model in torch: what engines draw is no matter of where."""
    return Options(str(out), engines=False, batch_size=2)


class Head:
    """A Ray cluster that somebody else has started."""

    def __init__(self, token: str | None):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token" if token else "disabled"}
        if token:
            environment["RAY_AUTH_TOKEN"] = token
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", HEAD], env=environment, stdin=pipe, stdout=pipe, text=True
        )
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        self.address = next(line.split()[1] for line in lines if line.startswith("AT "))

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("", timeout=60)


def test_a_killed_actor_costs_its_batches_alone(tmp_path, one_thread):
    whole = Run([JOB], plain(tmp_path / "whole"))
    assert len(list(whole)) == 12
    options = plain(tmp_path / "out")
    told: list[str] = []
    actors = Cluster(options, "local", lambda stage, _: told.append(stage), actors=2)
    run = Run([JOB], options, workers=actors)
    seen: Counter[str] = Counter()
    for result in run:
        if not seen:
            pids = {seat.facts.pid for seat in actors._seats if seat.facts is not None}
            psutil.Process(max(pids)).kill()
        seen[result.key] += 1
    assert len(seen) == 12 and set(seen.values()) == {1} and run.summary.ok and run.summary.drawn == 12
    (note,) = (text for text in run.summary.notes if text != "in plain torch, as asked")
    assert "ended, another takes its place" in note and note in told
    assert pixels(tmp_path / "out") == pixels(tmp_path / "whole")
    assert not list((tmp_path / "out" / OWN).glob("cluster-*"))
    assert not [name for name in os.environ if name.startswith("RAY_AUTH")]


class Deadly(str):
    """Whoever unpickles it ends."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def batch(number: int, prompt: str) -> BatchTask:
    job = Job(prompt, seed=number, steps=1, guidance=1.0, width=64, height=64)
    return BatchTask(number, None, (ImageTask(f"{number:064x}", job, number, f"{number}.png"),), (0,))


def test_of_two_batches_the_one_that_ends_its_actor_is_found(tmp_path):
    actors = Cluster(plain(tmp_path), "local", actors=1)
    try:
        actors.prepare(None, [])
        deadly, good = batch(1, Deadly("x")), batch(2, "a circle")
        actors.submit(good)
        actors.submit(deadly)
        first = [actors.events.get(timeout=120) for _ in range(2)]
        told = {event.batch.id: event for event in first}
        assert told[1] == Crashed(deadly, "")
        assert isinstance(told[2], Drawn) or told[2] == Crashed(good, "")
        actors.submit(deadly)
        actors.submit(good)
        second = {event.batch.id: event for event in (actors.events.get(timeout=120) for _ in range(2))}
        assert second[1].error.startswith("its worker on ") and second[1].error.endswith(" ended")
        assert isinstance(second[2], Drawn) and (tmp_path / "2.png").is_file()
    finally:
        actors.close(now=True)


def test_a_cluster_with_a_token_is_used_and_left_as_it_was(tmp_path, monkeypatch):
    token = secrets.token_hex(32)
    options = plain(tmp_path / "out")
    with Head(token) as head:
        with pytest.raises(SettingError, match=f"{head.address} is not used without token.*there is no token here"):
            Cluster(options, head.address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with pytest.raises(SettingError, match="has another token than this machine"):
            Cluster(options, head.address)
        (tmp_path / "token").write_text(token, encoding="utf-8")
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("RAY_ADDRESS", head.address)
        for seed in (1, 2):
            job = Job("a circle", seed=seed, steps=1, width=64, height=64)
            run = Run([job], options, workers=Cluster(options, "auto", actors=1))
            assert [result.ok for result in run] == [True]
    assert len(pixels(tmp_path / "out")) == 2


def test_a_cluster_without_a_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with Head(None) as head, pytest.raises(SettingError, match=r"takes commands without a token.*RAY_AUTH_MODE=token"):
        Cluster(plain(tmp_path), head.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SettingError, match="RAY_AUTH_MODE=disabled"):
        Cluster(plain(tmp_path), "10.0.0.1:6379")


@pytest.mark.parametrize(
    "address, changed, actors, text",
    [
        ("ray://10.0.0.1:10001", {}, None, "is not auto, local or host:port"),
        ("local", {"out": "memory://images"}, None, "is seen by one process alone"),
        ("local", {}, 0, "actors=0 is not between 1 and 1024"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, address, changed, actors, text):
    with pytest.raises(SettingError, match=text):
        Cluster(replace(plain(tmp_path), **changed), address, actors=actors)
    assert not list((tmp_path / OWN).glob("cluster-*"))


def test_an_actor_that_sees_another_folder_or_no_model_takes_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    mark = tmp_path / "mark"
    options = plain(tmp_path)
    assert "does not see the folder" in cluster._Actor(options, None, str(tmp_path), str(mark)).facts().fault
    mark.touch()
    assert cluster._Actor(options, None, str(tmp_path), str(mark)).facts().draws_with == "torch"
    nowhere = replace(options, model=str(tmp_path / "no model"))
    assert "no such file or folder" in cluster._Actor(nowhere, None, str(tmp_path), str(mark)).facts().fault


def test_without_ray_the_command_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r'Ray is not installed. Run: python -m pip install "sdaccel\[ray\]"'):
        Cluster(plain(tmp_path), "local")
