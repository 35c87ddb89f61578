"""Where workers are: in this process, or in processes of their own, one a GPU, that may end without taking us along."""

from __future__ import annotations

import atexit
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
from sdaccel.jobs.dispatch import AHEAD, Dispatcher, Seat
from sdaccel.jobs.job import Job
from sdaccel.jobs.remote import open_shared
from sdaccel.jobs.storage import Storage, is_address, open_storage
from sdaccel.jobs.task import BatchTask, ImageResult, ModelFacts, Options

if TYPE_CHECKING:
    from sdaccel.jobs.worker import Worker

Progress = Callable[[str, float], None]


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

    One that ends is replaced. Its batches are drawn again, each with nothing else beside it: a batch that takes another
    worker along then is told as crashed. Raises SettingError for an ``out`` that only this process sees.
    """

    def __init__(self, options: Options, count: int, progress: Progress | None = None):
        if is_address(options.out):
            open_shared(options.out)
        open_storage(options.out)  # what is wrong with it is told before anything is started
        self.events: queue.Queue[Any] = queue.Queue()
        self._options = options
        self._progress = progress
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.RLock()
        self._closing = False
        self._dispatcher: Dispatcher[_Child] = Dispatcher()
        self._children: list[_Child] = []
        atexit.register(self.close, now=True)
        with self._lock:  # they may end before all are there
            self._children = [_Child(self, place) for place in _places(count)]

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        """A worker that is lost with it is forgiven once."""
        ended: list[_Ended] = []
        while len(ended) < 2:
            with self._lock:
                child = next(iter(self._children), None)
            if child is None:
                gone = self.events.get()
                self.events.put(gone)
                raise gone.error
            answer = child.ask(model, jobs)
            if isinstance(answer, ModelFacts):
                return answer
            if isinstance(answer, Exception):
                raise answer
            ended.append(answer)
        raise BackendError(
            f"the worker that opened the model {model or self._options.model or 'of the run'} ended twice: "
            f"{ended[-1].how}.",
            hint="Is there enough memory? Try fewer --workers.",
        )

    def has_room(self) -> bool:
        with self._lock:
            return self._dispatcher.has_room(self._children)

    def submit(self, batch: BatchTask) -> None:
        with self._lock:
            self._dispatcher.add(batch)
            self._hand_out()

    def _hand_out(self) -> None:
        for child, number, batch in self._dispatcher.hand_out(self._children):
            child.draw(number, batch)

    def close(self, *, now: bool = False) -> None:
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
        for child in self._children:
            child.close(now)

    def started(self, child: _Child) -> None:
        with self._lock:
            child.ready = True
            if not self._closing:
                self._hand_out()

    def told(self, child: _Child, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "progress" and self._progress is not None:
            self._progress(*value)
        elif kind in ("drawn", "crashed"):
            number, event = value
            with self._lock:
                self._dispatcher.drawn(child, number)
                if isinstance(event, Drawn):
                    self._dispatcher.noted(event.results)
                if not self._closing:
                    self._hand_out()
            self.events.put(event)

    def ended(self, child: _Child) -> None:
        """A child is gone. Its batches were not drawn; another takes its place, unless none would start."""
        how = child.how()
        with self._lock:
            lost, guilty = self._dispatcher.lost(child)
            if self._closing:
                return
            place = self._children.index(child)
            if child.worn_out or not (child.ready or child.killed()):
                del self._children[place]
            else:
                self._children[place] = _Child(self, child.place, child.idle_losses)
                self._note(f"a worker ended ({how}), another takes its place.")
            for batch in lost:
                self.events.put(Crashed(batch, f"its worker ended: {how}" if guilty else ""))
            if not self._children:
                told = (
                    f"no worker is left: the last ended ({how})." if child.ready else f"no worker could start: {how}."
                )
                hint = "What it said is above; 'sdaccel doctor' looks at this installation."
                self.events.put(Gone(BackendError(told, hint=hint)))

    def _note(self, text: str) -> None:
        """Told at once, and with the next image that is drawn."""
        self._dispatcher.note(text)
        if self._progress is not None:
            self._progress(text, 0.0)


@dataclass(frozen=True)
class _Place:
    gpu: str | None
    threads: int | None
    workers: int = 1
    """As many share this machine's RAM."""


def _places(count: int) -> list[_Place]:
    """A GPU for each worker in turn, or its share of the processor's cores."""
    gpus = _gpus()
    if gpus:
        return [_Place(gpus[i % len(gpus)], None, count) for i in range(count)]
    share = max(1, (os.cpu_count() or 1) // count) if count > 1 else None
    return [_Place(None, share, count)] * count


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class _Ended:
    how: str


class _Child(Seat):
    def __init__(self, pool: Processes, place: _Place, idle_losses: int = 0):
        super().__init__(idle_losses=idle_losses)
        self.pool = pool
        self.place = place
        self.ready = False
        self._answers: queue.Queue[ModelFacts | Exception | _Ended] = queue.Queue()
        self._pipe, theirs = pool._context.Pipe()
        self._process = pool._context.Process(
            target=_serve, args=(theirs, pool._options, place), name="sdaccel-worker", daemon=True
        )
        self._process.start()
        theirs.close()
        threading.Thread(target=self._listen, name="sdaccel-listen", daemon=True).start()

    @property
    def there(self) -> bool:
        return self.ready

    def ask(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts | Exception | _Ended:
        self._send(("prepare", (model, list(jobs))))
        return self._answers.get()

    def draw(self, number: int, batch: BatchTask) -> None:
        self._send(("draw", (number, batch)))

    def close(self, now: bool) -> None:
        if now:
            self._process.terminate()
        else:
            self._send(("close", None))
        self._process.join(None if not now else 5)
        if self._process.is_alive():
            self._process.kill()

    def killed(self) -> bool:
        """Whether somebody else ended it."""
        return (self._process.exitcode or 0) < 0

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
                self.pool.started(self)
            else:
                self.pool.told(self, (kind, value))
        self.pool.ended(self)  # first: whoever asks again finds another
        self._answers.put(_Ended(self.how()))


def _serve(pipe: Any, options: Options, place: _Place) -> None:
    """The child's life."""
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    if place.threads is not None:
        os.environ[settings.THREADS.name] = os.environ["OMP_NUM_THREADS"] = str(place.threads)
    if settings.MODEL_CACHE.value() is None:
        from sdaccel.model_cache import GIB, budget_by_setting

        os.environ[settings.MODEL_CACHE.name] = f"{budget_by_setting() / GIB / place.workers:.3f}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and that one tells us
    if not settings.DEBUG.value():
        warnings.simplefilter("ignore")
    from tqdm import tqdm  # type: ignore[import-untyped]

    from sdaccel.jobs.worker import Worker

    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a killed worker would leave behind
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
