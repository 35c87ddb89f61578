"""LoRA files in a diffusers pipeline while it draws. Engines do not hold them: what they change runs in torch."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdaccel.errors import ModelError, SettingError

MOST = 10.0


@dataclass(frozen=True)
class Lora:
    """A .safetensors file of a LoRA or one of its relatives, and how strongly it acts (-10..10)."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Lora:
        """``FILE`` or ``FILE:SCALE``. Raises SettingError."""
        name, colon, tail = text.strip().rpartition(":")
        try:
            scale = float(tail) if colon and name else None
        except ValueError:  # a drive's colon
            scale = None
        if scale is None:
            name, scale = text.strip(), 1.0
        name = name.strip('"')
        if not (math.isfinite(scale) and abs(scale) <= MOST):
            raise SettingError(f"the strength {scale:g} of {name} is not between -{MOST:g} and {MOST:g}.")
        return cls(Path(name).expanduser(), scale)

    @property
    def name(self) -> str:
        return self.path.stem

    def check(self) -> None:
        """Raises SettingError where there is no such file, or it is none that may be opened."""
        if self.path.suffix.lower() != ".safetensors":
            raise SettingError(f"{self.path} is no .safetensors file, the only kind of LoRA that is opened.")
        if not self.path.is_file():
            raise SettingError(f"the LoRA {self.path} is not there.")


def chosen(texts: Iterable[str]) -> tuple[Lora, ...]:
    """What people wrote, each a file that is there. Raises SettingError."""
    found = tuple(map(Lora.parse, texts))
    for lora in found:
        lora.check()
    return found


@contextmanager
def applied(pipe: Any, loras: Sequence[Lora]) -> Iterator[None]:
    """``pipe``, which has no adapters, draws with ``loras`` and has none again afterwards.

    Raises SettingError, ModelError.
    """
    if not loras:
        yield
        return
    if importlib.util.find_spec("peft") is None:
        raise SettingError("LoRAs need the package peft.", hint='Run: python -m pip install "peft>=0.17"')
    for lora in loras:
        lora.check()
    names = [f"{index}_{re.sub(r'[^0-9A-Za-z_-]', '_', lora.name)}" for index, lora in enumerate(loras, 1)]
    try:
        for lora, name in zip(loras, names, strict=True):
            _load(pipe, lora, name)
        pipe.set_adapters(names, [lora.scale for lora in loras])
        yield
    finally:
        pipe.unload_lora_weights()


def _load(pipe: Any, lora: Lora, name: str) -> None:
    place = {"weight_name": lora.path.name, "adapter_name": name, "local_files_only": True}
    try:
        pipe.load_lora_weights(str(lora.path.absolute().parent), **place)
    except (ValueError, KeyError, RuntimeError, AttributeError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())[:300].removesuffix(".")
        raise ModelError(f"{lora.path} cannot be used with this model: {reason or type(error).__name__}.") from error
    if name not in {each for names in pipe.get_list_adapters().values() for each in names}:
        raise ModelError(f"{lora.path} changes nothing of this model: none of its weights belongs to it.")
