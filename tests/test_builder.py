"""One orchestrator: what is there is not built again, what differs in anything is."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

import sdaccel
from sdaccel import draw
from sdaccel.backends.base import pick_backend
from sdaccel.backends.onnxruntime import OnnxRuntime
from sdaccel.builder import BuilderConfig, build_engines, buildable_components, engines_here
from sdaccel.engine.store import Store
from sdaccel.errors import BackendError, Cancelled, ModelError, SettingError, StoreError
from sdaccel.export import to_onnx
from sdaccel.models.checkpoint import open_checkpoint
from sdaccel.profile import ImageProfile, Range
from tests import pipelines


@pytest.fixture(scope="module")
def store():
    torch.set_num_threads(1)
    return pipelines.shared_store()


def build(store, **options):
    pipe = options.pop("pipe", None) or pipelines.make("sd1", seed=options.pop("seed", 0))
    return sdaccel.build(pipe, store=store, **{"components": ["text_encoder"], **options})


def test_a_build_is_found_again_and_reports_its_stages(store):
    seen = []
    (first,) = build(store, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert seen[-1] == ("done", 1.0)
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    (again,) = build(store)
    assert again == first
    engine = first.engine
    assert engine.component == "text_encoder" and engine.precision == "fp32" and engine.backend == "onnxruntime"
    assert engine.details["check"]["largest_error"] < 1e-4 and engine.details["check"]["shapes"]
    assert engine.origin.startswith("pipeline StableDiffusion")


def test_whatever_differs_makes_another_engine(store):
    (first,) = build(store)
    (other_weights,) = build(store, seed=1)
    pipe = pipelines.make("sd1")
    pipe.text_encoder.final_layer_norm.bias.data[-1] += 1e-6
    (one_value,) = build(store, pipe=pipe)
    (other_batch,) = build(store, profiles=[ImageProfile(Range.of(64), Range.of(64), Range(1, 1, 8))])
    entries = (first, other_weights, one_value, other_batch)
    assert len({entry.key for entry in entries}) == 4
    assert len({entry.engine.architecture for entry in entries}) == 1
    assert first.engine.weights == other_batch.engine.weights
    assert len({entry.engine.weights for entry in entries}) == 3


def test_components(store):
    checkpoint = open_checkpoint(pipelines.make("sd1"))
    assert buildable_components(checkpoint) == ["unet", "vae_decoder", "vae_encoder", "text_encoder"]
    assert buildable_components(checkpoint, ["text_encoder", "unet"]) == ["unet", "text_encoder"]
    with pytest.raises(ModelError, match="no weights for text_encoder_2: it has unet, vae, text_encoder"):
        build_engines(checkpoint, BuilderConfig(("text_encoder_2",)), store)


@pytest.mark.parametrize("wrong", [{"precision": "int3"}, {"backend": "abacus"}])
def test_settings_that_do_not_exist(store, wrong):
    with pytest.raises(SettingError):
        build(store, **wrong)


def test_a_cancelled_build_leaves_nothing(store, tmp_path):
    build(store)
    shutil.copytree(store.root / "graphs", tmp_path / "graphs")
    store = Store(tmp_path)

    def cancel(stage: str, fraction: float) -> None:
        if "storing" in stage or "comparing" in stage:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        build(store, progress=cancel)
    assert store.list() == []
    assert not list((store.root / "tmp").iterdir())
    assert build(store) == store.list()


@pytest.mark.parametrize("when", ["fusing", "comparing"])
def test_weights_removed_during_a_build_are_named(store, tmp_path, when):
    build(store)
    shutil.copytree(store.root / "graphs", tmp_path / "graphs")
    store = Store(tmp_path)
    (first,) = build(store)

    def remove(stage: str, fraction: float) -> None:
        if when in stage and store.list():
            store.remove(first.key)

    with pytest.raises(StoreError, match=r"were removed from .* while an engine was built"):
        build(store, profiles=[ImageProfile(Range.of(64), Range.of(64), Range(1, 1, 8))], progress=remove)
    assert store.list() == [] and store.broken() == []


def test_a_disk_that_onnx_runtime_fills_is_named(tmp_path, monkeypatch):
    def session(self, model, options):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        raise BackendError("Failed to write external initializers to file")

    monkeypatch.setattr(OnnxRuntime, "_session", session)
    with pytest.raises(StoreError, match=r"the disk is full: .*optimized\.data needs [\d,]+ bytes and 100 are free"):
        build(Store(tmp_path))
    assert Store(tmp_path).list() == []


def test_engines_of_another_exporter_are_not_those_of_today(store, monkeypatch):
    (entry,) = build(store)
    checkpoint = open_checkpoint(pipelines.make("sd1"))
    backend = pick_backend("onnxruntime")
    assert entry in engines_here(checkpoint, "text_encoder", backend, store)
    assert draw._missing(checkpoint, ["text_encoder"], store, "onnxruntime", 64, 64) == []
    monkeypatch.setattr(to_onnx, "EXPORT_FORMAT", 0)
    assert engines_here(checkpoint, "text_encoder", backend, store) == []
    assert draw._missing(checkpoint, ["text_encoder"], store, "onnxruntime", 64, 64) == ["text_encoder"]
