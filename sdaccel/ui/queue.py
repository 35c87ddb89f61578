"""The queue of builds: one at a time, each in a process of its own, kept in the store's folder ``queue``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdaccel.engine.store import Store
from sdaccel.ui.requests import BuildRequest

WAITING, RUNNING, DONE, FAILED, CANCELLED, INTERRUPTED = (
    "waiting",
    "running",
    "done",
    "failed",
    "cancelled",
    "interrupted",
)
ENDED = (DONE, FAILED, CANCELLED, INTERRUPTED)


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
    """What went wrong, with its hint; or that all was there already."""
    engines: tuple[str, ...] = ()
    """Keys of the engines asked for, once it is done."""
    created: float = 0.0
    """Seconds since 1970."""
    notes: tuple[str, ...] = ()
    """What was assumed about the model."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class BuildQueue:
    """The builds of one store. Of the processes that look at it one runs them (the first), the others only look."""

    def __init__(self, store: Store): ...

    @property
    def runs_here(self) -> bool:
        """Whether this process runs the builds."""
        raise NotImplementedError

    def submit(self, request: BuildRequest) -> Job:
        """Queues a build; one that waits or runs already is returned as it is.

        Raises SettingError with all that is wrong with ``request``, StoreError where another process runs the queue.
        """
        raise NotImplementedError

    def jobs(self) -> list[Job]:
        """All of them, the oldest first."""
        raise NotImplementedError

    def job(self, id: str) -> Job:
        """Raises StoreError if there is none."""
        raise NotImplementedError

    def cancel(self, id: str) -> Job:
        """Ends a build within 5 seconds; its unfinished folders are removed. One that has ended stays as it is."""
        raise NotImplementedError

    def retry(self, id: str) -> Job:
        """Queues the request of a build that has ended once more. Raises StoreError for one that has not."""
        raise NotImplementedError

    def forget_finished(self) -> int:
        """Removes the builds that have ended, and their logs, from the list. Returns how many."""
        raise NotImplementedError

    def log(self, id: str, lines: int = 200) -> str:
        """The last lines that the build said."""
        raise NotImplementedError

    def wait(self, id: str, timeout: float | None = None) -> Job:
        """Returns when the build has ended, or after ``timeout`` seconds."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the running build ("interrupted") and lets go of the queue; what waits is run by the next owner."""


__all__: Sequence[str] = ["BuildQueue", "Job"]
