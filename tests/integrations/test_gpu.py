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


def test_adapters_in_place(store):
    """LoRA over every layer: like torch; the same bits each time; CUDA graphs and the module's weights stay."""
    import peft

    pipe, other = sdaccel.accelerate(on_gpu("sdxl"), store=store), on_gpu("sdxl")
    base = image(pipe, "sdxl")
    layers = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "conv1", "conv2", "proj_in"]
    layers += ["downsamplers.0.conv", "upsamplers.0.conv", "time_emb_proj", "conv_in", "conv_out"]
    kept = {name: parameter.detach().clone() for name, parameter in pipe.unet.named_parameters()}
    for seed, name in enumerate("ab"):
        for each in (pipe, other):
            torch.manual_seed(seed)
            config = {"r": 4, "init_lora_weights": False, "target_modules": layers, "use_dora": name == "b"}
            each.unet.add_adapter(peft.LoraConfig(**config), name)
            each.unet.to("cuda", torch.float16)
    executor = next(iter(pipe.sdaccel.contexts["unet"]._loaded.values())).executor
    seen: dict[str, Any] = {}
    graphs = None
    for turn in range(6):
        name = "ab"[turn % 2]
        for each in (pipe, other):
            each.unet.set_adapters([name], [0.8])
        found = image(pipe, "sdxl")
        assert through_engines(pipe) and pipe.sdaccel.last_report.components["unet"].adapters == [name]
        if name not in seen:
            assert alike(found, image(other, "sdxl")) and not alike(found, base)
        assert np.array_equal(found, seen.setdefault(name, found))
        if turn >= 1:
            assert graphs in (None, [id(captured.main) for captured in executor._captured.values()])
            graphs = [id(captured.main) for captured in executor._captured.values()]
    for name, parameter in pipe.unet.named_parameters():
        plain = name.replace(".base_layer", "")
        assert "lora_" in name or torch.equal(parameter, kept[plain])
    pipe.unet.unload_lora()
    assert np.array_equal(image(pipe, "sdxl"), base) and through_engines(pipe)
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(1.1)
        other.unet.unload_lora()
        other.unet.conv_in.weight.mul_(1.1)
    assert alike(image(pipe, "sdxl"), image(other, "sdxl")) and through_engines(pipe)


def test_weights_edited_in_place_reach_the_engine(store):
    """The memory is one; and the sums of an upsampler's taps are made again."""
    pipe, other = sdaccel.accelerate(on_gpu("sd1"), store=store), on_gpu("sd1")
    before = image(pipe, "sd1")
    for each in (pipe, other):
        for name, parameter in each.unet.named_parameters():
            if "upsamplers" in name or "conv_out" in name:
                parameter.data.mul_(1.3)
    found = image(pipe, "sd1")
    assert through_engines(pipe), pipe.sdaccel.last_report
    assert alike(found, image(other, "sd1")) and not np.array_equal(found, before)


def test_textual_inversion_and_lora_of_the_text_encoder(store):
    pipe, other = sdaccel.accelerate(on_gpu("sd1"), store=store), on_gpu("sd1")
    vectors = torch.randn(5, 12, generator=torch.Generator().manual_seed(9))
    for each in (pipe, other):
        each.load_textual_inversion({"<mine>": vectors}, token="<mine>")
    found = image(pipe, "sd1", prompt="a <mine> circle")
    assert through_engines(pipe), pipe.sdaccel.last_report
    assert alike(found, image(other, "sd1", prompt="a <mine> circle"))
