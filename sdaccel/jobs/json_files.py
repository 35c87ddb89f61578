"""Job files in JSON: .jsonl, an object a line, and .json, a list of them or a single one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from sdaccel.jobs.fields import shown
from sdaccel.jobs.job import JobError
from sdaccel.jobs.lines import Lines
from sdaccel.jobs.records import Found, Record
from sdaccel.jobs.sidecar import from_sidecar, is_sidecar

LARGEST = 64_000_000
"""Characters of a .json file, which is read whole."""


def read_json_lines(lines: Lines, base: Path, name: str) -> Iterator[Found]:
    for line in lines:
        source = f"{name}:{lines.number}"
        if lines.fault:
            yield JobError(lines.fault, source)
        elif (text := line.strip(" \t")) and not text.startswith("#"):
            try:
                yield _found(parse_json(line), base, source)
            except ValueError as error:
                yield JobError(f"{error}.", source)


def read_json(lines: Lines, base: Path, name: str) -> Iterator[Found]:
    """Object after object, so that each has its line, and one that is wrong spoils only what comes after it."""
    text, faults = whole_text(lines)
    line, counted = 1, 0

    def source(at: int) -> str:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, at), at
        return f"{name}:{line}"

    at = _blanks(text, 0)
    listed = text.startswith("[", at)
    if not listed and not text.startswith("{", at):
        yield JobError("a .json file must be a list of jobs or one object.", source(at))
        return
    at = _blanks(text, at + listed)
    while at < len(text) and not (listed and text[at] == "]"):
        place, first = source(at), line
        try:
            value, end = _decoded(_DECODER.raw_decode, text, at)
            fault = None
        except json.JSONDecodeError as error:
            yield JobError(f"{error}. What follows was not read.", source(error.pos))
            return
        except ValueError as error:
            end = _end(text, at)
            fault = f"{error}."
        last = first + text.count("\n", at, end)
        broken = [number for number in faults if first <= number <= last]
        if broken and "\ufffd" in text[at:end]:
            fault = f"line {broken[0]}: {faults[broken[0]]}"
        yield JobError(fault, place) if fault else _found(value, base, place)
        at = _blanks(text, end)
        if not listed:
            break
        if text.startswith(",", at):
            at = _blanks(text, at + 1)
            if text.startswith("]", at):
                yield JobError("this is no JSON: there is a comma after the last job.", source(at))
        elif not text.startswith("]", at):
            yield JobError("this is no JSON: a comma or ] must follow. What follows was not read.", source(at))
            return
    if listed and at >= len(text):
        yield JobError("this is no JSON: the list is never closed.", source(at))
    elif _blanks(text, at + listed) < len(text):
        hint = "Several objects, a line each, are a .jsonl file."
        yield JobError("this is no JSON: something follows the end.", source(_blanks(text, at + listed)), hint=hint)


def whole_text(lines: Lines) -> tuple[str, dict[int, str]]:
    """(text, line → what is wrong with it)."""
    found: list[str] = []
    faults: dict[int, str] = {}
    size = 0
    for line in lines:
        found.append(line)
        size += len(line) + 1
        if lines.fault:
            faults[lines.number] = lines.fault
        if size > LARGEST:
            raise JobError(f"a .json file of more than {LARGEST:,} characters is not read.", hint="Use .jsonl.")
    return "\n".join(found), faults


def _end(text: str, at: int) -> int:
    """Of a value that is JSON to look at; of the whole text if it is not."""
    try:
        return _decoded(json.JSONDecoder(parse_int=str).raw_decode, text, at)[1]
    except ValueError:
        return len(text)


def _blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def _found(value: Any, base: Path, source: str) -> Found:
    if not isinstance(value, dict):
        return JobError(f'a job must be an object such as {{"prompt": "a cat"}}, not {shown(value)}.', source)
    if is_sidecar(value):
        try:
            return from_sidecar(value, base, source)
        except JobError as error:
            return error
    return Record(value, base, source)


def parse_json(text: str) -> Any:
    """Raises ValueError in words, also for what Python lets pass: NaN, a name that is there twice."""
    return _decoded(_DECODER.decode, text)


def _decoded(decode: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return decode(*arguments)
    except json.JSONDecodeError as error:
        error.args = (f"this is no JSON: {error.msg} (column {error.colno})",)
        raise
    except RecursionError:
        raise ValueError("its lists or objects nest too deeply") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        raise ValueError(f"{shown(max(times, key=times.__getitem__))} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON knows")


def _int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"{text[:20]}... is too large a number")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_no_number, parse_int=_int)
_BLANKS = re.compile(r"[ \t\n\r]*")
