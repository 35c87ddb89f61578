"""The progress bar of long work in a terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_log = logging.getLogger("sdaccel")


@contextmanager
def terminal_progress(*, enabled: bool | None = None) -> Iterator[Callable[[str, float], None]]:
    """A callback (stage, fraction done) that draws a bar with the time left on stderr, if that is a terminal.

    ``enabled`` decides instead of the terminal.
    """
    console = Console(stderr=True)
    shown = console.is_terminal if enabled is None else enabled
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn(), TimeElapsedColumn())
    stage_column = TextColumn("{task.description}", markup=False)
    with Progress(*columns, stage_column, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        last = ""

        def report(stage: str, fraction: float) -> None:
            nonlocal last
            if stage != last:
                _log.info("%3.0f %% %s", 100 * fraction, stage)
                last = stage
            bar.update(task, description=stage, completed=min(1.0, max(0.0, fraction)))

        yield report
