"""Files of tensors and configs, whatever their format, as references that read nothing yet."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdaccel.errors import ModelError, PickleRefused
from sdaccel.models.tensors import NAMES, TensorRef, looks_like, read_stamped_header

PICKLES = (".ckpt", ".bin", ".pt", ".pth")
MAX_JSON = 64 << 20


class TensorFile(NamedTuple):
    tensors: dict[str, TensorRef]
    metadata: dict[str, str]
    """What a .safetensors header says about itself; empty for a pickle."""
    values: dict[str, Any]
    """What a pickle holds besides tensors ("global_step", …)."""


def read_tensors(path: Path, allow_pickle: bool) -> TensorFile:
    """The tensors of a .safetensors file, or of a pickle where that is allowed. Raises ModelError, PickleRefused."""
    if path.suffix.lower() in PICKLES:
        if not allow_pickle:
            raise refused(path.name, path.parent)
        return _read_pickle(path)
    entries, metadata, opened = read_stamped_header(path)
    found = {
        name: TensorRef(name, entry.dtype, entry.shape, path, entry.offset, stamp=opened)
        for name, entry in entries.items()
    }
    return TensorFile(found, metadata, {})


def refused(names: str, folder: Path) -> PickleRefused:
    return PickleRefused(
        f"{names} (in {folder}) is a pickle, which can run any code when opened.",
        hint="Use its .safetensors form; or --allow-pickle (allow_pickle=True), which reads plain tensors only.",
    )


def tensor_ref(name: str, tensor: torch.Tensor) -> TensorRef:
    dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return TensorRef(name, dtype, tuple(tensor.shape), tensor)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a config file. Raises ModelError for anything else."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelError(f"{path}: too large for a config.")
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"{path}: not JSON ({str(error)[:80]}).") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object.")
    return found


def _read_pickle(path: Path) -> TensorFile:
    state = _load(path)
    values: dict[str, Any] = {}
    while isinstance(state.get("state_dict"), Mapping):
        values |= {str(name): value for name, value in state.items() if isinstance(value, (int, float, str))}
        state = state["state_dict"]
    found = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return TensorFile({name: tensor_ref(name, tensor) for name, tensor in found.items()}, {}, values)


_LOAD_ERRORS = (
    pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, TypeError, LookupError, AttributeError,
    AssertionError, ImportError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if not start:
        raise ModelError(f"{path}: empty file (0 bytes).", hint="Download it again.")
    looks = looks_like(start)
    if looks and "pickle" not in looks[0] and "zip" not in looks[0]:
        raise ModelError(f"{path}: not a checkpoint, but {looks[0]}.", hint=looks[1])
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ModelError(
            f"{path}: not a whole checkpoint of plain tensors ({reason}).",
            hint="Download it again, or use the model's .safetensors form.",
        ) from None
    if not isinstance(state, Mapping):
        raise ModelError(f"{path}: holds a {type(state).__name__}, not a table of tensors.")
    return state
