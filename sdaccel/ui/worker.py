"""One build in a process of its own: ``python -m sdaccel.ui.worker``, started by `sdaccel.ui.process`.

stdin: one line of JSON, ``{"store": folder, "request": {...}}``; then it stays open for as long as the parent lives.
Its end is the parent's end, and stops the build.
stdout: one JSON object a line. ``opened`` (model, family, components, backend, notes), ``stage`` (stage, fraction), at
last ``done`` (engines, built), ``failed`` (message) or ``cancelled``.
stderr: the log. Whatever libraries print goes there too.
"""

from __future__ import annotations

import _thread
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from sdaccel import settings
from sdaccel.engine.store import Store
from sdaccel.errors import Cancelled, SdaccelError, SettingError
from sdaccel.ui import builder_python
from sdaccel.ui.requests import BuildRequest

GRACE = 3.0
"""Seconds for cleaning up after the parent's end; then the process ends regardless."""

DONE, FAILED, CRASHED, STOPPED = 0, 1, 70, 130
HERE = "--here"
"""Build by this Python, whatever it lacks."""

_log = logging.getLogger("sdaccel")


class Events:
    """The lines for the parent, on what was stdout; from then on stdout is stderr, for children too."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")  # a copy that children do not inherit
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._last = ("", -1.0, 0.0)

    def fileno(self) -> int:
        return self._file.fileno()

    def say(self, event: str, **facts: Any) -> None:
        try:
            self._file.write(json.dumps({"event": event, **facts}) + "\n")
            self._file.flush()
        except OSError:
            raise KeyboardInterrupt from None  # nobody listens any more

    def progress(self, stage: str, fraction: float) -> None:
        """Says every stage, and within one at most five times a second that it goes on."""
        last, then, told = self._last
        now = time.monotonic()
        if stage == last and (fraction <= then or now - told < 0.2):
            return
        if stage != last:
            _log.info("%3.0f %% %s", 100 * fraction, stage)
        self._last = (stage, fraction, now)
        self.say("stage", stage=stage, fraction=round(fraction, 5))


def main() -> NoReturn:
    serve(_asked)


def serve(work: Callable[[bytes, Events], int]) -> NoReturn:
    """Runs ``work`` on the line that the parent sends, and ends the process; what goes wrong is told as an event."""
    _prepare()
    events = Events()
    code = CRASHED
    try:
        _stop_on_signals()
        line = sys.stdin.buffer.readline()
        _stop_at_end_of(sys.stdin.buffer)
        code = work(line, events)
    except (KeyboardInterrupt, Cancelled):
        code = STOPPED
        with suppress(KeyboardInterrupt):
            events.say("cancelled")
    except SdaccelError as error:
        code = FAILED
        _log.error("%s", error)
        _log.debug("", exc_info=True)
        with suppress(KeyboardInterrupt):
            events.say("failed", message=" ".join(str(error).split()))
    except ImportError as error:
        _log.error("%s", error, exc_info=True)
        message = (
            f"the Python that builds ({sys.executable}) lacks what sdaccel needs, or has it too old: {error}. "
            "Run there: python -m sdaccel doctor"
        )
        with suppress(KeyboardInterrupt):
            events.say("failed", message=message)
        code = FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: the page must hear of it
        traceback.print_exc()
        text = " ".join(str(error).split())[:500]
        message = f"fault: {type(error).__name__}: {text}. This is a fault of sdaccel: please report it with this log."
        with suppress(KeyboardInterrupt):
            events.say("failed", message=message)
    _leave(code)


def _prepare() -> None:
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not settings.DEBUG.value():
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    _log.setLevel(logging.DEBUG if settings.DEBUG.value() > 1 else logging.INFO)


def _read(line: bytes) -> tuple[Store, BuildRequest]:
    try:
        document = json.loads(line)
        return Store(document["store"]), BuildRequest.from_json(document["request"])
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, SdaccelError):
            raise
        raise SettingError(f"no build request came on stdin: {line[:80]!r}.") from None


def _asked(line: bytes, events: Events) -> int:
    store, request = _read(line)
    python = sys.executable if HERE in sys.argv else builder_python.ready(store.root, events.progress)
    return _build(store, request, events) if python == sys.executable else _build_by(python, line, events)


def _build(store: Store, request: BuildRequest, events: Events) -> int:
    from sdaccel.builder import build_engines, buildable_components
    from sdaccel.ui.requests import open_checkpoint, parse

    events.progress("opening the model", 0.0)
    checkpoint = open_checkpoint(request)
    config = parse(request, checkpoint)
    components = buildable_components(checkpoint, config.components)
    _log.info("%s: %s by %s into %s", checkpoint.origin, ", ".join(components), config.backend, store.root)
    for note in checkpoint.notes:
        _log.info("note: %s", note)
    events.say(
        "opened",
        model=checkpoint.name,
        family=checkpoint.family.value,
        components=components,
        backend=config.backend,
        notes=list(checkpoint.notes),
    )
    before = {entry.key for entry in store.list()}
    entries = build_engines(checkpoint, config, store, events.progress)
    keys = [entry.key for entry in entries]
    events.say("done", engines=keys, built=[key for key in keys if key not in before])
    return DONE


def _build_by(python: str, line: bytes, events: Events) -> int:
    """The same in a Python that can build, which speaks to our parent itself."""
    command = [python, "-m", "sdaccel.ui.worker", HERE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=events.fileno()) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return process.wait()
        except BaseException:
            process.stdin.close()  # as if its parent had ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            raise


# ---- ending


def _stop_on_signals() -> None:
    """The first of them raises KeyboardInterrupt; what comes while that is cleaned up after is ignored."""
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)


def _stop_at_end_of(stream: BinaryIO) -> None:
    def watch() -> None:
        while stream.read(4096):
            pass
        timer = threading.Timer(GRACE, _leave, (STOPPED,))
        timer.daemon = True
        timer.start()
        _thread.interrupt_main()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _leave(code: int) -> NoReturn:
    """Ends at once, whatever threads are still at work in native code, and children with it."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
