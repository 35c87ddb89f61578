"""A run: jobs → plan → journal → workers → results. What an earlier run has drawn is not drawn again."""

from __future__ import annotations

import hashlib
import json
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdaccel.engine.store import Store
from sdaccel.errors import SdaccelError, StoreError
from sdaccel.jobs.job import Job, JobError
from sdaccel.jobs.journal import Journal
from sdaccel.jobs.names import Pattern
from sdaccel.jobs.plan import Plan, plan
from sdaccel.jobs.pool import Crashed, Drawn, Gone, Here, Processes, Workers, check_count
from sdaccel.jobs.storage import OWN, is_address, open_storage
from sdaccel.jobs.task import BatchTask, ImageResult, ImageTask, ModelFacts, Options
from sdaccel.resources import expanded

Progress = Callable[[str, float], None]
POLL = 1.0
"""Seconds between looks at batches that another process is drawing."""


@dataclass
class Summary:
    """Counts are images."""

    asked: int = 0
    before: int = 0
    """drawn by an earlier run"""
    drawn: int = 0
    elsewhere: int = 0
    """drawn in the meantime by another process in the same folder"""
    failed: int = 0
    repeated: int = 0
    faults: tuple[str, ...] = ()
    """Jobs that could not be read or planned, with their place."""
    errors: dict[str, int] = field(default_factory=dict)
    """Why images were set aside → how many"""
    ran: dict[str, int] = field(default_factory=dict)
    """ "unet: engine" and the like → how many images it ran"""
    notes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    """from the first batch to the last file"""
    stopped: str = ""

    @property
    def ok(self) -> bool:
        return not (self.faults or self.failed or self.stopped)

    @property
    def missing(self) -> int:
        return self.asked - self.before - self.drawn - self.elsewhere - self.failed

    def count(self, result: ImageResult) -> None:
        self.drawn += 1
        for component, how in result.engines.items():
            told = f"{component}: {how}"
            self.ran[told] = self.ran.get(told, 0) + 1
        for note in result.notes:
            self.notes[note] = self.notes.get(note, 0) + 1

    def to_json(self) -> dict[str, Any]:
        rate = round(self.drawn / self.seconds, 4) if self.seconds else None
        return {"ok": self.ok, **vars(self), "missing": self.missing, "images_per_second": rate}


@dataclass(frozen=True)
class Entry:
    """An image of a run, and what is known of it in the end."""

    image: ImageTask
    name: str = ""
    seconds: float | None = None
    error: str | None = None


class Run:
    """Iterate over it: each `ImageResult` comes when its file is written, or the image was set aside.

    jobs: complete ones (`sdaccel.jobs.reading` makes them). workers: None draws in this process, a number in so many
    processes. resume: go on with images that the folder's journal has already; without it they are an error.
    retry: those that were set aside too. Raises SettingError, StoreError, ModelError before anything is drawn.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        options: Options,
        *,
        workers: Workers | int | None = None,
        pattern: Pattern | str | None = None,
        resume: bool = False,
        retry: bool = False,
        faults: Iterable[JobError] = (),
        progress: Progress | None = None,
    ):
        self.options = options
        self.summary = Summary()
        self._jobs = jobs
        self._pattern = pattern if isinstance(pattern, Pattern) else Pattern(pattern) if pattern else Pattern()
        self._resume = resume or retry
        self._retry = retry
        self._faults = list(faults)
        self._storage = open_storage(options.out)
        self._journal = Journal(_home(options))
        self._workers = _workers(workers, options, progress)
        self._in_flight: dict[int, set[str]] = {}
        self._open: set[str] = set()
        self.images: dict[str, ImageTask] = {}
        """key → image, once the first result is there."""
        self._entries: list[Entry] = []

    def entries(self, *, others: bool = False) -> list[Entry]:
        """Every image that was drawn or set aside, by this run or an earlier one, in the order of the jobs.

        others: those of other jobs in the folder too.
        """
        chosen = (entry for entry in self._entries if others or entry.image.key in self.images)
        return sorted(chosen, key=lambda entry: entry.image.index)

    def __iter__(self) -> Generator[ImageResult, None, None]:
        finished = False
        try:
            self._planned()
            start = time.perf_counter()
            for result in self._drawn():
                self.summary.seconds = time.perf_counter() - start
                yield result
            finished = True
        finally:
            self._workers.close(now=not finished)
            self._entries = list(self._known_entries())
            self._journal.close()

    def _known_entries(self) -> Iterator[Entry]:
        for image, state in self._journal.everything():
            if not state.open:
                yield Entry(self.images.get(image.key, image), state.done or "", state.seconds, state.failed)

    # ---- before

    def _planned(self) -> None:
        planned = plan(self._jobs, self._facts())
        self.images = {image.key: image for image in planned.images}
        with self._journal.planning():
            self._add(planned)
        self.summary.asked, self.summary.repeated = len(self.images), planned.repeated
        self.summary.faults = tuple(str(fault) for fault in (*self._faults, *planned.faults))

    def _add(self, planned: Plan) -> None:
        """Writes what the journal does not have yet into it."""
        known = self._journal.known(self.images)
        if known and not self._resume:
            raise StoreError(
                f"{len(known)} of these {len(self.images)} images are in {self.options.out} already, or were begun.",
                hint="Add --resume to draw only what is missing, or choose another --out.",
            )
        if self._resume and not known and (others := self._journal.count()):
            self._note("in the folder already, of other jobs, another model or other files of it; they stay", others)
        for key in self.images.keys() - known:
            content, settings = planned.contents[key]
            other = self._journal.drawn_otherwise(content, settings)
            if other is not None:
                raise StoreError(
                    f"images of these jobs in {self.options.out} were drawn with {_words(other)}, not with "
                    f"{_words(settings)}.",
                    hint="Go on with the same backend, or choose another --out.",
                )
        there = {name.casefold() for name in self._storage.names()}

        def name(image: ImageTask, taken: Callable[[str], bool]) -> str:
            def is_taken(wanted: str) -> bool:
                side = str(Path(wanted).with_suffix(".json"))
                return taken(wanted) or bool({wanted.casefold(), side.casefold()} & there)

            return self._pattern.name(image.job, image.index, self.options.suffix, is_taken)

        self._journal.add(planned.batches(self.images.keys() - known), name, planned.contents)

    def _facts(self) -> Callable[[Job], ModelFacts]:
        """Of each model, asked for once, with all of its jobs at hand."""
        jobs: dict[str | None, list[Job]] = {}
        for job in self._jobs:
            jobs.setdefault(job.model, []).append(job)
        found: dict[str | None, ModelFacts | SdaccelError] = {}

        def facts(job: Job) -> ModelFacts:
            if job.model not in found:
                try:
                    found[job.model] = self._workers.prepare(job.model, jobs[job.model])
                except SdaccelError as error:
                    found[job.model] = error
            known = found[job.model]
            if isinstance(known, SdaccelError):
                raise known
            return known

        return facts

    # ---- drawing

    def _drawn(self) -> Iterator[ImageResult]:
        waiting = deque(self._journal.batches_of(self.images))
        done = [each for batch in waiting for each in self._look(batch)]
        self._miss(done)
        tasks: deque[BatchTask] = deque()
        taken: list[int] = []
        """Batches that another process has."""
        while tasks or waiting or taken or self._in_flight:
            while (tasks or waiting) and self._workers.has_room():
                if not tasks:
                    self._claim(waiting, tasks, taken)
                    continue
                task = tasks.popleft()
                self._in_flight.setdefault(task.id, set()).update(image.key for image in task.writing)
                self._workers.submit(task)
                if not self._workers.events.empty():
                    break
            try:
                event = self._workers.events.get(timeout=POLL if self._in_flight or taken else 0)
            except queue.Empty:
                if not self._in_flight and taken:
                    waiting, taken = deque(taken), []
                continue
            stops = yield from self._take(event, waiting)
            if stops:
                return

    def _look(self, batch: int) -> list[tuple[int, str, str]]:
        """Counts what a batch has behind it; returns (batch, key, name) of what is drawn."""
        states = {key: state for key, state in self._journal.states(batch).items() if key in self.images}
        if self._retry:
            again = [key for key, state in states.items() if state.failed is not None]
            self._journal.retry(batch, again)
            states |= {key: self._journal.states(batch)[key] for key in again}
        self.summary.before += sum(state.done is not None for state in states.values())
        for state in states.values():
            if state.failed is not None:
                self._count_failure(state.failed)
        self._open |= {key for key, state in states.items() if state.open}
        return [(batch, key, state.done) for key, state in states.items() if state.done is not None]

    def _miss(self, done: Sequence[tuple[int, str, str]]) -> None:
        """Images whose files are no longer there are to be drawn again."""
        if not done:
            return
        there = self._storage.names()  # after the journal was read: what it has as drawn was there by then
        for batch, key, name in done:
            if name not in there:
                self._journal.lost(batch, [key])
                self._open.add(key)
                self.summary.before -= 1
                self._note("gone from the folder, and drawn again")
            elif (suffix := Path(name).suffix) != self.options.suffix:
                self._note(f"there already as {suffix}, so not drawn as {self.options.suffix}")

    def _note(self, text: str, images: int = 1) -> None:
        self.summary.notes[text] = self.summary.notes.get(text, 0) + images

    def _claim(self, waiting: deque[int], tasks: deque[BatchTask], taken: list[int]) -> None:
        batch = waiting.popleft()
        keys = {key for key in self._journal.states(batch) if key in self._open}
        found = self._journal.claim(batch, keys)
        if found is None:
            taken.append(batch)
            return
        tasks.extend(found)
        drawing = {image.key for task in found for image in task.writing}
        for key, state in self._journal.states(batch).items():
            if key in keys - drawing and key in self._open:  # another process was faster
                self._open.discard(key)
                if state.failed is None:
                    self.summary.elsewhere += 1
                else:
                    self._count_failure(state.failed)

    def _take(self, event: Any, waiting: deque[int]) -> Generator[ImageResult, None, bool]:
        """Writes what happened into the journal; returns whether the run has to stop."""
        if isinstance(event, Gone):
            self.summary.stopped = str(event.error)
            return True
        batch = event.batch
        keys = {image.key for image in batch.writing}
        self._in_flight[batch.id] -= keys
        if not self._in_flight[batch.id]:
            del self._in_flight[batch.id]
        if isinstance(event, Crashed):
            if event.stops is not None:
                self.summary.stopped = str(event.stops)
                return True
            yield from self._crashed(batch, keys, event.error, waiting)
            return False
        assert isinstance(event, Drawn)
        good = [result for result in event.results if result.ok]
        self._journal.done(batch.id, good)
        for result in good:
            self._open.discard(result.key)
            self.summary.count(result)
            yield result
        bad: dict[str, list[ImageResult]] = {}
        for result in event.results:
            if not result.ok:
                bad.setdefault(result.error, []).append(result)
        for error, results in bad.items():
            yield from self._crashed(batch, {result.key for result in results}, error, waiting)
        return False

    def _crashed(self, batch: BatchTask, keys: set[str], error: str, waiting: deque[int]) -> Iterator[ImageResult]:
        aside = self._journal.crashed(batch.id, sorted(keys), error) if error else []
        for key in aside:
            self._open.discard(key)
            self._count_failure(error)
            image = self.images[key]
            yield ImageResult(key, image.index, seed=image.job.seed or 0, error=error)
        if keys - set(aside):
            waiting.appendleft(batch.id)

    def _count_failure(self, error: str) -> None:
        self.summary.failed += 1
        self.summary.errors[error] = self.summary.errors.get(error, 0) + 1


def _workers(wanted: Workers | int | None, options: Options, progress: Progress | None) -> Workers:
    if wanted is None:
        return Here(options, progress)
    if isinstance(wanted, int):
        return Processes(options, check_count(wanted), progress)
    return wanted


def _home(options: Options) -> Path:
    """Where the journal is: in the folder of images, or in the store if they go to an address."""
    if is_address(options.out):
        digest = hashlib.sha256(options.out.rstrip("/").encode()).hexdigest()[:32]
        return Store(options.store).root / "jobs" / digest
    return expanded(options.out) / OWN


def _words(settings: str) -> str:
    found: Mapping[str, Any] = json.loads(settings)
    return " ".join(str(value) for value in found.values())


def generate(
    jobs: Iterable[str | Mapping[str, Any] | Job] | str | Path,
    out: str | Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    expand: str = "random",
    seed: int = 0,
    workers: Workers | int | None = None,
    pattern: str | None = None,
    resume: bool = False,
    retry: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Images of many jobs into the folder ``out``; iterate over what is returned for an `ImageResult` of each.

    jobs: prompts, mappings or `Job`s, or the path of a job file. defaults: of fields that a job leaves out.
    expand: ``{a|b}`` in prompts: "random", "all" or "none". seed: changes the seeds of jobs that name none.
    options: of `sdaccel.jobs.task.Options`: model, store, backend, batch_size, format, … A job that cannot be read is
    no exception: it is in ``summary.faults``, and the others are drawn.
    """
    from sdaccel.jobs.reading import jobs_from, read_jobs

    if isinstance(jobs, (str, Path)):
        found = read_jobs(jobs, defaults, expand, seed)
    else:
        found = jobs_from(jobs, defaults, expand, seed)
    chosen = Options(out=str(out), **options)
    return Run(
        found.jobs,
        chosen,
        workers=workers,
        pattern=pattern,
        resume=resume,
        retry=retry,
        faults=found.faults,
        progress=progress,
    )
