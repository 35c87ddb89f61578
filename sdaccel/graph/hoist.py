"""What a loop over timesteps need not compute again."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def invariant(model: ir.Model, inputs: Collection[str]) -> list[str]:
    """Names of the nodes that depend on no other graph input than ``inputs``, in an order in which they can run.

    Weights and constants are no inputs; an optional input is one, whether it has a default or not.
    """
    varying = {value for value in model.graph.inputs if value.name not in inputs}
    found = []
    for step in model.graph:
        if varying.isdisjoint(value for value in step.inputs if value is not None):
            found.append(step.name or "")
        else:
            varying.update(step.outputs)
    return found
