"""Attention without its head transposes.

    x → Reshape [B, S, H, D] → Transpose → [B, H, S, D] ┐
    (the same for keys and values)                       ├ Attention → Transpose → Reshape [B, S, H·D]
                                                         ┘
becomes one ``Attention`` (opset 23) on [B, S, H·D] with the number of heads as an attribute.
"""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph.match import Outcome, dims, only_user, producer, replace

HEADS_FIRST = (0, 2, 1, 3)


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for attention in list(model.graph):
        if attention.op_type == "Attention" and "q_num_heads" not in attention.attributes:
            reason = _fuse_one(attention)
            if reason:
                outcome.refused[reason] += 1
            else:
                outcome.fired += 1
    return outcome


def _fuse_one(attention: ir.Node) -> str | None:
    mask = attention.inputs[3] if len(attention.inputs) > 3 else None
    if mask is not None or len(attention.inputs) > 4 or len(attention.outputs) > 1:
        return "it has a mask, a cache or more outputs than one"
    if "softcap" in attention.attributes and attention.attributes["softcap"].as_float():
        return "it caps its scores"
    merged = [_before_split(value) for value in attention.inputs[:3]]
    if None in merged:
        return "an input is not split into heads by Reshape and Transpose"
    back = only_user(attention.outputs[0], "Transpose")
    if back is None or tuple(back.attributes["perm"].as_ints()) != HEADS_FIRST:
        return "the output's heads are not moved back by one Transpose"
    flat = only_user(back.outputs[0], "Reshape")
    shape = dims(flat.outputs[0]) if flat is not None else None
    if flat is None or shape is None or len(shape) != 3:
        return "the output's heads are not merged by one Reshape"
    heads = dims(attention.inputs[0])[1]  # type: ignore[index]
    attributes = {
        name: attention.attributes[name].value for name in ("is_causal", "scale") if name in attention.attributes
    }
    fused = ir.node("Attention", merged, {**attributes, "q_num_heads": heads, "kv_num_heads": heads})
    replace([attention, back, flat], flat.outputs[0], [fused])
    return None


def _before_split(value: ir.Value | None) -> ir.Value | None:
    """The [B, S, H·D] value that ``value`` [B, H, S, D] is a view of."""
    transpose = producer(value, "Transpose")
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != HEADS_FIRST:
        return None
    reshape = producer(transpose.inputs[0], "Reshape")
    source, split = (dims(reshape.inputs[0]), dims(reshape.outputs[0])) if reshape is not None else (None, None)
    if source is None or split is None or len(source) != 3 or len(split) != 4:
        return None
    heads, width = split[2:]
    return reshape.inputs[0] if heads and width and source[2] == heads * width else None  # type: ignore[union-attr]
