"""Whole graphs of every kind, fused for CUDA: what is left, and ONNX Runtime's results before and after."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir
import pytest

from sdaccel.export.components import component_spec
from sdaccel.export.to_onnx import bind_weights, weight_names
from sdaccel.graph import hoist
from sdaccel.graph.optimize import optimize
from tests.exported import Exported, session_runner
from tests.tolerances import EXPORT_MAX_ABS

# A text encoder's embeddings and the choice of its pooled token.
_TEXT = {"Gather": 2, "Range": 2, "Shape": 2, "Squeeze": 2, "Unsqueeze": 3, "Cast": 2, "Concat": 1}
_TEXT |= {"Add": 1, "Equal": 1, "ArgMax": 1, "GatherND": 1}

LEFT = {
    # 8 resnets, 4 transformers of one layer, 1 upsampler, 5 ControlNet residuals.
    "unet-sd1": {
        "GroupNorm": 8 + 8 + 4 + 1,
        "Conv": 2 + 8 + 8 + 6 + 8 + 1 - 1,
        "UpsampleConv": 1,
        "LayerNorm": 3 * 4,
        "MultiLinear": 4 + 1 + 1,
        "Linear": 5 * 4 + 2,
        "Attention": 2 * 4,
        "ToTokens": 4,
        "ToImage": 4,
        "TimestepEmbedding": 1,
        "Add": 5,
    },
    # 11 resnets, 4 transformers of two layers whose projections are linears, 2 upsamplers, 7 ControlNet residuals.
    "unet-sdxl": {
        "GroupNorm": 11 + 11 + 4 + 1,
        "Conv": 2 + 11 + 11 + 7 + 2,
        "UpsampleConv": 2,
        "LayerNorm": 3 * 8,
        "MultiLinear": 8 + 1 + 1,
        "Linear": 5 * 8 + 2 * 4 + 4,
        "Attention": 2 * 8,
        "ToTokens": 4 + 4,
        "ToImage": 4,
        "TimestepEmbedding": 1,
        "Add": 7,
    },
    "vae_decoder": {
        "GroupNorm": 2 * 10 + 2,
        "Conv": 3 + 2 * 10 + 1,
        "UpsampleConv": 3,
        "MultiLinear": 1,
        "Attention": 1,
        "Linear": 1,
        "ToTokens": 2,
        "ToImage": 1,
    },
    "vae_encoder": {
        "GroupNorm": 2 * 6 + 2,
        "Conv": 3 + 2 * 6 + 1 + 3,
        "MultiLinear": 1,
        "Attention": 1,
        "Linear": 1,
        "ToTokens": 2,
        "ToImage": 1,
    },
    # 4 resnets, 2 transformers, 1 down-sampler; 8 convolutions of the image, added once, and one for each of 5 results.
    "controlnet": {
        "GroupNorm": 2 * 4 + 2,
        "Conv": 1 + 8 + 2 * 4 + 1 + 2 * 2 + 1 + 5,
        "LayerNorm": 3 * 2,
        "MultiLinear": 2 + 1 + 1,
        "Linear": 5 * 2 + 2,
        "Attention": 2 * 2,
        "ToTokens": 2,
        "ToImage": 2,
        "TimestepEmbedding": 1,
        "Add": 1,
    },
    "text_encoder": {"LayerNorm": 5, "MultiLinear": 2, "Attention": 2, "Linear": 6, **_TEXT},
    "text_encoder_2": {"LayerNorm": 5, "MultiLinear": 2, "Attention": 2, "Linear": 7, **_TEXT, "Cast": 1, "Equal": 0},
}
# Forms that differ at the edges of the network alone: the same few operators.
ALSO = ("unet-sd2", "unet-refiner", "unet-inpaint", "unet-lcm-8-channel", "controlnet-sdxl")
UNET_OPS = set(LEFT["unet-sd1"])


def fuse(model: Exported) -> ir.Model:
    graph = ir.from_proto(bind_weights(model.graph, model.layout))
    optimize(graph, "cuda")
    return graph


@pytest.mark.parametrize("name", [*LEFT, *ALSO])
def test_fused_graph(exported, name: str):
    """Few operators are left; weights have kept their names; every result is the same, at odd sizes too."""
    model = exported(name)
    graph = fuse(model)
    left = Counter(step.op_type for step in graph.graph)
    if name in LEFT:
        assert left == Counter(LEFT[name])
    else:
        assert set(left) <= UNET_OPS

    proto = ir.to_proto(graph)
    assert sorted(weight_names(proto)) == sorted(weight_names(model.graph))
    labels = [step.name for step in proto.graph.node]
    assert all(labels) and len(set(labels)) == len(labels)
    path = model.folder / "fused.onnx"
    onnx.save(proto, path)
    onnx.checker.check_model(str(path), full_check=True)

    run = session_runner(path)
    spec = component_spec(model.component, model.config)
    for index, shape in enumerate(spec.shapes):
        for optional in {False, any(tensor.optional for tensor in spec.inputs)}:
            inputs = spec.random_inputs(shape, seed=index, optional=optional)
            expected, found = model.run(inputs), run(inputs)
            assert max((found[key] - expected[key]).abs().max() for key in expected) <= EXPORT_MAX_ABS


def test_every_function_is_used(exported):
    graph = fuse(exported("unet-sd1"))
    used = {step.op_identifier() for step in graph.graph if step.domain == "sdaccel"}
    assert set(graph.functions) == used
    assert graph.opset_imports["sdaccel"] == 1


def test_what_depends_on_the_prompt_alone(exported):
    graph = fuse(exported("unet-sdxl"))
    by_name = {step.name: step for step in graph.graph}
    prompt = [by_name[name] for name in hoist.invariant(graph, ["encoder_hidden_states", "y"])]
    assert [f"{step.op_type} {step.overload}" for step in prompt] == [
        "Linear bias+silu",
        "Linear bias",
        "MultiLinear 16",
    ]
    text = [by_name[name] for name in hoist.invariant(graph, ["encoder_hidden_states"])]
    assert [step.op_type for step in text] == ["MultiLinear"]


def test_optional_inputs_are_no_constants():
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[2] x, float[2] later) => (float[2] y) <float[2] w = {1.0, 2.0}>
        { a = Exp(w) b = Add(a, later) y = Add(b, x) }"""
    )
    for index, step in enumerate(proto.graph.node):
        step.name = f"n{index}"
    proto.graph.initializer.append(onnx.helper.make_tensor("later", onnx.TensorProto.FLOAT, [2], [0.0, 0.0]))
    graph = ir.from_proto(proto)
    assert hoist.invariant(graph, []) == ["n0"]
    assert hoist.invariant(graph, ["later"]) == ["n0", "n1"]
    assert hoist.invariant(graph, ["x", "later"]) == ["n0", "n1", "n2"]
