"""Each call on its own: profiles, fallbacks, unusable outputs, threads, broken stores."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import sdaccel
from sdaccel.engine.store import Store
from sdaccel.errors import BackendError, EngineBroken, ProfileError, SdaccelError, UnsupportedCall
from sdaccel.integrations.diffusers import Accelerated
from sdaccel.profile import ImageProfile, Range
from sdaccel.runtime import ExecutionContext, RunReport
from tests import pipelines
from tests.integrations.conftest import error, images, plain, reasons, same, through_engines
from tests.tolerances import LARGE_IMAGE_MAX_ABS, PIPELINE_MAX_ABS


def copied_store(folder: Path, part: str = "") -> Store:
    """A store of the test's own with what the shared one holds for sd1, or only its graphs."""
    shared = pipelines.shared_store()
    sdaccel.accelerate(pipelines.make("sd1"), store=shared)
    shutil.copytree(shared.root / part, folder / part, dirs_exist_ok=True)
    return Store(folder)


UP_TO_TWO = Range(1, 1, 2)


def square(side: int, batch: Range = UP_TO_TWO) -> ImageProfile:
    return ImageProfile(Range.of(side), Range.of(side), batch, Range.of(77))


# --- profiles


def test_a_size_outside_every_profile_is_torch_and_the_next_call_is_not(accelerated):
    pipe = accelerated("sd1")
    for size, inside in ((64, True), (160, False), (64, True)):
        found = images(pipe, "sd1", width=size, height=size)
        assert same(found, images(plain("sd1"), "sd1", width=size, height=size))
        assert through_engines(pipe) == inside
    images(pipe, "sd1", width=160, height=160)
    assert "height 20 is outside" in reasons(pipe)["unet"]
    assert pipe.sdaccel.last_report.fallbacks[0].calls == 2
    assert pipe.sdaccel.last_report.components["text_encoder"].torch_calls == 0


def test_without_fallback_torch_is_refused(accelerated):
    pipe = accelerated("sd1", fallback=False)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    with pytest.raises(ProfileError, match="height 20 is outside"):
        images(pipe, "sd1", width=160, height=160)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    with pytest.raises(UnsupportedCall, match="FreeU is on"):
        images(pipe, "sd1")
    pipe.disable_freeu()
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))


def test_three_profiles_in_one_engine_and_more_engines(tmp_path):
    """The containing profile is picked, whichever engine has it (G1)."""
    store = copied_store(tmp_path, "graphs")
    pipe = pipelines.make("sd1")
    sdaccel.accelerate(pipe, store=store, components=["unet"], profiles=[square(64), square(96), square(128)])
    assert [len(entry.engine.profiles) for entry in store.find_engines(component="unet")] == [3]
    sdaccel.accelerate(pipe, store=store, components=["unet"], profiles=[square(112), square(160)])
    assert len(pipe.sdaccel.engines()["unet"]) == 2
    for side, latents in ((64, 8), (96, 12), (128, 16), (112, 14), (160, 20)):
        found = images(pipe, "sd1", width=side, height=side)
        assert same(found, images(plain("sd1"), "sd1", width=side, height=side))
        report = pipe.sdaccel.last_report
        ((_, profiles),) = report.components["unet"].engines.items()
        assert profiles == [f"batch=1-2-4 height={latents} tokens=77 width={latents}"] and not report.fallbacks
    images(pipe, "sd1", width=64, height=96)
    assert "no profile" in reasons(pipe)["unet"]


def test_a_batch_of_four_is_four(tmp_path):
    """The engine records what was asked for, and guidance doubles it (G2)."""
    store = copied_store(tmp_path, "graphs")
    profile = square(64, Range.of(4))
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, profiles=[profile])
    for entry in store.list():
        assert entry.engine.image_profiles == (profile,)
        assert entry.engine.profiles == (profile.for_component(entry.engine.component),)
    options = {"num_images_per_prompt": 4, "guidance_scale": 7.5}
    found = images(pipe, "sd1", **options)
    assert found.shape[0] == 4 and through_engines(pipe), pipe.sdaccel.last_report
    assert same(found, images(plain("sd1"), "sd1", **options))
    images(pipe, "sd1", guidance_scale=0.0)
    assert reasons(pipe).keys() == {"vae_decoder"}, "a UNet profile always admits batch 1 (G19)"


@pytest.mark.parametrize(
    ("width", "height", "limit"),
    [
        (104, 72, PIPELINE_MAX_ABS),
        (72, 104, PIPELINE_MAX_ABS),
        (1000, 1000, LARGE_IMAGE_MAX_ABS),
        (832, 1216, LARGE_IMAGE_MAX_ABS),
    ],
)
def test_odd_latents(width, height, limit, accelerated):
    """9x13, 125x125, 104x152 latents (G3), in three levels."""
    sides = Range(64, 64, 1216)
    pipe = accelerated("sdxl", profiles=[ImageProfile(sides, sides, Range(1, 1, 1))])
    size = {"width": width, "height": height, "num_inference_steps": 1}
    assert error(images(pipe, "sdxl", **size), images(plain("sdxl"), "sdxl", **size)) <= limit
    assert through_engines(pipe), pipe.sdaccel.last_report


def test_nothing_is_built_that_was_not_asked_for(tmp_path):
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=Store(tmp_path / "none"), build="never")
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert reasons(pipe)["unet"] == "no engine of unet is in the store. Run: sdaccel build"
    assert set(reasons(pipe)) == {"unet", "vae_decoder", "text_encoder"}
    assert not (tmp_path / "none").exists()


def test_equal_weights_under_another_config_are_another_engine():
    """Heads change what the same weights compute."""
    store = pipelines.shared_store()
    sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["unet"])
    pipe = pipelines.make("sd1", attention_head_dim=4)
    expected = images(pipe, "sd1")
    assert error(expected, images(plain("sd1"), "sd1")) > 1e-3
    sdaccel.accelerate(pipe, store=store, build="never", components=["unet"])
    assert same(images(pipe, "sd1"), expected)
    assert "no engine" in reasons(pipe)["unet"]


def test_a_component_of_another_kind_is_reported():
    pipe = pipelines.make("sd1")
    pipe.vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4, num_encoder_blocks=(1,) * 4,
        num_decoder_blocks=(1,) * 4,
    ).eval()  # fmt: skip
    expected = images(pipe, "sd1")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    assert same(images(pipe, "sd1"), expected)
    assert reasons(pipe).keys() == {"vae"} and "AutoencoderTiny" in reasons(pipe)["vae"]


# --- unusable outputs


class Spoiled:
    """A loaded engine whose outputs are replaced."""

    def __init__(self, engine: Any, value: float):
        self.engine, self.value = engine, value

    def run(self, *args: Any) -> Any:
        return {name: torch.full_like(result, self.value) for name, result in self.engine.run(*args).items()}


def spoil(monkeypatch, component: str, value: float) -> None:
    load = ExecutionContext._load

    def spoiled(self, entry):
        engine = load(self, entry)
        return Spoiled(engine, value) if self.component == component else engine

    monkeypatch.setattr(ExecutionContext, "_load", spoiled)


@pytest.mark.parametrize("component", ["unet", "vae_decoder", "text_encoder"])
@pytest.mark.parametrize(
    "value, name", [(float("nan"), "NaN"), (float("inf"), "infinite values"), (0.0, "the constant 0")]
)
def test_an_engine_that_gives_rubbish_is_redone_by_torch(component, value, name, accelerated, monkeypatch):
    pipe = accelerated("sd1")
    spoil(monkeypatch, component, value)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert reasons(pipe) == {component: f"the output was {name}: computed again by torch in float32."}
    report = pipe.sdaccel.last_report
    assert report.ok and report.components[component].torch_calls == report.components[component].calls > 0


def test_a_repetition_that_does_not_fit_leaves_the_first_result():
    host = Accelerated(SimpleNamespace(), fallback=True)
    host.checks.faults = lambda: {"unet": "NaN"}

    def call():
        assert host.exact == {"unet"}
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    report = RunReport()
    assert host._repeated("first", call, lambda: None, report) == "first"
    assert not report.ok and "memory" in report.failed[0] and not host.exact


def test_rubbish_without_fallback_raises(accelerated, monkeypatch):
    pipe = accelerated("sd1", fallback=False)
    spoil(monkeypatch, "unet", float("nan"))
    with pytest.raises(BackendError, match="the output of unet was NaN"):
        images(pipe, "sd1")


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rubbish_from_torch_too_is_a_failure():
    pipe = pipelines.make("sd1")
    pipe.vae.decoder.conv_out.bias.data[0] = float("nan")
    sdaccel.accelerate(pipe, store=pipelines.shared_store(), components=["unet", "text_encoder"])
    sdaccel.accelerate(pipe, store=pipelines.shared_store(), build="never")
    images(pipe, "sd1")
    report = pipe.sdaccel.last_report
    assert not report.ok and report.failed == ["vae_decoder gives NaN, in torch and float32 too."]
    assert report.components["vae_decoder"].torch_calls == 1
    assert json.loads(json.dumps(report.to_json()))["ok"] is False and "failed: vae_decoder" in str(report)


# --- half precision VAEs (G8)


def overflowing(seed: int = 0) -> Any:
    """A pipeline whose VAE overflows in half precision and is fine in float32."""
    pipe = pipelines.make("sd1", seed=seed)
    for name, parameter in pipe.vae.decoder.named_parameters():
        if name == "conv_in.weight" or name == "conv_in.bias":
            parameter.data.mul_(3e4)
    return pipe


def test_a_vae_that_overflows_in_half_precision_decodes_in_float32():
    expected = images(overflowing().to(torch.float16).to(torch.float32), "sd1")
    half = overflowing().to(torch.float16)
    with torch.no_grad():
        assert not half.vae.decode(torch.randn(1, 4, 8, 8, dtype=torch.float16)).sample.isfinite().all()
    pipe = sdaccel.accelerate(half, store=pipelines.shared_store())
    found = images(pipe, "sd1")
    assert error(found, expected) < 0.02 and through_engines(pipe)
    assert "vae_decoder ran in float32, where half precision can overflow." in pipe.sdaccel.last_report.notes
    # Without an engine torch overflows, notices, and does it again in float32.
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 4, 32
    tiled = images(pipe, "sd1")
    report = pipe.sdaccel.last_report
    assert report.ok and report.components["vae_decoder"].torch_calls == 2
    assert pipe.vae.dtype == torch.float16 and tiled.std() > 0.01


def test_force_upcast_is_honoured(accelerated):
    pipe = pipelines.make("sdxl").to(torch.float16)
    expected = images(pipelines.make("sdxl").to(torch.float16).to(torch.float32), "sdxl")
    sdaccel.accelerate(pipe, store=pipelines.shared_store())
    seen = []
    decode = pipe.vae.decode

    def watched(latents, *args, **kwargs):
        seen.append((latents.dtype, pipe.vae.dtype))
        return decode(latents, *args, **kwargs)

    pipe.vae.decode = watched
    for _ in range(2):
        assert error(images(pipe, "sdxl"), expected) < 0.02
        assert through_engines(pipe), pipe.sdaccel.last_report
        assert pipe.vae.dtype == torch.float16
    assert seen == [(torch.float32, torch.float32)] * 2


def test_a_vae_that_wants_float32_stays_in_half_precision_for_its_engine(monkeypatch):
    expected = images(pipelines.make("sdxl").to(torch.float16).to(torch.float32), "sdxl")
    pipe = sdaccel.accelerate(pipelines.make("sdxl").to(torch.float16), store=pipelines.shared_store())
    weights = {name: value.data_ptr() for name, value in pipe.vae.named_parameters()}
    found = images(pipe, "sdxl")
    assert error(found, expected) < 0.02 and through_engines(pipe)
    assert weights == {name: value.data_ptr() for name, value in pipe.vae.named_parameters()}

    # Torch decodes what engines do not, in float32.
    seen, forward = [], type(pipe.vae.decoder).forward

    def patched(self, sample, *args, **kwargs):
        seen.append((sample.dtype, pipe.vae.dtype))
        return forward(self, sample, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe.vae.decoder), "forward", patched)
        assert error(images(pipe, "sdxl"), expected) < 0.02
    assert seen == [(torch.float32, torch.float32)] and pipe.vae.dtype == torch.float16
    assert "replaced" in reasons(pipe)["vae_decoder"]
    assert np.array_equal(images(pipe, "sdxl"), found)
    # Outside of a call it goes to float32 as ever.
    pipe.upcast_vae()
    assert pipe.vae.dtype == torch.float32


# --- threads (G11)


def in_threads(*jobs: Any) -> list[Any]:
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:  # noqa: BLE001 - the test shows it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def job(pipe: Any, seed: int, steps: int = 3, kind: str = "sd1") -> Any:
    def run():
        options = {"generator": torch.Generator().manual_seed(seed), "num_inference_steps": steps}
        return images(pipe, kind, **options), pipe.sdaccel.last_report

    return run


def test_four_threads_on_one_pipeline(accelerated):
    pipe = accelerated("sd1")
    serial = [job(pipe, seed, steps=2 + seed)()[0] for seed in range(4)]
    results = in_threads(*(job(pipe, seed, steps=2 + seed) for seed in range(4)))
    for seed, result in enumerate(results):
        assert not isinstance(result, BaseException), result
        image, report = result
        assert (image == serial[seed]).all()
        assert report.components["unet"].calls == 2 + seed and not report.fallbacks


def test_two_pipelines_in_two_threads(accelerated):
    one, other = accelerated("sd1"), accelerated("sd2")
    shared = sdaccel.accelerate(diffusers.AutoPipelineForImage2Image.from_pipe(one), store=pipelines.shared_store())
    shared.set_progress_bar_config(disable=True)
    jobs = [job(one, 1), job(other, 2, kind="sd2"), job(shared, 3, kind="img2img"), job(one, 4)]
    serial = [run() for run in jobs]
    for found, (image, report) in zip(in_threads(*jobs), serial, strict=True):
        assert not isinstance(found, BaseException), found
        assert (found[0] == image).all()
        assert {n: r.calls for n, r in found[1].components.items()} == {
            n: r.calls for n, r in report.components.items()
        }


# --- stores that break


@pytest.fixture
def own_store(tmp_path):
    """(store, pipeline) with the UNet's engine alone, in a store of the test's own."""
    store = copied_store(tmp_path)
    return store, sdaccel.accelerate(pipelines.make("sd1"), store=store)


def test_a_broken_engine_is_found_at_the_first_call(own_store):
    store, pipe = own_store
    for entry in store.find_engines(component="unet"):
        path = entry.path / sorted(entry.files)[0]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    for _ in range(2):
        assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
        assert reasons(pipe).keys() == {"unet"} and "model.onnx" in reasons(pipe)["unet"]


def test_a_store_that_is_deleted_under_a_pipeline(own_store):
    store, pipe = own_store
    options = {"output_type": "latent"}
    images(pipe, "sd1", **options)  # the decoder is not loaded yet
    shutil.rmtree(store.root)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert reasons(pipe).keys() == {"vae_decoder"} and "no engine" in reasons(pipe)["vae_decoder"]


def test_errors_of_accelerate_leave_the_pipeline_as_it_was(accelerated):
    pipe = accelerated("sd1")
    for wrong in ({"build": "maybe"}, {"backend": "none"}, {"components": ["text_encoder_2"]}):
        with pytest.raises(SdaccelError):
            sdaccel.accelerate(pipe, store=pipelines.shared_store(), **wrong)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1")) and through_engines(pipe)
    assert issubclass(EngineBroken, SdaccelError)
