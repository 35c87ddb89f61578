"""The ordered list of fusions that a target gets."""

from __future__ import annotations

import logging
from collections.abc import Callable

import onnx_ir as ir

from sdaccel.graph import for_onnxruntime, ops
from sdaccel.graph.fusions import (
    attention,
    constants,
    conv,
    group_norm,
    layer_norm,
    linear,
    multi_linear,
    noops,
    skip_concat,
    timestep_embedding,
    tokens,
    upsample_conv,
)
from sdaccel.graph.match import Outcome

Fusion = Callable[[ir.Model], Outcome]

_ANY: tuple[tuple[str, Fusion], ...] = (("noops", noops.fuse), ("attention", attention.fuse))
_ONNXRUNTIME: tuple[tuple[str, Fusion], ...] = (
    ("flash-attention", for_onnxruntime.attention),
    ("linear", for_onnxruntime.linear),
)
# Images and tokens first, as the sums around them depend on it; norms before what takes in sums of their own;
# joined inputs and linears when all else about their readers is settled.
_CUDA: tuple[tuple[str, Fusion], ...] = (
    ("constants", constants.fuse),
    ("tokens", tokens.fuse),
    ("timestep-embedding", timestep_embedding.fuse),
    ("group-norm", group_norm.fuse),
    ("linear", linear.fuse),
    ("upsample-conv", upsample_conv.fuse),
    ("conv", conv.fuse),
    ("skip-concat", skip_concat.fuse),
    ("layer-norm", layer_norm.fuse),
    ("multi-linear", multi_linear.fuse),
    ("functions", ops.define),
)
_TARGETS: dict[str, tuple[tuple[str, Fusion], ...]] = {
    "onnxruntime": (*_ONNXRUNTIME, ("group-norm", for_onnxruntime.group_norm)),
    "onnxruntime, images": (*_ONNXRUNTIME, ("group-norm", for_onnxruntime.group_norm_of_images)),
    "cuda": _CUDA,
}
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
