"""Workers on Ray: an actor for each GPU of a cluster, or of this machine.

Whoever reaches a Ray cluster can run any code on it. So the cluster that is started here has a token of its own, and
no other is used unless it refuses commands without one
(https://docs.ray.io/en/latest/ray-security/token-auth.html).
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import platform
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdaccel import __version__, settings
from sdaccel.errors import BackendError, SdaccelError, SettingError
from sdaccel.jobs.dispatch import AHEAD, Dispatcher, Seat
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Crashed, Drawn, Gone, Progress, _gpus, crash, outcome
from sdaccel.jobs.remote import open_shared, protocols
from sdaccel.jobs.storage import OWN, Folder, is_address
from sdaccel.jobs.task import BatchTask, ModelFacts, Options
from sdaccel.resources import expanded

OBJECTS = 100 << 20
"""Bytes of the object store of a cluster that is started here: only plain data goes through it."""
START = 180.0
"""Seconds in which at least one actor has to be there."""
MOST = 1024
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_WITH_TOKENS = (
    "On every machine set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file of the same secret "
    "(ray get-auth-token --generate makes one), then start Ray again: ray stop, ray start."
)


class Cluster:
    """Draws batches on the actors of a Ray cluster: `sdaccel.jobs.pool.Workers`.

    address: "auto" is the cluster of RAY_ADDRESS or that this machine has joined (``ray start``), else as "local";
    "local" is one that is started here and ended with us; or the ``host:port`` of a cluster that this machine has
    joined. actors: None is one for each GPU, or for every two CPUs where there is no GPU.

    An actor holds at most two batches. One that is lost costs these, and a new one takes its place. They are drawn
    again, each with nothing else beside it: a batch that takes another actor along then is told as crashed.

    Raises SettingError: no Ray, no such cluster, one without token authentication, an ``out`` that others cannot see.
    """

    def __init__(
        self, options: Options, address: str = "auto", progress: Progress | None = None, *, actors: int | None = None
    ):
        if actors is not None and not 1 <= actors <= MOST:
            raise SettingError(f"actors={actors} is not between 1 and {MOST}.")
        self.events: queue.Queue[Any] = queue.Queue()
        self._progress = progress
        self._lock = threading.Condition(threading.RLock())
        self._dispatcher: Dispatcher[_Seat] = Dispatcher()
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._closed = False
        self._mark: Path | None = None
        self._seats: list[_Seat] = []
        self._draws_with: str | None = None
        self._options = self._everywhere(options)
        try:
            self._session = _Session(address, actors)
        except BaseException:
            self._unmark()
            raise
        atexit.register(self.close, now=True)
        try:
            self._seats = self._seated(actors)
            self._deadline = time.monotonic() + START
            for seat in self._seats:
                self._fill(seat)
        except BaseException:
            self.close(now=True)
            raise
        self._thread = threading.Thread(target=self._listen, name="sdaccel-ray", daemon=True)
        self._thread.start()

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        ray = self._session.ray
        with self._lock:
            while not any(seat.there for seat in self._seats):
                if not self.events.empty():
                    gone = self.events.get()
                    self.events.put(gone)
                    raise gone.error
                self._lock.wait(1.0)
            actor = next(seat for seat in self._seats if seat.there).actor
        asked = actor.prepare.remote(model, list(jobs))
        try:
            while not ray.wait([asked], timeout=1.0)[0]:
                self._tell(actor)
            answer = ray.get(asked)
        except ray.exceptions.RayError as error:
            raise BackendError(f"the worker that opened the model {_how(error)}.") from None
        if isinstance(answer, SdaccelError):
            raise answer
        return answer

    def _tell(self, actor: Any) -> None:
        """How far an actor is with what it prepares."""
        ray = self._session.ray
        asked = actor.stage.remote()
        if self._progress is not None and ray.wait([asked], timeout=1.0)[0]:
            stage = ray.get(asked)
            if stage is not None:
                self._progress(*stage)

    def has_room(self) -> bool:
        with self._lock:
            return self._dispatcher.has_room(self._seats)

    def submit(self, batch: BatchTask) -> None:
        with self._lock:
            self._dispatcher.add(batch)
            self._hand_out()

    def close(self, *, now: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._inbox.put(None)
        ray = self._session.ray
        actors = [seat.actor for seat in self._seats if seat.actor is not None]
        if actors and not now:
            with suppress(ray.exceptions.RayError):
                ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=START)
        for actor in actors:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        self._unmark()
        self._session.close()

    def _unmark(self) -> None:
        if self._mark is not None:
            with suppress(OSError):
                self._mark.unlink(missing_ok=True)

    # ---- actors

    def _everywhere(self, options: Options) -> Options:
        """``options`` as they mean the same on every machine."""
        options = replace(options, model=options.model or settings.MODEL.value())
        out = options.out
        if is_address(out):
            fs, path = open_shared(out)
            if "file" not in protocols(fs):
                return options
            out = path
        folder = expanded(out).absolute()
        Folder(folder)
        self._mark = folder / OWN / f"cluster-{secrets.token_hex(8)}"
        self._mark.touch()
        return replace(options, out=str(folder))

    def _seated(self, actors: int | None) -> list[_Seat]:
        resources = [node["Resources"] for node in self._session.ray.nodes() if node["Alive"]]
        devices = int(sum(each.get("GPU", 0) for each in resources))
        if devices:
            if actors is not None and actors > devices:
                raise SettingError(f"actors={actors} are more than the {devices} GPUs of the cluster.")
            return [_Seat(gpu=True, threads=None) for _ in range(actors or devices)]
        here = os.cpu_count() or 1
        cores = here if self._session.own else int(sum(each.get("CPU", 0) for each in resources))
        count = actors or max(1, cores // 2)
        return [_Seat(gpu=False, threads=max(1, cores // count)) for _ in range(count)]

    def _fill(self, seat: _Seat) -> None:
        """Starts an actor; it is there when it has told what it is."""
        ray = self._session.ray
        kind = ray.remote(_Actor).options(
            num_gpus=1 if seat.gpu else 0,
            num_cpus=0 if seat.gpu else 1,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=AHEAD + 4,
            scheduling_strategy="SPREAD",
        )
        mark = str(self._mark) if self._mark is not None else None
        seat.actor = kind.remote(self._options, seat.threads, str(Path.cwd()), mark)
        asked = seat.actor.facts.remote()
        self._when_done(asked, partial(self._arrived, seat, seat.actor))
        stays = seat.actor.stay.remote()
        self._when_done(stays, partial(self._left, seat, seat.actor))

    def _when_done(self, reference: Any, then: Callable[[Future[Any]], None]) -> None:
        """Calls ``then`` in our own thread: Ray's must not wait for anything."""
        reference.future().add_done_callback(lambda future: self._inbox.put(lambda: then(future)))

    def _listen(self) -> None:
        while True:
            try:
                step = self._inbox.get(timeout=1.0)
            except queue.Empty:
                self._check_start()
                continue
            if step is None or self._closed:
                return
            try:
                step()
            except Exception as error:  # noqa: BLE001 - nobody else would tell it
                self._gone(BackendError(f"the workers on Ray cannot go on: {type(error).__name__}: {error}."))
                return

    def _check_start(self) -> None:
        with self._lock:
            if any(seat.there for seat in self._seats):
                self._deadline = time.monotonic() + START
            elif self._seats and time.monotonic() > self._deadline:
                self._seats.clear()
                text = f"the cluster has had no room for a worker for {START:.0f} seconds."
                self._gone(BackendError(text, hint="Run: ray status"))

    def _gone(self, error: SdaccelError) -> None:
        with self._lock:
            self.events.put(Gone(error))
            self._lock.notify_all()

    def _arrived(self, seat: _Seat, actor: Any, future: Future[_Facts]) -> None:
        error = future.exception()
        if isinstance(error, self._session.ray.exceptions.RayActorError):
            self._left(seat, actor, future)
            return
        with self._lock:
            if self._closed or seat.actor is not actor:
                return
            if error is not None:
                self._leave(seat, f"a worker does not take part: it {_how(error)}.")
                return
            facts = future.result()
            fault = facts.fault
            if not fault and facts.version != __version__:
                fault = f"it has sdaccel {facts.version}, this machine {__version__}"
            self._draws_with = self._draws_with or facts.draws_with
            if not fault and facts.draws_with != self._draws_with:
                fault = f"it would draw with {facts.draws_with}, others do with {self._draws_with}"
            if fault:
                self._leave(seat, f"a worker on {facts.node} does not take part: {fault}.")
                return
            seat.facts = facts
            self._hand_out()
            self._lock.notify_all()

    def _left(self, seat: _Seat, actor: Any, future: Future[Any]) -> None:
        """An actor is gone. Its batches were not drawn; another takes its place."""
        error = future.exception()
        ray = self._session.ray
        with self._lock:
            if self._closed or seat.actor is not actor or error is None:
                return
            lost, guilty = self._dispatcher.lost(seat)
            where = seat.facts.node if seat.facts is not None else "some machine"
            seat.facts = None
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)  # it may only be out of reach
            for batch in lost:
                self.events.put(Crashed(batch, f"its worker on {where} {_how(error)}" if guilty else ""))
            if seat.worn_out:
                times = f"{seat.idle_losses} times in a row"
                self._leave(seat, f"a worker on {where} was lost {times}: it {_how(error)}.")
            else:
                self._note(f"a worker on {where} {_how(error)}, another takes its place.")
                self._fill(seat)

    def _leave(self, seat: _Seat, text: str) -> None:
        self._seats.remove(seat)
        actor, seat.actor = seat.actor, None
        with suppress(self._session.ray.exceptions.RayError, ValueError):
            self._session.ray.kill(actor)
        self._note(text)
        if not self._seats:
            self._gone(BackendError(f"no worker is left: {text}"))

    def _note(self, text: str) -> None:
        """Told at once, and with the next image that is drawn."""
        self._dispatcher.note(text)
        if self._progress is not None:
            self._progress(text, 0.0)

    # ---- batches

    def _hand_out(self) -> None:
        for seat, number, batch in self._dispatcher.hand_out(self._seats):
            drawn = seat.actor.draw.remote(batch)
            self._when_done(drawn, partial(self._drawn, seat, seat.actor, number))

    def _drawn(self, seat: _Seat, actor: Any, number: int, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, self._session.ray.exceptions.RayActorError):
            self._left(seat, actor, future)
            return
        with self._lock:
            batch = self._dispatcher.drawn(seat, number)
            if self._closed or batch is None:
                return
            event = crash(batch, error) if error is not None else future.result()
            if isinstance(event, Drawn):
                self._dispatcher.noted(event.results)
            self._hand_out()
        self.events.put(event)


def _how(error: BaseException) -> str:
    """What became of an actor, in words."""
    text = str(error)
    if "node has died" in text or type(error).__name__ == "NodeDiedError":
        return "was lost with its machine"
    if type(error).__name__ == "OutOfMemoryError" or "running low on memory" in text:
        return "was ended by Ray, because its machine ran out of memory"
    if "Actor" in type(error).__name__ and "creation" not in text and "__init__" not in text:
        return "ended"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"failed ({lines[-1][:300] if lines else type(error).__name__})"


@dataclass(kw_only=True, eq=False)
class _Seat(Seat):
    gpu: bool
    threads: int | None
    actor: Any = None
    facts: _Facts | None = None

    @property
    def there(self) -> bool:
        return self.facts is not None


# ---- on the machines


@dataclass(frozen=True)
class _Facts:
    node: str
    pid: int
    version: str
    """of sdaccel"""
    draws_with: str
    """Backend and precision."""
    fault: str
    """Why this actor cannot take part."""


class _Actor:
    """Owns a `Worker`. Ray calls it from several threads; one of its own draws."""

    def __init__(self, options: Options, threads: int | None, folder: str, mark: str | None):
        os.environ.update(_QUIET)
        if threads is not None:
            os.environ[settings.THREADS.name] = os.environ["OMP_NUM_THREADS"] = str(threads)
        with suppress(OSError):
            os.chdir(folder)  # relative paths of models and images mean what they mean to the one who asks
        self._options = options
        self._threads = threads
        self._mark = mark
        self._stage: tuple[str, float] | None = None
        self._drawing = ThreadPoolExecutor(1, "sdaccel-draw")
        self._ended = threading.Event()
        self._worker: Any = None

    def facts(self) -> _Facts:
        found = _Facts(platform.node(), os.getpid(), __version__, "", "")
        try:
            return replace(found, draws_with=self._opened())
        except SdaccelError as error:
            return replace(found, fault=str(error).rstrip("."))

    def _opened(self) -> str:
        """What it draws with. Raises SdaccelError if it cannot take part."""
        import torch

        from sdaccel.backends.base import pick_backend
        from sdaccel.jobs.storage import open_storage
        from sdaccel.jobs.worker import Worker
        from sdaccel.model_choice import choose_model

        if self._threads is not None:
            torch.set_num_threads(self._threads)
        options = self._options
        if self._mark is not None and not _appears(Path(self._mark)):
            raise SettingError(
                f"it does not see the folder {options.out} as it is on the first machine.",
                hint="Use one that all machines share, or an address such as s3://….",
            )
        if not is_address(options.model):
            choose_model(options.model)
        self._worker = Worker(options, open_storage(options.out), self._note)
        if not options.engines:
            return "torch"
        backend = pick_backend(options.backend)
        return f"{backend.name} {backend.precisions[0]}"

    def stay(self) -> None:
        """Returns when it is closed; Ray tells when it is lost before."""
        self._ended.wait()

    def _note(self, stage: str, fraction: float) -> None:
        self._stage = (stage, fraction)

    def stage(self) -> tuple[str, float] | None:
        return self._stage

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts | SdaccelError:
        try:
            return self._drawing.submit(self._worker.prepare, model, jobs).result()
        except SdaccelError as error:
            return error
        except Exception as error:  # noqa: BLE001 - told to the one who asks, whatever it is
            return BackendError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")

    def draw(self, batch: BatchTask) -> Drawn | Crashed:
        try:
            written: Future[Any] = self._drawing.submit(self._worker.draw, batch).result()
        except Exception as error:  # noqa: BLE001 - a job may end in anything; it is told and set aside
            return crash(batch, error)
        with suppress(Exception):
            written.exception()
        return outcome(batch, written)

    def close(self) -> None:
        self._drawing.submit(self._worker.close).result()
        self._ended.set()


def _appears(path: Path) -> bool:
    """Whether there is such a file; a network disk may need a moment to show it."""
    for _ in range(5):
        if path.exists():
            return True
        time.sleep(1.0)
    return False


# ---- the cluster


class _Session:
    """The connection to a cluster. ``own``: it is started here, and ended by `close`."""

    def __init__(self, address: str, actors: int | None):
        self.own = self._connected = False
        self._folder: Path | None = None
        self._before: dict[str, str | None] = {}
        self._set(_QUIET)
        try:
            self.ray = _ray()
            self._connected = self._connect(address, actors)
        except BaseException:
            self._restore()
            raise

    def _connect(self, address: str, actors: int | None) -> bool:
        """Whether the connection is ours to end."""
        if self.ray.is_initialized():
            joined = self.ray.get_runtime_context().gcs_address
            if address not in ("auto", joined):
                raise SettingError(
                    f"this process is connected to the Ray cluster {joined} already.",
                    hint='Use that one (ray="auto"), or call ray.shutdown() first.',
                )
            _refuse_open(joined)
            return False
        found = _running() if address == "auto" else address if address != "local" else None
        if found is None:
            self._start(actors)
            return True
        self._join(found)
        return True

    def _start(self, actors: int | None) -> None:
        """A cluster of this machine alone: Ray listens on all interfaces, so it gets a token that nobody else knows."""
        self._set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_TOKEN_PATH": None})
        self._read_again()
        base = "/tmp" if os.name == "posix" else None  # the names of its sockets have to be short
        self._folder = Path(tempfile.mkdtemp(prefix="sdaccel-ray-", dir=base))
        devices = len(_gpus())
        count = actors or devices or max(1, (os.cpu_count() or 1) // 2)
        try:
            self.ray.init(
                address="local",
                num_cpus=count + 2,  # Ray counts them, it does not bind them; its own tasks need some too
                num_gpus=devices,
                object_store_memory=OBJECTS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._folder),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise BackendError(f"Ray does not start: {_line(error)}.") from error
        self.own = True

    def _join(self, address: str) -> None:
        if is_address(address):
            raise SettingError(
                f"ray={address!r} is not auto, local or host:port.",
                hint="Run this on a machine of the cluster (ray start --address=HOST:PORT), with ray=auto.",
            )
        mode = os.environ.get("RAY_AUTH_MODE", "").lower()
        if mode not in ("", "token") or not _has_token():
            why = f"RAY_AUTH_MODE={mode}" if mode not in ("", "token") else "there is no token here"
            raise SettingError(
                f"the Ray cluster {address} is not used without token authentication ({why}): whoever reaches a "
                "cluster without it can run any code on its machines.",
                hint=_WITH_TOKENS,
            )
        self._set({"RAY_AUTH_MODE": "token"})
        self._read_again()
        _refuse_open(address)
        if not _answers(
            address, {name: os.environ[name] for name in (*_TOKENS, "RAY_AUTH_MODE") if name in os.environ}
        ):
            raise SettingError(f"the Ray cluster {address} has another token than this machine.", hint=_WITH_TOKENS)
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            raise SettingError(
                f"the Ray cluster {address} cannot be joined: {_line(error)}.",
                hint=f"Run on this machine: ray start --address={address}",
            ) from error

    def close(self) -> None:
        if self._connected:
            self._connected = False
            self.ray.shutdown()
        self._restore()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- environment: Ray reads its settings there, and its processes inherit them

    def _set(self, values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            self._before.setdefault(name, os.environ.get(name))
            _put(name, value)

    def _restore(self) -> None:
        changed = any(name.startswith("RAY_AUTH") for name in self._before)
        for name, value in self._before.items():
            _put(name, value)
        self._before.clear()
        if changed:
            self._read_again()

    def _read_again(self) -> None:
        """Ray keeps what it once read; this is how it renews that itself (ray._private.authentication)."""
        raylet = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise SettingError("Ray is not installed.", hint='Run: python -m pip install "sdaccel[ray]"') from None
    if not hasattr(ray.exceptions, "AuthenticationError"):
        raise SettingError(
            f"Ray {ray.__version__} knows no token authentication.",
            hint='Run: python -m pip install --upgrade "sdaccel[ray]"',
        )
    return ray


def _has_token() -> bool:
    return any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").is_file()


def _running() -> str | None:
    """The address of the cluster of RAY_ADDRESS, or that ``ray start`` has noted on this machine."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named and named != "auto":
        return None if named == "local" else named
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if os.name == "posix" else tempfile.gettempdir())
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _refuse_open(address: str) -> None:
    """Raises SettingError if the cluster tells its state to one without a token."""
    if not _answers(address, {"RAY_AUTH_MODE": "disabled"}):
        return
    raise SettingError(
        f"the Ray cluster {address} takes commands without a token: whoever reaches it can run any code on its "
        "machines. It is not used.",
        hint=_WITH_TOKENS,
    )


def _answers(address: str, token: Mapping[str, str]) -> bool:
    """Whether the cluster tells its state, or refuses to for want of the right token.

    token: of the environment. Raises SettingError if it does neither.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*_TOKENS, "RAY_AUTH_MODE")}
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        asked = subprocess.run(
            command, env={**environment, **token}, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        reason = "it takes longer than a minute"
    else:
        if asked.returncode == 0:
            return True
        if "authenticat" in asked.stderr.lower():
            return False
        lines = [line.strip() for line in asked.stderr.splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else "no reason is given"
    raise SettingError(
        f"the Ray cluster {address} does not answer: {reason}.",
        hint=f"Run: ray status --address={address}; after a cluster has ended without it, ray stop.",
    )


def _line(error: BaseException) -> str:
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
