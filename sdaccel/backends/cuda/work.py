"""What a call of an operator has to do at least: operations (multiply and add are two) and bytes moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def work(op: str, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any], results: Any) -> tuple[float, int]:
    """(operations of products, bytes of all inputs read once and all outputs written once)."""
    outputs = results if isinstance(results, tuple) else (results,)
    given = [tensor for tensor in (*tensors, *attributes.values()) if isinstance(tensor, Tensor)]
    return _operations(op, tensors, attributes, outputs[0]), _nbytes(given) + _nbytes(outputs)


def _operations(op: str, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any], output: Tensor) -> float:
    if op == "attention":
        q, k = tensors[:2]
        return 4.0 * q.numel() * k.shape[1]  # type: ignore[union-attr]
    if op in ("linear", "conv", "upsample_conv"):
        weight = tensors[1]
        assert weight is not None
        each = 2.0 * math.prod(weight.shape[1:])
        values = output.numel() * (2 if attributes.get("activation") == "geglu" else 1)
        return each * values
    return 0.0


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
