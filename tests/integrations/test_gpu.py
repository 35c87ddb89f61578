"""Pipelines through CUDA engines: like torch, in threads and streams, without memory, without their files."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import sdaccel
from sdaccel.engine.store import Store
from sdaccel.errors import BackendError, OutOfMemory
from sdaccel.quality import psnr
from tests import pipelines
from tests.integrations.conftest import reasons, through_engines
from tests.tolerances import BF16_IMAGE_PSNR, FP16_IMAGE_PSNR

pytestmark = pytest.mark.gpu


def on_gpu(kind: str, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
    return pipelines.make(kind, **options).to("cuda", dtype)


def image(pipe: Any, kind: str, seed: int = 5, **changed: Any) -> np.ndarray:
    call = pipelines.inputs(kind, generator=torch.Generator().manual_seed(seed), **changed)
    return pipe(**call).images


def alike(found: np.ndarray, expected: np.ndarray) -> bool:
    assert expected.std() > 0.01, "an image this flat would hide errors"
    return psnr(found, expected, peak=1.0) >= FP16_IMAGE_PSNR


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@contextmanager
def memory_for(nbytes: int):
    """Lets this process have ``nbytes`` more than it has now."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + nbytes
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("sd1", torch.float16),
        ("sdxl", torch.float16),
        ("sd1", torch.bfloat16),
        ("controlnet", torch.float16),
        ("sdxl-controlnet", torch.float16),
    ],
)
def test_like_torch(store, kind, dtype):
    """All that SDXL has runs in float16 too: its VAE, which torch runs in float32."""
    expected = [image(on_gpu(kind, dtype), kind, seed) for seed in (5, 6)]
    pipe = sdaccel.accelerate(on_gpu(kind, dtype), store=store)
    for seed, wanted in zip((5, 6), expected, strict=True):
        found = image(pipe, kind, seed)
        assert through_engines(pipe), str(pipe.sdaccel.last_report)
        assert psnr(found, wanted, peak=1.0) >= (FP16_IMAGE_PSNR if dtype is torch.float16 else BF16_IMAGE_PSNR)
    precisions = {entry.engine.precision for context in pipe.sdaccel.contexts.values() for entry in context.engines}
    assert precisions == {"fp16" if dtype is torch.float16 else "bf16"}


def test_two_pipelines_in_two_threads_on_streams_of_their_own(store):
    """Their graphs share one pool of memory."""
    pipes = {kind: sdaccel.accelerate(on_gpu(kind), store=store) for kind in ("sd1", "sdxl")}
    expected = {(kind, seed): image(pipe, kind, seed) for kind, pipe in pipes.items() for seed in range(3)}
    wrong: list[Any] = []

    def work(kind: str) -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                for turn in range(9):
                    if not np.array_equal(image(pipes[kind], kind, turn % 3), expected[kind, turn % 3]):
                        wrong.append((kind, turn))
                    if not through_engines(pipes[kind]):
                        wrong.append(str(pipes[kind].sdaccel.last_report))
        except Exception as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(kind,)) for kind in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_a_build_without_memory_is_an_error_and_the_process_goes_on(tmp_path):
    pipe = on_gpu("sd1")
    expected = image(pipe, "sd1")
    with memory_for(1 << 20), pytest.raises((OutOfMemory, BackendError)):
        sdaccel.accelerate(pipe, store=Store(tmp_path), components=["unet"])
    assert np.array_equal(image(pipe, "sd1"), expected)
    sdaccel.accelerate(pipe, store=Store(tmp_path), components=["unet"])
    assert alike(image(pipe, "sd1"), expected) and not pipe.sdaccel.last_report.fallbacks


def test_a_call_without_memory_runs_in_torch_and_the_next_through_engines(store, monkeypatch):
    pipe = sdaccel.accelerate(on_gpu("sd1"), store=store)
    expected = image(pipe, "sd1")
    context = pipe.sdaccel.contexts["unet"]
    (engine,) = context._loaded.values()
    tries = []

    def full(*_: Any) -> Any:
        tries.append(1)
        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(engine.executor, "_replay", full)
    assert alike(image(pipe, "sd1"), expected)
    assert "out of GPU memory" in reasons(pipe)["unet"] and len(tries) == 1
    monkeypatch.undo()
    assert np.array_equal(image(pipe, "sd1"), expected) and through_engines(pipe)


def test_an_engine_deleted_while_it_is_in_use_runs_on(tmp_path):
    store = Store(tmp_path)
    pipe = sdaccel.accelerate(on_gpu("sd1"), store=store, components=["unet"])
    expected = image(pipe, "sd1")
    for entry in store.find_engines():
        store.remove(entry.key)
    assert np.array_equal(image(pipe, "sd1"), expected) and not pipe.sdaccel.last_report.fallbacks


def test_a_pipeline_that_goes_while_its_work_is_under_way(store):
    """What was enqueued ends as it should, whoever gets the memory next."""
    pipe = sdaccel.accelerate(on_gpu("sd1"), store=store, components=["unet"])
    latents = image(pipe, "sd1", output_type="latent").clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = image(pipe, "sd1", output_type="latent")
    sdaccel.restore(pipe)
    del pipe
    gc.collect()
    torch.cuda.empty_cache()
    rest = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del rest
    assert torch.equal(found, latents)


def test_moved_away_and_back(store):
    """Engines share the module's memory: they follow it."""
    pipe = sdaccel.accelerate(on_gpu("sd1"), store=store)
    expected = image(pipe, "sd1")
    pipe.to("cpu", torch.float32)
    image(pipe, "sd1")
    assert "on cpu" in reasons(pipe)["unet"]
    pipe.to("cuda", torch.float16)
    assert alike(image(pipe, "sd1"), expected) and through_engines(pipe)
