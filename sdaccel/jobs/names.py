"""Names of image files, from a pattern such as ``{index:05d}-{seed}-{prompt}``. They are good on every system."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Any

from sdaccel.errors import SettingError
from sdaccel.jobs.job import Job
from sdaccel.metadata import SUFFIXES

DEFAULT = "{index:05d}-{seed}-{prompt}"
MOST_BYTES = 255
"""Of a name, in UTF-8: what Linux takes. Windows and macOS count UTF-16, which is never more."""

_SPARE = len(".part")
_USUAL_TAG = len("-12")
_SAMPLES: dict[str, Any] = {
    "index": 2**31,
    "seed": 2**32,
    "prompt": "a",
    "model": "a",
    "width": 2**16,
    "height": 2**16,
    "steps": 1000,
    "guidance": 7.5,
    "scheduler": "a",
}
_FORBIDDEN = '<>:"/\\|?*'
_RESERVED = re.compile(r"(CON|PRN|AUX|NUL|CLOCK\$|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³]) *(\.|$)", re.IGNORECASE)
_JOINERS = "\u200c\u200d"
_MOST_OF_ONE_NAME = 10**8


@dataclass(frozen=True)
class Pattern:
    """Fields: index (from 1), seed, prompt, model, width, height, steps, guidance, scheduler; as in `str.format`.

    Raises SettingError for any other field, a format that does not fit its field, and letters that no name may have.
    """

    text: str = DEFAULT

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise SettingError("a pattern for names cannot be empty.", hint=f"Write {DEFAULT}.")
        for literal, name, form in _parsed(self.text):
            bad = "".join(c for c in literal if c in _FORBIDDEN or not _allowed(c))
            if bad:
                raise SettingError(
                    f"{bad!r} in the pattern {self.text!r} can be in no file's name; it names no folder."
                )
            if name is not None:
                self._check(name, form)
        if self.text[0] in ".- ":
            raise SettingError(f"the pattern {self.text!r} begins with {self.text[0]!r}: tools hide or misread that.")
        if self.text.lower().endswith(SUFFIXES):
            raise SettingError(f"the pattern {self.text!r} has a suffix, which comes by itself.", hint="Leave it out.")
        longest = sum(len(piece.encode()) for piece, kind in self._pieces(_SAMPLES) if not kind)
        if longest > MOST_BYTES // 2:
            raise SettingError(f"the pattern {self.text!r} leaves no room: {longest} of {MOST_BYTES} bytes are fixed.")

    def _check(self, name: str, form: str) -> None:
        if name not in _SAMPLES:
            known = ", ".join(f"{{{each}}}" for each in _SAMPLES)
            raise SettingError(f"{{{name}}} in the pattern {self.text!r} is none of {known}.")
        try:
            if re.search(r"\d{5}|[{}]", form):
                raise ValueError("longer than names are")
            format(_SAMPLES[name], form)
        except (ValueError, OverflowError) as error:
            raise SettingError(f"{{{name}:{form}}} in the pattern {self.text!r}: {error}.") from None

    def name(self, job: Job, index: int, suffix: str, taken: Callable[[str], bool] = lambda name: False) -> str:
        """A file's name for a single image, suffix included: at most `MOST_BYTES`, with room for a ".part" behind.

        The prompt is what is cut, between characters as people see them. ``taken`` says whether there is such a file,
        whatever the case of its letters: then "-2", "-3" and so on comes before the suffix.
        """
        values = {
            **{name: getattr(job, name) for name in _SAMPLES if name not in ("index", "model")},
            "index": index,
            "model": re.split(r"[/\\]", (job.model or "").rstrip("/\\"))[-1].removesuffix(".safetensors") or "default",
            "scheduler": job.scheduler or "default",
        }
        unknown = [name for _, name, _ in _parsed(self.text) if name is not None and values[name] is None]
        if unknown:
            raise SettingError(f"a job without {unknown[0]} has no name of the pattern {self.text!r}.")

        stems: dict[int, str] = {}

        def tagged(number: int) -> str:
            tag = f"-{number}" if number > 1 else ""
            room = MOST_BYTES - _SPARE - len(suffix.encode()) - max(len(tag), _USUAL_TAG)
            if room not in stems:
                stems[room] = self._stem(values, room) or f"{index:05d}"
            return f"{stems[room]}{tag}{suffix}"

        return tagged(_first(lambda number: not taken(tagged(number))))

    def _stem(self, values: dict[str, Any], room: int) -> str:
        """At most ``room`` bytes."""
        pieces = self._pieces(values)
        fixed = sum(len(piece.encode()) for piece, kind in pieces if kind == "")
        for left in range(room - 1 - fixed, -1, -1):  # 1: before a reserved name
            rest, parts = left, [piece for piece, _ in pieces]
            for at in sorted((i for i, (_, kind) in enumerate(pieces) if kind), key=lambda i: pieces[i][1] == "prompt"):
                parts[at] = _cut(parts[at], rest)
                rest -= len(parts[at].encode())
            stem = unicodedata.normalize("NFC", "".join(parts)).lstrip(".- ").rstrip(". ")
            if _RESERVED.match(stem):
                stem = f"_{stem}"
            if len(stem.encode()) <= room:  # what was joined may be longer than its parts
                return stem
        raise SettingError(f"a name of the pattern {self.text!r} would be longer than {MOST_BYTES} bytes.")

    def _pieces(self, values: dict[str, Any]) -> list[tuple[str, str]]:
        """(text, the field that it came from if it may be cut)"""
        found: list[tuple[str, str]] = []
        for literal, name, form in _parsed(self.text):
            found.append((unicodedata.normalize("NFC", literal), ""))
            if name is not None:
                value = values[name]
                cut = isinstance(value, str)
                found.append((_clean(format(_clean(value) if cut else value, form)), name if cut else ""))
        return found


def _parsed(text: str) -> Iterator[tuple[str, str | None, str]]:
    """(text, the field that follows it, its format)"""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise SettingError(f"the pattern {text!r} cannot be read: {error}.") from None
    for literal, name, form, conversion in parts:
        if conversion:
            raise SettingError(f"!{conversion} in the pattern {text!r} has no meaning in a name.")
        yield literal, name, form or ""


def _clean(text: str) -> str:
    kept = (c for c in " ".join(text.split()) if c not in _FORBIDDEN and _allowed(c))
    return unicodedata.normalize("NFC", " ".join("".join(kept).split()))


def _allowed(letter: str) -> bool:
    """No control character, line break, half of a pair, or mark that turns the direction of what follows."""
    if letter in _JOINERS:
        return True
    return unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp") and ord(letter) & 0xFFFE != 0xFFFE


def _cut(text: str, room: int) -> str:
    """The beginning of ``text``, at most ``room`` bytes in UTF-8; what is seen as one character stays whole."""
    end = len(text.encode()[: max(0, room)].decode(errors="ignore"))
    while 0 < end < len(text) and _joined(text, end):
        end -= 1
    return text[:end]


def _joined(text: str, at: int) -> bool:
    """Whether the letter at ``at`` is seen as one with the letter before it."""
    before, letter = text[at - 1], text[at]
    if before == _JOINERS[1] or letter in _JOINERS or unicodedata.category(letter)[0] == "M":
        return True
    if "\U0001f3fb" <= letter <= "\U0001f3ff":  # the colour of a skin
        return True
    flags = 0  # a flag is two letters of an alphabet of its own
    while at > flags and "\U0001f1e6" <= text[at - 1 - flags] <= "\U0001f1ff":
        flags += 1
    return flags % 2 == 1 and "\U0001f1e6" <= letter <= "\U0001f1ff"


def _first(free: Callable[[int], bool]) -> int:
    """The smallest number from 1 that is free; past a hundred, one after a number that is not, without a long walk."""
    for number in range(1, 100):
        if free(number):
            return number
    low, high = number, 2 * number
    while not free(high):
        low, high = high, 2 * high
        if high > _MOST_OF_ONE_NAME:
            raise SettingError(f"there are {low} files of one name already.", hint="Put {index} into the pattern.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if free(middle) else (middle, high)
    return high
