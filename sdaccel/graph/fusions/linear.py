"""MatMul by a transposed weight or Gemm, + bias, + residual, + activation → ``Linear``.

A residual that is added after the tokens have become an image again is taken in as tokens. Where both summands are
linears, the one that comes first takes the sum: the timestep's, so that what depends on the prompt alone (SDXL's y)
stays apart.
"""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import activations, ops
from sdaccel.graph.fusions import sums, tokens
from sdaccel.graph.match import Outcome, dims, is_weight, only_user, other, producer, substitute

ACTIVATIONS = ("silu", "quick_gelu", "gelu", "geglu")


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type not in ("MatMul", "Gemm"):
            continue
        found = _weight_and_bias(step)
        if isinstance(found, str):
            outcome.refused[found] += 1
            continue
        weight, bias, value = found
        residual, total = sums.residual(value, outcome)
        inputs = {"x": step.inputs[0], "weight": weight, "bias": bias, "residual": residual}
        kind, result = activations.after(total, ACTIVATIONS if residual is None else ACTIVATIONS[:-1])
        if result is not value or not _take_in_around_an_image(value, inputs, outcome):
            fused = ops.node("Linear", inputs, {"activation": kind}, name=ops.layer(weight))
            substitute([result], fused.outputs, [fused])
        outcome.fired += 1
    return outcome


def _weight_and_bias(step: ir.Node) -> tuple[ir.Value, ir.Value | None, ir.Value] | str:
    """Weight, bias and the value to which both have been applied; or what is wrong."""
    value = step.outputs[0]
    if step.op_type == "Gemm":
        attributes = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0, **ops.plain_attributes(step)}
        if attributes != {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}:
            return "a Gemm that does more than a linear"
        weight = step.inputs[1]
        bias = step.inputs[2] if len(step.inputs) > 2 else None
        if bias is not None and not _is_bias(bias, weight):
            return "what a Gemm adds is no bias"
    else:
        transpose = producer(step.inputs[1], "Transpose")
        weight = transpose.inputs[0] if transpose is not None else None
        if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != (1, 0):
            return "the second factor is not a transposed weight"
        add = only_user(value, "Add")
        bias = other(add, value) if add is not None else None
        if add is not None and _is_bias(bias, weight):
            value = add.outputs[0]
        else:
            bias = None
    if weight is None or not is_weight(weight):
        return "the second factor is not a transposed weight"
    return weight, bias, value


def _is_bias(value: ir.Value | None, weight: ir.Value | None) -> bool:
    return is_weight(value) and dims(value) == (dims(weight) or [None])[:1]


def _take_in_around_an_image(value: ir.Value, inputs: dict[str, ir.Value | None], outcome: Outcome) -> bool:
    """Whether something is added to ``value`` after it has become an image; if so, the linear takes it in."""
    image = tokens.image_of(value)
    residual, total = sums.residual(image.outputs[0], outcome) if image is not None else (None, value)
    if residual is None:
        return False
    name = ops.layer(inputs["weight"])
    flat = ops.node("ToTokens", {"x": residual}, name=f"{name}/ToTokens")
    fused = ops.node("Linear", {**inputs, "residual": flat.outputs[0]}, {"activation": "none"}, name=name)
    for made in (*flat.outputs, *fused.outputs):
        made.shape, made.type = value.shape, value.type
    back = ops.node("ToImage", {"x": fused.outputs[0], "like": residual}, name=f"{name}/ToImage")
    substitute([total], back.outputs, [flat, fused, back])
    return True
