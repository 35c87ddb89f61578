"""An image of one seed by torch and by engines, drawn in a process of its own: ``python -m sdaccel.ui.comparison``.

For programs whose own Python cannot draw, see `builder_python`. stdin: one line of JSON with store, model, request and
folder; its end stops the work. stdout: one JSON object a line. ``stage`` (stage, fraction), ``preview`` (picture), at
last ``done`` (the numbers; the images lie in the folder), ``failed`` (message) or ``cancelled``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdaccel.engine.store import Store
from sdaccel.errors import SdaccelError
from sdaccel.runtime import Fallback
from sdaccel.ui.process import environment
from sdaccel.ui.tasks import Task
from sdaccel.ui.worker import DONE, Events, serve

if TYPE_CHECKING:
    from sdaccel.draw import Request

IMAGES = ("torch", "engines", "difference")


@dataclass(frozen=True)
class Comparison:
    """An image of one seed by torch and by engines (PIL images)."""

    torch: Any
    engines: Any
    difference: Any
    """|engines - torch|, times ``gain``."""
    gain: float
    psnr: float
    """Decibels; infinite where both are equal to the last bit."""
    limit: float
    """The least that counts as equal in this precision."""
    max_abs: float
    """The largest difference of a channel of a pixel, 0..255."""
    torch_seconds: float
    engine_seconds: float
    seed: int
    fallbacks: tuple[Fallback, ...]
    """What torch ran instead of engines, and why."""
    failed: tuple[str, ...]
    """What cannot be kept, and why."""
    notes: tuple[str, ...]

    @property
    def by_engines(self) -> bool:
        """Whether engines ran all of it."""
        return not self.fallbacks

    @property
    def equal(self) -> bool:
        return self.psnr >= self.limit and not self.failed


def compare_by(python: str, store: Store, model: str, request: Request, task: Task) -> Comparison:
    """The comparison, drawn by ``python`` as the work of ``task``. Raises SdaccelError, Cancelled."""
    from PIL import Image

    with (
        tempfile.TemporaryDirectory(prefix="sdaccel-compare-") as folder,
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [python, "-m", "sdaccel.ui.comparison"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            cwd=sys.prefix,
        ) as process,
    ):
        task.on_cancel = process.kill
        assert process.stdin is not None and process.stdout is not None
        said: dict[str, Any] = {}
        try:
            asked = {"store": str(store.root), "model": model, "request": asdict(request), "folder": folder}
            process.stdin.write(json.dumps(asked).encode("ascii") + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if said["event"] == "stage":
                    task.progress(said["stage"], said["fraction"])
                elif said["event"] == "preview":
                    task.preview = said["picture"]
        except (OSError, ValueError) as error:
            raise SdaccelError(f"the process that draws gave no answer: {error}.") from error
        finally:
            process.kill()
        task.progress("done", 1.0)  # raises Cancelled if that is why it ended
        if said.get("event") == "done":
            found: Any = said["comparison"]
            found |= {name: Image.open(Path(folder) / f"{name}.png").convert("RGB") for name in IMAGES}
            found |= {"fallbacks": tuple(Fallback(**each) for each in found["fallbacks"])}
            return Comparison(**found | {name: tuple(found[name]) for name in ("failed", "notes")})
        log.seek(0)
        last = log.read()[-600:].decode("utf-8", errors="replace").strip().rpartition("\n")[2]
        raise SdaccelError(said.get("message") or f"the process that draws has ended: {last}")


def _compare(line: bytes, events: Events) -> int:
    from sdaccel.draw import Request
    from sdaccel.ui.studio import Studio

    asked = json.loads(line)
    studio = Studio(Store(asked["store"]))
    found = studio.compare(
        asked["model"],
        Request(**asked["request"]),
        progress=events.progress,
        show=lambda picture: events.say("preview", picture=picture),
    )
    for name in IMAGES:
        getattr(found, name).save(Path(asked["folder"]) / f"{name}.png")
    numbers = {key: value for key, value in vars(found).items() if key not in IMAGES}
    numbers["fallbacks"] = [asdict(fallback) for fallback in found.fallbacks]
    events.say("done", comparison=numbers)
    return DONE


if __name__ == "__main__":
    serve(_compare)
