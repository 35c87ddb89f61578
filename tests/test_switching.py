"""Another checkpoint of the same architecture: its weights are stored, and all else is that of the first."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

import sdaccel
from sdaccel import cli, draw, model_cache
from sdaccel.backends import base
from sdaccel.backends.cuda.plan import PLAN, ExecutionPlan
from sdaccel.backends.onnxruntime import WEIGHTS, OnnxRuntime
from sdaccel.builder import BuilderConfig, build_engines, buildable_components, engines_here
from sdaccel.engine.entry import MANIFESTS
from sdaccel.engine.store import Store
from sdaccel.export import to_onnx
from sdaccel.export.components import source_of
from sdaccel.jobs import worker
from sdaccel.jobs.job import Job
from sdaccel.jobs.storage import Folder
from sdaccel.jobs.task import BatchTask, ImageTask, Options
from sdaccel.listing import listed
from sdaccel.models.checkpoint import open_checkpoint
from sdaccel.profile import ImageProfile, Range
from sdaccel.quality import psnr
from sdaccel.ui.studio import Studio
from tests import pipelines
from tests.backends.cuda.test_backend import OnCpu
from tests.tolerances import FP16_IMAGE_PSNR, PIPELINE_MAX_ABS

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


def test_an_adopted_engine_says_so(on_cpu, store, capsys):
    (first,) = build(store, 0)
    (second,) = build(store, 600)
    assert [listed(store, entry).to_json()["adopted_from"] for entry in (first, second)] == [None, first.key]
    cli._print_engine(listed(store, second))
    assert f" s, adopted from {first.key[:12]}" in capsys.readouterr().out


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


@pytest.mark.parametrize("component", ["unet", "vae_decoder", "text_encoder"])
def test_onnx_runtime_takes_a_plan_over(component, tmp_path, monkeypatch):
    """Weights are laid out in blocks as its optimizer does, which is not asked again."""
    store, config = with_graphs(tmp_path / "a"), BuilderConfig((component,), backend="onnxruntime")
    first, second = (open_checkpoint(pipelines.make("sd1", seed=seed)) for seed in (0, 500))
    (donor,) = build_engines(first, config, store)
    (built,) = build_engines(second, config, with_graphs(tmp_path / "b"))
    monkeypatch.setattr(to_onnx, "export_graph", None)
    monkeypatch.setattr(OnnxRuntime, "build", None)
    (adopted,) = build_engines(second, config, store)
    assert adopted.engine.details["adopted_from"] == donor.key and adopted.engine.details["ops"]
    assert adopted.files[WEIGHTS] == built.files[WEIGHTS]
    assert adopted.engine.weights_entries == built.engine.weights_entries
    plans = [onnx.load(str(entry.file("model.onnx")), load_external_data=False) for entry in (adopted, built)]
    assert plans[0].graph.initializer == plans[1].graph.initializer
    assert adopted.engine.details["check"]["largest_error"] < 1e-4
    again = build_engines(first, config, store)
    assert again == [donor]


@pytest.mark.parametrize("damage", ["removed", "cut off", "changed"])
def test_an_engine_whose_weights_are_damaged_is_no_example(damage, tmp_path):
    store, config = with_graphs(tmp_path), BuilderConfig(("vae_decoder",), backend="onnxruntime")
    (donor,) = build_engines(open_checkpoint(pipelines.make("sd1")), config, store)
    file = store.get("weights", donor.engine.weights_entries[0]).file("weights.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes({"removed": b"", "cut off": data[: len(data) // 2], "changed": data}[damage])
    if damage == "removed":
        file.unlink()
    (entry,) = build_engines(open_checkpoint(pipelines.make("sd1", seed=500)), config, store)
    assert "adopted_from" not in entry.engine.details


def test_weights_that_hide_their_layout_are_not_taken_for_an_example(tmp_path):
    pipe, store = pipelines.make("sd1"), with_graphs(tmp_path)
    pipe.unet.conv_in.weight.data.zero_()
    config = BuilderConfig(("unet",), backend="onnxruntime")
    for checkpoint in (pipe, pipelines.make("sd1", seed=1)):
        (entry,) = build_engines(open_checkpoint(checkpoint), config, store)
        assert "adopted_from" not in entry.engine.details


def test_an_adopted_engine_that_is_wrong_is_built(on_cpu, tmp_path, monkeypatch, caplog):
    store = with_graphs(tmp_path)
    build(store, 0)
    plain = OnCpu.adopt

    def adopt(self, engine, job, folder):
        built = plain(self, engine, job, folder)
        plan = ExecutionPlan.read(folder)
        name, other = "conv_norm_out.weight", "conv_norm_out.bias"
        swapped = {name: plan.weights[other], other: plan.weights[name]}
        replace(plan, weights={**plan.weights, **swapped}).save(folder)
        return built

    monkeypatch.setattr(OnCpu, "adopt", adopt)
    (second,) = build(store, 1)
    assert "adopted_from" not in second.engine.details and len(second.engine.details["check"]["shapes"]) > 1
    assert "what was adopted is wrong" in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_from_checkpoint_to_checkpoint_and_back(tmp_path):
    store = with_graphs(tmp_path)
    pipes = [pipelines.make("sd1", seed=seed).to(dtype=torch.float16) for seed in (0, 100)]
    hosts = [model_cache.HostWeights(pipe) for pipe in pipes]
    gc.collect()
    free = torch.cuda.memory_allocated()
    expected = []
    for turn in range(4):
        pipe, host = pipes[turn % 2], hosts[turn % 2]
        host.move("cuda")
        expected += [image(pipe)] if turn < 2 else []
        sdaccel.accelerate(pipe, store=store)
        assert psnr(image(pipe), expected[turn % 2], peak=1.0) >= FP16_IMAGE_PSNR
        assert not pipe.sdaccel.last_report.fallbacks
        adopted = "adopted_from" in pipe.sdaccel.contexts["unet"].engines[0].engine.details
        assert adopted == (turn % 2 == 1)
        sdaccel.restore(pipe)
        host.leave()
        gc.collect()
        assert torch.cuda.memory_allocated() - free < host.nbytes / 2
    assert psnr(expected[0], expected[1], peak=1.0) < FP16_IMAGE_PSNR - 10


# ---- programs that go from model to model


@pytest.fixture(scope="module")
def two(tiny_store, tmp_path_factory):
    """Two models of one architecture, and a store with the engines of both."""
    folder = tmp_path_factory.mktemp("two models")
    pipe = StableDiffusionPipeline.from_pretrained(tiny_store.model)
    for module in (pipe.unet, pipe.text_encoder):
        pipelines.scaled(module, 9)
    pipe.save_pretrained(folder / "second")
    shutil.copytree(tiny_store.store, folder / "store")
    profiles = Store(tiny_store.store).list()[0].engine.image_profiles
    sdaccel.build(folder / "second", profiles=profiles, store=Store(folder / "store"), check=False)
    return SimpleNamespace(models=[str(tiny_store.model), str(folder / "second")], store=folder / "store")


@pytest.fixture
def opened(monkeypatch):
    """The models whose weights are read from here on."""
    found, plain = [], worker.open_on_host
    monkeypatch.setattr(worker, "open_on_host", lambda it, *rest: (found.append(it.origin), plain(it, *rest))[1])
    return found


class Painter:
    """A worker that draws one image at a time."""

    def __init__(self, two, out, **options):
        out.mkdir(exist_ok=True)
        self.worker = worker.Worker(
            Options(**{"out": str(out), "model": two.models[0], "store": str(two.store), "build": "never", **options}),
            Folder(out),
        )
        self.out, self.count = out, 0

    def draw(self, model, **changed):
        self.count += 1
        job = replace(Job("a red circle", seed=3, steps=2, guidance=5.0, width=64, height=64, model=model), **changed)
        batch = BatchTask(self.count, model, (ImageTask(f"{self.count:064x}", job, 1, f"{self.count}.png"),), (0,))
        (result,) = self.worker.draw(batch).result()
        ran = {*result.engines.values()}
        assert result.ok and ran == {"engine"}, result
        return np.asarray(Image.open(self.out / result.name))


def test_a_batch_that_alternates_reads_each_model_once(two, tmp_path, opened):
    expected = []
    for index, model in enumerate(two.models):
        alone = Painter(two, tmp_path / f"alone {index}")
        expected.append(alone.draw(model))
        alone.worker.close()
    assert abs(expected[0].astype(int) - expected[1]).max() > 8
    del opened[:]
    painter = Painter(two, tmp_path)
    for turn in range(6):
        assert np.array_equal(painter.draw(two.models[turn % 2]), expected[turn % 2])
    assert opened == two.models
    kept = weakref.ref(painter.worker._kept._models[two.models[0]][0])
    painter.worker.close()
    del painter
    gc.collect()
    assert kept() is None


def test_what_goes_beyond_the_budget_is_read_again(two, tmp_path, opened, monkeypatch):
    monkeypatch.setenv("SDACCEL_MODEL_CACHE", "0")
    painter = Painter(two, tmp_path)
    first = painter.draw(two.models[0])
    gone = weakref.ref(painter.worker._model)
    painter.draw(two.models[1])
    assert gone() is None and painter.worker._kept.nbytes == 0
    assert np.array_equal(painter.draw(two.models[0]), first)
    assert opened == [two.models[0], two.models[1], two.models[0]]
    painter.worker.close()


def test_a_parked_model_leaves_the_gpu_with_its_engines(two, tmp_path, opened, monkeypatch):
    """The CPU in the place of a GPU: what is copied there must be gone when another model is in use."""
    uploaded = []

    def upload(tensors, device):
        copies = [tensor.clone() for tensor in tensors]
        uploaded.append(weakref.ref(copies[0]))
        return copies

    monkeypatch.setattr(model_cache, "upload", upload)
    monkeypatch.setattr(worker, "device_for", lambda backend: "cuda:0")
    painter = Painter(two, tmp_path)
    images = [painter.draw(model) for model in two.models]
    (parked,) = (model for model, _ in painter.worker._kept._models.values())
    assert parked._parked and parked._pipe is None and not hasattr(parked._base, "sdaccel")
    pages = {tensor.data_ptr() for _, _, tensor in parked._host._tensors}
    assert {parameter.data_ptr() for parameter in parked._base.unet.parameters()} <= pages
    for turn in range(2):
        assert np.array_equal(painter.draw(two.models[turn]), images[turn])
    assert opened == two.models and len(uploaded) == 4
    gc.collect()
    assert [reference() is None for reference in uploaded[:3]] == [True] * 3
    painter.worker.close()


def test_a_model_whose_file_is_another_now_is_opened_anew(two, tmp_path, opened):
    shutil.copytree(two.models[1], tmp_path / "third")
    painter = Painter(two, tmp_path, engines=True)
    third = str(tmp_path / "third")
    before = painter.draw(third)
    painter.draw(two.models[0])
    path = tmp_path / "third" / "unet" / "diffusion_pytorch_model.safetensors"
    shutil.copyfile(two.models[0] + "/unet/diffusion_pytorch_model.safetensors", path)
    after = painter.draw(third)
    assert abs(before.astype(int) - after).max() > 8 and opened == [third, two.models[0], third]
    painter.worker.close()


def test_the_pages_keep_models_too(two, monkeypatch):
    monkeypatch.setenv("SDACCEL_BACKEND", "onnxruntime")
    found, plain = [], draw.open_on_host
    monkeypatch.setattr(draw, "open_on_host", lambda it, *rest: (found.append(it.origin), plain(it, *rest))[1])
    studio, request = Studio(Store(two.store)), draw.Request("a red circle", "", 64, 64, 2, 5.0, 3)

    def drawn(model):
        result = studio.draw(model, request, progress=lambda stage, fraction: None)
        assert result.ok and not result.fallbacks
        return np.asarray(result.images[0].image)

    images = [drawn(model) for model in two.models]
    assert abs(images[0].astype(int) - images[1]).max() > 8
    assert all(np.array_equal(drawn(model), image) for model, image in zip(two.models, images, strict=True))
    assert found == two.models and studio._kept.keys() == two.models[:1]
    pipe = weakref.ref(studio._kept._models[two.models[0]][0].pipe)
    studio.forget()
    gc.collect()
    assert pipe() is None


def test_engines_are_verified_while_weights_are_read(two, tmp_path, opened, monkeypatch):
    order, plain = [], Store.open_engine
    monkeypatch.setattr(Store, "open_engine", lambda store, key: (order.append(key), plain(store, key))[1])
    painter = Painter(two, tmp_path)
    painter.draw(two.models[0])
    assert len(order) == 6 and sorted(order[:3]) == sorted(order[3:])
    painter.worker.close()


def test_a_damaged_engine_is_told_when_it_is_loaded(two, tmp_path, monkeypatch):
    shutil.copytree(two.store, tmp_path / "store")
    checkpoint = open_checkpoint(two.models[0])
    backend = base.pick_backend("onnxruntime")
    (entry, *_) = engines_here(checkpoint, "unet", backend, Store(tmp_path / "store"))
    path = entry.file("model.onnx")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    request = draw.Request("a red circle", "", 64, 64, 2, 5.0, 3)
    pipe, _ = draw.open_accelerated(checkpoint, request, Store(tmp_path / "store"), "onnxruntime", "never")
    (report,) = draw.draw(pipe, request).reports
    assert {fallback.component for fallback in report.fallbacks} == {"unet"}
    assert "has changed since it was built" in report.fallbacks[0].reason
