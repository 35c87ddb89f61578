"""Every operator the executor knows, by the name it has in a plan.

An operator takes the executor's `Chooser`, the step's attributes and its input tensors. Those of our own domain have
several tactics, which the chooser picks from; the standard ones have one way each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from sdaccel.backends.cuda.ops import attention as attention_op
from sdaccel.backends.cuda.ops import conv as conv_op
from sdaccel.backends.cuda.ops import elementwise, standard
from sdaccel.backends.cuda.ops import group_norm as group_norm_op
from sdaccel.backends.cuda.ops import layer_norm as layer_norm_op
from sdaccel.backends.cuda.ops import linear as linear_op
from sdaccel.backends.cuda.ops import upsample_conv as upsample_conv_op
from sdaccel.errors import BackendError

Attributes = Mapping[str, Any]


class Chooser(Protocol):
    dtype: torch.dtype
    """What activations are computed in."""

    def on_device(self, value: Tensor) -> Tensor:
        """A small tensor of the CPU on the device; the same one each time, so that a graph may read it."""

    def run(self, op: Any, *tensors: Tensor | None, **attributes: Any) -> Any:
        """The result of the best tactic of the op module ``op`` for these tensors."""


Operator = Callable[..., Any]


def group_norm(
    choose: Chooser,
    attributes: Attributes,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    x2: Tensor | None = None,
    add: Tensor | None = None,
) -> Tensor:
    return choose.run(
        group_norm_op,
        x,
        scale,
        bias,
        x2,
        add,
        groups=attributes["num_groups"],
        epsilon=attributes["epsilon"],
        activation=attributes["activation"],
    )


def layer_norm(
    choose: Chooser, attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Any:
    return choose.run(layer_norm_op, x, scale, bias, residual, epsilon=attributes["epsilon"])


def linear(
    choose: Chooser,
    attributes: Attributes,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor | None:
    if x is None:  # an optional input that was left out
        return bias if residual is None else residual
    x = x.to(choose.dtype)
    more = {"group": attributes["group"]} if "group" in attributes else {}
    return choose.run(linear_op, x, weight, bias, residual, activation=attributes["activation"], **more)


def conv(
    choose: Chooser,
    attributes: Attributes,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
) -> Tensor:
    x = x.to(choose.dtype)
    stride, pads, activation = attributes["strides"], attributes["pads"], attributes["activation"]
    top, left, bottom, right = pads
    if (top, left) == (bottom, right) and top == left and stride[0] == stride[1]:
        return choose.run(
            conv_op, x, weight, bias, residual, x2, None, stride=stride[0], padding=top, activation=activation
        )
    return _activate(
        standard.convolution(attributes, x if x2 is None else torch.cat((x, x2), 1), weight, bias), residual, activation
    )


def _activate(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    y = y if residual is None else y + residual
    return torch.nn.functional.silu(y) if activation == "silu" else y


def upsample_conv(
    choose: Chooser,
    attributes: Attributes,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    like: Tensor | None = None,
) -> Tensor:
    sides = (2 * x.shape[2], 2 * x.shape[3]) if like is None else (like.shape[2], like.shape[3])
    return choose.run(upsample_conv_op, x, weight, bias, sides=sides)


def views(choose: Chooser, attributes: Attributes, x: Tensor | None, *weights: Tensor) -> tuple[Tensor | None, ...]:
    """The part of ``x`` that each of the weights made."""
    return (None,) * len(weights) if x is None else x.split([weight.shape[0] for weight in weights], -1)


def groups(choose: Chooser, attributes: Attributes, x: Tensor) -> tuple[Tensor, ...]:
    return x.unbind()


def to_tokens(choose: Chooser, attributes: Attributes, x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    return x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)


def to_image(choose: Chooser, attributes: Attributes, x: Tensor, like: Tensor) -> Tensor:
    batch, _, channels = x.shape
    height, width = like.shape[2:]
    return x.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


def timestep_embedding(choose: Chooser, attributes: Attributes, timestep: Tensor, frequencies: Tensor) -> Tensor:
    flip = bool(attributes["flip_sin_to_cos"])
    return choose.run(
        elementwise.timestep_embedding,
        timestep.float(),
        frequencies.reshape(-1),
        flip_sin_to_cos=flip,
        dtype=choose.dtype,
    )


def attention(
    choose: Chooser, attributes: Attributes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    if "q_num_heads" not in attributes:
        return standard.attention(attributes, q, k, v, mask)
    if mask is not None:
        raise BackendError("the CUDA engine does not run attention with a mask.")
    heads = attributes["q_num_heads"]
    scale = attributes.get("scale") or 1 / math.sqrt(q.shape[-1] // heads)
    return choose.run(attention_op, q, k, v, heads=heads, scale=scale, causal=bool(attributes.get("is_causal")))


def _plain(operator: Callable[..., Any]) -> Operator:
    return lambda choose, attributes, *tensors: operator(attributes, *tensors)


def _mixing(operator: Callable[..., Any]) -> Operator:
    """One whose inputs must lie on one device: those that were computed on the CPU, out of shapes, are moved."""

    def run(choose: Chooser, attributes: Attributes, *tensors: Tensor | None) -> Any:
        if any(tensor is not None and tensor.is_cuda for tensor in tensors):
            tensors = tuple(
                choose.on_device(tensor) if tensor is not None and tensor.is_cpu and tensor.dim() else tensor
                for tensor in tensors
            )
        return operator(attributes, *tensors)

    return run


_MIXING = frozenset({"Add", "Concat", "Div", "Equal", "Gather", "GatherND", "Mul", "Pow", "Sub", "Where"})


OPS: dict[str, Operator] = {
    **{
        f"ai.onnx.{name}": (_mixing if name in _MIXING else _plain)(operator)
        for name, operator in standard.OPERATORS.items()
    },
    "ai.onnx.Attention": attention,
    "GroupNorm": group_norm,
    "LayerNorm": layer_norm,
    "Conv": conv,
    "UpsampleConv": upsample_conv,
    "Linear": linear,
    "Views": views,
    "Groups": groups,
    "ToTokens": to_tokens,
    "ToImage": to_image,
    "TimestepEmbedding": timestep_embedding,
}
"""MultiLinear is not among them: lowering makes one Linear over joined weights of it, and views."""
