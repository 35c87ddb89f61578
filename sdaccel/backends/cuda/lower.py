"""Fused ONNX graph → ExecutionPlan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from sdaccel.backends.cuda.plan import ExecutionPlan, Step, WeightPlace
from sdaccel.engine.weights import TensorPlace
from sdaccel.errors import BackendError

OURS = "sdaccel"


def lower(
    model: onnx.ModelProto, entry: str, layout: Mapping[str, TensorPlace], prologue: Collection[str] = ()
) -> ExecutionPlan:
    """The plan of ``model``, whose external initializers are the tensors of ``layout`` in the weights entry ``entry``.

    prologue: names of the nodes that depend on the prompt alone. Raises BackendError for an operator that the executor
    does not know.
    """
    graph = model.graph
    weights, constants, defaults = {}, {}, set()
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.name in inputs:
            defaults.add(tensor.name)
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = layout[tensor.name]
            weights[tensor.name] = WeightPlace(entry, place.offset, place.nbytes, place.dtype, tuple(place.shape))
        else:
            constants[tensor.name] = _tensor(tensor)
    joined: dict[str, tuple[str, ...]] = {}
    first = set(prologue)
    before: list[Step] = []
    after: list[Step] = []
    for node, steps in _steps(graph, constants, joined, first):
        (before if node in first else after).extend(steps)
    used = {name for step in (*before, *after) for name in step.inputs}
    used |= {name for parts in joined.values() for name in parts}
    return ExecutionPlan(
        inputs=tuple(value.name for value in graph.input if value.name in used),
        optional=tuple(name for name in (value.name for value in graph.input) if name in defaults),
        outputs=tuple(value.name for value in graph.output),
        prologue=tuple(before),
        steps=tuple(after),
        joined=joined,
        weights={name: place for name, place in weights.items() if name in used},
        constants={name: value for name, value in constants.items() if name in used},
    )


def _steps(
    graph: onnx.GraphProto,
    constants: dict[str, torch.Tensor],
    joined: dict[str, tuple[str, ...]],
    prologue: Collection[str],
) -> Iterator[tuple[str, list[Step]]]:
    """The name of each node, and the steps it becomes."""
    from sdaccel.backends.cuda.ops.registry import OPS

    for index, node in enumerate(graph.node):
        attributes = {item.name: _attribute(item) for item in node.attribute}
        name = node.name or f"node_{index}"
        if node.op_type == "Constant" and not node.domain:
            (value,) = attributes.values()
            constants[node.output[0]] = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            continue
        if (node.domain, node.op_type) == (OURS, "MultiLinear"):
            widths = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
            lasting = node.name in prologue
            yield node.name, list(_grouped(name, node, joined, widths) if lasting else _one_linear(name, node, joined))
            continue
        op = node.op_type if node.domain == OURS else f"{node.domain or 'ai.onnx'}.{node.op_type}"
        if op not in OPS:
            raise BackendError(f"the CUDA engine does not run the operator {op} ({name}).")
        yield node.name, [Step(name, op, tuple(node.input), tuple(node.output), attributes)]


def _one_linear(name: str, node: onnx.NodeProto, joined: dict[str, tuple[str, ...]]) -> Iterator[Step]:
    """Linears of one input as one product with all their weights, and a view for each."""
    count = len(node.output)
    x, weights, biases = node.input[0], tuple(node.input[1 : 1 + count]), tuple(node.input[1 + count :])
    inputs = [x, f"{name}.weight"]
    joined[inputs[1]] = weights
    if biases:
        inputs.append(f"{name}.bias")
        joined[inputs[2]] = biases
    whole = f"{name}.output"
    yield Step(name, "Linear", tuple(inputs), (whole,), {"activation": "none"})
    yield Step(f"{name}.views", "Views", (whole, *weights), tuple(node.output))


def _grouped(
    name: str, node: onnx.NodeProto, joined: dict[str, tuple[str, ...]], widths: Mapping[str, int]
) -> Iterator[Step]:
    """Linears of the prompt: one product for each width, each result dense.

    Views into rows of all layers' keys and values, 300 KB long in SDXL, would lie on as many pages as there are tokens;
    to fetch them costs attention several times what it computes.
    """
    count = len(node.output)
    x, weights, biases = node.input[0], node.input[1 : 1 + count], node.input[1 + count :]
    for width in sorted({widths[weight] for weight in weights}):
        chosen = [index for index, weight in enumerate(weights) if widths[weight] == width]
        inputs = [x, f"{name}.{width}.weight"]
        joined[inputs[1]] = tuple(weights[index] for index in chosen)
        if biases:
            inputs.append(f"{name}.{width}.bias")
            joined[inputs[2]] = tuple(biases[index] for index in chosen)
        whole = f"{name}.{width}.output"
        yield Step(f"{name}.{width}", "Linear", tuple(inputs), (whole,), {"activation": "none", "group": width})
        yield Step(f"{name}.{width}.groups", "Groups", (whole,), tuple(node.output[index] for index in chosen))


def _attribute(item: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(item)
    if isinstance(value, onnx.TensorProto):
        return _tensor(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)):
        return [part.decode() if isinstance(part, bytes) else part for part in value]
    return value


def _tensor(tensor: onnx.TensorProto) -> torch.Tensor:
    return torch.from_numpy(np.array(numpy_helper.to_array(tensor)))
