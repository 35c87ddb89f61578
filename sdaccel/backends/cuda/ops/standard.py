"""The ONNX operators that no fusion took in, by torch. A value on the CPU is a shape, a size or an index.

An optional input that was left out is None and stands for zero: what is added to it is itself, what is multiplied by it
is left out too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attributes = Mapping[str, Any]
Operator = Callable[..., Any]


def add(attributes: Attributes, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _keeping_none(function: Callable[..., Any]) -> Operator:
    def operator(attributes: Attributes, *values: Tensor | None) -> Any:
        return None if values[0] is None else function(*values)

    return operator


def _divide(a: Tensor, b: Tensor) -> Tensor:
    whole = not a.is_floating_point() and not b.is_floating_point()
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def multiply(attributes: Attributes, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a * b


def concat(attributes: Attributes, *values: Tensor) -> Tensor:
    return torch.cat(values, attributes["axis"])


def reshape(attributes: Attributes, x: Tensor | None, shape: Tensor) -> Tensor | None:
    if x is None:
        return None
    sizes = shape.tolist()
    if not attributes.get("allowzero"):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def transpose(attributes: Attributes, x: Tensor) -> Tensor:
    return x.permute(attributes.get("perm") or tuple(reversed(range(x.dim()))))


def unsqueeze(attributes: Attributes, x: Tensor | None, axes: Tensor) -> Tensor | None:
    if x is None:
        return None
    wanted = axes.tolist()
    rank = x.dim() + len(wanted)
    for axis in sorted(axis % rank for axis in wanted):
        x = x.unsqueeze(axis)
    return x


def squeeze(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.reshape(-1).tolist()))


def shape(attributes: Attributes, x: Tensor) -> Tensor:
    sizes = list(x.shape)[attributes.get("start", 0) : attributes.get("end")]
    return torch.tensor(sizes, dtype=torch.int64)


def slice_(
    attributes: Attributes,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    where = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    index = [slice(None)] * x.dim()
    for axis, start, end, step in zip(where, starts.tolist(), ends.tolist(), strides, strict=True):
        index[axis] = slice(start, None if end >= x.shape[axis] else end, step)
    return x[tuple(index)]


def gather(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.dim()
    indices = indices.to(x.device) if indices.device != x.device else indices
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    picked = x.index_select(axis, indices.reshape(-1))
    return picked.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def gather_nd(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    batch = attributes.get("batch_dims", 0)
    if batch == 0:
        return x[tuple(indices.unbind(-1))]
    rows = torch.arange(x.shape[0], device=x.device).reshape(-1, *[1] * (indices.dim() - 2))
    return x[(rows, *indices.unbind(-1))]


def range_(attributes: Attributes, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


_TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 16: torch.bfloat16}


def cast(attributes: Attributes, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(_TYPES[attributes["to"]])


def argmax(attributes: Attributes, x: Tensor) -> Tensor:
    return x.argmax(attributes.get("axis", 0), bool(attributes.get("keepdims", 1)))


def split(attributes: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is not None:
        return x.split(sizes.tolist(), axis)
    return x.split(math.ceil(x.shape[axis] / attributes["num_outputs"]), axis)


def expand(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape.tolist())))


def constant_of_shape(attributes: Attributes, shape: Tensor) -> Tensor:
    value = attributes.get("value")
    filling = torch.zeros(1) if value is None else value
    return torch.full(shape.tolist(), filling.item(), dtype=filling.dtype)


def where(attributes: Attributes, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


def softmax(attributes: Attributes, x: Tensor) -> Tensor:
    return x.softmax(attributes.get("axis", -1))


def gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=attributes.get("approximate", "none"))


def matmul(attributes: Attributes, a: Tensor | None, b: Tensor) -> Tensor | None:
    return None if a is None else a.to(b.dtype) @ b


def gemm(attributes: Attributes, a: Tensor | None, b: Tensor, c: Tensor | None = None) -> Tensor | None:
    if a is None:
        return c
    a, b = (x.mT if attributes.get(flag) else x for x, flag in ((a, "transA"), (b, "transB")))
    product = attributes.get("alpha", 1.0) * (a.to(b.dtype) @ b)
    return product if c is None else product + attributes.get("beta", 1.0) * c


def convolution(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    pads = attributes.get("pads") or [0] * 4
    top, left, bottom, right = pads
    if (top, left) != (bottom, right):
        x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
    return F.conv2d(
        x.to(weight.dtype),
        weight,
        bias,
        attributes.get("strides") or 1,
        (top, left),
        attributes.get("dilations") or 1,
        attributes.get("group", 1),
    )


def pad(attributes: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None, *_: Any) -> Tensor:
    sizes = pads.tolist()
    pairs = [(sizes[axis], sizes[axis + x.dim()]) for axis in reversed(range(x.dim()))]
    filling = 0.0 if value is None else float(value)
    return F.pad(x, [size for pair in pairs for size in pair], value=filling)


def resize(
    attributes: Attributes, x: Tensor, roi: Tensor | None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    """Nearest neighbour, the source index rounded down: all that an up-sampler asks for."""
    if sizes is not None and sizes.numel():
        sides = tuple(sizes.tolist()[2:])
    else:
        sides = tuple(int(side * scale) for side, scale in zip(x.shape[2:], scales.tolist()[2:], strict=True))  # type: ignore[union-attr]
    return F.interpolate(x, sides, mode="nearest")


def layer_norm(attributes: Attributes, x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    axis = attributes.get("axis", -1) % x.dim()
    return F.layer_norm(x, x.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def group_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, attributes["num_groups"], scale, bias, attributes.get("epsilon", 1e-5))


def attention(attributes: Attributes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(attributes.get("is_causal")), scale=attributes.get("scale")
    )


OPERATORS: dict[str, Operator] = {
    "Add": add,
    "ArgMax": argmax,
    "Attention": attention,
    "Cast": cast,
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Conv": convolution,
    "Cos": _keeping_none(torch.cos),
    "Div": _keeping_none(_divide),
    "Equal": _keeping_none(torch.eq),
    "Exp": _keeping_none(torch.exp),
    "Expand": expand,
    "Gather": gather,
    "GatherND": gather_nd,
    "Gelu": gelu,
    "Gemm": gemm,
    "GroupNormalization": group_norm,
    "Identity": _keeping_none(lambda x: x),
    "LayerNormalization": layer_norm,
    "MatMul": matmul,
    "Mul": multiply,
    "Neg": _keeping_none(torch.neg),
    "Pad": pad,
    "Pow": _keeping_none(torch.pow),
    "Range": range_,
    "Reshape": reshape,
    "Resize": resize,
    "Shape": shape,
    "Sigmoid": _keeping_none(torch.sigmoid),
    "Sin": _keeping_none(torch.sin),
    "Slice": slice_,
    "Softmax": softmax,
    "Split": split,
    "Sqrt": _keeping_none(torch.sqrt),
    "Squeeze": squeeze,
    "Sub": _keeping_none(torch.sub),
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Where": where,
}
