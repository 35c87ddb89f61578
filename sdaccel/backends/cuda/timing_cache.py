"""What the tuner has measured on a device: (op, types, shapes) → tactic, µs. Makes the second build fast; portable."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from sdaccel.engine import disk
from sdaccel.errors import SettingError, StoreError

FORMAT = 1
FULL = "out of memory"
"""the reason of a tactic that is out for now: with more memory free it may be the fastest"""


@dataclass(frozen=True)
class Signature:
    """What decides how fast a tactic is. ``sizes`` are the dimensions that differ from call to call."""

    op: str
    fixed: str
    """types, widths, weights' shapes and attributes"""
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op}|{self.fixed}|{','.join(map(str, self.sizes))}"

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Raises ValueError."""
        op, fixed, sizes = text.split("|")
        return cls(op, fixed, tuple(int(size) for size in sizes.split(",") if size))

    def distance(self, other: Signature) -> float:
        """How unlike two calls of the same op are: 0 for equal sizes."""
        if len(self.sizes) != len(other.sizes):
            return math.inf
        return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(self.sizes, other.sizes, strict=True))


@dataclass(frozen=True)
class Measured:
    """The fastest correct tactic, its time, and the times of all that were tried, in µs."""

    tactic: str
    microseconds: float
    tried: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """tactic → why it is out: an error, or how far it was from the reference"""


class TacticTable:
    """Signature → what was measured; a shape that was not measured takes the tactic of the nearest that was."""

    def __init__(self, measured: Mapping[Signature, Measured] | None = None):
        self.measured: dict[Signature, Measured] = {}
        self._alike: dict[tuple[str, str], list[Signature]] = {}
        for signature, found in (measured or {}).items():
            self.put(signature, found)

    def put(self, signature: Signature, found: Measured) -> None:
        if signature not in self.measured:
            self._alike.setdefault((signature.op, signature.fixed), []).append(signature)
        self.measured[signature] = found

    def get(self, signature: Signature) -> Measured | None:
        return self.measured.get(signature)

    def nearest(self, signature: Signature) -> Measured | None:
        alike = self._alike.get((signature.op, signature.fixed))
        return self.measured[min(alike, key=signature.distance)] if alike else None

    def refused(self) -> dict[str, str]:
        """op and tactic → why it is out, at the first shape where it is; parameters of tactics left out."""
        found: dict[str, str] = {}
        for signature, measured in self.measured.items():
            for tactic, reason in measured.refused.items():
                found.setdefault(f"{signature.op} {tactic.partition('<')[0]}", reason)
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            str(signature): asdict(found) for signature, found in sorted(self.measured.items(), key=lambda i: str(i[0]))
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TacticTable:
        """Raises ValueError, TypeError or KeyError for anything `to_json` did not give."""
        table = cls()
        for text, item in document.items():
            measured = Measured(
                str(item["tactic"]), float(item["microseconds"]), dict(item["tried"]), dict(item["refused"])
            )
            table.put(Signature.parse(text), measured)
        return table


class TimingCache(TacticTable):
    """A table in a file that processes share: each adds what it measured. A damaged file counts as empty."""

    def __init__(self, path: Path, device: Mapping[str, str]):
        super().__init__()
        self.path = path
        self.device = dict(device)
        self._guard = threading.Lock()
        with suppress(OSError, TimeoutError), self._alone():  # without it everything is measured anew
            self._add_from_file()

    def save(self) -> None:
        """Merges with what others have written since. Raises StoreError."""
        with self._guard:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self._alone():
                    self._add_from_file()
                    self.export(self.path)
            except (OSError, TimeoutError) as error:
                raise StoreError(f"the timing cache {self.path} cannot be written: {error}.") from error

    def _alone(self) -> FileLock:
        """Windows does not replace a file that another process reads."""
        return FileLock(self.path.with_suffix(".lock"), timeout=30)

    def _add_from_file(self) -> None:
        """What is in the file and not known here."""
        try:
            others = _read(self.path, self.device)
        except (OSError, ValueError, TypeError, KeyError, SettingError):
            return
        for signature, found in others.measured.items():
            if signature not in self.measured:
                self.put(signature, found)

    def export(self, path: Path) -> None:
        """All but what was measured while memory was short: the next build tries again."""
        lasting = {text: item for text, item in self.to_json().items() if FULL not in item["refused"].values()}
        document = {"format": FORMAT, "device": self.device, "measured": lasting}
        disk.overwrite(path, json.dumps(document, indent=1).encode())

    def take(self, path: Path) -> int:
        """Adds what another machine of the same kind has exported. Returns how much. Raises SettingError."""
        try:
            found = _read(path, self.device)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SettingError(f"{path} is not a timing cache: {error}.") from error
        for signature, measured in found.measured.items():
            self.put(signature, measured)
        return len(found.measured)


def _read(path: Path, device: Mapping[str, str]) -> TacticTable:
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")), path, device)
    except (AttributeError, RecursionError) as error:  # JSON of another shape
        raise ValueError(str(error)) from error


def _parsed(document: Any, path: Path, device: Mapping[str, str]) -> TacticTable:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r} is not {FORMAT}")
    if document["device"] != dict(device):
        other = " ".join(map(str, dict(document["device"]).values()))
        raise SettingError(
            f"{path} was measured on another device ({other}).", hint="Build without it: it is measured anew."
        )
    return TacticTable.from_json(document["measured"])
