"""Which sum a linear or a convolution may take in as its residual."""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph.match import Outcome, is_optional_input, only_user, other, symbols


def residual(value: ir.Value, outcome: Outcome) -> tuple[ir.Value | None, ir.Value]:
    """What is added to ``value``, and the sum, where nothing but the Add reads ``value``; else None and ``value``."""
    add = only_user(value, "Add")
    if add is None:
        return None, value
    summand = other(add, value)
    if is_optional_input(summand):
        outcome.refused["what is added is an optional input"] += 1
    elif summand is value or symbols(summand) is None or symbols(summand) != symbols(value):
        outcome.refused["what is added has another shape"] += 1
    else:
        return summand, add.outputs[0]
    return None, value
