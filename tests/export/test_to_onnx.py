from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

import sdaccel
from sdaccel.engine.manifest import TensorSpec
from sdaccel.engine.store import Store
from sdaccel.errors import Cancelled, ExportError
from sdaccel.export import to_onnx
from sdaccel.export.components import component_spec
from sdaccel.export.to_onnx import bind_weights, check_graph, describe_graph, publish_graph, weight_names
from tests import shapes
from tests.export import tiny
from tests.tolerances import EXPORT_MAX_ABS

SHORT_TEXT = {**tiny.TEXT, "num_hidden_layers": 1}


def test_the_limit_of_a_check_is_that_of_the_tests():
    assert to_onnx.MAX_ABS == EXPORT_MAX_ABS


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_graph_equals_torch(exported, name):
    """Batch 1 to 4, non-square, odd, 77 to 231 tokens; at the last shape with the optional inputs."""
    model = exported(name)
    results = check_graph(model.run, model.component, model.config, model.weights, model.layout)
    batches = {result.shape["batch"] for result in results}
    assert batches >= {1, 4}
    assert max(result.error for result in results) <= EXPORT_MAX_ABS
    assert any(result.optional for result in results) == (model.component == "unet")


def test_odd_latents_equal_torch(exported):
    model = exported("unet-sdxl")
    odd = [{"batch": 1, "height": h, "width": w, "tokens": 77} for h, w in shapes.ODD_LATENTS]
    check_graph(model.run, model.component, model.config, model.weights, model.layout, shapes=odd)


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("vae_decoder", [{"batch": 1, "height": 13, "width": 9}, {"batch": 2, "height": 26, "width": 38}]),
        ("vae_encoder", [{"batch": 1, "height": 43, "width": 66}, {"batch": 2, "height": 104, "width": 72}]),
        ("text_encoder", [{"batch": 1, "tokens": 1}, {"batch": 9, "tokens": 76}]),
    ],
)
def test_odd_sizes_equal_torch(exported, name, odd):
    model = exported(name)
    check_graph(model.run, model.component, model.config, model.weights, model.layout, shapes=odd)


def test_graph_equals_the_models_own_forward(exported):
    """`check_graph` compares with our wrapper; here the wrapper's model is called as a pipeline calls it."""
    from diffusers import UNet2DConditionModel
    from safetensors.torch import load_file

    model = exported("unet-sdxl")
    unet = UNet2DConditionModel(**{k: v for k, v in model.config.items() if not k.startswith("_")}).eval()
    unet.load_state_dict(load_file(model.weights))
    pooled, time_ids = torch.randn(2, 10), torch.tensor([[64.0, 48, 0, 0, 64, 48]] * 2)
    features = unet.add_time_proj(time_ids.flatten()).reshape(2, -1)
    inputs = {
        "sample": torch.randn(2, 4, 11, 6),
        "timestep": torch.tensor([501.0, 501.0]),
        "encoder_hidden_states": torch.randn(2, 77, 12),
        "y": torch.cat([pooled, features], dim=-1),
    }
    with torch.inference_mode():
        expected = unet(
            inputs["sample"],
            torch.tensor(501),
            inputs["encoder_hidden_states"],
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
        ).sample
    assert (model.run(inputs)["sample_out"] - expected).abs().max() <= EXPORT_MAX_ABS


def controlnet(config):
    from diffusers import ControlNetModel

    given = inspect.signature(ControlNetModel.__init__).parameters
    return ControlNetModel(**{key: value for key, value in config.items() if key in given}).eval()


@pytest.mark.parametrize(("name", "height", "width"), [("controlnet", 8, 6), ("controlnet-sdxl", 13, 9)])
def test_residuals_are_those_of_the_controlnets_own_forward(exported, name, height, width):
    from safetensors.torch import load_file

    model = exported(name)
    net = controlnet(model.config)
    net.load_state_dict(load_file(model.weights))
    inputs = {
        "sample": torch.randn(2, 4, height, width),
        "timestep": torch.tensor([501.0, 501.0]),
        "encoder_hidden_states": torch.randn(2, 154, 12),
    }
    added = None
    if name == "controlnet-sdxl":
        pooled, time_ids = torch.randn(2, 10), torch.tensor([[64.0, 48, 0, 0, 64, 48]] * 2)
        inputs["y"] = torch.cat([pooled, net.add_time_proj(time_ids.flatten()).reshape(2, -1)], dim=-1)
        added = {"text_embeds": pooled, "time_ids": time_ids}
    inputs["controlnet_cond"] = torch.rand(2, 3, 8 * height, 8 * width)
    with torch.inference_mode():
        *given, image = (inputs[key] for key in ("sample", "timestep", "encoder_hidden_states", "controlnet_cond"))
        down, mid = net(*given, image, added_cond_kwargs=added, return_dict=False)
    found = model.run(inputs)
    assert list(found) == [f"down_residual_{index}" for index in range(len(down))] + ["mid_residual"]
    for residual, expected in zip(found.values(), [*down, mid], strict=True):
        assert (residual - expected).abs().max() <= EXPORT_MAX_ABS
    inputs["controlnet_cond"] = inputs["controlnet_cond"].flip(0)
    assert (model.run(inputs)["mid_residual"] - found["mid_residual"]).abs().max() > 10 * EXPORT_MAX_ABS


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_text_states_are_those_of_transformers(exported, name):
    from safetensors.torch import load_file
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    model = exported(name)
    kind = CLIPTextModel if name == "text_encoder" else CLIPTextModelWithProjection
    text = kind(CLIPTextConfig(**{k: v for k, v in model.config.items() if k != "model_type"})).eval()
    missing, unexpected = text.load_state_dict(load_file(model.weights), strict=False)
    assert not unexpected
    assert not [key for key in missing if not key.endswith("position_ids")]
    ids = component_spec(name, model.config).random_inputs({"batch": 3, "tokens": 77})["input_ids"]
    found = model.run({"input_ids": ids})
    with torch.inference_mode():
        expected = text(ids, output_hidden_states=True)
    for index, state in enumerate(expected.hidden_states):
        assert (found[f"hidden_{index}"] - state).abs().max() <= EXPORT_MAX_ABS
    pooled = expected.pooler_output if name == "text_encoder" else expected.text_embeds
    assert (found["last_hidden_state"] - expected.last_hidden_state).abs().max() <= EXPORT_MAX_ABS
    assert (found["pooled"] - pooled).abs().max() <= EXPORT_MAX_ABS


@pytest.mark.parametrize("name", ["unet-sd1", "unet-lcm-8-channel"])
def test_optional_inputs_change_the_result_when_given(exported, name):
    model = exported(name)
    spec = component_spec(model.component, model.config)
    shape = {"batch": 2, "height": 8, "width": 6, "tokens": 77}
    inputs = spec.random_inputs(shape, optional=True)
    plain = {tensor.name: inputs[tensor.name] for tensor in spec.inputs if not tensor.optional}
    without = model.run(plain)["sample_out"]
    for tensor in spec.inputs:
        if tensor.optional:
            zeros = torch.zeros_like(inputs[tensor.name])
            assert (model.run({**plain, tensor.name: zeros})["sample_out"] - without).abs().max() <= EXPORT_MAX_ABS
            one = model.run({**plain, tensor.name: inputs[tensor.name]})["sample_out"]
            assert (one - without).abs().max() > 10 * EXPORT_MAX_ABS, tensor.name


# The graph on its own


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_every_weight_keeps_its_name(exported, name):
    model = exported(name)
    if model.component == "unet":
        from diffusers import UNet2DConditionModel as Model

        keys = Model(**{k: v for k, v in model.config.items() if not k.startswith("_")}).state_dict().keys()
    elif model.component == "controlnet":
        keys = controlnet(model.config).state_dict().keys()
    elif model.component.startswith("vae"):
        from diffusers import AutoencoderKL as Model

        half = ("decoder.", "post_quant_conv.") if model.component == "vae_decoder" else ("encoder.", "quant_conv.")
        state = Model(**{k: v for k, v in model.config.items() if not k.startswith("_")}).state_dict()
        keys = [key for key in state if key.startswith(half)]
    else:
        keys = component_spec(model.component, model.config).build_module().text.state_dict().keys()
    assert sorted(weight_names(model.graph)) == sorted(keys)
    assert describe_graph(model.graph)["weights"] == len(keys) > 30


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_graph_holds_no_weights(exported, name):
    model = exported(name)
    external = [t for t in model.graph.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert all(not t.raw_data and not t.float_data for t in external)
    assert {entry.value for t in external for entry in t.external_data} == {to_onnx.WEIGHTS_FILE}
    inline = sum(t.ByteSize() for t in model.graph.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL)
    assert inline < 4096
    assert model.graph.ByteSize() < 250_000


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_graph_declares_what_the_spec_says(exported, name):
    model = exported(name)
    spec = component_spec(model.component, model.config)

    def declared(values) -> list[tuple]:
        return [(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)) for v in values]

    graph = model.graph.graph
    assert declared(graph.input) == [(tensor.name, tensor.shape) for tensor in spec.inputs]
    assert declared(graph.output) == [(tensor.name, tensor.shape) for tensor in spec.outputs]
    defaults = {t.name: t for t in graph.initializer if t.name in {tensor.name for tensor in spec.inputs}}
    assert list(defaults) == [tensor.name for tensor in spec.inputs if tensor.optional]
    assert not any(onnx.numpy_helper.to_array(t).any() for t in defaults.values())
    assert [(o.domain, o.version) for o in model.graph.opset_import] == [("", 23)]
    onnx.checker.check_model(str(model.folder / "graph.onnx"), full_check=False)


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_graph_is_clean(exported, name):
    model = exported(name)
    ops = describe_graph(model.graph)["ops"]
    gone = {"Identity", "Constant", "SequenceAt", "SplitToSequence", "SequenceConstruct", "Dropout", "Softmax"}
    assert not gone & ops.keys()
    assert ops["Attention"] >= 1
    assert not model.graph.functions
    assert not any(node.metadata_props or node.doc_string for node in model.graph.graph.node)
    used = {name for node in model.graph.graph.node for name in node.input}
    assert used >= {t.name for t in model.graph.graph.initializer}


# Weights


def test_binding_leaves_the_shared_graph_alone(exported):
    model = exported("vae_encoder")
    before = model.graph.SerializeToString(deterministic=True)
    bound = bind_weights(model.graph, model.layout)
    assert model.graph.SerializeToString(deterministic=True) == before
    tensor = next(t for t in bound.graph.initializer if t.name == "quant_conv.weight")
    place = model.layout["quant_conv.weight"]
    assert {entry.key: entry.value for entry in tensor.external_data} == {
        "location": "weights.safetensors",
        "offset": str(place.offset),
        "length": str(place.nbytes),
    }


def test_binding_refuses_weights_that_do_not_fit(exported):
    model = exported("vae_encoder")
    name = "quant_conv.weight"
    place = model.layout[name]
    without = {key: value for key, value in model.layout.items() if key != name}
    with pytest.raises(ExportError, match=f"no weight {name}"):
        bind_weights(model.graph, without)
    with pytest.raises(ExportError, match=rf"{name} is \(8, 8\) .*\(8, 8, 1, 1\)"):
        bind_weights(model.graph, {**without, name: replace(place, shape=(8, 8))})
    with pytest.raises(ExportError, match=f"{name} is stored as F16"):
        bind_weights(model.graph, {**without, name: replace(place, dtype="F16")})


# Checks


def test_check_names_shape_and_error(exported):
    model = exported("text_encoder")

    def off(inputs):
        return {name: value + 0.01 for name, value in model.run(inputs).items()}

    with pytest.raises(ExportError, match=r"differs from torch by \d.*in hidden_0 at batch=1 tokens=77"):
        check_graph(off, model.component, model.config, model.weights, model.layout)


def test_check_refuses_nan_a_missing_output_and_a_wrong_shape(exported):
    model = exported("vae_decoder")
    arguments = (model.component, model.config, model.weights, model.layout)
    with pytest.raises(ExportError, match="differs from torch by nan in image"):
        check_graph(lambda inputs: {"image": model.run(inputs)["image"] * float("nan")}, *arguments)
    with pytest.raises(ExportError, match="no output image"):
        check_graph(lambda inputs: {}, *arguments)
    with pytest.raises(ExportError, match=r"gave image as \(1, 3, 64\)"):
        check_graph(lambda inputs: {"image": model.run(inputs)["image"][..., 0]}, *arguments)


def test_torch_has_let_go_of_the_weights_before_the_engine_runs(exported, monkeypatch):
    model = exported("vae_encoder")
    loaded = to_onnx.load_module
    modules = []

    def watched(*args):
        module = loaded(*args)
        modules.append(weakref.ref(module))
        return module

    monkeypatch.setattr(to_onnx, "load_module", watched)

    def run(inputs):
        assert [module() for module in modules] == [None]
        return model.run(inputs)

    check_graph(run, model.component, model.config, model.weights, model.layout)


def test_check_reads_half_precision_weights(exported, tmp_path):
    """The reference computes in float32 on the rounded weights: far from the engine's, close to its own."""
    model = exported("vae_encoder")
    path = tmp_path / "weights.safetensors"
    tiny.write_weights(model.component, model.config, path, torch.float16)
    layout = tiny.places(path)
    results = check_graph(model.run, model.component, model.config, path, layout, limit=0.02)
    assert 1e-6 < max(result.error for result in results) < 0.02


# Progress, cache, errors


def test_progress_rises_to_one():
    seen = []
    to_onnx.export_graph("text_encoder", SHORT_TEXT, progress=lambda stage, fraction: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len({stage for stage, _ in seen}) >= 4
    for begin, end in ((0.02, 0.4), (0.4, 0.8), (0.8, 1.0)):  # tracing, converting, cleaning
        assert sum(begin < fraction < end for fraction in fractions) >= 4


@pytest.mark.parametrize(
    ("begin", "stop"), [(0.02, Cancelled("tracing")), (0.4, Cancelled("converting")), (0.4, KeyboardInterrupt())]
)
def test_cancel_passes_through(begin, stop):
    def give_up(stage, fraction):
        if fraction > begin:
            raise stop

    with pytest.raises(type(stop)) as caught:
        to_onnx.export_graph("text_encoder", SHORT_TEXT, progress=give_up)
    assert caught.value is stop


def test_second_checkpoint_of_an_architecture_exports_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    calls = []
    export = to_onnx.export_graph
    monkeypatch.setattr(to_onnx, "export_graph", lambda *a, **k: calls.append(a) or export(*a, **k))
    first = publish_graph(store, "text_encoder", SHORT_TEXT)
    second = publish_graph(store, "text_encoder", {**SHORT_TEXT, "_name_or_path": "another", "bos_token_id": 7})
    assert (first.key, len(calls)) == (second.key, 1)
    assert first.key == to_onnx.architecture_hash("text_encoder", SHORT_TEXT)
    assert first.manifest["component"] == "text_encoder"
    assert [TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), t["optional"]) for t in first.manifest["inputs"]] == [
        *component_spec("text_encoder", SHORT_TEXT).inputs
    ]
    assert first.manifest["weights"] == len(
        weight_names(onnx.load(second.file("graph.onnx"), load_external_data=False))
    )


def test_exporter_is_silent_and_its_words_are_in_the_error(monkeypatch, capfd):
    def fail(*args, **kwargs):
        warnings.warn("the exporter warned", UserWarning, stacklevel=1)
        logging.getLogger("torch.onnx").warning("the exporter logged")
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(ExportError, match=r"text_encoder cannot be exported: no such operator") as caught:
        to_onnx.export_graph("text_encoder", SHORT_TEXT)
    assert "the exporter warned" in str(caught.value)
    assert "the exporter logged" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_export_neither_heeds_nor_changes_the_hosts_settings(capfd):
    plain = to_onnx.export_graph("text_encoder", SHORT_TEXT)
    generator = torch.random.get_rng_state()
    handlers = logging.getLogger("torch").handlers[:]
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    torch.set_default_dtype(torch.float64)
    matmul.fp32_precision = "tf32"  # `allow_tf32` can no longer be read then
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            graph = to_onnx.export_graph("text_encoder", SHORT_TEXT)
        assert torch.get_default_dtype() == torch.float64 and matmul.fp32_precision == "tf32"
    finally:
        torch.set_default_dtype(torch.float32)
        matmul.fp32_precision = precision
    assert graph.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert logging.getLogger("torch").handlers == handlers
    assert capfd.readouterr() == ("", "")


# Real sizes

PEAK = """
import json, resource, sys, time
from pathlib import Path
from sdaccel.export.to_onnx import describe_graph, export_graph
config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
start = time.monotonic()
graph = export_graph("unet", config)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform != "darwin" else 2**30)
found = {"gib": peak, "seconds": time.monotonic() - start, "bytes": graph.ByteSize()}
print(json.dumps({**found, **describe_graph(graph)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "weights"), [("sd15", 686), ("sdxl", 1680)])
def test_real_unets_export_in_two_gib(model, weights):
    pytest.importorskip("resource")
    config = Path(sdaccel.__file__).parent / "models" / "configs" / model / "unet.json"
    child = subprocess.run([sys.executable, "-c", PEAK, str(config)], capture_output=True, text=True, check=True)
    found = json.loads(child.stdout)
    print(found)
    assert found["gib"] <= 2
    assert found["weights"] == weights
    assert found["bytes"] <= 4 << 20
