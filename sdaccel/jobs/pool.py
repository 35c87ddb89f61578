"""Where workers are: in this process, or in processes of their own, one a GPU, that may end without taking us along."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sdaccel import settings
from sdaccel.errors import BackendError, SdaccelError, SettingError, StoreError
from sdaccel.jobs.job import Job
from sdaccel.jobs.storage import Storage
from sdaccel.jobs.task import BatchTask, ImageResult, ModelFacts, Options

if TYPE_CHECKING:
    from sdaccel.jobs.worker import Worker

Progress = Callable[[str, float], None]
AHEAD = 2
"""Batches that a worker is given at once, so that it need not wait for the next."""


@dataclass(frozen=True)
class Drawn:
    batch: BatchTask
    results: list[ImageResult]


@dataclass(frozen=True)
class Crashed:
    """The batch was not drawn. ``stops``: no other can be either, such as when the disk is full."""

    batch: BatchTask
    error: str
    stops: SdaccelError | None = None


@dataclass(frozen=True)
class Gone:
    """A worker could not go on, and none is left."""

    error: SdaccelError


class Workers(Protocol):
    """Draws what it is given; what became of it comes out of ``events``."""

    events: queue.Queue[Any]

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts: ...

    def has_room(self) -> bool:
        """Whether one more batch would find somebody to draw it soon."""

    def submit(self, batch: BatchTask) -> None: ...

    def close(self, *, now: bool = False) -> None:
        """``now``: what is being drawn is given up."""


def outcome(batch: BatchTask, future: Future[list[ImageResult]]) -> Drawn | Crashed:
    error = future.exception()
    return Drawn(batch, future.result()) if error is None else crash(batch, error)


def crash(batch: BatchTask, error: BaseException) -> Crashed:
    text = " ".join(str(error).split())[:500] or type(error).__name__
    told = text if isinstance(error, SdaccelError) else f"{type(error).__name__}: {text}"
    return Crashed(batch, told, error if isinstance(error, StoreError) else None)


# ---- in this process


class Here:
    """A single worker in this process, in a thread of its own: what is told of one batch costs the next no time."""

    def __init__(self, options: Options, progress: Progress | None = None, worker: Worker | None = None):
        """worker: one that there is already; it stays open."""
        from sdaccel.jobs.storage import open_storage
        from sdaccel.jobs.worker import Worker

        self.events: queue.Queue[Any] = queue.Queue()
        self._owned = worker is None
        self._worker = worker or Worker(options, open_storage(options.out), progress)
        self._batches: queue.Queue[BatchTask | None] = queue.Queue()
        self._thread = threading.Thread(target=self._draw, name="sdaccel-draw", daemon=True)
        self._thread.start()

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        return self._worker.prepare(model, jobs)

    def has_room(self) -> bool:
        return self._batches.qsize() < AHEAD - 1

    def submit(self, batch: BatchTask) -> None:
        self._batches.put(batch)

    def _draw(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                future = self._worker.draw(batch)
            except Exception as error:  # noqa: BLE001 - a job may end in anything; it is told and set aside
                self.events.put(crash(batch, error))
                continue
            future.add_done_callback(partial(self._tell, batch))

    def _tell(self, batch: BatchTask, done: Future[list[ImageResult]]) -> None:
        self.events.put(outcome(batch, done))

    def close(self, *, now: bool = False) -> None:
        if now:
            with suppress(queue.Empty):
                while True:
                    self._batches.get_nowait()
        self._batches.put(None)
        self._thread.join()
        if self._owned:
            self._worker.close(now=now)


# ---- in processes of their own


def check_count(workers: int) -> int:
    """Raises SettingError."""
    if not 1 <= workers <= 64:
        raise SettingError(f"workers={workers} is not between 1 and 64.")
    return workers


class Processes:
    """``count`` workers, each in a process, on a GPU of its own as far as there are any.

    One that ends in the middle of a batch is replaced, and that batch told as crashed.
    """

    def __init__(self, options: Options, count: int, progress: Progress | None = None):
        self.events: queue.Queue[Any] = queue.Queue()
        self._options = options
        self._progress = progress
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.RLock()
        self._closing = False
        self._places = _places(count)
        self._children = [_Child(self, place) for place in self._places]

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        return self._children[0].ask(model, jobs)

    def has_room(self) -> bool:
        with self._lock:
            return any(len(child.batches) < AHEAD for child in self._children)

    def submit(self, batch: BatchTask) -> None:
        with self._lock:
            free = [child for child in self._children if len(child.batches) < AHEAD]
            child = min(free or self._children, key=lambda c: (len(c.batches), c.model != batch.model))
            child.draw(batch)

    def close(self, *, now: bool = False) -> None:
        with self._lock:
            self._closing = True
        for child in self._children:
            child.close(now)

    def told(self, child: _Child, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "progress" and self._progress is not None:
            self._progress(*value)
        elif kind in ("drawn", "crashed"):
            number, event = value
            with self._lock:
                child.batches.pop(number, None)
            self.events.put(event)

    def ended(self, child: _Child) -> None:
        """A child is gone. Its batches were not drawn; another takes its place."""
        with self._lock:
            lost, child.batches = list(child.batches.values()), {}
            if self._closing:
                return
            if child.ever_ready:
                self._children[self._children.index(child)] = _Child(self, child.place)
            else:
                self._children.remove(child)
            left = bool(self._children)
        for batch in lost[:1]:  # those behind it had not been begun
            self.events.put(Crashed(batch, f"its worker ended: {child.how()}"))
        for batch in lost[1:]:
            self.events.put(Crashed(batch, ""))
        if not left:
            self.events.put(Gone(BackendError(f"no worker could start: {child.how()}.")))


@dataclass(frozen=True)
class _Place:
    gpu: str | None
    threads: int | None


def _places(count: int) -> list[_Place]:
    """A GPU for each worker in turn, or its share of the processor's cores."""
    gpus = _gpus()
    if gpus:
        return [_Place(gpus[i % len(gpus)], None) for i in range(count)]
    share = max(1, (os.cpu_count() or 1) // count) if count > 1 else None
    return [_Place(None, share)] * count


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class _Child:
    def __init__(self, pool: Processes, place: _Place):
        self.pool = pool
        self.place = place
        self.batches: dict[int, BatchTask] = {}
        self.model: str | None = None
        self.ever_ready = False
        self._answers: queue.Queue[Any] = queue.Queue()
        self._number = 0
        self._pipe, theirs = pool._context.Pipe()
        self._process = pool._context.Process(
            target=_serve, args=(theirs, pool._options, place), name="sdaccel-worker", daemon=True
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._listen, name="sdaccel-listen", daemon=True).start()

    def ask(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        self._send(("prepare", (model, list(jobs))))
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def draw(self, batch: BatchTask) -> None:
        self._number += 1
        self.batches[self._number] = batch
        self.model = batch.model
        self._send(("draw", (self._number, batch)))

    def close(self, now: bool) -> None:
        if now:
            self._process.terminate()
        else:
            self._send(("close", None))
        self._process.join(None if not now else 5)
        if self._process.is_alive():
            self._process.kill()

    def how(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _send(self, message: tuple[str, Any]) -> None:
        with suppress(OSError):  # it is gone: told by the one who listens
            self._pipe.send(message)

    def _listen(self) -> None:
        while True:
            try:
                kind, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "answer":
                self._answers.put(value)
            elif kind == "ready":
                self.ever_ready = True
            else:
                self.pool.told(self, (kind, value))
        self._answers.put(BackendError(f"the worker ended: {self.how()}."))
        self.pool.ended(self)


def _serve(pipe: Any, options: Options, place: _Place) -> None:
    """The child's life."""
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    if place.threads is not None:
        os.environ[settings.THREADS.name] = os.environ["OMP_NUM_THREADS"] = str(place.threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and that one tells us
    if not settings.DEBUG.value():
        warnings.simplefilter("ignore")
    from sdaccel.jobs.storage import open_storage
    from sdaccel.jobs.worker import Worker

    guard = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with guard, suppress(OSError):
            pipe.send((kind, value))

    storage: Storage = open_storage(options.out)
    worker = Worker(options, storage, lambda stage, fraction: send("progress", (stage, fraction)))
    send("ready", None)
    while True:
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone
        if kind == "close":
            worker.close()
            return
        try:
            if kind == "prepare":
                send("answer", worker.prepare(*value))
                continue
            number, batch = value
            future = worker.draw(batch)
        except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
            if kind == "prepare":
                send("answer", error if isinstance(error, SdaccelError) else BackendError(_text(error)))
            else:
                send("crashed", (number, crash(batch, error)))
            continue
        future.add_done_callback(partial(_tell, send, number, batch))


def _tell(send: Callable[[str, Any], None], number: int, batch: BatchTask, done: Future[list[ImageResult]]) -> None:
    send("drawn", (number, outcome(batch, done)))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
