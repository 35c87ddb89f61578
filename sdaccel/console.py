"""What the command line says and how it ends: output, exit codes, Ctrl-C, logging.

Results go to stdout (with --json as JSON and nothing else), all else to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sdaccel import settings
from sdaccel.errors import Cancelled, SdaccelError, SettingError
from sdaccel.resources import expanded

OK, FAULT, USAGE, DIFFERS, CRASH, INTERRUPTED = 0, 1, 2, 3, 70, 130
GRACE = 4.0
"""Seconds that a command gets to clean up after Ctrl-C."""

EPILOG = (
    "Exit codes: 0 done; 1 an error, said on stderr; 2 wrong usage; 3 a comparison failed or the image is no good; "
    "70 a fault of ours; 130 stopped with Ctrl-C."
)


def bar(as_json: bool) -> bool | None:
    """Whether to draw a progress bar: not beside JSON, else if stderr is a terminal."""
    return False if as_json else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In a terminal as wide as it is; into a file or pipe never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=400)
    console.print(table)


def write_text(path: Path, text: str) -> None:
    try:
        expanded(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}.") from None


# ---- running, and ending


def run(app: Any, arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; says on stderr what went wrong."""
    debug = 0
    try:
        debug = settings.DEBUG.value()
        _configure_logging(debug)
        with _interruptible():
            code = app(list(arguments), prog_name="sdaccel", standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        return OK if code is None else int(code)
    except (KeyboardInterrupt, Cancelled):
        say("stopped: nothing half-built is left in the store")
        return INTERRUPTED
    except SdaccelError as error:
        if debug:
            traceback.print_exc()
        say(f"error: {' '.join(str(error).split())}")
        return FAULT
    except BrokenPipeError:
        return FAULT
    except Exception as error:  # noqa: BLE001 - the last resort
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # typer's own: wrong usage
            error.show()
            return USAGE
        if type(error).__name__ == "Abort":
            say("stopped")
            return INTERRUPTED
        if debug:
            traceback.print_exc()
        text = " ".join(str(error).split())[:500]
        say(
            f"fault: {type(error).__name__}: {text}. This is a fault of sdaccel, not of yours. Please report it with "
            "what 'sdaccel doctor' prints and this command run again with SDACCEL_DEBUG=1."
        )
        return CRASH


def main(app: Any) -> None:
    """The entry point. Ends at once after Ctrl-C, whatever threads are still at work in native code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a Windows console may have another encoding than our texts
            stream.reconfigure(errors="replace")
    _quiet_libraries()
    code = run(app, sys.argv[1:])
    if code == INTERRUPTED:
        _leave(code)
    sys.exit(code)


def _quiet_libraries() -> None:
    """diffusers and transformers comment on what they load; with SDACCEL_DEBUG they may."""
    if os.environ.get(settings.DEBUG.name, "0").strip() in ("", "0"):
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        warnings.simplefilter("ignore")


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C (on Windows Ctrl-Break too) raises KeyboardInterrupt; `GRACE` seconds later the process ends regardless.

    Entries are renamed into place whole and locks end with their process, so an end at any moment leaves a good store.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = [signal.SIGINT] + ([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else [])
    timers: list[threading.Timer] = []

    def interrupt(number: int, frame: Any) -> None:
        if timers:
            return  # the cleaning up is under way, and has until the timer
        timer = threading.Timer(GRACE, _leave, (INTERRUPTED,))
        timer.daemon = True
        timer.start()
        timers.append(timer)
        raise KeyboardInterrupt

    before = [(kind, signal.signal(kind, interrupt)) for kind in kinds]
    try:
        yield
    except Exception:
        if timers:  # an import that was cut off fails with whatever it likes
            raise KeyboardInterrupt from None
        raise
    finally:
        for kind, handler in before:
            signal.signal(kind, handler)
        for timer in timers:
            timer.cancel()


@contextmanager
def told_when_stopped(text: str) -> Iterator[None]:
    """After Ctrl-C, says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        say(text)
        raise


def _configure_logging(level: int) -> None:
    """SDACCEL_DEBUG: 1 stages, 2 and more details too. Without it only warnings."""
    logger = logging.getLogger("sdaccel")
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(level, logging.DEBUG))
    if not any(getattr(handler, "of_sdaccel", False) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever stderr is at the time."""

    of_sdaccel = True

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr
