"""Sine and cosine of timestep · frequencies, in either order → ``TimestepEmbedding``."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.match import Outcome, constant, dims, only_user, other, producer, substitute


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "Sin":
            continue
        reason = _fuse_one(step)
        if reason:
            outcome.refused[reason] += 1
        else:
            outcome.fired += 1
    return outcome


def _fuse_one(sine: ir.Node) -> str | None:
    angles = producer(sine.inputs[0], "Mul")
    column = next((c for v in angles.inputs if (c := producer(v, "Unsqueeze"))), None) if angles is not None else None
    axes = constant(column.inputs[1]) if column is not None else None
    if angles is None or column is None or axes is None or axes.tolist() not in ([1], [-1]):
        return "its angles are no column times a row"
    timestep, frequencies = column.inputs[0], other(angles, column.outputs[0])
    row = constant(frequencies)
    if row is None or row.ndim != 2 or row.shape[0] != 1 or len(dims(timestep) or ()) != 1:
        return "its angles are no column times a row"
    cosine = next((step for step, _ in angles.outputs[0].uses() if step.op_type == "Cos"), None)
    joined = only_user(sine.outputs[0], "Concat")
    if cosine is None or joined is None or list(joined.inputs) != [sine.outputs[0], cosine.outputs[0]]:
        return "sine and cosine are not joined"
    if joined.attributes["axis"].as_int() not in (-1, 1):
        return "sine and cosine are not joined"
    flipped = _flipped(joined, row.shape[1])
    result = flipped.outputs[0] if flipped is not None else joined.outputs[0]
    fused = ops.node(
        "TimestepEmbedding",
        {"timestep": timestep, "frequencies": frequencies},
        {"flip_sin_to_cos": int(flipped is not None)},
        name="timestep_embedding",
        forms=["flip"] if flipped is not None else [],
    )
    substitute([result], fused.outputs, [fused])
    return None


def _flipped(joined: ir.Node, half: int) -> ir.Node | None:
    """The Concat of the two halves of ``joined`` in the other order, if nothing else reads it."""
    users = [step for step, _ in joined.outputs[0].uses()]
    if len(users) != 2 or any(step.op_type != "Slice" for step in users) or joined.outputs[0].is_graph_output():
        return None
    ends = {only_user(step.outputs[0], "Concat") for step in users}
    (flipped,) = ends if len(ends) == 1 else (None,)
    if flipped is None or flipped.attributes["axis"].as_int() not in (-1, 1) or len(flipped.inputs) != 2:
        return None
    bounds = [_bounds(producer(value, "Slice"), 2 * half) for value in flipped.inputs]
    return flipped if bounds == [(half, 2 * half), (0, half)] else None


def _bounds(step: ir.Node | None, size: int) -> tuple[int, int] | None:
    if step is None or len(step.inputs) != 5:
        return None
    start, end, axis, stride = (constant(value) for value in step.inputs[1:])
    if start is None or end is None or axis is None or stride is None or stride.tolist() != [1]:
        return None
    return (int(start[0]), min(int(end[0]), size)) if axis.tolist() in ([1], [-1]) else None
