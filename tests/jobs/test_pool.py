"""Workers in processes of their own: what they draw, and what is left when one of them ends."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sdaccel.errors import SettingError
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Processes, _places
from sdaccel.jobs.run import Run
from sdaccel.jobs.task import Options

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
    assert len(list((tmp_path / "out").glob("*.png"))) == 16
    whole = Run(jobs, Options(str(tmp_path / "whole"), **usual))
    assert len(list(whole)) == 16
    for path in (tmp_path / "whole").glob("*.png"):
        ours, theirs = (
            np.asarray(Image.open(folder / path.name)).astype(int) for folder in (path.parent, tmp_path / "out")
        )
        assert np.abs(ours - theirs).max() <= 1  # of the batch that was lost, images are drawn one by one


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


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_workers_has_bounds(tmp_path, count):
    with pytest.raises(SettingError, match="not between 1 and 64"):
        Run([JOB], Options(str(tmp_path)), workers=count)
