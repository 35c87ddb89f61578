"""float32 on a GPU without TF32, whatever the host has allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Products and convolutions inside are computed in float32 itself; then the host's setting is back."""
    settings = [
        _setting(torch.backends.cuda.matmul, torch.backends.cuda.matmul),
        _setting(torch.backends.cudnn, torch.backends.cudnn.conv),
    ]
    before = [getattr(place, name) for place, name, _ in settings]
    try:
        for place, name, off in settings:
            setattr(place, name, off)
        yield
    finally:
        for (place, name, _), value in zip(settings, before, strict=True):
            setattr(place, name, value)


def _setting(old: Any, new: Any) -> tuple[Any, str, Any]:
    """(where it stands, its name, off). The old one can no longer be read once a host has set the new one."""
    try:
        _ = old.allow_tf32
    except RuntimeError:
        return new, "fp32_precision", "ieee"
    return old, "allow_tf32", False
