"""The fields that people write: what each may be. One name each, the limits are those of `sdaccel.draw.Request`."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from sdaccel.errors import ProfileError, SettingError
from sdaccel.jobs.job import Job
from sdaccel.jobs.lines import fault_of
from sdaccel.lora import Lora
from sdaccel.profile import ImageProfile, Range
from sdaccel.resources import expanded

_USUAL = {field.name: field.default for field in fields(Job)}
_LARGEST = 2**63


def checked(values: Mapping[str, Any], base: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """(field → its values, what is wrong). Several values: a list was written, each is to be drawn.

    Values are as JSON or Python has them; ``base`` is the folder that their relative paths start from. None stands for
    the usual value, where that depends on the model or is nothing at all.
    """
    found: dict[str, list[Any]] = {}
    wrong: list[str] = []
    for name, written in values.items():
        try:
            known(name)
            found[name] = [_checked(name, value, base) for value in _sweep(name, written)]
        except SettingError as error:
            wrong.append(str(error))
    return found, wrong


def known(name: Any) -> None:
    """Raises SettingError, which names the nearest field, for what is no name of one."""
    if name in NAMES:
        return
    near = difflib.get_close_matches(str(name).lower(), NAMES, n=1, cutoff=0.5)
    near = near or [field for field in NAMES if field.startswith(f"{name}_".lower())]
    hint = f"Did you mean {near[0]}?" if near else f"The fields are {', '.join(NAMES)}."
    raise SettingError(f"there is no field {shown(name)}.", hint=hint)


def from_cell(name: str, text: str, comma: bool = False) -> Any:
    """What a cell of a spreadsheet says. ``comma``: decimals may have one. Raises SettingError."""
    kind = _KINDS[name]
    if kind is _whole or kind is _side:
        if not re.fullmatch(r"[+-]?[0-9]+([.,]0*)?" if comma else r"[+-]?[0-9]+(\.0*)?", text):
            rounded = re.fullmatch(r"[0-9.,]+[eE]\+?[0-9]+", text)
            hint = "The spreadsheet has rounded it: give the column a number format without exponents."
            raise SettingError(f"{name} must be a whole number, not {shown(text)}.", hint=hint if rounded else None)
        digits = re.split("[.,]", text)[0]
        if len(digits) > 20:
            raise SettingError(f"{name} is too large a number.")
        return int(digits)
    if kind is _number:
        if not re.fullmatch(r"[+-]?([0-9]+[.,]?[0-9]*|[.,][0-9]+)([eE][+-]?[0-9]+)?", text) or (
            "," in text and not comma
        ):
            raise SettingError(f"{name} must be a number, not {shown(text)}.")
        return float(text.replace(",", "."))
    if kind is _loras:
        return [part.strip() for part in text.split(";") if part.strip()]
    return text


def shown(value: Any) -> str:
    """``value`` on one short line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:80])
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sweep(name: str, written: Any) -> Iterable[Any]:
    if not isinstance(written, (list, tuple)):
        return [written]
    if name == "loras":
        return written if written and all(isinstance(each, (list, tuple)) for each in written) else [written]
    if not written:
        raise SettingError(f"{name} is an empty list: at least one value is needed.")
    return written


def _checked(name: str, value: Any, base: Path) -> Any:
    if value is None and _USUAL[name] is None:
        return None
    found = _KINDS[name](name, value, base)
    if name in _LIMITED:
        Job(**{"prompt": "", name: found}).request(0, 0.0)
    return found


def _whole(name: str, value: Any, base: Path) -> int:
    whole = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if isinstance(value, bool) or not whole:
        raise SettingError(f"{name} must be a whole number, not {shown(value)}.")
    number = int(value)
    if abs(number) >= _LARGEST:
        raise SettingError(f"{name} is too large a number.")
    return number


def _side(name: str, value: Any, base: Path) -> int:
    side = _whole(name, value, base)
    if side < 1:
        raise SettingError(f"{name} must be a number of pixels, not {side}.")
    try:
        ImageProfile(**{"width": Range.of(64), "height": Range.of(64), name: Range.of(side)})
    except ProfileError as error:
        raise SettingError(str(error)) from None
    return side


def _number(name: str, value: Any, base: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SettingError(f"{name} must be a number, not {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SettingError(f"{name} must be a finite number.")
    return number


def _text(name: str, value: Any, base: Path | None = None) -> str:
    if not isinstance(value, str):
        raise SettingError(f"{name} must be text, not {shown(value)}.")
    if fault := fault_of(value):
        raise SettingError(f"{name}: {fault}")
    return value


def _name(name: str, value: Any, base: Path) -> str:
    if not _text(name, value).strip():
        raise SettingError(f"{name} is empty: leave it out for the usual one.")
    return str(value)


def _file(name: str, value: Any, base: Path) -> Path:
    path = value if isinstance(value, Path) else Path(_name(name, value, base))
    try:
        path = (base / expanded(path)).absolute()
        there = path.is_file()
    except OSError as error:
        raise SettingError(f"{name} {path} cannot be opened: {error.strerror or error}.") from None
    if not there:
        raise SettingError(f"{name} {path} is not there.")
    return path


def _loras(name: str, value: Any, base: Path) -> tuple[Lora, ...]:
    if not isinstance(value, (list, tuple)):
        raise SettingError(f'loras must be a list such as ["style.safetensors:0.8"], not {shown(value)}.')
    return tuple(_lora(each, base) for each in value)


def _lora(value: Any, base: Path) -> Lora:
    if isinstance(value, Lora):
        lora = value
    elif isinstance(value, Mapping):
        if not {"path"} <= set(value) <= {"path", "scale"}:
            raise SettingError(f"loras: {shown(dict(value))} must have a path, may have a scale, and nothing else.")
        path, scale = _name("loras: path", value["path"], base), _number("loras: scale", value.get("scale", 1), base)
        lora = Lora.parse(f"{path}:{scale!r}")
    else:
        lora = Lora.parse(_name("loras", value, base))
    lora = Lora((base / lora.path).absolute(), lora.scale)
    try:
        lora.check()
    except OSError as error:
        raise SettingError(f"the LoRA {lora.path} cannot be opened: {error.strerror or error}.") from None
    return lora


_KINDS: dict[str, Callable[[str, Any, Path], Any]] = {
    "prompt": _text,
    "negative_prompt": _text,
    "seed": _whole,
    "steps": _whole,
    "guidance": _number,
    "scheduler": _name,
    "width": _side,
    "height": _side,
    "n": _whole,
    "init_image": _file,
    "mask": _file,
    "strength": _number,
    "loras": _loras,
    "model": _name,
}
NAMES = tuple(_KINDS)
_LIMITED = ("seed", "steps", "guidance", "scheduler", "n", "strength")
