"""Small questions that fusions ask of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir


@dataclass
class Outcome:
    """How often a fusion fired, and why it did not where its first node was found."""

    fired: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The ``op_type`` node that makes ``value``, if that is what makes it."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one ``op_type`` node that reads ``value``, if nothing else does and it is no graph output."""
    users = [node for node, _ in value.uses()]
    if len(users) == 1 and users[0].op_type == op_type and not value.is_graph_output():
        return users[0]
    return None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The number(s) ``value`` always has; None for weights that lie outside the file and for computed values."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    node = value.producer()
    if tensor is None and node is not None and node.op_type == "Constant":
        (attribute,) = node.attributes.values()
        if attribute.name != "value":
            return np.asarray(attribute.value)
        tensor = attribute.value
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.numpy()


def is_scalar(value: ir.Value | None, number: float) -> bool:
    """Whether ``value`` is a constant with one element equal to ``number``."""
    array = constant(value)
    return array is not None and array.size == 1 and float(array.reshape(())) == number


def dims(value: ir.Value | None) -> list[int | None] | None:
    """The shape of ``value`` with None for what is only known at run time; None when the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return [d if isinstance(d, int) else None for d in value.shape]


def replace(old: Sequence[ir.Node], output: ir.Value, new: Sequence[ir.Node]) -> None:
    """Puts ``new`` in place of ``old``: the last of ``new`` makes what ``output`` was.

    The new nodes are named after the first old one, so that a profile of the fused graph still reads as the model.
    """
    graph = old[-1].graph
    for index, step in enumerate(new):
        step.name = f"{old[0].name}/{index}.{step.op_type}"
    (result,) = new[-1].outputs
    result.shape, result.type, result.name = output.shape, output.type, output.name
    if isinstance(graph, ir.Graph):
        for index, value in enumerate(graph.outputs):
            if value is output:
                graph.outputs[index] = result
    graph.insert_before(old[-1], list(new))
    output.replace_all_uses_with(result)
    graph.remove(list(old), safe=True)


Dims = tuple[int | str, ...]


def symbols(value: ir.Value | None) -> Dims | None:
    """The shape of ``value`` with names for what is only known at run time; None unless every dimension has one.

    Equal symbols are equal sizes: the exporter names a size by how it is computed from the inputs'.
    """
    if value is None or value.shape is None:
        return None
    found = tuple(d if isinstance(d, int) else d.value for d in value.shape)
    return None if None in found else found  # type: ignore[return-value]


def is_weight(value: ir.Value | None) -> bool:
    """Whether ``value`` is the same at every call: an initializer, and no default of an input."""
    return value is not None and value.is_initializer() and not value.is_graph_input()


def is_optional_input(value: ir.Value | None) -> bool:
    """Whether ``value`` is an input that may be left out."""
    return value is not None and value.is_initializer() and value.is_graph_input()


def other(step: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other factor or summand of the two that ``step`` reads."""
    first, second = step.inputs
    return second if first is value else first


def substitute(
    old: Sequence[ir.Value], new: Sequence[ir.Value], steps: Sequence[ir.Node], before: ir.Node | None = None
) -> None:
    """``steps`` make ``new``, which is read wherever ``old`` was; they lie where the last of ``old`` was made.

    ``before`` is another place for them. Nodes that made ``old`` go, and whatever only they read.
    """
    before = before or old[-1].producer()
    graph = before.graph if before is not None else None
    if before is None or not isinstance(graph, ir.Graph):
        raise ValueError(f"{old[-1].name} is made by no node of a graph")
    graph.insert_before(before, list(steps))
    for was, now in zip(old, new, strict=True):
        now.shape, now.type, now.name = was.shape, was.type, was.name
        for index, value in enumerate(graph.outputs):
            if value is was:
                graph.outputs[index] = now
        was.replace_all_uses_with(now)
    dead = [value.producer() for value in old]
    while dead:
        step = dead.pop()
        if step is None or step.graph is not graph or any(v.uses() or v.is_graph_output() for v in step.outputs):
            continue
        dead += [value.producer() for value in step.inputs if value is not None]
        graph.remove(step, safe=True)
