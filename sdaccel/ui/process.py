"""The process of one build, seen from its parent: started, listened to, and ended with all that it started."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import sdaccel
from sdaccel.ui.requests import BuildRequest

COMMAND = (sys.executable, "-m", "sdaccel.ui.worker")
GRACE = 2.5
"""Seconds from the request to end until the process is killed."""

_LONGEST = 1 << 20


class BuildProcess:
    """A worker at work on ``request``. Its log is appended to the file ``log``. Raises OSError if it cannot start."""

    def __init__(self, request: BuildRequest, store: Path, log: Path, command: Sequence[str] = COMMAND):
        self._gone = threading.Event()
        own_group: dict[str, Any] = (
            {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
            if os.name == "nt"
            else {"start_new_session": True}
        )
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment(),
                cwd=sys.prefix,  # Python looks for modules there first
                **own_group,
            )
        assert self._process.stdin is not None
        with suppress(OSError):  # it may be gone already: its exit code tells
            self._process.stdin.write(
                json.dumps({"store": str(store), "request": request.to_json()}).encode("ascii") + b"\n"
            )
            self._process.stdin.flush()
        threading.Thread(target=self._watch, name="sdaccel build", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[dict[str, Any]]:
        """What it says, until it says no more. What is no event is left out."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while line := lines.readline(_LONGEST):
                with suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and isinstance(event.get("event"), str):
                        yield event

    def wait(self) -> int:
        """The exit code, once it has ended; nothing of its group is left then."""
        self._gone.wait()
        return self._process.returncode

    def _watch(self) -> None:
        """Waits for its end, then ends what it has left behind, which may hold `events` open."""
        self._process.wait()
        if os.name != "nt":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._close_stdin()
        self._gone.set()

    def end(self) -> None:
        """Asks it to end, and kills it with its children if it has not after `GRACE` seconds."""
        family = self._family()
        self._ask()
        if not self._gone.wait(GRACE):
            family += [process for process in self._family() if process not in family]
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        self._gone.wait(GRACE)

    def _ask(self) -> None:
        with suppress(OSError, ValueError):
            if os.name == "nt":
                self._process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
            elif not self._gone.is_set():
                os.killpg(self._process.pid, signal.SIGTERM)
        self._close_stdin()

    def _close_stdin(self) -> None:
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _family(self) -> list[psutil.Process]:
        """The process and what it started; psutil tells a process from a later one with the same number."""
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []


def environment() -> dict[str, str]:
    """This process's, with the sdaccel that it runs where the child would not find it or would find another."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
    package = Path(sdaccel.__file__).resolve().parent.parent
    installed = {Path(folder).resolve() for folder in [*site.getsitepackages(), site.getusersitepackages()]}
    if package not in installed:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(package) + (os.pathsep + before if before else "")
    return environment


def describe_exit(code: int) -> str:
    """Why a process that said nothing ended, in words."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = " (the system does this when memory runs out)" if -code == getattr(signal, "SIGKILL", 9) else ""
        return f"the build's process was ended by {name}{why}. Its log tells how far it came."
    text = f"0x{code:08X}" if code > 255 else str(code)
    return f"the build's process ended with exit code {text}. Its log tells how far it came."
