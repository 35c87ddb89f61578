"""The worker, on a tiny model through engines on the CPU: images are those drawn one by one, and say how they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors.torch import save_file

from sdaccel import metadata
from sdaccel.draw import draw, fit_pipeline, open_accelerated
from sdaccel.engine.store import Store
from sdaccel.errors import ModelError
from sdaccel.jobs.job import Job
from sdaccel.jobs.reading import read_jobs
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import Folder
from sdaccel.jobs.task import BatchTask, ImageTask, Options
from sdaccel.jobs.throughput import bench_batch
from sdaccel.jobs.worker import Worker
from sdaccel.lora import Lora
from sdaccel.models.checkpoint import open_checkpoint
from tests.conftest import Built
from tests.integrations.test_patches import lora

JOB = Job("a red circle", seed=3, steps=2, guidance=5.0, width=64, height=64)


def options(built: Built, out: Path, **changed) -> Options:
    return Options(
        **{"out": str(out), "model": str(built.model), "store": str(built.store), "build": "never", **changed}
    )


def batch(*jobs: Job) -> BatchTask:
    images = tuple(ImageTask(f"{i:064x}", job, i, f"{i}.png") for i, job in enumerate(jobs))
    return BatchTask(1, None, images, tuple(range(len(images))))


def drawn(built: Built, folder: Path, *jobs: Job, **changed) -> tuple[Run, list[np.ndarray]]:
    """The run, and its images in the order of the jobs."""
    run = Run(jobs, options(built, folder, **changed))
    results = sorted(run, key=lambda result: result.index)
    assert run.summary.ok, run.summary
    return run, [np.asarray(Image.open(folder / result.name)) for result in results]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "start.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    path = tmp_path / "mask.png"
    Image.fromarray(np.repeat([[0], [255]], [32, 32], axis=0).repeat(64, axis=1).astype(np.uint8)).save(path)
    return path


def test_images_are_those_that_the_pipeline_gives_by_itself(tiny_store, tmp_path):
    _, (image,) = drawn(tiny_store, tmp_path, JOB)
    request = JOB.request(64, 7.5)
    pipe, _ = open_accelerated(open_checkpoint(tiny_store.model), request, Store(tiny_store.store), build="never")
    assert np.array_equal(image, np.asarray(draw(pipe, request).images[0].image))


@pytest.mark.parametrize(("engines", "count"), [(True, 2), (False, 4)])
def test_an_image_does_not_depend_on_those_beside_it(tiny_store, tmp_path, engines, count):
    jobs = [replace(JOB, prompt=f"a circle {i}", seed=10 + i) for i in range(count)]
    worker = Worker(options(tiny_store, tmp_path, engines=engines), Folder(tmp_path))

    def latents(*jobs: Job) -> torch.Tensor:
        encoded = worker._encode(batch(*jobs), None)
        return encoded.model.latents(encoded).latents

    together = latents(*jobs)
    assert (together - torch.cat([latents(job) for job in jobs])).abs().max() <= 1e-4
    assert torch.equal(together, latents(*jobs))
    worker.close()


def test_engines_run_it_all_and_the_file_says_so(tiny_store, tmp_path):
    run, _ = drawn(tiny_store, tmp_path, JOB, replace(JOB, seed=4, prompt="two"))
    (first, _) = sorted(run.entries(), key=lambda entry: entry.image.index)
    facts = metadata.read(tmp_path / first.name)
    assert facts.key == first.image.key and facts.parameters is not None and facts.details is not None
    assert facts.parameters.prompt == "a red circle" and facts.parameters.facts["Seed"] == "3"
    reports = facts.details["reports"]
    assert not any(report["fallbacks"] for report in reports)
    assert {name for report in reports for name in report["components"]} == {"text_encoder", "unet", "vae_decoder"}
    assert facts.details["batch"]["position"] == 0
    assert [job["prompt"] for job in facts.details["batch"]["jobs"]] == ["a red circle", "two"]
    assert facts.details["settings"] == {"backend": "onnxruntime", "precision": "fp32"}


def test_kinds_schedulers_and_sizes_follow_each_other(tiny_store, tmp_path, picture, mask):
    jobs = [
        JOB,
        replace(JOB, scheduler="euler-a", seed=5),
        replace(JOB, init_image=picture, strength=0.9),
        replace(JOB, init_image=picture, strength=0.9, seed=8),
        replace(JOB, init_image=picture, mask=mask, strength=0.9),
        replace(JOB, width=128, height=64, guidance=0.0),
        replace(JOB, negative_prompt="blue"),
        replace(JOB, scheduler="ddim", seed=5, n=3),
    ]
    run, images = drawn(tiny_store, tmp_path / "out", *jobs)
    assert [image.shape[:2] for image in images[4:7]] == [(64, 64), (64, 128), (64, 64)]
    for place, job in ((1, jobs[1]), (3, jobs[3]), (4, jobs[4])):
        request = job.request(64, 7.5)
        pipe, _ = open_accelerated(open_checkpoint(tiny_store.model), request, Store(tiny_store.store), build="never")
        expected = np.asarray(draw(fit_pipeline(pipe, request) if place == 1 else pipe, request).images[0].image)
        assert np.abs(images[place].astype(int) - expected.astype(int)).max() <= 1
    assert len(run.entries()) == 10


def test_a_sidecar_draws_its_image_again(tiny_store, tmp_path):
    jobs = [replace(JOB, prompt=f"a circle {i}", seed=10 + i) for i in range(2)]
    run, images = drawn(tiny_store, tmp_path / "first", *jobs, format="jpg", quality=100)
    (side,) = (tmp_path / "first").glob("*circle 1.json")
    again = read_jobs(side)
    assert not again.faults and [job.position for job in again.jobs] == [1]
    _, (image,) = drawn(tiny_store, tmp_path / "second", *again.jobs, format="jpg", quality=100, model=None)
    assert np.array_equal(image, images[1])
    assert json.loads(side.read_text(encoding="utf-8"))["key"] == run.entries()[1].image.key


def test_an_image_file_draws_itself_again(tiny_store, tmp_path):
    jobs = [replace(JOB, prompt=f"a circle {i}", seed=10 + i) for i in range(2)]
    _, images = drawn(tiny_store, tmp_path / "first", *jobs)
    again = read_jobs(tmp_path / "first")
    _, copies = drawn(tiny_store, tmp_path / "second", *again.jobs)
    assert all(np.array_equal(*pair) for pair in zip(images, copies, strict=True))


def test_what_a_run_has_left_is_drawn_in_the_format_of_the_next(tiny_store, tmp_path):
    drawn(tiny_store, tmp_path, replace(JOB, n=2))
    next(tmp_path.glob("00001*.png")).unlink()
    run = Run([replace(JOB, n=2)], options(tiny_store, tmp_path, format="jpg"), resume=True)
    (result,) = run
    assert Image.open(tmp_path / result.name).format == "JPEG" and result.name.endswith(".jpg")
    assert run.entries()[0].name == result.name and not list(tmp_path.glob("00001*.png"))
    again = Run([replace(JOB, n=2)], options(tiny_store, tmp_path, format="jpg"), resume=True)
    assert not list(again) and again.summary.before == 2


def test_a_longer_prompt_than_clip_reads_is_told(tiny_store, tmp_path):
    run, _ = drawn(tiny_store, tmp_path, replace(JOB, prompt="circle " * 100), JOB, batch_size=2)
    ((note, images),) = run.summary.notes.items()
    assert "the prompt has" in note and "are read" in note and images == 1
    first, second = ((metadata.read(tmp_path / entry.name).details or {})["notes"] for entry in run.entries())
    assert first == [note] and second == []


def test_a_gpu_that_is_not_used_is_told(tiny_store, tmp_path, monkeypatch):
    monkeypatch.setattr("sdaccel.backends.base.gpu_left_out", lambda wanted, chosen: f"the GPU is not used: {wanted}.")
    run, _ = drawn(tiny_store, tmp_path, JOB)
    assert run.summary.notes == {"the GPU is not used: auto.": 1}


def test_loras_act_on_their_own_jobs_alone(tiny_store, tmp_path):
    unet = UNet2DConditionModel.from_pretrained(tiny_store.model, subfolder="unet")
    save_file(lora(unet, "unet", ("to_q", "to_v"), 1), str(tmp_path / "style.safetensors"))
    styled = replace(JOB, loras=(Lora(tmp_path / "style.safetensors", 1.5),))
    run, (plain, ink, again) = drawn(tiny_store, tmp_path / "out", JOB, styled, replace(JOB, prompt="a red circle "))
    assert np.abs(plain.astype(int) - ink).max() > 8
    assert np.array_equal(plain, again)
    told = []
    for entry in sorted(run.entries(), key=lambda entry: entry.image.index):
        details = metadata.read(tmp_path / "out" / entry.name).details or {}
        runs = [run for report in details["reports"] for run in report["components"].items()]
        told.append({(name, adapter) for name, run in runs for adapter in run["adapters"]})
        assert all(run["calls"] and not run["torch_calls"] for _, run in runs)
    assert told == [set(), {("unet", "style:1.5")}, set()]


def test_a_lora_of_the_wrong_shape_costs_its_own_jobs_alone(tiny_store, tmp_path):
    unet = UNet2DConditionModel.from_pretrained(tiny_store.model, subfolder="unet")
    state = lora(unet, "unet", ("to_q", "to_v"), 1)
    save_file(state, tmp_path / "style.safetensors")
    save_file({name: torch.zeros(3, 3) for name in state}, tmp_path / "wide.safetensors")
    styled, bad = (replace(JOB, loras=(Lora(tmp_path / f"{name}.safetensors"),)) for name in ("style", "wide"))
    worker = Worker(options(tiny_store, tmp_path), Folder(tmp_path))
    latents = []
    for job in (JOB, styled, bad, styled, JOB):
        try:
            encoded = worker._encode(batch(job), None)
            latents.append(encoded.model.latents(encoded).latents)
        except ModelError as error:
            assert "weights 3 × 3" in str(error) and "is (8, 8)" in str(error)
    worker.close()
    plain, first, second, last = latents
    assert torch.equal(plain, last) and torch.equal(first, second) and not torch.equal(plain, first)


def test_a_job_that_the_pipeline_refuses_is_set_aside(tiny_store, tmp_path):
    bad = replace(JOB, scheduler="lms", steps=1000)
    run = Run([JOB, bad, replace(JOB, seed=9)], options(tiny_store, tmp_path))
    results = list(run)
    assert sorted(result.ok for result in results) == [False, True, True]
    assert run.summary.failed == 1 and "LMSDiscreteScheduler" in next(iter(run.summary.errors))


def test_throughput_is_measured_against_engine_calls_alone(tiny_store, tmp_path):
    found = bench_batch(options(tiny_store, tmp_path), width=64, height=64, steps=1, batches=1, repeats=1)
    assert found.at_once == found.images == 2 and len(found.bare) == len(found.loop) == 1 and found.ratio > 0
