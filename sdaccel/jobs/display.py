"""What is seen of a run while it goes on: a bar in the terminal, or an event a line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sdaccel.jobs.run import Run, Summary
    from sdaccel.jobs.task import ImageResult


MOST = 20
"""So many different notes, and errors, a summary shows."""


class Display(Protocol):
    def stage(self, text: str, fraction: float) -> None:
        """Before the first image: opening, building."""

    def image(self, run: Run, result: ImageResult) -> None: ...

    def fault(self, text: str) -> None:
        """Of a job that cannot be read, where none can."""


@contextmanager
def bar(enabled: bool | None = None) -> Iterator[Display]:
    """On stderr, if that is a terminal; ``enabled`` decides instead."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = console.is_terminal if enabled is None else enabled
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=console, disable=not shown, transient=True) as progress:
        yield _Bar(progress)


class _Bar:
    def __init__(self, progress: Any):
        self._progress = progress
        self._task = progress.add_task("starting", total=1.0)
        self._drawing = False

    def stage(self, text: str, fraction: float) -> None:
        if not self._drawing:
            self._progress.update(self._task, description=text, completed=min(1.0, max(0.0, fraction)))

    def image(self, run: Run, result: ImageResult) -> None:
        summary = run.summary
        if not self._drawing:
            self._drawing = True
            self._progress.reset(self._task)
        ended = summary.drawn + summary.failed + summary.elsewhere
        self._progress.update(
            self._task, total=summary.asked - summary.before, completed=ended, description=rate_line(run, result)
        )

    def fault(self, text: str) -> None:
        _say_fault(text)


def _say_fault(text: str) -> None:
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


def rate_line(run: Run, result: ImageResult) -> str:
    summary = run.summary
    parts = [_images(summary.drawn)]
    if summary.seconds > 0 and summary.drawn:
        parts.append(_rate(summary))
    if summary.failed:
        parts.append(f"{summary.failed} failed")
    if result.memory:
        parts.append(f"{result.memory / 1e9:.1f} GB of the GPU")
    return ", ".join(parts)


class JsonEvents:
    """One JSON object a line on stdout: ``{"event": "stage" | "image", …}``."""

    def __init__(self) -> None:
        self._last = ""

    def stage(self, text: str, fraction: float) -> None:
        if text != self._last:
            self._last = text
            self.say("stage", stage=text, fraction=round(fraction, 4))

    def image(self, run: Run, result: ImageResult) -> None:
        summary = run.summary
        counts = {name: getattr(summary, name) for name in ("asked", "before", "drawn", "failed")}
        self.say("image", **{**asdict(result), "ok": result.ok}, run=counts)

    def fault(self, text: str) -> None:
        _say_fault(text)

    def say(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}, ensure_ascii=False), flush=True, file=sys.stdout)


@contextmanager
def events() -> Iterator[JsonEvents]:
    """The last event is ``{"event": "summary", …}``, of `Summary.to_json`."""
    yield JsonEvents()


def summary_lines(run: Run) -> list[str]:
    """What became of it, in plain words."""
    summary = run.summary
    rate = f" ({_rate(summary)})" if summary.drawn and summary.seconds else ""
    lines = [f"{summary.drawn} of {_images(summary.asked)} drawn in {summary.seconds:.1f} s{rate}"]
    told = (
        (summary.before, "there already"),
        (summary.elsewhere, "drawn by another process meanwhile"),
        (summary.repeated, "asked for twice, and drawn once"),
        (summary.failed, "set aside (--retry tries them again)"),
        (summary.missing, "missing: run the same command with --resume"),
    )
    lines += [f"{_images(number)} {text}" for number, text in told if number]
    lines += [f"{what} ran {_images(number)}" for what, number in summary.ran.items()]
    lines += _most_often("set aside", summary.errors) + _most_often("note", summary.notes)
    if summary.faults:
        lines.append(f"jobs that could not be used: {len(summary.faults)}, see below")
    return [*lines, f"images: {run.options.out}"]


def _most_often(what: str, counts: Mapping[str, int]) -> list[str]:
    """Each of thousands of prompts may have its own."""
    first = sorted(counts.items(), key=lambda item: -item[1])[:MOST]
    lines = [f"{what}, {_images(number)}: {text}" for text, number in first]
    left = len(counts) - len(first)
    return [*lines, f"{what}: {left} more, which --json shows"] if left else lines


def _images(number: int) -> str:
    return f"{number} image{'' if number == 1 else 's'}"


def _rate(summary: Summary) -> str:
    rate = summary.drawn / summary.seconds
    return f"{rate:.2f} images/s" if rate >= 0.1 else f"{1 / rate:.0f} s an image"
