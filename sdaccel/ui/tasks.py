"""Long work behind a page: one thread, its progress, its end. A page that is loaded anew finds it where it stands."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from sdaccel.errors import Cancelled, SdaccelError

RUNNING, DONE, FAILED, CANCELLED = "running", "done", "failed", "cancelled"

_log = logging.getLogger("sdaccel")


def fault(error: BaseException) -> str:
    """What a page says about an error that is not one of ours."""
    text = " ".join(str(error).split())[:300]
    return (
        f"{type(error).__name__}: {text}. This is a fault of sdaccel, not of yours. "
        "Please report it with what 'sdaccel doctor' prints."
    )


class Task:
    """``work(task)`` in a thread of its own. It calls `progress`, which raises Cancelled after `cancel`."""

    def __init__(self, title: str, work: Callable[[Task], Any]):
        self.title = title
        self.state = RUNNING
        self.stage = "starting"
        self.fraction = 0.0
        self.message = ""
        """What went wrong, with its hint."""
        self.result: Any = None
        self.preview = ""
        """A picture of what there is so far, as a data URI."""
        self.on_cancel: Callable[[], None] = lambda: None
        self._begin = time.monotonic()
        self._end: float | None = None
        self._pace: tuple[float, float] | None = None
        self._asked = threading.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"sdaccel {title}", daemon=True)
        self._thread.start()

    def progress(self, stage: str, fraction: float) -> None:
        if self._asked.is_set():
            raise Cancelled(f"{self.title} was stopped.")
        self.stage, self.fraction = stage, min(1.0, max(0.0, fraction))
        if self._pace is None and self.fraction > 0:
            self._pace = time.monotonic(), self.fraction

    def cancel(self) -> None:
        if self.running:
            self.stage = "stopping"
            self._asked.set()
            self.on_cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, after at most ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self.state == RUNNING

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return self._asked.is_set()

    @property
    def seconds(self) -> float:
        return (self._end or time.monotonic()) - self._begin

    @property
    def seconds_left(self) -> float | None:
        """From the pace since it got going; None while that tells nothing."""
        if not self.running or self._pace is None:
            return None
        since, began = self._pace
        done = self.fraction - began
        return (time.monotonic() - since) * (1 - self.fraction) / done if done > 0.05 else None

    def _run(self) -> None:
        try:
            self.result = self._work(self)
            state = DONE
        except Cancelled:
            state = CANCELLED
        except SdaccelError as error:
            self.message, state = str(error), FAILED
        except Exception as error:  # noqa: BLE001 - a page must not lose its host
            if self._asked.is_set():
                state = CANCELLED
            else:
                _log.exception("%s failed", self.title)
                self.message, state = fault(error), FAILED
        self._end = time.monotonic()
        self.state = state
