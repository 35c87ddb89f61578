"""LayerNormalization over the last axis, with the sum before it that no linear has taken in → ``LayerNorm``."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.match import Outcome, dims, is_optional_input, producer, substitute, symbols


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "LayerNormalization" or step.domain:
            continue
        shape = dims(step.inputs[0])
        axis = step.attributes["axis"].as_int() if "axis" in step.attributes else -1
        if len(step.inputs) != 3 or len(step.outputs) != 1 or shape is None or axis not in (-1, len(shape) - 1):
            outcome.refused["it is not over the last axis, or lacks a bias, or gives its statistics"] += 1
            continue
        x, scale, bias = step.inputs
        add = producer(x, "Add")
        residual = None
        if add is not None and not add.domain:
            first, second = add.inputs
            if symbols(first) is None or symbols(first) != symbols(second):
                outcome.refused["the sum before it broadcasts"] += 1
            elif is_optional_input(first) or is_optional_input(second):
                outcome.refused["what is added is an optional input"] += 1
            else:
                x, residual = first, second
        fused = ops.node(
            "LayerNorm",
            {"x": x, "scale": scale, "bias": bias, "residual": residual},
            {"epsilon": step.attributes["epsilon"].as_float() if "epsilon" in step.attributes else 1e-5},
            name=ops.layer(scale),
            outputs=1 if residual is None else 2,
        )
        if residual is None or add is None:
            substitute(step.outputs, fused.outputs, [fused])
        else:
            substitute([*step.outputs, *add.outputs], fused.outputs, [fused], add)
        outcome.fired += 1
    return outcome
