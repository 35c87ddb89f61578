"""Image ↔ tokens, which the exporter writes as Reshape and Transpose with sizes computed from the inputs'.

    [B, C, H, W] → Transpose → Reshape → [B, H·W, C], or Reshape, (GroupNormalization), Transpose: ``ToTokens``
    [B, H·W, C] → Reshape → Transpose → [B, C, H, W], or Transpose, Reshape: ``ToImage``

The computed sizes are no longer needed: ``ToImage`` takes them from an image of that size.
"""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.match import Dims, Outcome, is_optional_input, only_user, producer, substitute, symbols

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
SWAPPED = (0, 2, 1)


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        if step.op_type == "GroupNormalization":
            _norm_the_image(step)
    for step in list(model.graph):
        if step.graph is None or step.op_type not in ("Reshape", "Transpose"):
            continue
        image, tokens = _image_of(step), _tokens_of(step)
        if image is not None:
            fused = ops.node("ToTokens", {"x": image}, name=step.name or "")
        elif tokens is not None:
            like = size_of(model, symbols(step.outputs[0]), step)
            if like is None:
                outcome.refused["no other value has the image's height and width"] += 1
                continue
            fused = ops.node("ToImage", {"x": tokens, "like": like}, name=step.name or "")
        else:
            continue
        substitute(step.outputs, fused.outputs, [fused])
        outcome.fired += 1
    return outcome


def size_of(model: ir.Model, wanted: Dims | None, before: ir.Node) -> ir.Value | None:
    """A value with the batch, height and width of ``wanted`` that is made before ``before`` and needed after it.

    So nothing is kept for its size alone, unless nothing else has that size.
    """
    if wanted is None:
        return None

    def fits(value: ir.Value) -> bool:
        shape = symbols(value)
        return shape is not None and len(shape) == 4 and (shape[0], *shape[2:]) == (wanted[0], *wanted[2:])

    for value in model.graph.inputs:
        if fits(value) and not is_optional_input(value):
            return value
    position = {step: index for index, step in enumerate(model.graph)}
    made = [value for step in model.graph if position[step] < position[before] for value in step.outputs if fits(value)]
    needed = [v for v in made if any(position[step] > position[before] for step, _ in v.uses())]
    return (needed or made or [None])[-1]


def _norm_the_image(norm: ir.Node) -> None:
    """A norm of an image that was flattened first → the norm of the image, flattened."""
    flatten = producer(norm.inputs[0], "Reshape")
    source = flatten.inputs[0] if flatten is not None else None
    image, flat = symbols(source), symbols(norm.inputs[0])
    if flatten is None or source is None or image is None or flat is None:
        return
    if (len(image), len(flat)) != (4, 3) or flat[:2] != image[:2]:
        return
    fused = ir.node("GroupNormalization", [source, *norm.inputs[1:]], ops.plain_attributes(norm))
    normal = fused.outputs[0]
    normal.shape, normal.type = source.shape, source.type
    again = ir.node("Reshape", [normal, flatten.inputs[1]], ops.plain_attributes(flatten))
    fused.name, again.name = norm.name, flatten.name
    substitute(norm.outputs, again.outputs, [fused, again])


def _image_of(step: ir.Node) -> ir.Value | None:
    """The image whose tokens ``step`` makes."""
    image, middle, tokens = _two_steps(step, LAST, SWAPPED)
    if image is None or middle is None or tokens is None or (len(image), len(tokens)) != (4, 3):
        return None
    if step.op_type == "Transpose" and middle[:2] != image[:2]:
        return None
    return _source(step) if (image[0], image[1]) == (tokens[0], tokens[2]) else None


def _tokens_of(step: ir.Node) -> ir.Value | None:
    """The tokens whose image ``step`` makes."""
    tokens, middle, image = _two_steps(step, SWAPPED, FIRST)
    if image is None or middle is None or tokens is None or (len(image), len(tokens)) != (4, 3):
        return None
    if step.op_type == "Transpose" and (middle[0], middle[3]) != (tokens[0], tokens[2]):
        return None
    return _source(step) if (image[0], image[1]) == (tokens[0], tokens[2]) else None


def _two_steps(
    step: ir.Node, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dims | None, Dims | None, Dims | None]:
    """Shapes around ``step`` and the one before it: a Reshape after Transpose ``before`` or before ``after``."""
    if step.op_type == "Reshape":
        first = producer(step.inputs[0], "Transpose")
        if first is None or tuple(first.attributes["perm"].as_ints()) != before:
            return None, None, None
    else:
        first = producer(step.inputs[0], "Reshape")
        if first is None or tuple(step.attributes["perm"].as_ints()) != after:
            return None, None, None
    return symbols(first.inputs[0]), symbols(step.inputs[0]), symbols(step.outputs[0])


def _source(step: ir.Node) -> ir.Value | None:
    first = step.inputs[0].producer() if step.inputs[0] is not None else None
    return first.inputs[0] if first is not None else None


def image_of(tokens: ir.Value) -> ir.Node | None:
    """The ``ToImage`` that is all that reads ``tokens``."""
    step = only_user(tokens, "ToImage")
    return step if ops.is_op(step, "ToImage") else None
