"""Activations as the exporter writes them, in several nodes."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from sdaccel.graph.match import dims, is_scalar, only_user, other

QUICK_GELU = 1.702


def after(value: ir.Value, kinds: Collection[str]) -> tuple[str, ir.Value]:
    """The activation of ``kinds`` that is all that reads ``value``, and its result; ("none", ``value``) otherwise."""
    for kind in kinds:
        result = _FIND[kind](value)
        if result is not None:
            return kind, result
    return "none", value


def _silu(value: ir.Value) -> ir.Value | None:
    """value · sigmoid(value)"""
    users = _users(value, 2)
    gate = _one(users, "Sigmoid")
    return _product(value, gate, users)


def _quick_gelu(value: ir.Value) -> ir.Value | None:
    """value · sigmoid(1.702 value)"""
    users = _users(value, 2)
    scaled = next((step for step in users if step.op_type == "Mul" and _is_quick(other(step, value))), None)
    gate = only_user(scaled.outputs[0], "Sigmoid") if scaled is not None else None
    return _product(value, gate, users)


def _is_quick(factor: ir.Value | None) -> bool:
    return any(is_scalar(factor, number) for number in (QUICK_GELU, _AS_FLOAT32))


_AS_FLOAT32 = 1.7020000219345093


def _gelu(value: ir.Value) -> ir.Value | None:
    gelu = only_user(value, "Gelu")
    return gelu.outputs[0] if gelu is not None and _is_exact(gelu) else None


def _geglu(value: ir.Value) -> ir.Value | None:
    """first half · gelu(second half)"""
    split = only_user(value, "Split")
    shape = dims(value)
    if split is None or shape is None or len(split.outputs) != 2 or len(split.inputs) > 1:
        return None
    if split.attributes["axis"].as_int() not in (-1, len(shape) - 1):
        return None
    half, gate = split.outputs
    gelu, product = only_user(gate, "Gelu"), only_user(half, "Mul")
    if gelu is None or product is None or not _is_exact(gelu):
        return None
    joined = only_user(gelu.outputs[0], "Mul") is product
    return product.outputs[0] if joined else None


_FIND = {"silu": _silu, "quick_gelu": _quick_gelu, "gelu": _gelu, "geglu": _geglu}


def _is_exact(gelu: ir.Node) -> bool:
    return "approximate" not in gelu.attributes or gelu.attributes["approximate"].as_string() == "none"


def _users(value: ir.Value, count: int) -> list[ir.Node]:
    users = [step for step, _ in value.uses()]
    return users if len(users) == count and not value.is_graph_output() else []


def _one(users: list[ir.Node], op_type: str) -> ir.Node | None:
    return next((step for step in users if step.op_type == op_type), None)


def _product(value: ir.Value, gate: ir.Node | None, users: list[ir.Node]) -> ir.Value | None:
    """value · gate, where nothing else reads either."""
    product = only_user(gate.outputs[0], "Mul") if gate is not None else None
    if gate is None or product is None or product not in users:
        return None
    return product.outputs[0] if other(product, value) is gate.outputs[0] else None
