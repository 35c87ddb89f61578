"""The queue of builds: one at a time, each in a process of its own, kept in the store.

    <store>/queue/<id>.json      a build: its request and how far it came
    <store>/queue/<id>.log       what it said
    <store>/queue/history.json   how long earlier builds took (see `history`)
    <store>/queue/queue.lock     held by the one process that runs them

Other processes only look. Where the owner ends, whoever looks next takes the queue over: what ran is "interrupted",
what waited is built. A file that cannot be read is set aside under another name and told in `BuildQueue.notes`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sdaccel.engine import disk
from sdaccel.engine.locks import Busy, hold
from sdaccel.engine.store import Store
from sdaccel.errors import SdaccelError, SettingError, StoreError
from sdaccel.resources import expanded
from sdaccel.ui.history import History, Pace
from sdaccel.ui.process import COMMAND, BuildProcess, describe_exit
from sdaccel.ui.requests import DEMO, BuildRequest, problems

__all__ = ["ENDED", "BuildQueue", "Job", "open_queue"]

WAITING, RUNNING, DONE, FAILED, CANCELLED, INTERRUPTED = STATES = (
    "waiting",
    "running",
    "done",
    "failed",
    "cancelled",
    "interrupted",
)
ENDED = (DONE, FAILED, CANCELLED, INTERRUPTED)
FORMAT = 1

_ID = re.compile(r"\d{8}-\d{6}-\d{6}-[0-9a-f]{4}")
_LOG_TAIL = 256 << 10
_SAVE_EVERY = 1.0
_LOOK_EVERY = 3.0

_log = logging.getLogger("sdaccel")


@dataclass(frozen=True)
class Job:
    """A build as it stands now: a snapshot, never changed."""

    id: str
    request: BuildRequest
    state: str = WAITING
    """"waiting", "running", "done", "failed", "cancelled" or "interrupted" (its host ended meanwhile)."""
    stage: str = ""
    fraction: float = 0.0
    seconds: float = 0.0
    """Since it began, until it ended."""
    seconds_left: float | None = None
    """An estimate from earlier builds, else from the pace so far; None where neither tells."""
    message: str = ""
    """What went wrong, with its hint; of a build that is done, how much of it was there already."""
    engines: tuple[str, ...] = ()
    """Keys of the engines asked for, once it is done."""
    created: float = 0.0
    """Seconds since 1970."""
    notes: tuple[str, ...] = ()
    """What was assumed about the model."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "request": self.request.to_json(),
            "engines": list(self.engines),
            "notes": list(self.notes),
        }


@dataclass
class _Running:
    """What only the owner knows of the build that runs."""

    began: float = field(default_factory=time.monotonic)
    pace: Pace = field(default_factory=Pace)
    process: BuildProcess | None = None
    kind: str = ""
    saved: float = 0.0
    end: str = ""
    """The state that somebody has asked for."""


class BuildQueue:
    """The builds of one store. Safe to use from several threads. Within one process take `open_queue`."""

    command: Sequence[str] = COMMAND

    def __init__(self, store: Store):
        self.store = store
        self.folder = store.root / "queue"
        self.notes: list[str] = []
        """What had to be set aside."""
        self._jobs: dict[str, Job] = {}
        self._running = _Running()
        self._changed = threading.Condition(threading.RLock())
        self._taking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._looked = 0.0
        self._elsewhere = ""
        self._look()

    @property
    def runs_here(self) -> bool:
        """Whether this process runs the builds, or would if there were one: no other process does."""
        self._look()
        return not self._elsewhere

    @property
    def elsewhere(self) -> str:
        """Which process runs the builds, if it is another; empty if none does."""
        self._look()
        return self._elsewhere

    # ---- what anyone may ask

    def submit(self, request: BuildRequest) -> Job:
        """Queues a build; one that waits or runs already is returned as it is.

        Raises SettingError with all that is wrong with ``request``, StoreError where another process runs the queue.
        """
        self.admit([request])
        return self._submit(_absolute(request))

    def admit(self, requests: Iterable[BuildRequest]) -> None:
        """Raises what `submit` would raise, and queues nothing."""
        for request in requests:
            wrong = problems(request)
            if wrong:
                raise SettingError(" ".join(f"{name}: {message}" for name, message in wrong.items()))
        self._own()

    def jobs(self) -> list[Job]:
        """All of them, the oldest first."""
        self._look()
        with self._changed:
            if self._thread is not None:
                return [self._now(job) for job in self._jobs.values()]
        return list(self._read(set_aside=False).values())

    def job(self, id: str) -> Job:
        """Raises StoreError if there is none."""
        return self._get(id, {job.id: job for job in self.jobs()})

    def cancel(self, id: str) -> Job:
        """Ends a build within 5 seconds; its unfinished folders are removed. One that has ended stays as it is."""
        self._own()
        with self._changed:
            job = self._get(id)
            if job.state == WAITING:
                return self._set(id, state=CANCELLED, stage="")
            if job.ended:
                return job
        return self._end(id, CANCELLED)

    def retry(self, id: str) -> Job:
        """Queues the request of a build that has ended once more. Raises StoreError for one that has not."""
        job = self.job(id)
        if not job.ended:
            raise StoreError(f"the build {id} is {job.state}.", hint="Cancel it first.")
        return self.submit(job.request)

    def forget_finished(self) -> int:
        """Removes the builds that have ended, and their logs, from the list. Returns how many."""
        self._own()
        with self._changed:
            ended = [job.id for job in self._jobs.values() if job.ended]
            for id in ended:
                del self._jobs[id]
                for path in (self._file(id), self._log_file(id)):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            self._changed.notify_all()
        return len(ended)

    def log(self, id: str, lines: int = 200) -> str:
        """The last lines that the build said; empty before it has begun. Raises StoreError if there is none."""
        self.job(id)
        try:
            with self._log_file(id).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LOG_TAIL))
                text = file.read(_LOG_TAIL).decode("utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-max(0, lines) :] if lines > 0 else [])

    def wait(self, id: str, timeout: float | None = None) -> Job:
        """Returns when the build has ended, or after ``timeout`` seconds."""
        with self._changed:
            if self._thread is not None:
                self._changed.wait_for(lambda: id not in self._jobs or self._jobs[id].ended, timeout)
                return self._now(self._get(id))
        until = None if timeout is None else time.monotonic() + timeout
        while not (job := self.job(id)).ended and (until is None or time.monotonic() < until):
            time.sleep(0.5)
        return job

    def close(self) -> None:
        """Ends the running build ("interrupted") and lets go of the queue; what waits is run by the next owner."""
        with self._changed:
            self._closing = True
            thread = self._thread
            running = next((job.id for job in self._jobs.values() if job.state == RUNNING), None)
            self._changed.notify_all()
        if running is not None:
            self._end(running, INTERRUPTED)
        if thread is not None:
            thread.join(10.0)

    # ---- owning

    def _own(self) -> None:
        """Becomes the one who runs the builds. Raises StoreError if another process is, or nothing can be written."""
        with self._taking:
            if self._closing:
                raise StoreError("this queue has been closed.", hint="Open it again.")
            if self._thread is not None:
                return
            self._looked = time.monotonic()
            with disk.clear_errors(self.store.root):
                self.folder.mkdir(parents=True, exist_ok=True)
            taken: Future[None] = Future()
            thread = threading.Thread(target=self._work, args=(taken,), name="sdaccel builds", daemon=True)
            thread.start()
            try:
                taken.result()
            except Busy:
                self._elsewhere = self._owner()
                raise StoreError(
                    f"the builds of {self.store.root} are run by {self._elsewhere}.",
                    hint="Build there, or close that program first.",
                ) from None
            self._elsewhere = ""

    def _look(self) -> None:
        """Takes over what another process has left, if there is anything and it can be had."""
        if (
            self._thread is not None
            or self._closing
            or time.monotonic() - self._looked < _LOOK_EVERY * bool(self._looked)
        ):
            return
        if self.folder.is_dir():
            with suppress(StoreError):
                self._own()

    def _owner(self) -> str:
        try:
            text = (self.folder / "queue.owner").read_text(encoding="utf-8", errors="replace")[:200].strip()
        except OSError:
            text = ""
        return ascii(text)[1:-1] or "another process"

    def _work(self, taken: Future[None]) -> None:
        """The thread that runs the builds, one after the other."""
        try:
            with hold(self.folder, "queue", timeout=0):
                try:
                    self._take_over()
                    taken.set_result(None)
                    while (id := self._next()) is not None:
                        self._run(id)
                finally:
                    with self._changed:
                        self._thread = None
                        self._changed.notify_all()
        except BaseException as error:
            if taken.done():
                raise
            taken.set_exception(error)  # whoever waits for it hears of it

    def _take_over(self) -> None:
        history = History(self.folder / "history.json")
        jobs = self._read(set_aside=True)
        with self._changed:
            self._history, self._jobs, self._thread = history, jobs, threading.current_thread()
            for job in jobs.values():
                if job.state == RUNNING:
                    message = (
                        "the program that ran this build has ended meanwhile. Retry: what is stored is used again."
                    )
                    self._set(job.id, state=INTERRUPTED, seconds_left=None, message=message)
        for part in self.folder.glob("*.part"):
            with suppress(OSError):
                part.unlink()
        self._sweep()

    def _next(self) -> str | None:
        """The build whose turn it is, once there is one; None when the queue is closed."""
        with self._changed:
            while not self._closing:
                for job in self._jobs.values():
                    if job.state == WAITING:
                        self._running = _Running()
                        self._set(job.id, state=RUNNING, stage="starting")
                        return job.id
                self._changed.wait()
        return None

    # ---- running one

    def _submit(self, request: BuildRequest) -> Job:
        self._own()
        with self._changed:
            for job in self._jobs.values():
                if job.request == request and not job.ended:
                    return self._now(job)
            now = time.time()
            stamp = datetime.fromtimestamp(now, timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
            job = Job(f"{stamp}-{secrets.token_hex(2)}", request, created=now)
            with disk.clear_errors(self.store.root):
                self._save(job)
            self._jobs[job.id] = job
            self._changed.notify_all()
            return job

    def _run(self, id: str) -> None:
        running = self._running
        try:
            process = BuildProcess(self._jobs[id].request, self.store.root, self._log_file(id), self.command)
        except OSError as error:
            self._finish(id, FAILED, f"the build's process cannot start: {error.strerror or error}.")
            return
        with self._changed:
            running.process = process
            late = bool(running.end)
        if late:  # cancelled in between: whoever did waits, and this thread must hear the process end
            threading.Thread(target=process.end, name="sdaccel end", daemon=True).start()
        told: dict[str, Any] = {}
        for event in process.events():
            told = event
            try:
                self._hear(id, event)
            except (LookupError, TypeError, ValueError):
                _log.warning("a build said what nobody understands: %.200r", event)
        code = process.wait()
        self._sweep()
        what, message = told.get("event"), str(told.get("message", ""))
        if what == "done" and code == 0:
            self._finish(id, DONE)
        elif running.end:
            self._finish(id, running.end)
        elif what == "cancelled":
            self._finish(id, CANCELLED, "it was stopped from outside.")
        else:
            self._finish(id, FAILED, message if what == "failed" else describe_exit(code))

    def _hear(self, id: str, event: Mapping[str, Any]) -> None:
        running = self._running
        seconds = time.monotonic() - running.began
        if event["event"] == "opened":
            components = " ".join(map(str, event["components"]))
            running.kind = f"{event['backend']} {event['family']} {components}"
            self._set(id, notes=tuple(map(str, event["notes"])))
        elif event["event"] == "stage":
            fraction = min(1.0, max(0.0, float(event["fraction"]), self._jobs[id].fraction))
            with self._changed:
                running.pace.add(fraction, seconds)
            self._set(id, stage=str(event["stage"]), fraction=fraction)
        elif event["event"] == "done":
            keys, built = tuple(map(str, event["engines"])), len(event["built"])
            there = len(keys) - built
            message = f"{_engines(built)} built" + (f", {there} there already" if there else "")
            self._set(id, engines=keys, message=message)
            if running.kind and not there:
                try:
                    self._history.add(running.kind, running.pace.whole(seconds))
                except OSError as error:
                    _log.warning("the history of builds cannot be written: %s", error)

    def _finish(self, id: str, state: str, message: str | None = None) -> None:
        with self._changed:
            job = self._jobs[id]
            if message is None:
                message = {INTERRUPTED: "its program was closed.", DONE: job.message}.get(state, "")
            self._set(
                id,
                state=state,
                seconds=time.monotonic() - self._running.began,
                seconds_left=None,
                message=message,
                stage="" if state == DONE else job.stage,
                fraction=1.0 if state == DONE else job.fraction,
            )

    def _end(self, id: str, state: str) -> Job:
        """Ends the build that runs; it gets ``state``."""
        with self._changed:
            if self._jobs[id].state != RUNNING:
                return self._jobs[id]
            self._running.end = self._running.end or state
            process = self._running.process
        if process is not None:
            process.end()
        return self.wait(id, 5.0)

    def _sweep(self) -> None:
        """Removes what an ended build has left half-written."""
        try:
            self.store.sweep()
        except (SdaccelError, OSError) as error:
            _log.warning("the store could not be swept: %s", error)

    # ---- state, in memory and on disk

    def _get(self, id: str, jobs: Mapping[str, Job] | None = None) -> Job:
        job = (self._jobs if jobs is None else jobs).get(id)
        if job is None:
            raise StoreError(f"there is no build {id[:40]!r} in the queue.", hint="It may have been forgotten.")
        return job

    def _now(self, job: Job) -> Job:
        if job.state != RUNNING:
            return job
        running = self._running
        seconds = time.monotonic() - running.began
        left = self._history.seconds_left(running.kind, job.fraction, seconds) if running.kind else None
        return replace(job, seconds=seconds, seconds_left=left)

    def _set(self, id: str, **changes: Any) -> Job:
        """Changes a build. It is saved at once with its state, else about once a second: others look at it there."""
        with self._changed:
            job = self._jobs[id] = replace(self._jobs[id], **changes)
            now = time.monotonic()
            if "state" in changes or now - self._running.saved >= _SAVE_EVERY:
                self._running.saved = now
                try:
                    self._save(self._now(job))
                except OSError as error:
                    _log.warning("the queue cannot be written: %s", error)
            self._changed.notify_all()
            return job

    def _save(self, job: Job) -> None:
        disk.overwrite(self._file(job.id), json.dumps({"format": FORMAT, **job.to_json()}, indent=1).encode())

    def _read(self, *, set_aside: bool) -> dict[str, Job]:
        """The builds on disk, the oldest first."""
        found: list[Job] = []
        try:
            paths = sorted(self.folder.glob("*.json"))
        except OSError:
            paths = []
        for path in paths:
            if not _ID.fullmatch(path.stem):
                continue
            try:
                found.append(_job(path))
            except FileNotFoundError:
                continue  # forgotten meanwhile
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                if set_aside:
                    self._set_aside(path, error)
        return {job.id: job for job in sorted(found, key=lambda job: (job.created, job.id))}

    def _set_aside(self, path: Path, error: Exception) -> None:
        away = path.with_suffix(".damaged")
        note = (
            f"the build {path.stem} cannot be read ({' '.join(str(error).split())[:200]}): its file is now {away.name}"
        )
        with suppress(OSError):
            path.replace(away)
        _log.warning("%s", note)
        self.notes.append(note)

    def _file(self, id: str) -> Path:
        return self.folder / f"{id}.json"

    def _log_file(self, id: str) -> Path:
        return self.folder / f"{id}.log"


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"


def _absolute(request: BuildRequest) -> BuildRequest:
    """``request`` for a process that works in another folder."""
    model, preset = request.model, request.preset
    if model != DEMO:
        model = str(expanded(model).absolute())
    if preset is not None and preset.endswith(".toml"):
        preset = str(expanded(preset).absolute())
    return replace(request, model=model, preset=preset)


def _job(path: Path) -> Job:
    """The build in a file. Raises OSError, ValueError, LookupError or TypeError for what `BuildQueue` did not write."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.pop("format") != FORMAT:
        raise ValueError("another format")
    left = document["seconds_left"]
    job = Job(
        id=str(document["id"]),
        request=BuildRequest.from_json(document["request"]),
        state=str(document["state"]),
        stage=str(document["stage"]),
        fraction=float(document["fraction"]),
        seconds=float(document["seconds"]),
        seconds_left=None if left is None else float(left),
        message=str(document["message"]),
        engines=tuple(map(str, document["engines"])),
        created=float(document["created"]),
        notes=tuple(map(str, document["notes"])),
    )
    if job.id != path.stem or job.state not in STATES:
        raise ValueError("it is of another build" if job.id != path.stem else f"the state {job.state[:20]!r}")
    return job


# ---- one a process

_open: dict[Path, BuildQueue] = {}
_opening = threading.Lock()


def open_queue(store: Store) -> BuildQueue:
    """The queue of ``store`` in this process: the same object each time, until it is closed."""
    with _opening:
        queue = _open.get(store.root)
        if queue is None or queue._closing:
            queue = _open[store.root] = BuildQueue(store)
        return queue
