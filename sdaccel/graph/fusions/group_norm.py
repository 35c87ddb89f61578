"""GroupNormalization, + SiLU, with the time embedding that is added before it → ``GroupNorm``."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import activations, ops
from sdaccel.graph.match import Outcome, constant, dims, other, producer, substitute


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "GroupNormalization" or step.domain:
            continue
        x, scale, bias = step.inputs
        if x is None or len(dims(x) or ()) != 4:
            outcome.refused["it is not of an image"] += 1
            continue
        x, embedding = _before_embedding(x, outcome)
        kind, result = activations.after(step.outputs[0], ["silu"])
        attributes = {name: step.attributes[name].value for name in ("num_groups", "epsilon")}
        fused = ops.node(
            "GroupNorm",
            {"x": x, "scale": scale, "bias": bias, "add": embedding},
            {**attributes, "activation": kind},
            name=ops.layer(scale),
        )
        substitute([result], fused.outputs, [fused])
        outcome.fired += 1
    return outcome


def _before_embedding(value: ir.Value, outcome: Outcome) -> tuple[ir.Value, ir.Value | None]:
    """The image and the [B, C] whose sum ``value`` is, if only the norm reads it."""
    add = producer(value, "Add")
    if add is None:
        return value, None
    for wide in add.inputs:
        embedding = _narrow(wide)
        image = other(add, wide) if wide is not None else None
        if embedding is None or image is None or image.shape != value.shape:
            continue
        if len(value.uses()) > 1 or value.is_graph_output():
            outcome.refused["the sum with the time embedding is read elsewhere"] += 1
            return value, None
        return image, embedding
    return value, None


def _narrow(value: ir.Value | None) -> ir.Value | None:
    """The [B, C] that ``value`` [B, C, 1, 1] is a view of."""
    shape = dims(value)
    step = value.producer() if value is not None else None
    if step is None or shape is None or len(shape) != 4 or shape[2:] != [1, 1]:
        return None
    source = step.inputs[0] if step.op_type in ("Unsqueeze", "Reshape") else None
    narrow = dims(source)
    if narrow is None or len(narrow) != 2 or narrow[1] != shape[1] or narrow[1] is None:
        return None
    if step.op_type == "Unsqueeze":
        axes = constant(step.inputs[1])
        if axes is None or sorted(axis % 4 for axis in axes.tolist()) != [2, 3]:
            return None
    return source
