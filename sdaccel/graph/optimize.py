"""The ordered list of fusions that a target gets."""

from __future__ import annotations

import logging
from collections.abc import Callable

import onnx_ir as ir

from sdaccel.graph import for_onnxruntime
from sdaccel.graph.fusions import attention, noops
from sdaccel.graph.match import Outcome

Fusion = Callable[[ir.Model], Outcome]

_ANY: tuple[tuple[str, Fusion], ...] = (("noops", noops.fuse), ("attention", attention.fuse))
_ONNXRUNTIME: tuple[tuple[str, Fusion], ...] = (
    ("flash-attention", for_onnxruntime.attention),
    ("linear", for_onnxruntime.linear),
)
_TARGETS: dict[str, tuple[tuple[str, Fusion], ...]] = {
    "onnxruntime": (*_ONNXRUNTIME, ("group-norm", for_onnxruntime.group_norm)),
    "onnxruntime, images": (*_ONNXRUNTIME, ("group-norm", for_onnxruntime.group_norm_of_images)),
}
VERSION = "2"
"""Part of every engine's key: raise it when a fusion changes what it writes."""

_log = logging.getLogger("sdaccel.graph")


def optimize(model: ir.Model, target: str) -> dict[str, int]:
    """Fuses ``model`` in place for ``target`` and returns how often each fusion fired.

    ``target`` is a backend, "…, images" where the component handles pixels. Why a fusion did not fire where it might
    have is logged at level DEBUG (SDACCEL_DEBUG=2).
    """
    fired = {}
    for name, fuse in (*_ANY, *_TARGETS[target], ("noops-after", noops.fuse)):
        outcome = fuse(model)
        fired[name] = outcome.fired
        for reason, count in outcome.refused.items():
            _log.debug("%s: not fused %d times: %s", name, count, reason)
    return fired
