"""Operators of the domain ``sdaccel``: how a node of each is made, and its body in standard operators.

What they compute is told in `sdaccel.graph.fusions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from sdaccel.graph.match import Outcome

DOMAIN = "sdaccel"
OPSET = 23


@dataclass(frozen=True)
class Operator:
    """``body`` gives the lines of a function of these inputs for a form; the last ones make the outputs."""

    inputs: tuple[str, ...]
    body: Callable[[Collection[str]], list[str]]
    optional: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


def node(
    op_type: str,
    inputs: Mapping[str, ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    name: str,
    forms: Sequence[str] = (),
    outputs: int = 1,
) -> ir.Node:
    """A node in the form that its present inputs and its activation call for, or in the given ``forms``."""
    attributes = dict(attributes or {})
    if op_type == "MultiLinear":
        values = list(inputs.values())
    else:
        operator = OPERATORS[op_type]
        values = [inputs.get(name) for name in (*operator.inputs, *operator.optional)]
        forms = [*forms, *(name for name in operator.optional if inputs.get(name) is not None)]
        if attributes.get("activation", "none") != "none":
            forms = [*forms, attributes["activation"]]
    while values[-1] is None:
        values.pop()
    overload = "+".join(forms)
    return ir.node(op_type, values, attributes, domain=DOMAIN, overload=overload, num_outputs=outputs, name=name)


def layer(weight: ir.Value | None) -> str:
    """The name of the layer that ``weight`` belongs to, which its node gets too."""
    return ((weight.name if weight is not None else None) or "").removesuffix(".weight")


def is_op(step: ir.Node | None, *op_types: str) -> bool:
    return step is not None and step.domain == DOMAIN and step.op_type in op_types


def named_inputs(step: ir.Node) -> dict[str, ir.Value | None]:
    """What ``step`` reads, by the names of its operator's inputs."""
    operator = OPERATORS[step.op_type]
    names = (*operator.inputs, *operator.optional)
    return dict(zip(names, [*step.inputs, *[None] * (len(names) - len(step.inputs))], strict=True))


def plain_attributes(step: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in step.attributes.items()}


def define(model: ir.Model) -> Outcome:
    """Adds the body of every form in use, and makes names unique."""
    outcome = Outcome()
    for step in model.graph:
        identifier = step.op_identifier()
        if step.domain == DOMAIN and identifier not in model.functions:
            model.functions[identifier] = function(step.op_type, step.overload)
            outcome.fired += 1
    if any(step.domain == DOMAIN for step in model.graph):
        model.opset_imports[DOMAIN] = 1
    NameFixPass()(model)
    return outcome


def function(op_type: str, overload: str) -> ir.Function:
    """The body of ``op_type`` in the form ``overload``."""
    form = overload.split("+") if overload else []
    if op_type == "MultiLinear":
        operator = _multi_linear(int(form[0]), "bias" in form)
        outputs = [f"y{index}" for index in range(int(form[0]))]
    else:
        operator = OPERATORS[op_type]
        outputs = ["y", "sum"] if op_type == "LayerNorm" and "residual" in form else ["y"]
    inputs = ", ".join((*operator.inputs, *operator.optional))
    attributes = f"<{', '.join(operator.attributes)}>" if operator.attributes else ""
    text = (
        f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}], overload: "{overload}">\n'
        f"{op_type} {attributes} ({inputs}) => ({', '.join(outputs)}) {{\n" + "\n".join(operator.body(form)) + "\n}"
    )
    made = ir.from_proto(onnx.parser.parse_function(text))
    for index, step in enumerate(made):
        step.name = f"{op_type}/{overload}/{index}.{step.op_type}"
    return made


def _activation(form: Collection[str], value: str) -> list[str]:
    if "silu" in form:
        return [f"gate = Sigmoid({value})", f"y = Mul({value}, gate)"]
    if "gelu" in form:
        return [f"y = Gelu({value})"]
    if "quick_gelu" in form:
        factor = "factor = Constant<value_float: float = 1.702>()"
        return [factor, f"scaled = Mul({value}, factor)", "gate = Sigmoid(scaled)", f"y = Mul({value}, gate)"]
    if "geglu" in form:
        return [f"half, gate = Split<axis = -1, num_outputs = 2>({value})", "open = Gelu(gate)", "y = Mul(half, open)"]
    return [f"y = Identity({value})"]


def _joined(form: Collection[str]) -> tuple[list[str], str]:
    return (["joined = Concat<axis = 1>(x, x2)"], "joined") if "x2" in form else ([], "x")


def _plus(form: Collection[str], value: str) -> tuple[list[str], str]:
    return ([f"total = Add({value}, residual)"], "total") if "residual" in form else ([], value)


def _group_norm(form: Collection[str]) -> list[str]:
    lines, value = _joined(form)
    if "add" in form:
        axes = "axes = Constant<value_ints: ints = [2, 3]>()"
        lines += [axes, "wide = Unsqueeze(add, axes)", f"moved = Add({value}, wide)"]
        value = "moved"
    attributes = "num_groups: int = @num_groups, epsilon: float = @epsilon"
    return [*lines, f"normal = GroupNormalization<{attributes}>({value}, scale, bias)", *_activation(form, "normal")]


def _layer_norm(form: Collection[str]) -> list[str]:
    lines, value = (["sum = Add(x, residual)"], "sum") if "residual" in form else ([], "x")
    return [*lines, f"y = LayerNormalization<axis = -1, epsilon: float = @epsilon>({value}, scale, bias)"]


def _conv(form: Collection[str]) -> list[str]:
    lines, value = _joined(form)
    bias = ", bias" if "bias" in form else ""
    lines.append(f"made = Conv<strides: ints = @strides, pads: ints = @pads>({value}, weight{bias})")
    more, value = _plus(form, "made")
    return [*lines, *more, *_activation(form, value)]


def _upsample_conv(form: Collection[str]) -> list[str]:
    how = 'mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"'
    if "like" in form:
        lines = ["front = Shape<start = 0, end = 2>(x)", "back = Shape<start = 2, end = 4>(like)"]
        lines += ["sizes = Concat<axis = 0>(front, back)", f"large = Resize<{how}>(x, , , sizes)"]
    else:
        lines = ["scales = Constant<value_floats: floats = [1.0, 1.0, 2.0, 2.0]>()"]
        lines += [f"large = Resize<{how}>(x, , scales)"]
    bias = ", bias" if "bias" in form else ""
    return [*lines, f"y = Conv<pads = [1, 1, 1, 1]>(large, weight{bias})"]


def _linear(form: Collection[str]) -> list[str]:
    lines, value = ["turned = Transpose<perm = [1, 0]>(weight)", "made = MatMul(x, turned)"], "made"
    if "bias" in form:
        lines, value = [*lines, "shifted = Add(made, bias)"], "shifted"
    more, value = _plus(form, value)
    return [*lines, *more, *_activation(form, value)]


def _multi_linear(count: int, biased: bool) -> Operator:
    def body(_: Collection[str]) -> list[str]:
        lines = []
        for i in range(count):
            lines += [f"turned{i} = Transpose<perm = [1, 0]>(weight{i})", f"made{i} = MatMul(x, turned{i})"]
            lines.append(f"y{i} = Add(made{i}, bias{i})" if biased else f"y{i} = Identity(made{i})")
        return lines

    weights = [f"weight{i}" for i in range(count)]
    return Operator(("x", *weights, *[f"bias{i}" for i in range(count) if biased]), body)


def _to_tokens(_: Collection[str]) -> list[str]:
    return [
        "last = Transpose<perm = [0, 2, 3, 1]>(x)",
        "front = Constant<value_ints: ints = [0, -1]>()",
        "channels = Shape<start = 1, end = 2>(x)",
        "size = Concat<axis = 0>(front, channels)",
        "y = Reshape(last, size)",
    ]


def _to_image(_: Collection[str]) -> list[str]:
    return [
        "batch = Shape<start = 0, end = 1>(x)",
        "area = Shape<start = 2, end = 4>(like)",
        "channels = Shape<start = 2, end = 3>(x)",
        "size = Concat<axis = 0>(batch, area, channels)",
        "last = Reshape(x, size)",
        "y = Transpose<perm = [0, 3, 1, 2]>(last)",
    ]


def _timestep_embedding(form: Collection[str]) -> list[str]:
    first, second = ("cosine", "sine") if "flip" in form else ("sine", "cosine")
    return [
        "axes = Constant<value_ints: ints = [1]>()",
        "column = Unsqueeze(timestep, axes)",
        "angles = Mul(column, frequencies)",
        "sine = Sin(angles)",
        "cosine = Cos(angles)",
        f"y = Concat<axis = 1>({first}, {second})",
    ]


OPERATORS = {
    "GroupNorm": Operator(("x", "scale", "bias"), _group_norm, ("x2", "add"), ("num_groups", "epsilon", "activation")),
    "LayerNorm": Operator(("x", "scale", "bias"), _layer_norm, ("residual",), ("epsilon",)),
    "Conv": Operator(("x", "weight"), _conv, ("bias", "residual", "x2"), ("strides", "pads", "activation")),
    "UpsampleConv": Operator(("x", "weight"), _upsample_conv, ("bias", "like")),
    "Linear": Operator(("x", "weight"), _linear, ("bias", "residual"), ("activation",)),
    "ToTokens": Operator(("x",), _to_tokens),
    "ToImage": Operator(("x", "like"), _to_image),
    "TimestepEmbedding": Operator(("timestep", "frequencies"), _timestep_embedding, (), ("flip_sin_to_cos",)),
}
