"""What a build would need, against what builds then took."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sdaccel.backends.onnxruntime import OnnxRuntime
from sdaccel.engine.store import Store
from sdaccel.errors import ModelError, ProfileError
from sdaccel.models.demo import demo_model_path
from sdaccel.profile import OptimizationProfile, Range
from sdaccel.ui import preflight as module
from sdaccel.ui.preflight import _activations, duration_text, preflight
from sdaccel.ui.requests import BuildRequest


def of(tiny_store, **fields) -> BuildRequest:
    """What the store of the tiny model holds, unless ``fields`` say otherwise."""
    asked = {"resolutions": ("64-128",), "batches": ("1-2",), "tokens": ("77-154",)}
    return BuildRequest(model=str(tiny_store.model), **{**asked, **fields})


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_is_there_need_not_be_built(tiny_store):
    found = preflight(of(tiny_store), Store(tiny_store.store))
    assert all(part.exact for part in found.parts) and len(found.parts) == 4
    assert set(found.covered) == {entry.key for entry in Store(tiny_store.store).list()}
    assert (found.disk, found.seconds, found.memory, found.seconds_from) == (0, 0.0, 0, "")
    assert "Nothing to build" in "\n".join(found.lines())


def test_larger_profiles_cover_smaller_ones(tiny_store):
    store = Store(tiny_store.store)
    found = preflight(of(tiny_store, resolutions=("64", "96-128"), batches=("2",), tokens=("77",)), store)
    unet = found.parts[0]
    assert unet.covered_by is not None and not unet.exact
    assert len(found.covered) == 4
    text = "\n".join(found.lines())
    assert "hold all of these sizes already" in text and "To build: unet" in text
    larger = preflight(of(tiny_store, resolutions=("64-136",)), store)
    assert [part.component for part in larger.parts if part.covered_by] == ["text_encoder"]  # which has no size
    assert larger.covered == () and "already: text_encoder." in "\n".join(larger.lines())


def test_nothing_shared_is_counted_that_is_there(tiny_store):
    """An engine of other profiles adds its own few files: weights, graph and packed weights are in the store."""
    found = preflight(of(tiny_store, resolutions=("64-256",)), Store(tiny_store.store))
    assert 0 < found.disk < 4 * module._OWN["onnxruntime"]
    assert found.seconds_from == "past builds here"


def test_the_disk_for_a_new_store(tiny_store, tmp_path):
    """Against what the very same build took, headers and small graphs aside."""
    found = preflight(of(tiny_store), Store(tmp_path / "new"))
    parts = {part.component: part for part in found.parts}
    own = module._OWN["onnxruntime"]
    weights = sum(entry.manifest["nbytes"] for entry in Store(tiny_store.store).list("weights"))
    # Blocks of channels are filled up, which counts where a layer has but a few.
    assert found.disk - 4 * own == pytest.approx(weights, rel=0.25)
    assert parts["vae_decoder"].disk > parts["vae_encoder"].disk  # the weights of both count once
    assert found.disk == sum(part.disk for part in found.parts)
    assert found.seconds_from == "a table" and found.covered == ()
    assert not (tmp_path / "new").exists()


def test_the_disk_for_the_demo(tmp_path):
    """Weights in float32, and those of convolutions once more, in blocks."""
    found = preflight(BuildRequest(), Store(tmp_path))
    once = 2 * folder_bytes(demo_model_path())
    assert 1.3 * once < found.disk < 2.2 * once
    unet = preflight(BuildRequest(components=("unet",)), Store(tmp_path))
    assert unet.disk == found.parts[0].disk < found.disk


def test_another_precision_has_weights_of_its_own(tiny_store, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "precisions", ("fp32", "fp16"))
    store = Store(tiny_store.store)
    half = preflight(of(tiny_store, precision="fp16"), store)
    assert half.covered == () and {part.precision for part in half.parts} == {"fp16"}
    empty = preflight(of(tiny_store), Store(store.root / "none"))
    own = 4 * module._OWN["onnxruntime"]
    assert half.disk - own == pytest.approx((empty.disk - own) / 2, rel=0.01)


def test_a_checkpoint_that_changed_is_another(tiny_store, tmp_path, monkeypatch):
    model = tmp_path / "Modell"
    shutil.copytree(tiny_store.model, model)
    moved = preflight(replace(of(tiny_store), model=str(model)), Store(tiny_store.store))
    assert moved.covered == ()  # of another path: not known before it is read
    assert moved.seconds_from == "past builds here"  # builds of such components, though
    changed_at = module._changed
    monkeypatch.setattr(module, "_changed", lambda file: time.time() if "unet" in str(file) else changed_at(file))
    changed = preflight(of(tiny_store), Store(tiny_store.store))
    assert [part.component for part in changed.parts if not part.exact] == ["unet"]


@pytest.mark.skipif(os.name == "nt", reason="Windows does not note when a file was moved")
def test_an_old_file_moved_to_its_place_has_changed(tmp_path):
    file = tmp_path / "old"
    file.write_bytes(b"x")
    os.utime(file, (1e9, 1e9))
    before = module._changed(file)
    time.sleep(0.05)
    assert module._changed(file.rename(tmp_path / "new")) > before > 1.7e9


def test_stale_engines_are_told(tiny_store, monkeypatch):
    from sdaccel import listing

    device, versions = OnnxRuntime().device(), {**OnnxRuntime().versions(), "onnxruntime": "99.0"}
    monkeypatch.setattr(listing, "_backend_now", lambda name: (device, versions))
    found = preflight(of(tiny_store), Store(tiny_store.store))
    assert found.covered == ()
    stale = [text for text in found.warnings if "is stale: built with onnxruntime" in text and "(now 99.0)" in text]
    assert len(stale) == 4, found.warnings


def test_the_header_alone_is_read(tiny_store, monkeypatch):
    from sdaccel.models.tensors import TensorRef

    def read(*_):
        raise AssertionError("weights are read")

    monkeypatch.setattr(TensorRef, "read", read)
    monkeypatch.setattr(TensorRef, "chunks", read)
    start = time.monotonic()
    preflight(of(tiny_store), Store(tiny_store.store))
    assert time.monotonic() - start < 2.0


def test_little_room_is_told(tiny_store, tmp_path, monkeypatch):
    import psutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    found = preflight(of(tiny_store), Store(tmp_path))
    assert found.disk_free == 1000
    text = "\n".join(found.warnings)
    assert "too little disk" in text and "SDACCEL_STORE" in text and "of main memory" in text
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=int(found.disk + 1e9)))
    assert "about 1.0 GB of disk will be left." in preflight(of(tiny_store), Store(tmp_path)).warnings


def test_without_a_gpu_it_says_so(tiny_store):
    found = preflight(of(tiny_store), Store(tiny_store.store))
    assert found.vram is None and found.device.startswith("the CPU")
    assert any("no GPU" in text and "CUDA" in text for text in found.warnings)
    chosen = preflight(of(tiny_store, backend="onnxruntime"), Store(tiny_store.store))
    assert not any("GPU" in text for text in chosen.warnings)


class Pretended(OnnxRuntime):
    """A GPU with little memory."""

    name = "pretended"
    precisions = ("fp16",)
    tunes = True

    def device(self) -> dict[str, str]:
        return {"kind": "cuda", "name": "Pretended GPU"}

    def device_type(self) -> str:
        return "cuda"


@pytest.fixture
def gpu(monkeypatch):
    import torch

    from sdaccel.backends import base

    monkeypatch.setattr(base, "backends", lambda: {"pretended": Pretended})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))


def test_gpu_memory(gpu, tmp_path):
    small, large = (
        preflight(BuildRequest(resolutions=(side,), batches=("1",)), Store(tmp_path)) for side in ("256", "2048")
    )
    assert small.device == "Pretended GPU" and small.vram is not None and large.vram is not None
    weights = folder_bytes(demo_model_path())
    assert module._GPU_BASE + 0.9 * weights < small.vram < module._GPU_BASE + 2 * weights + 1e8
    assert large.vram > small.vram
    assert not any("the GPU has" in text for text in small.warnings)
    huge = preflight(BuildRequest(resolutions=("4096",), batches=("4",)), Store(tmp_path))
    assert any("the GPU has 2.1 GB. Choose smaller sizes" in text for text in huge.warnings)
    assert any("GPU memory at the largest size" in line for line in huge.lines())


def test_activations_grow_with_the_shape():
    sd = {"block_out_channels": [320, 640, 1280, 1280], "layers_per_block": 2}
    vae = {"block_out_channels": [128, 256, 512, 512]}

    def profile(batch: int, side: int) -> OptimizationProfile:
        one = Range(side, side, side)
        return OptimizationProfile.make(
            batch=Range(batch, batch, batch), height=one, width=one, tokens=Range(1, 77, 77)
        )

    unet = _activations("unet", sd, profile(2, 64))
    assert 1e7 < unet < 1e8
    assert _activations("unet", sd, profile(4, 64)) == pytest.approx(2 * unet)
    assert _activations("unet", sd, profile(2, 128)) == pytest.approx(4 * unet)
    decoder = _activations("vae_decoder", vae, profile(1, 128))  # 1024 x 1024 pixels
    assert decoder == 2 * (128 + 256) * 1024 * 1024
    assert _activations("vae_encoder", vae, profile(1, 1024)) < decoder
    assert _activations("text_encoder", {"hidden_size": 768}, profile(2, 8)) < unet


def test_past_builds_count_by_their_size(tiny_store, tmp_path):
    """The demo's UNet has many times the weights of the tiny one: it takes longer by as much, and its own export."""
    demo = preflight(BuildRequest(components=("unet",)), Store(tiny_store.store))
    tiny = preflight(of(tiny_store, components=("unet",), resolutions=("64-256",)), Store(tiny_store.store))
    assert demo.seconds_from == tiny.seconds_from == "past builds here"
    assert demo.seconds > tiny.seconds + module._EXPORT["unet"]


def test_wrong_requests_raise(tmp_path):
    with pytest.raises(ProfileError, match="Try 96"):
        preflight(BuildRequest(resolutions=("100",)), Store(tmp_path))
    with pytest.raises(ModelError, match="no such file or folder"):
        preflight(BuildRequest(model=str(tmp_path / "nichts")), Store(tmp_path))


def test_durations_in_words():
    assert [duration_text(seconds) for seconds in (0.2, 40, 200, 4800)] == ["1 s", "40 s", "3 min", "1 h 20 min"]


def test_what_the_first_build_installs_is_told(tiny_store, monkeypatch):
    from sdaccel.ui import builder_python

    request, store = BuildRequest(model=str(tiny_store.model), resolutions=("64",)), Store(tiny_store.store)
    assert not any("lacks" in text for text in preflight(request, store).warnings)
    monkeypatch.setattr(builder_python, "lacking", lambda: ["diffusers", "transformers 4.30.2"])
    (told,) = [text for text in preflight(request, store).warnings if "lacks" in text]
    assert "diffusers, transformers 4.30.2" in told and str(builder_python.folder(store.root)) in told
    assert not any("lacks" in text for text in preflight(request, store, "/own/python").warnings)
