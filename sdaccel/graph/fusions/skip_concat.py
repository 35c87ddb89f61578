"""Concat of channels that never happens: ``GroupNorm`` and 1×1 ``Conv`` read its two parts (x and x2)."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.match import Outcome, dims, substitute


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "Concat" or len(dims(step.outputs[0]) or ()) != 4:
            continue
        joined = step.outputs[0]
        users = list(joined.uses())
        if step.attributes["axis"].as_int() != 1 or len(step.inputs) != 2:
            outcome.refused["it joins other than two parts by channels"] += 1
        elif joined.is_graph_output() or not users or not all(_reads_two(reader, at) for reader, at in users):
            outcome.refused["a reader cannot take two inputs"] += 1
        else:
            for reader, _ in users:
                _read_parts(reader, step)
            outcome.fired += 1
    return outcome


def _reads_two(reader: ir.Node, index: int) -> bool:
    if not ops.is_op(reader, "GroupNorm", "Conv") or index != 0:
        return False
    inputs = ops.named_inputs(reader)
    if reader.op_type == "GroupNorm":
        return inputs["x2"] is None and inputs["add"] is None
    kernel = (dims(inputs["weight"]) or [])[2:]
    return inputs["x2"] is None and kernel == [1, 1] and set(reader.attributes["pads"].as_ints()) == {0}


def _read_parts(reader: ir.Node, concat: ir.Node) -> None:
    x, x2 = concat.inputs
    inputs = {**ops.named_inputs(reader), "x": x, "x2": x2}
    fused = ops.node(reader.op_type, inputs, ops.plain_attributes(reader), name=reader.name or "")
    substitute(reader.outputs, fused.outputs, [fused])
