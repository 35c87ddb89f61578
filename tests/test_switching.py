"""Another checkpoint of the same architecture: its weights are stored, and all else is that of the first."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

import sdaccel
from sdaccel.backends import base
from sdaccel.backends.cuda.plan import PLAN, ExecutionPlan
from sdaccel.builder import BuilderConfig, build_engines, buildable_components
from sdaccel.engine.entry import MANIFESTS
from sdaccel.engine.store import Store
from sdaccel.export import to_onnx
from sdaccel.export.components import source_of
from sdaccel.models.checkpoint import open_checkpoint
from sdaccel.profile import ImageProfile, Range
from tests import pipelines
from tests.backends.cuda.test_backend import OnCpu
from tests.tolerances import PIPELINE_MAX_ABS

CALL = {"num_inference_steps": 2, "output_type": "np", "height": 64, "width": 64}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(base, "backends", lambda: {"cuda": OnCpu})


def with_graphs(folder):
    """A store without engines."""
    checkpoint = open_checkpoint(pipelines.make("sd1"))
    shared = pipelines.shared_store()
    for component in buildable_components(checkpoint):
        to_onnx.publish_graph(shared, component, checkpoint.components[source_of(component)].config)
    shutil.copytree(shared.root / "graphs", folder / "graphs")
    return Store(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    torch.set_num_threads(1)
    return with_graphs(tmp_path_factory.mktemp("store"))


@pytest.fixture
def work(monkeypatch):
    """What is exported and built from here on."""
    done = []
    export, build = to_onnx.export_graph, OnCpu._build
    monkeypatch.setattr(to_onnx, "export_graph", lambda name, *a, **k: (done.append(name), export(name, *a, **k))[1])
    monkeypatch.setattr(OnCpu, "_build", lambda self, job, *a: (done.append(job.component), build(self, job, *a))[1])
    return done


def image(pipe):
    return pipe(pipelines.PROMPT, generator=torch.Generator().manual_seed(3), **CALL).images


def build(store, seed, **options):
    return build_engines(open_checkpoint(pipelines.make("sd1", seed=seed)), BuilderConfig(("unet",), **options), store)


def test_a_second_checkpoint_takes_over_all_but_its_weights(on_cpu, store, work):
    first, second = (pipelines.make("sd1", seed=seed) for seed in (0, 100))
    expected = [image(pipe) for pipe in (first, second)]
    assert abs(expected[0] - expected[1]).max() > 0.05
    sdaccel.accelerate(first, store=store)
    assert sorted(work) == ["text_encoder", "unet", "vae_decoder", "vae_encoder"]
    sdaccel.accelerate(second, store=store)
    assert len(work) == 4
    for _ in range(2):
        for pipe, reference in zip((first, second), expected, strict=True):
            assert abs(image(pipe) - reference).max() <= PIPELINE_MAX_ABS
            assert not pipe.sdaccel.last_report.fallbacks
    for component in first.sdaccel.contexts:
        old, new = (pipe.sdaccel.contexts[component].engines[0].engine for pipe in (first, second))
        assert new.details["adopted_from"] == old.key and "adopted_from" not in old.details
        assert len(new.details["check"]["shapes"]) == 1 and new.details["profiles"] == old.details["profiles"]
        assert new.weights != old.weights and not {*new.weights_entries} & {*old.weights_entries}


def test_an_adopted_engine_is_the_one_that_would_have_been_built(on_cpu, store, work, tmp_path):
    build(store, 0)
    (adopted,) = build(store, 200)
    del work[:]
    (built,) = build(with_graphs(tmp_path), 200)
    assert adopted.key == built.key and work == ["unet"]
    assert {*adopted.files} == {*built.files} and PLAN in built.files
    assert adopted.files[PLAN] == built.files[PLAN] and adopted.engine.weights_entries == built.engine.weights_entries


def test_places_are_found_by_name_whatever_else_an_entry_holds(on_cpu, store):
    """A checkpoint may bring weights that no network uses, so that all others lie elsewhere in its file."""
    build(store, 0)
    checkpoint = open_checkpoint(pipelines.make("sd1", seed=300))
    unet = checkpoint.components["unet"]
    extra = replace(unet.tensors["conv_in.weight"], name="a_note")
    unet.tensors["a_note"] = extra
    (entry,) = build_engines(checkpoint, BuilderConfig(("unet",)), store)
    assert "adopted_from" in entry.engine.details
    assert entry.engine.details["check"]["largest_error"] < 1e-4


@pytest.mark.parametrize(
    "options", [{"profiles": (ImageProfile(Range.of(64), Range.of(64), Range(1, 1, 2)),)}, {"timing_cache": True}]
)
def test_what_differs_in_more_is_built(on_cpu, store, work, tmp_path, options):
    build(store, 0)
    if "timing_cache" in options:
        options = {"timing_cache": tmp_path / "times.json"}
    (entry,) = build(store, 400, **options)
    assert work[-1:] == ["unet"] and "adopted_from" not in entry.engine.details


def test_a_weight_of_another_shape_is_not_adopted(on_cpu, store, monkeypatch, tmp_path):
    (first,) = build(store, 0)
    plan = ExecutionPlan.read(first.path)
    place = plan.weights["conv_in.weight"]
    monkeypatch.setattr(
        ExecutionPlan,
        "read",
        lambda folder: replace(plan, weights={"conv_in.weight": replace(place, shape=(*place.shape[:-1], 1))}),
    )
    job = base.BuildJob("unet", None, "", store.get("weights", place.entry), "fp32", (), store, print)
    assert OnCpu().adopt(first, job, tmp_path) is None and not list(tmp_path.iterdir())


def test_a_damaged_engine_is_not_adopted(on_cpu, tmp_path, work):
    store = with_graphs(tmp_path)
    (first,) = build(store, 0)
    path = first.path / "tactics.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document, indent=1).replace("torch", "toich"), encoding="utf-8")
    assert MANIFESTS["engines"] not in first.files
    del work[:]
    (second,) = build(store, 1)
    assert work == ["unet"] and "adopted_from" not in second.engine.details


def test_onnx_runtime_exports_no_second_graph(monkeypatch):
    store = pipelines.shared_store()
    build(store, 0, backend="onnxruntime")
    monkeypatch.setattr(to_onnx, "export_graph", None)
    (second,) = build(store, 500, backend="onnxruntime")
    assert second.engine.details["check"]["largest_error"] < 1e-4
