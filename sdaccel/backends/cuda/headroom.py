"""Room for large activations in float16: what is written for normalization alone to read is kept smaller.

Group normalization divides by the standard deviation, so GroupNorm(s x, epsilon s²) = GroupNorm(x, epsilon): the
values in front of it, along a residual stream and through the convolutions that carry it on, may be scaled as one
likes. Here s is a power of two, put into weights and biases, and changes no rounding. SDXL's VAE, whose stream exceeds
65504 and which torch therefore runs in float32, fits into float16 so.
"""

from __future__ import annotations

from dataclasses import replace

from sdaccel.backends.cuda.plan import ExecutionPlan, Step
from sdaccel.errors import BackendError

EXPONENT = -7
"""Values up to 65504 * 2^7 fit then; and weights of order 1e-2 stay normal numbers."""

_PRODUCTS = frozenset({"Conv", "Linear", "UpsampleConv"})
_RESIDUAL = 3
"""its place among the inputs of Conv and Linear"""


def with_headroom(plan: ExecutionPlan, exponent: int = EXPONENT) -> ExecutionPlan:
    """``plan`` with every value that may be scaled smaller by 2^exponent, and the weights' exponents that do it.

    Raises BackendError where one weight would have to be scaled in two ways.
    """
    scaled = _scalable(plan)

    def of(name: str) -> int:
        return exponent if name in scaled else 0

    exponents: dict[str, int] = {}
    steps = []
    for step in plan.steps:
        if step.op in _PRODUCTS:
            out = of(step.outputs[0])
            for name, power in zip(step.inputs[1:3], (out - of(step.inputs[0]), out), strict=False):
                for part in plan.joined.get(name, (name,)):
                    if part and exponents.setdefault(part, power) != power:
                        raise BackendError(f"{part} would have to be scaled by 2^{power} and by 2^{exponents[part]}.")
        elif step.op == "GroupNorm" and step.inputs[0] in scaled:
            epsilon = step.attributes["epsilon"] * 4.0**exponent
            step = replace(step, attributes={**step.attributes, "epsilon": epsilon})
        steps.append(step)
    return replace(plan, steps=tuple(steps), exponents={name: power for name, power in exponents.items() if power})


def _scalable(plan: ExecutionPlan) -> set[str]:
    """Values that products, sums and moves write, and that these and group normalization read, and nothing else.

    Those that are added to each other are scaled alike or not at all, and products of them are scaled too.
    """
    alike: dict[str, str] = {}

    def root(name: str) -> str:
        while alike.get(name, name) != name:
            name = alike[name]
        return name

    fixed = {*plan.inputs, *plan.optional, *plan.outputs, *plan.constants, *plan.weights, *plan.joined}
    for step in plan.prologue:
        fixed.update((*step.inputs, *step.outputs))
    written: set[str] = set()
    for step in plan.steps:
        together, free = _together(step)
        for name in together[1:]:
            alike[root(name)] = root(together[0])
        fixed.update(name for name in (*step.inputs, *step.outputs) if name not in free)
        written.update(step.outputs)
    stuck = {root(name) for name in fixed}
    products = [(root(step.inputs[0]), root(step.outputs[0])) for step in plan.steps if step.op in _PRODUCTS]
    while more := {read for read, wrote in products if wrote in stuck} - stuck:
        stuck |= more
    return {name for name in written if root(name) not in stuck}


def _together(step: Step) -> tuple[list[str], set[str]]:
    """Values of a step that have to be scaled alike; and all that may be scaled at all."""
    inputs, (out, *more) = step.inputs, step.outputs
    if more:
        return [], set()
    if step.op in _PRODUCTS:
        residual, second = (*inputs[_RESIDUAL:], "", "")[:2] if step.op != "UpsampleConv" else ("", "")
        linear = step.attributes.get("activation", "none") == "none"
        sums = [name for name in (out, residual) if name]
        reads = [name for name in (inputs[0], second) if name]
        if second:  # one weight for both: what they are scaled by must be one
            return [*reads, *sums], {*reads, *sums} if linear else set()
        return sums, {*reads, *sums} if linear else set(reads)
    if step.op == "GroupNorm":
        reads = [name for name in (inputs[0], *inputs[3:]) if name]
        return reads, set(reads)
    if step.op == "ai.onnx.Add":
        return [out, *inputs], {out, *inputs}
    if step.op in ("ToTokens", "ToImage"):  # the second input of ToImage gives its shape alone
        return [out, inputs[0]], {out, *inputs}
    return [], set()
