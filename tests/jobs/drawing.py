"""Workers that draw at once and without a model, and a program of a run that is killed at one of its lines.

python -m tests.jobs.drawing FOLDER COUNT KILL_AT
"""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from PIL import Image

from sdaccel import metadata
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Drawn, crash
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import has_key, open_storage
from sdaccel.jobs.task import BatchTask, ImageResult, ImageTask, ModelFacts, Options

AT_ONCE = 3


def picture(image: ImageTask, batch: BatchTask) -> Image.Image:
    """Of the image and of what it is drawn together with."""
    together = repr([each.job.to_json() for each in batch.images])
    return Image.frombytes("RGB", (8, 4), (hashlib.sha256(f"{image.key}{together}".encode()).digest() * 3)[:96])


class Painters:
    """Draws in `submit`. fault: what a batch ends in instead, if it gives an error."""

    def __init__(self, options: Options, fault: Callable[[BatchTask], Exception | None] = lambda batch: None):
        self.events: queue.Queue[Any] = queue.Queue()
        self.storage = open_storage(options.out)
        self.fault = fault
        self.drawn: list[BatchTask] = []
        self.prepared: list[str | None] = []
        self.closed = 0
        self.settings: dict[str, Any] = {"backend": "painters"}

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        self.prepared.append(model)
        sizes = {(job.width or 8, job.height or 8): AT_ONCE for job in jobs}
        return ModelFacts(model, "painter", f"content of {model}", 8, 7.5, self.settings, sizes)

    def has_room(self) -> bool:
        return self.events.qsize() < 2

    def submit(self, batch: BatchTask) -> None:
        self.drawn.append(batch)
        error = self.fault(batch)
        if error is not None:
            self.events.put(crash(batch, error))
            return
        self.events.put(Drawn(batch, [self._save(image, batch) for image in batch.writing]))

    def _save(self, image: ImageTask, batch: BatchTask) -> ImageResult:
        data = metadata.encode(picture(image, batch), ".png", key=image.key)
        name = self.storage.write(image.name, data, lambda there: has_key(there, image.key))
        return ImageResult(image.key, image.index, name, image.job.seed or 0, len(data))

    def close(self, *, now: bool = False) -> None:
        self.closed += 1


def jobs(count: int) -> list[Job]:
    return [Job(f"a picture {i // 2}", seed=i, n=1 + i % 3, steps=1 + i % 2) for i in range(count)]


def pixels(folder: Path) -> dict[str, bytes]:
    """name → pixels, of every image in a folder."""
    return {path.name: Image.open(path).tobytes() for path in sorted(folder.glob("*.png"))}


def killed_at(line: int) -> Callable[..., Any]:
    """A trace function: the process is killed at that line of a run, as by ``kill -9``."""
    seen = 0
    files = tuple(f"{name}.py" for name in ("journal", "storage", "run", "plan"))

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        path = Path(frame.f_code.co_filename)
        return lines if path.parent.name == "jobs" and path.name in files else None

    def lines(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal seen
        seen += event == "line"
        if seen == line:
            if hasattr(signal, "SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)
        return lines

    return trace


def main(folder: str, count: int, line: int) -> None:
    options = Options(out=folder)
    if line:
        sys.settrace(killed_at(line))
    run = Run(jobs(count), options, workers=Painters(options), resume=True)
    names = [result.name for result in run]
    sys.settrace(None)
    print(run.summary.before, run.summary.drawn, len(names))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
