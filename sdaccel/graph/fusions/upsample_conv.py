"""Nearest Resize to twice the size, or to that of the skip, and a 3×3 convolution after it → ``UpsampleConv``."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.fusions import conv, tokens
from sdaccel.graph.match import Outcome, constant, dims, only_user, substitute, symbols

_NEAREST = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "Resize" or step.domain:
            continue
        reason = _fuse_one(model, step)
        if reason:
            outcome.refused[reason] += 1
        else:
            outcome.fired += 1
    return outcome


def _fuse_one(model: ir.Model, resize: ir.Node) -> str | None:
    attributes = ops.plain_attributes(resize)
    if any(attributes.get(name) != value for name, value in _NEAREST.items()):
        return "it is not the nearest pixel at or before"
    if attributes.get("antialias", 0) or attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "it smoothes or keeps the aspect ratio"
    step = only_user(resize.outputs[0], "Conv")
    if step is None or conv.refusal(step) or (dims(step.inputs[1]) or [])[2:] != [3, 3]:
        return "no 3×3 convolution alone reads it"
    around = {"strides": (1, 1), "pads": (0, 0, 0, 0), **ops.plain_attributes(step)}
    if (tuple(around["strides"]), tuple(around["pads"])) != ((1, 1), (1, 1, 1, 1)):
        return "the convolution after it changes the size"
    x, _, scales, sizes = (*resize.inputs, None, None, None)[:4]
    small, large = symbols(x), symbols(resize.outputs[0])
    like = None
    if sizes is not None:
        if small is None or large is None or small[:2] != large[:2]:
            return "it changes batch or channels"
        like = tokens.size_of(model, large, resize)
        if like is None:
            return "no other value has its height and width"
    elif scales is None or (factors := constant(scales)) is None or factors.tolist() != [1, 1, 2, 2]:
        return "it does not double height and width"
    weight, bias = (*step.inputs[1:], None)[:2]
    inputs = {"x": x, "weight": weight, "bias": bias, "like": like}
    fused = ops.node("UpsampleConv", inputs, name=ops.layer(weight))
    substitute(step.outputs, fused.outputs, [fused])
    return None
