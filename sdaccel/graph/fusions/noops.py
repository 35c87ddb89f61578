"""Nodes that change nothing: division or multiplication by one, and what is left without a reader."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, RemoveUnusedNodesPass

from sdaccel.graph.match import Outcome, is_scalar


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    for step in list(model.graph):
        scaled = step.op_type in ("Div", "Mul") and is_scalar(step.inputs[1], 1.0)
        if scaled and not step.outputs[0].is_graph_output():
            step.outputs[0].replace_all_uses_with(step.inputs[0])
            model.graph.remove(step, safe=True)
            outcome.fired += 1
    IdentityEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    return outcome
