"""The graph as ONNX Runtime's CPU kernels run it fastest. Exact: only the order of float additions changes.

Weights keep their names and their layout in the shared file (a linear's weight is read transposed, not stored so).
"""

from __future__ import annotations

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
    """GroupNormalization → InstanceNormalization over [B, groups, -1], which is one kernel instead of a dozen."""
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "GroupNormalization":
            continue
        shape = dims(step.inputs[0])
        if shape is None or len(shape) < 3:
            outcome.refused["the rank is unknown"] += 1
            continue
        groups = step.attributes["num_groups"].as_int()
        epsilon = step.attributes["epsilon"].as_float()
        x, scale, bias = step.inputs
        ones, zeros = (_number(np.full(groups, value, np.float32)) for value in (1, 0))
        grouped = _number(np.array([0, groups, -1]))
        tail = _number(np.arange(1, len(shape) - 1))
        size = ir.node("Shape", [x])
        flat = ir.node("Reshape", [x, grouped.outputs[0]])
        normal = ir.node(
            "InstanceNormalization", [flat.outputs[0], ones.outputs[0], zeros.outputs[0]], {"epsilon": epsilon}
        )
        back = ir.node("Reshape", [normal.outputs[0], size.outputs[0]])
        wide_scale, wide_bias = (ir.node("Unsqueeze", [value, tail.outputs[0]]) for value in (scale, bias))
        scaled = ir.node("Mul", [back.outputs[0], wide_scale.outputs[0]])
        shifted = ir.node("Add", [scaled.outputs[0], wide_bias.outputs[0]])
        new = [ones, zeros, grouped, tail, size, flat, normal, back, wide_scale, wide_bias, scaled, shifted]
        replace([step], step.outputs[0], new)
        outcome.fired += 1
    return outcome


def _number(array: np.ndarray) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(array)})
