"""The graph as ONNX Runtime's CPU kernels run it fastest. Exact: only the order of float additions changes.

Weights keep their names and their layout in the shared file (a linear's weight is read transposed, not stored so).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from sdaccel.graph.match import Outcome, dims, producer, replace

MICROSOFT = "com.microsoft"


def attention(model: ir.Model) -> Outcome:
    """``Attention`` on [B, S, H·D] → MultiHeadAttention, which has a flash kernel and needs no [S, S] scores."""
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "Attention" or step.domain or "q_num_heads" not in step.attributes:
            continue
        attributes = {"num_heads": step.attributes["q_num_heads"].as_int()}
        if "scale" in step.attributes:
            attributes["scale"] = step.attributes["scale"].as_float()
        if "is_causal" in step.attributes and step.attributes["is_causal"].as_int():
            attributes["unidirectional"] = 1
        fused = ir.node("MultiHeadAttention", step.inputs[:3], attributes, domain=MICROSOFT)
        replace([step], step.outputs[0], [fused])
        outcome.fired += 1
    return outcome


def linear(model: ir.Model) -> Outcome:
    """MatMul by a transposed weight → FusedMatMul, which packs the weight as it lies in the file."""
    outcome = Outcome()
    for step in list(model.graph):
        transpose = producer(step.inputs[1], "Transpose") if step.op_type == "MatMul" else None
        if transpose is None:
            continue
        weight = transpose.inputs[0]
        if weight is None or not weight.is_initializer() or tuple(transpose.attributes["perm"].as_ints()) != (1, 0):
            outcome.refused["the second factor is not a transposed weight"] += 1
            continue
        fused = ir.node("FusedMatMul", [step.inputs[0], weight], {"transB": 1}, domain=MICROSOFT)
        replace([step], step.outputs[0], [fused])
        outcome.fired += 1
    return outcome


def group_norm(model: ir.Model) -> Outcome:
    """GroupNormalization → InstanceNormalization over [B, groups, -1], which is one kernel instead of a dozen.

    That kernel adds up a group in one plain float32 sum: enough for latents, not for the images of a VAE.
    """
    return _each_group_norm(model, _one_kernel)


def group_norm_of_images(model: ir.Model) -> Outcome:
    """GroupNormalization → means of rows, then of their means, whose error does not grow with the image."""
    return _each_group_norm(model, _mean_of_means)


Steps = tuple[list[ir.Node], ir.Value]


def _each_group_norm(model: ir.Model, normalize: Callable[[ir.Node, ir.Value], Steps]) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "GroupNormalization":
            continue
        shape = dims(step.inputs[0])
        if shape is None or len(shape) < 3:
            outcome.refused["the rank is unknown"] += 1
            continue
        x, scale, bias = step.inputs
        steps, normal = normalize(step, x)
        size = ir.node("Shape", [x])
        back = ir.node("Reshape", [normal, size.outputs[0]])
        tail = _number(np.arange(1, len(shape) - 1))
        wide_scale, wide_bias = (ir.node("Unsqueeze", [value, tail.outputs[0]]) for value in (scale, bias))
        scaled = ir.node("Mul", [back.outputs[0], wide_scale.outputs[0]])
        shifted = ir.node("Add", [scaled.outputs[0], wide_bias.outputs[0]])
        replace([step], step.outputs[0], [*steps, size, back, tail, wide_scale, wide_bias, scaled, shifted])
        outcome.fired += 1
    return outcome


def _one_kernel(step: ir.Node, x: ir.Value) -> Steps:
    groups = step.attributes["num_groups"].as_int()
    grouped = _number(np.array([0, groups, -1]))
    ones, zeros = (_number(np.full(groups, value, np.float32)) for value in (1, 0))
    flat = ir.node("Reshape", [x, grouped.outputs[0]])
    inputs = [flat.outputs[0], ones.outputs[0], zeros.outputs[0]]
    normal = ir.node("InstanceNormalization", inputs, {"epsilon": step.attributes["epsilon"].as_float()})
    return [grouped, ones, zeros, flat, normal], normal.outputs[0]


def _mean_of_means(step: ir.Node, x: ir.Value) -> Steps:
    steps: list[ir.Node] = []

    def add(op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        steps.append(ir.node(op, inputs, attributes))
        return steps[-1].outputs[0]

    def number(array: np.ndarray) -> ir.Value:
        steps.append(_number(array))
        return steps[-1].outputs[0]

    last = number(np.array([-1], np.int64))
    within, across = number(np.array([3])), number(np.array([2]))
    width = add("Gather", add("Shape", x), last)
    groups = number(np.array([0, step.attributes["num_groups"].as_int(), -1]))
    rows = add("Reshape", x, add("Concat", groups, width, axis=0))
    centred = add("Sub", rows, add("ReduceMean", add("ReduceMean", rows, within), across))
    variance = add("ReduceMean", add("ReduceMean", add("Mul", centred, centred), within), across)
    epsilon = number(np.array(step.attributes["epsilon"].as_float(), np.float32))
    deviation = add("Sqrt", add("Add", variance, epsilon))
    return steps, add("Mul", centred, add("Reciprocal", deviation))


def _number(array: np.ndarray) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(array)})
