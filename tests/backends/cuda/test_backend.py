"""The whole way of a CUDA engine through builder, store and pipeline, on the CPU: all of it but kernels and timing."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

import sdaccel
from sdaccel.backends import base
from sdaccel.backends.cuda import backend as cuda
from sdaccel.backends.cuda import nvrtc
from sdaccel.backends.cuda.timing_cache import Measured, TimingCache
from sdaccel.backends.onnxruntime import OnnxRuntime
from sdaccel.builder import BuilderConfig, build_engines, slower_than_torch
from sdaccel.engine.store import Store
from sdaccel.errors import BackendError, EngineBroken, SettingError
from sdaccel.integrations import diffusers
from sdaccel.models.checkpoint import open_checkpoint
from tests import pipelines
from tests.tolerances import PIPELINE_MAX_ABS


class FirstTactic:
    """In the place of the tuner: takes torch's way of everything, and counts what it was asked."""

    def __init__(self, cache):
        self.cache = cache
        self.measured = 0

    def choose(self, signature, op, tactics, tensors, attributes):
        self.measured += self.cache.get(signature) is None
        found = Measured("torch", 2.0, {"torch": 2.0}, {})
        self.cache.put(signature, found)
        return found

    def ceilings(self, dtype):
        return {"operations": 1e12, "bytes": 1e11}


class OnCpu(cuda.Cuda):
    precisions = ("fp32",)
    driver = "13000"

    def unavailable(self):
        return None

    def device_type(self):
        return "cpu"

    def where(self):
        return torch.device("cpu")

    def device(self):
        return {"kind": "cpu", "name": "a CPU in the place of a GPU", "capability": "0.0"}

    def versions(self):
        return {"torch": torch.__version__, "driver": self.driver, "kernels": cuda.kernels_version()}

    def tuner(self, cache):
        return FirstTactic(cache)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(base, "backends", lambda: {"cuda": OnCpu})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


def build(store: Store, components=("vae_decoder",)):
    checkpoint = open_checkpoint(pipelines.make("sd1"))
    return build_engines(checkpoint, BuilderConfig(components), store)


def test_a_pipeline_through_cuda_engines_equals_torch(on_cpu, store):
    pipe = pipelines.make("sdxl")
    call = {"num_inference_steps": 2, "output_type": "np", "height": 64, "width": 64}
    expected = pipe(pipelines.PROMPT, generator=torch.Generator().manual_seed(3), **call).images
    before = {name: value.clone() for name, value in pipe.unet.state_dict().items()}
    sdaccel.accelerate(pipe, store=store)
    for _ in range(2):
        found = pipe(pipelines.PROMPT, generator=torch.Generator().manual_seed(3), **call).images
        assert abs(found - expected).max() <= PIPELINE_MAX_ABS
    report = pipe.sdaccel.last_report
    assert not report.fallbacks and {run.backend for run in report.components.values()} == {"cuda"}
    assert all(torch.equal(value, before[name]) for name, value in pipe.unet.state_dict().items())


def test_engine_and_module_share_their_weights(on_cpu, store):
    pipe = pipelines.make("sd1")
    sdaccel.accelerate(pipe, store=store, components=["unet"])
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64, output_type="latent")
    (engine,) = pipe.sdaccel.contexts["unet"]._loaded.values()
    parameters = dict(pipe.unet.named_parameters())
    enlarged = {step.inputs[1] for step in engine.executor.plan.steps if step.op == "UpsampleConv"}
    assert enlarged and engine.shared == set(engine.executor.plan.weights) - enlarged
    for name in engine.shared:
        assert parameters[name].data_ptr() == engine.executor.weights[name].data_ptr()
    with torch.no_grad():
        pipe.unet.conv_in.weight += 0.1
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64, output_type="latent")
    assert not pipe.sdaccel.last_report.fallbacks and "conv_in.weight changed" in str(pipe.sdaccel.last_report)
    assert parameters["conv_in.weight"].data_ptr() == engine.executor.weights["conv_in.weight"].data_ptr()


def test_weights_loaded_in_inference_mode_stay_ordinary(on_cpu, store):
    """An engine is loaded at its first call, which a host may make in inference mode: gradients are possible later."""
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["unet"])
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
    with torch.inference_mode():
        pipe(pipelines.PROMPT, **call)
    (engine,) = pipe.sdaccel.contexts["unet"]._loaded.values()
    assert engine.shared and not pipe.sdaccel.last_report.fallbacks
    tensors = (*pipe.unet.parameters(), *engine.executor.weights.values())
    assert not any(tensor.is_inference() for tensor in tensors)


def test_every_call_of_a_pipeline_renews_its_engines(on_cpu, store, monkeypatch):
    """What depends on the prompt alone is kept from call to call; weights may have been edited between them."""
    renewed = []
    monkeypatch.setattr(cuda.CudaEngine, "renew", lambda engine: renewed.append(engine.executor.renew()))
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["unet"])
    for count in (0, 1, 2):
        pipe(pipelines.PROMPT, num_inference_steps=2, height=64, width=64, output_type="latent")
        assert len(renewed) == count


def test_what_torch_raises_in_a_build_is_ours(on_cpu, tmp_path, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB.\nDetails.")

    monkeypatch.setattr(OnCpu, "tuner", full)
    with pytest.raises(BackendError, match=r"vae_decoder could not be built on the GPU: CUDA out of memory\. Tried"):
        build(Store(tmp_path))


def test_an_edit_that_leaves_no_trace_is_computed_with(on_cpu, store):
    """Through ``.data``: the engine reads the same memory; what it made of the weights beforehand is made again."""
    pipe = pipelines.make("sd1")
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "np"}
    sdaccel.accelerate(pipe, store=store, components=["unet"])

    def image():
        return pipe(pipelines.PROMPT, generator=torch.Generator().manual_seed(3), **call).images

    image()
    for module in (pipe.unet.conv_in, pipe.unet.up_blocks[0].upsamplers[0].conv):
        module.weight.data.mul_(-1.5)
        found = image()
        assert not pipe.sdaccel.last_report.fallbacks
        sdaccel.restore(pipe)
        assert abs(found - image()).max() <= PIPELINE_MAX_ABS
        sdaccel.accelerate(pipe, store=store, components=["unet"])


def test_the_second_build_measures_nothing(on_cpu, tmp_path):
    store = Store(tmp_path)
    (first,) = build(store)
    store.remove(first.key)
    (second,) = build(store)
    assert first.engine.details["measured"] > 0 == second.engine.details["measured"]
    profile = second.engine.details["profiles"][0]
    assert profile["replay_error"] == 0.0
    assert all(step["bytes"] > 0 for step in profile["steps"])
    assert any(step["op"] == "conv" and step["operations"] > 0 for step in profile["steps"])


def test_an_engine_of_another_driver_is_explained_and_built_anew(on_cpu, tmp_path, monkeypatch):
    store = Store(tmp_path)
    (first,) = build(store)
    monkeypatch.setattr(OnCpu, "driver", "13010")
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["vae_decoder"], build="never")
    (note,) = [note for note in pipe.sdaccel.notes if first.key[:12] in note]
    assert note == f"the engine {first.key[:12]} of vae_decoder was built for driver 13000 (now 13010)."
    (second,) = build(store)
    assert first.key != second.key
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["vae_decoder"], build="never")
    assert not pipe.sdaccel.notes and pipe.sdaccel.engines() == {"vae_decoder": [second.key]}


def test_times_travel_in_a_file(on_cpu, tmp_path):
    checkpoint, path = open_checkpoint(pipelines.make("sd1")), tmp_path / "times.json"
    config = BuilderConfig(("vae_decoder",), timing_cache=path)
    (first,) = build_engines(checkpoint, config, Store(tmp_path / "here"))
    (second,) = build_engines(checkpoint, config, Store(tmp_path / "there"))
    assert first.engine.details["measured"] > 0 == second.engine.details["measured"]


def test_a_timing_cache_is_not_ignored_by_a_backend_without_one(tmp_path):
    config = BuilderConfig(("vae_decoder",), backend="onnxruntime", timing_cache=tmp_path / "times.json")
    with pytest.raises(SettingError, match="onnxruntime measures nothing"):
        build_engines(open_checkpoint(pipelines.make("sd1")), config, Store(tmp_path))


def test_a_timing_cache_without_a_folder_is_refused_before_anything_is_measured(on_cpu, tmp_path):
    config = BuilderConfig(("vae_decoder",), timing_cache=tmp_path / "nowhere" / "times.json")
    with pytest.raises(SettingError, match="nowhere"):
        build_engines(open_checkpoint(pipelines.make("sd1")), config, Store(tmp_path))


def test_an_engine_slower_than_torch_is_left_out_and_named(on_cpu, store, monkeypatch):
    (entry,) = build(store)
    assert slower_than_torch(entry) is None
    monkeypatch.setitem(entry.engine.details, "speed", {"slower": True, "milliseconds": {"engine": 3.5, "torch": 2.0}})
    assert "is slower than torch (3.5 ms against 2.0 ms)" in slower_than_torch(entry)
    monkeypatch.setattr(diffusers, "slower_than_torch", lambda found: f"the engine {found.key[:12]} is slower")
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["vae_decoder"])
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64)
    report = pipe.sdaccel.last_report
    assert any("is slower, so it is left out" in note for note in report.notes)
    assert [fallback.component for fallback in report.fallbacks] == ["vae_decoder"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (cuda.TACTICS, b""),
        (cuda.TACTICS, b"{}"),
        (cuda.TACTICS, b'{"precision": "fp8", "dependent": true, "measured": {}}'),
        (cuda.TACTICS, b'{"precision": "fp32", "dependent": true, "measured": []}'),
        (cuda.CUBINS, b""),
        (cuda.CUBINS, b"\0" * 99),
    ],
)
def test_a_damaged_table_of_tactics_or_kernels_is_refused(on_cpu, store, name, content, tmp_path):
    (entry,) = build(store)
    for path in entry.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineBroken, match="cannot be read"):
        OnCpu().load(tmp_path, store.root / "weights", entry.engine.inputs)


def test_tactics_are_open_to_look_into(on_cpu, store):
    (entry,) = build(store)
    document = json.loads((entry.path / cuda.TACTICS).read_text(encoding="utf-8"))
    assert document["precision"] == "fp32" and document["measured"]
    assert all(item["tactic"] == "torch" for item in document["measured"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_told():
    assert "no CUDA device" in cuda.Cuda().unavailable()
    with pytest.raises(BackendError, match="cuda: torch finds no CUDA device"):
        base.pick_backend("cuda")


def test_an_engine_whose_module_went_elsewhere_is_loaded_again(on_cpu, store):
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["unet"])
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
    engines = []
    for turn in range(3):
        pipe(pipelines.PROMPT, **call)
        assert not [fallback for fallback in pipe.sdaccel.last_report.fallbacks if fallback.component == "unet"]
        engines.append(next(iter(pipe.sdaccel.contexts["unet"]._loaded.values())))
        if turn == 1:  # as by .to("cpu") and back
            for parameter in pipe.unet.parameters():
                parameter.data = parameter.data.clone()
    assert engines[0] is engines[1] is not engines[2]
    assert engines[2].shared == engines[0].shared


def test_offloading_and_engines_exclude_each_other(on_cpu, store, monkeypatch):
    from accelerate.hooks import CpuOffload, add_hook_to_module

    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store, components=["unet"])
    monkeypatch.setattr(pipe.sdaccel.contexts["unet"], "device", "cuda")
    add_hook_to_module(pipe.unet, CpuOffload("cpu"))
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64, output_type="latent")
    assert any("offloads its modules" in fallback.reason for fallback in pipe.sdaccel.last_report.fallbacks)


def test_the_backend_is_where_the_pipeline_is(monkeypatch):
    class OnGpu(OnCpu):
        def device_type(self):
            return "cuda"

    monkeypatch.setattr(base, "backends", lambda: {"cuda": OnGpu, "other": OnCpu})
    assert type(base.pick_backend()) is OnGpu and type(base.pick_backend("auto", "cuda")) is OnGpu
    assert type(base.pick_backend("auto", "cpu")) is OnCpu
    assert type(base.pick_backend("auto", "mps")) is OnGpu
    assert type(base.pick_backend("cuda", "cpu")) is OnGpu


def test_engines_go_where_the_module_is(monkeypatch):
    """On a machine of several GPUs; not on one of another kind, for which nothing was tuned."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    names = {first: "GPU A", second: "GPU A"}
    monkeypatch.setattr(cuda.Cuda, "where", lambda backend: first)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    backend = cuda.Cuda()
    assert backend._device_of({}) == first
    assert backend._device_of({"a": SimpleNamespace(device=torch.device("cpu"))}) == first
    assert backend._device_of({"a": SimpleNamespace(device=second)}) == second
    names[second] = "GPU B"
    with pytest.raises(BackendError, match=r"on cuda:1, a GPU B; engines were built for a GPU A.*DEVICES=1"):
        backend._device_of({"a": SimpleNamespace(device=second)})


def test_a_pipeline_that_is_not_on_the_gpu_yet_is_told(on_cpu, store, monkeypatch):
    pipe, pick = pipelines.make("sd1"), base.pick_backend
    gpu = SimpleNamespace(device_type=lambda: "cuda")
    monkeypatch.setattr(diffusers, "pick_backend", lambda *asked: pick(*asked) if asked else gpu)
    with pytest.warns(UserWarning, match=r"the pipeline is on the CPU.*pipe\.to\('cuda'\) first"):
        sdaccel.accelerate(pipe, store=store, components=["unet"])
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64, output_type="latent")
    assert any("pipe.to('cuda') first" in note for note in pipe.sdaccel.last_report.notes)


WITHOUT = 'cuda-python is not installed: pip install "sdaccel[cuda]".'


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_that_engines_cannot_use_is_told(monkeypatch, tmp_path, caplog, device):
    class Lacking(OnCpu):
        def unavailable(self):
            return WITHOUT

    base._tell.cache_clear()
    monkeypatch.setattr(base, "backends", lambda: {"cuda": Lacking, "onnxruntime": OnnxRuntime})
    monkeypatch.setattr(base, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(diffusers, "_device_of", lambda pipe: device)
    store, pipe = Store(tmp_path), pipelines.make("sd1")
    with pytest.warns(UserWarning, match=r"the GPU is not used: cuda-python is not installed"):
        sdaccel.accelerate(pipe, store=store, components=["vae_decoder"])
    assert caplog.text.count("the GPU is not used: cuda-python is not installed") == 1
    pipe(pipelines.PROMPT, num_inference_steps=1, height=64, width=64)
    (note,) = [note for note in pipe.sdaccel.last_report.notes if WITHOUT in note]
    in_vain = device == "cuda"
    assert note.startswith("no engine runs on cuda, where the pipeline is") == in_vain
    assert bool(store.list()) != in_vain


@pytest.mark.parametrize(
    ("compiler", "driver", "reason"),
    [
        ((13, 5), "13000", None),
        ((12, 9), "13000", None),
        ((13, 0), "12080", r"NVRTC 13\.0 compiles what the driver, of CUDA 12\.8, cannot load: .*cuda12\]\"\.$"),
        (None, "13000", r"NVRTC cannot be loaded: no such file: pip install \"sdaccel\[cuda\]\"\.$"),
    ],
)
def test_a_compiler_that_is_missing_or_too_new_is_told(monkeypatch, compiler, driver, reason):
    def version():
        if compiler is None:
            raise BackendError("NVRTC cannot be loaded: no such file.", hint="Run: something")
        return compiler

    monkeypatch.setattr(cuda.torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "version", version)
    monkeypatch.setattr(cuda, "_driver_version", lambda: driver)
    found = cuda._without_compiler.__wrapped__()
    assert found is None if reason is None else re.match(reason, found)


def test_times_that_cannot_be_kept_end_no_build(on_cpu, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TimingCache, "export", full)
    (entry,) = build(Store(tmp_path))
    assert entry.engine.details["measured"] and "No space left" in caplog.text


def test_tactics_that_are_out_are_told(on_cpu, tmp_path, monkeypatch, caplog):
    def choose(self, signature, op, tactics, tensors, attributes):
        found = Measured("torch", 2.0, {"torch": 2.0}, {f"ours<{len(self.cache.measured)}>": "it does not load"})
        self.cache.put(signature, found)
        return found

    monkeypatch.setattr(FirstTactic, "choose", choose)
    (entry,) = build(Store(tmp_path))
    assert entry.engine.details["refused"]["conv ours"] == "it does not load"
    assert caplog.text.count("vae_decoder: conv ours is not used: it does not load") == 1
