r"""``{a|b|c}`` in prompts: one of them, or each of them in turn.

    group  a brace pair with at least one ``|`` of its own; alternatives may be empty and may hold groups
    pair   a brace pair without one stays as it is, braces and all
    \{ \} \|   the sign itself; any other backslash stays

Nothing else has a meaning here: ``(word:1.2)``, ``[a:b:0.5]`` and ``<lora:name:1>`` pass untouched.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from itertools import product

from sdaccel.jobs.job import MOST_IMAGES, JobError

DEEPEST = 50
MOST_CHARACTERS = 100_000_000
"""Of all combinations of one prompt together."""
_SIGN = re.compile(r"\\[{}|]|[{}|]")


@dataclass(frozen=True)
class _Group:
    number: int
    """Which opening brace of the prompt it is, from 0."""
    source: str
    choices: tuple[_Parts, ...]


_Parts = tuple[str | _Group, ...]


@dataclass
class _Open:
    at: int
    number: int
    choices: list[list[str | _Group]] = field(default_factory=lambda: [[]])


def combinations(text: str) -> list[str]:
    """Every combination, the last group changing fastest; ``[text]`` without its escapes where there is no group.

    Raises JobError for a brace without its other half, and for more than `MOST_IMAGES` combinations, before they are
    made.
    """
    parts = _parse(text)
    _measure(parts)
    return _all(parts)


def count(text: str) -> int:
    """How many `combinations` there are. Raises JobError as it does."""
    return _measure(_parse(text))[0]


def chosen(text: str, seed: int, stream: str = "") -> str:
    """One pick of each group: equal for equal ``text``, ``seed`` and ``stream``, everywhere and always.

    A group's pick depends on its own text and place alone: other words of the prompt may change. ``stream`` parts
    texts whose picks shall not go together, such as a prompt and its negative one. Raises JobError.
    """

    def pick(group: _Group) -> str:
        digest = hashlib.sha256(f"{seed}:{group.number}:{stream}:{group.source}".encode("utf-8", "surrogatepass"))
        return one(group.choices[int.from_bytes(digest.digest()[:8], "big") % len(group.choices)])

    def one(parts: _Parts) -> str:
        return "".join(part if isinstance(part, str) else pick(part) for part in parts)

    return one(_parse(text))


def has_groups(text: str) -> bool:
    """Raises JobError for a brace without its other half."""
    return any(isinstance(part, _Group) for part in _parse(text))


def literal(text: str) -> str:
    """What to write so that ``text`` comes out."""
    return re.sub(r"[{}|]", r"\\\g<0>", text)


def _parse(text: str) -> _Parts:
    open_braces: list[_Open] = []
    top: list[str | _Group] = []
    into, at, number = top, 0, 0
    for found in _SIGN.finditer(text):
        if at < found.start():
            into.append(text[at : found.start()])
        at, sign = found.end(), found.group()
        if sign == "{":
            if len(open_braces) == DEEPEST:
                raise JobError(f"the braces nest deeper than {DEEPEST} in column {found.start() + 1}.")
            open_braces.append(_Open(found.start(), number))
            number += 1
        elif sign == "}":
            if not open_braces:
                raise JobError(
                    f"the brace in column {found.start() + 1} closes nothing.", hint=r"Write \} for the sign itself."
                )
            closed = open_braces.pop()
            outer = open_braces[-1].choices[-1] if open_braces else top
            if len(closed.choices) == 1:
                outer += ["{", *closed.choices[0], "}"]
            else:
                outer.append(_Group(closed.number, text[closed.at : at], tuple(map(tuple, closed.choices))))
        elif sign == "|" and open_braces:
            open_braces[-1].choices.append([])
        else:
            into.append(sign[-1])
        into = open_braces[-1].choices[-1] if open_braces else top
    if open_braces:
        raise JobError(
            f"the brace in column {open_braces[-1].at + 1} is never closed.", hint=r"Write \{ for the sign itself."
        )
    return (*top, text[at:])


def _measure(parts: _Parts) -> tuple[int, int]:
    """(combinations, characters of all of them together)."""
    ways, characters = 1, 0
    for part in parts:
        if isinstance(part, str):
            characters += ways * len(part)
            continue
        each = [_measure(choice) for choice in part.choices]
        here, there = sum(n for n, _ in each), sum(length for _, length in each)
        ways, characters = ways * here, characters * here + there * ways
        if ways > MOST_IMAGES or characters > MOST_CHARACTERS:
            raise JobError(
                f"its braces make more than {MOST_IMAGES:,} combinations, or too long ones.",
                hint="Write fewer alternatives, or let each image pick (expand random).",
            )
    return ways, characters


def _all(parts: _Parts) -> list[str]:
    def forms(part: str | _Group) -> list[str]:
        return [part] if isinstance(part, str) else [text for choice in part.choices for text in _all(choice)]

    return ["".join(each) for each in product(*map(forms, parts))]
