"""Conv, + residual, + SiLU → ``Conv`` of our domain.

Where both summands are convolutions, the one that comes first takes the sum: the 3×3, as the exporter writes the
shortcut's 1×1 after it.
"""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import activations, ops
from sdaccel.graph.fusions import sums
from sdaccel.graph.match import Outcome, dims, is_weight, substitute


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type != "Conv" or step.domain:
            continue
        reason = refusal(step)
        if reason:
            outcome.refused[reason] += 1
            continue
        x, weight, bias = (*step.inputs, None)[:3]
        attributes = {"strides": [1, 1], "pads": [0, 0, 0, 0], **ops.plain_attributes(step)}
        residual, total = sums.residual(step.outputs[0], outcome)
        kind, result = activations.after(total, ["silu"])
        fused = ops.node(
            "Conv",
            {"x": x, "weight": weight, "bias": bias, "residual": residual},
            {"strides": attributes["strides"], "pads": attributes["pads"], "activation": kind},
            name=ops.layer(weight),
        )
        substitute([result], fused.outputs, [fused])
        outcome.fired += 1
    return outcome


def refusal(conv: ir.Node) -> str | None:
    """Why ``conv`` is none of ours."""
    attributes = ops.plain_attributes(conv)
    if not is_weight(conv.inputs[1]) or len(dims(conv.inputs[1]) or ()) != 4:
        return "its weight is computed, or it is not of images"
    if attributes.get("group", 1) != 1 or set(attributes.get("dilations", [1])) != {1}:
        return "it has groups or is dilated"
    if attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return "it pads by itself"
    return None
