"""Batches on an NVIDIA GPU, where decoding has a stream and a thread of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sdaccel.draw import draw, open_accelerated
from sdaccel.engine.store import Store
from sdaccel.jobs.job import Job
from sdaccel.jobs.run import Run
from sdaccel.jobs.task import Options
from sdaccel.model_choice import demo_model, open_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
JOB = Job("a red circle on a blue background", seed=1, steps=8, guidance=5.0, width=256, height=256)


def images(folder, jobs: list[Job], store) -> tuple[Run, list[np.ndarray]]:
    run = Run(jobs, Options(str(folder), store=str(store), backend="cuda"))
    results = sorted(run, key=lambda result: result.index)
    assert run.summary.ok, run.summary
    return run, [np.asarray(Image.open(folder / result.name)) for result in results]


def test_equal_batches_are_equal_bit_for_bit_and_engines_draw_them_all(tmp_path):
    jobs = [
        replace(JOB, prompt=f"a red circle on a {colour} background", seed=9 * n, n=4)
        for n, colour in enumerate(("blue", "green", "white", "black", "yellow"))
    ]
    run, first = images(tmp_path / "first", jobs, tmp_path / "store")
    assert set(run.summary.ran) == {"text_encoder: engine", "unet: engine", "vae_decoder: engine"}
    assert not run.summary.notes
    _, second = images(tmp_path / "second", jobs, tmp_path / "store")
    assert len(first) == 20 and all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    request = replace(JOB, prompt=jobs[0].prompt, seed=0, n=4).request(256, 5.0)
    store = Store(tmp_path / "store")
    pipe, _ = open_accelerated(open_model(demo_model()), request, store, backend="cuda", build="never")
    expected = [np.asarray(drawn.image) for drawn in draw(pipe, request).images]
    for ours, theirs in zip(first, expected, strict=False):  # there the prompt is encoded once for all four
        assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 3
