"""Convolution, bias and activation as one cuDNN graph, if nvidia-cudnn-frontend is installed.

No residual: cuDNN 9.19 launches such a graph dependent on the kernel before it and reads the residual without waiting
for that kernel, so that a residual made just before is read half-written (seen in CUDA graphs on an H200).

Plans come in the order of cuDNN's heuristic; a tactic is a place in that order. Graphs are built once a shape and kept.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.errors import BackendError

if TYPE_CHECKING:
    from sdaccel.backends.cuda.ops.conv import Call

PLANS = 1
"""how many of the heuristic's are offered"""


def tactics(call: Call) -> list[Tactic]:
    """None where the package is missing, or the call has a part that the graph does not express."""
    if _cudnn() is None or call.add is not None or call.residual is not None:
        return []
    if call.activation not in ("none", "silu"):
        return []
    if call.x.dtype not in (torch.float16, torch.bfloat16) or min(call.sides) < 1:
        return []
    return [Tactic(f"cudnn<plan={index}>", partial(_run, call, index)) for index in range(PLANS)]


@functools.cache
def _cudnn() -> Any:
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError):  # not installed, or without its library
        return None


@functools.cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return _cudnn().create_handle()


@dataclass
class _Graph:
    graph: Any
    inputs: list[Any]
    """of the graph: x, weight, then bias where it is given"""
    output: Any
    workspaces: dict[int, int] = field(default_factory=dict)
    """plan → bytes, of the plans that are built"""


_graphs: dict[tuple[Any, ...], _Graph] = {}
_lock = threading.Lock()


def _run(call: Call, index: int) -> Tensor:
    """Raises BackendError where cuDNN has no such plan."""
    cudnn = _cudnn()
    x = call.x if call.x2 is None else torch.cat((call.x, call.x2), 1)
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, call.weight))
    bias = None if call.bias is None else call.bias.view(1, -1, 1, 1)
    out = call.result()
    given = [t for t in (x, weight, bias) if t is not None]
    device = x.device.index or 0
    options = (bias is not None, call.stride, call.padding, call.activation)
    key = (device, x.dtype, tuple(x.shape), tuple(weight.shape), *options)
    with _lock:
        handle = _handle(device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        try:
            graph = _graphs.get(key)
            if graph is None:
                graph = _graphs[key] = _build(cudnn, handle, given, out, *options)
            if index not in graph.workspaces:
                if index >= graph.graph.get_execution_plan_count():
                    raise BackendError(f"cuDNN has no plan {index} for this convolution.")
                graph.graph.build_plan_at_index(index)
                graph.workspaces[index] = graph.graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(1, graph.workspaces[index]), dtype=torch.uint8, device=x.device)
            pack = dict(zip((*graph.inputs, graph.output), (*given, out), strict=True))
            graph.graph.execute_plan_at_index(pack, workspace, index, handle=handle)
        except (RuntimeError, ValueError, cudnn.cudnnGraphNotSupportedError) as error:
            raise BackendError(f"cuDNN: {error}") from error
    return out


def _build(
    cudnn: Any,
    handle: Any,
    given: list[Tensor],
    out: Tensor,
    biased: bool,
    stride: int,
    padding: int,
    activation: str,
) -> _Graph:
    kind = cudnn.data_type.HALF if out.dtype == torch.float16 else cudnn.data_type.BFLOAT16
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(handle=handle, io_data_type=kind, intermediate_data_type=single, compute_data_type=single)
    inputs = [
        graph.tensor(name=f"input{i}", dim=list(t.shape), stride=_strides(t), data_type=kind)
        for i, t in enumerate(given)
    ]
    y = graph.conv_fprop(image=inputs[0], weight=inputs[1], padding=[padding] * 2, stride=[stride] * 2, dilation=[1, 1])
    if biased:
        y = graph.add(a=y, b=inputs[2])
    if activation == "silu":
        y = graph.swish(input=y)
    y.set_output(True).set_data_type(kind).set_dim(list(out.shape)).set_stride(_strides(out))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    return _Graph(graph, inputs, y)


def _strides(x: Tensor) -> list[int]:
    """Of channels innermost, also where a side is one pixel long and torch does not care."""
    _, channels, height, width = x.shape
    return [height * width * channels, 1, width * channels, channels]
