"""All linears that read one value → one ``MultiLinear``: QKV, all cross-attentions' keys and values, time embeddings.

Those with and those without bias make two.
"""

from __future__ import annotations

import onnx_ir as ir

from sdaccel.graph import ops
from sdaccel.graph.match import Outcome, substitute


def fuse(model: ir.Model) -> Outcome:
    outcome = Outcome()
    groups: dict[tuple[ir.Value | None, bool], list[ir.Node]] = {}
    for step in model.graph:
        if not ops.is_op(step, "Linear"):
            continue
        if step.overload in ("", "bias"):
            groups.setdefault((step.inputs[0], step.overload == "bias"), []).append(step)
        elif len(step.inputs[0].uses()) > 1:  # type: ignore[union-attr]
            outcome.refused["it has a residual or an activation"] += 1
    for (x, biased), steps in groups.items():
        if len(steps) == 1:
            outcome.refused["no other linear like it reads its input"] += 1
            continue
        parts = [ops.named_inputs(step) for step in steps]
        inputs = {"x": x, **{f"weight{i}": part["weight"] for i, part in enumerate(parts)}}
        if biased:
            inputs |= {f"bias{i}": part["bias"] for i, part in enumerate(parts)}
        forms = [str(len(steps)), *(["bias"] if biased else [])]
        name = f"{steps[0].name} and {len(steps) - 1} more"
        fused = ops.node("MultiLinear", inputs, name=name, forms=forms, outputs=len(steps))
        substitute([step.outputs[0] for step in steps], fused.outputs, [fused], steps[0])
        outcome.fired += 1
    return outcome
