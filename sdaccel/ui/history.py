"""How earlier builds went, to tell how long one that runs still takes.

A build reports the fraction that is done, but not every percent takes as long: each build leaves its curve, seconds
over fraction, and the latest one of the same kind tells what is left.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

from sdaccel.engine import disk

_log = logging.getLogger("sdaccel")

FORMAT = 1
MOST_KINDS = 64
MOST_POINTS = 256
STEP = 0.005

Curve = list[tuple[float, float]]
"""(fraction, seconds since it began), both rising, from (0, 0) to (1, all of it)"""


class Pace:
    """The curve of the build that runs."""

    def __init__(self) -> None:
        self.points: Curve = [(0.0, 0.0)]

    def add(self, fraction: float, seconds: float) -> None:
        last, then = self.points[-1]
        if fraction > last and seconds >= then and (fraction >= last + STEP or fraction >= 1.0):
            self.points.append((min(fraction, 1.0), seconds))

    def whole(self, seconds: float) -> Curve:
        return [*(point for point in self.points if point[0] < 1.0), (1.0, max(seconds, self.points[-1][1]))]


class History:
    """Kind of build → the curve of the latest one, in a JSON file. A damaged file counts as empty."""

    def __init__(self, path: Path):
        self.path = path
        self.curves: dict[str, Curve] = {}
        try:
            self.curves = _read(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            _log.warning("%s is not a history of builds (%s): it begins anew", path, error)

    def add(self, kind: str, curve: Curve) -> None:
        """Raises OSError."""
        thinned = curve[:: max(1, math.ceil(len(curve) / MOST_POINTS))]
        self.curves.pop(kind, None)
        self.curves[kind] = thinned if thinned[-1] == curve[-1] else [*thinned, curve[-1]]
        for oldest in list(self.curves)[:-MOST_KINDS]:
            del self.curves[oldest]
        disk.overwrite(self.path, json.dumps({"format": FORMAT, "curves": self.curves}).encode())

    def seconds_left(self, kind: str, fraction: float, seconds: float) -> float | None:
        """What the latest build of this kind still took from here; else at the pace so far; None if that is too early.

        A build that falls behind the earlier one is expected to stay as much slower.
        """
        curve = self.curves.get(kind)
        if curve is None:
            return seconds * (1 - fraction) / fraction if fraction >= 0.1 and seconds >= 2.0 else None
        then = _at(curve, fraction)
        slower = min(max(1.0, seconds / then), 4.0) if then > 1.0 else 1.0
        return (curve[-1][1] - then) * slower


def _at(curve: Curve, fraction: float) -> float:
    """Seconds at ``fraction``, on the lines between the points."""
    index = bisect_right(curve, (fraction, math.inf))
    if index == 0 or index == len(curve):
        return curve[min(index, len(curve) - 1)][1]
    (f0, s0), (f1, s1) = curve[index - 1], curve[index]
    return s0 + (s1 - s0) * (fraction - f0) / (f1 - f0)


def _read(path: Path) -> dict[str, Curve]:
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r} is not {FORMAT}")
    curves = {}
    for kind, points in document["curves"].items():
        curve = [(float(fraction), float(seconds)) for fraction, seconds in points]
        rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(curve))
        if not curve or not rising or not all(map(math.isfinite, (*curve[0], *curve[-1]))):
            raise ValueError("a curve does not rise")
        curves[str(kind)] = curve
    return curves
