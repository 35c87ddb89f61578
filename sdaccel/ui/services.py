"""What the pages call: engines, builds, comparisons, images. No gradio here, and no exporter in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from sdaccel import settings
from sdaccel.engine.store import Store
from sdaccel.errors import EngineBroken, SdaccelError, SettingError, StoreError
from sdaccel.lora import Lora, chosen
from sdaccel.resources import expanded
from sdaccel.ui import builder_python
from sdaccel.ui.preflight import Preflight, preflight
from sdaccel.ui.process import COMMAND, environment
from sdaccel.ui.queue import BuildQueue, Job, open_queue
from sdaccel.ui.requests import DEMO, BuildRequest, problems
from sdaccel.ui.rows import (
    EngineRow,
    delete,
    engine_rows,
    export_timing_cache,
    import_timing_cache,
    rebuild_request,
)
from sdaccel.ui.tasks import Task

if TYPE_CHECKING:
    from sdaccel.draw import Request
    from sdaccel.ui.studio import Studio

Models = Callable[[], Sequence[tuple[str, str]]]

MOST_IMAGES = 16
MOST_SIDE = 2048


@dataclass(frozen=True)
class Host:
    """The program that shows the pages."""

    name: str = "sdaccel"
    models: Models = tuple
    """(label, path) of the checkpoints that it knows of."""
    remote: bool = False
    """Whether others than this machine's user may reach the pages without a password."""
    components: tuple[str, ...] = ()
    """What it runs of a checkpoint by engines; empty: all there is."""

    @property
    def allowed(self) -> bool:
        """Whether its pages may change anything: build, delete, import."""
        return not self.remote or settings.ALLOW_REMOTE.value() == 1

    def permit(self, what: str) -> None:
        """Raises SettingError where ``what`` is refused to a page that others can reach."""
        if not self.allowed:
            raise SettingError(
                f"{what} is refused, because others can reach this page without a password.",
                hint="Start it with SDACCEL_ALLOW_REMOTE=1 to allow it, or on 127.0.0.1 only.",
            )


@dataclass
class Services:
    """Everything behind the pages of one store."""

    store: Store
    host: Host = field(default_factory=Host)
    output: Path | None = None
    """Where images are saved; None: the user's data folder."""

    def __post_init__(self) -> None:
        self.queue: BuildQueue = open_queue(self.store)
        self.tasks: dict[str, Task] = {}
        self.python = ""
        """The Python that builds, verifies and compares; empty: this one, or the one that it puts aside."""
        self._studio: Studio | None = None
        self._lock = threading.Lock()
        self._exports: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.queue.close()
        if self._exports is not None:
            self._exports.cleanup()

    def work_by(self, python: str) -> None:
        """Has ``python`` build, verify and compare from now on; empty: see `builder_python`."""
        self.python = python
        self.queue.command = [python or COMMAND[0], *COMMAND[1:]]

    def _worker(self, task: Task) -> str:
        return self.python or builder_python.ready(self.store.root, task.progress)

    # ---- models

    def models(self) -> list[tuple[str, str]]:
        """(label, path) of the checkpoints to choose from: the host's, those that engines were built of, the demo.

        The demo comes first where no other program shows the pages.
        """
        from sdaccel.model_choice import DEMO_NAME, demo_model

        found = {DEMO: f"{DEMO_NAME} (ships with sdaccel)"}
        demo = str(demo_model().path.resolve())
        known = [(label, path) for label, path in self.host.models()]
        if settings.MODEL.value():
            known.append((Path(settings.MODEL.value()).stem, settings.MODEL.value()))
        for entry in self.store.list():
            origin = entry.engine.origin
            if origin and not origin.startswith("pipeline ") and Path(origin).exists():
                known.append((entry.engine.model, origin))
        for label, path in known:
            if str(expanded(path).resolve()) != demo:
                found.setdefault(str(expanded(path)), label)
        if self.host.name != Host.name:
            found[DEMO] = found.pop(DEMO)
        labels = list(found.values())
        return [(label if labels.count(label) == 1 else f"{label} ({path})", path) for path, label in found.items()]

    def model(self, named: Any) -> str:
        """The path of a checkpoint named by its label or its path. Where anyone may ask, it must be listed.

        Raises SettingError.
        """
        text = str(named or "").strip().strip('"')
        if not text:
            raise SettingError("no checkpoint is chosen.", hint="Choose one, or name a path.")
        known = dict(self.models())
        if not self.host.allowed and text not in (*known, *known.values()):
            raise SettingError("only the checkpoints in the list can be opened from here.")
        return known.get(text, text)

    # ---- builds

    def check(self, request: BuildRequest) -> tuple[dict[str, str], Preflight | None]:
        """(field → what is wrong with it, what the build needs if nothing is)."""
        found = problems(request)
        if found:
            return found, None
        try:
            return {}, preflight(request, self.store, self.python)
        except SdaccelError as error:
            return {"model": str(error)}, None

    def build(self, requests: Iterable[BuildRequest]) -> list[Job]:
        self.host.permit("building")
        return [self.queue.submit(request) for request in requests]

    def cancel(self, job: str) -> Job:
        self.host.permit("cancelling a build")
        return self.queue.cancel(job)

    def retry(self, job: str) -> Job:
        self.host.permit("building")
        return self.queue.retry(job)

    def forget_finished(self) -> int:
        self.host.permit("clearing the list of builds")
        return self.queue.forget_finished()

    # ---- engines

    def engines(self) -> list[EngineRow]:
        return engine_rows(self.store)

    def delete(self, keys: Sequence[str]) -> int:
        """Bytes freed. Raises StoreError where none of them is there any more."""
        self.host.permit("deleting")
        if not {row.key for row in self.engines()} & set(keys):
            raise StoreError("there is no such engine any more.", hint="It has been deleted already.")
        return delete(self.store, keys)

    def rebuild(self, keys: Sequence[str]) -> list[Job]:
        """Queues the builds that make these engines anew. One that is whole goes first: it would only be found.

        Raises SettingError, StoreError or EngineBroken, and has deleted nothing then.
        """
        self.host.permit("building")
        rows = {row.key: row for row in self.engines()}
        found: dict[BuildRequest, list[str]] = {}
        for key in keys:
            entry = self._readable(key) if key in rows else None
            if entry is None:
                raise StoreError(f"the engine {key[:12]} is gone.", hint="It has been deleted meanwhile.")
            request = rebuild_request(entry)
            components = found.setdefault(replace(request, components=None), [])
            components += request.components or ()
        merged = [replace(request, components=tuple(names) or None) for request, names in found.items()]
        self.queue.admit(merged)
        ready = [key for key in keys if rows[key].state == "ready"]
        if ready:
            delete(self.store, ready)
        return [self.queue.submit(request) for request in merged]

    def _readable(self, key: str) -> Any:
        try:
            return self.store.get("engines", key)
        except EngineBroken:
            raise EngineBroken(
                f"the engine {key[:12]} is so broken that it does not say what it was built of.",
                hint="Delete it, then build on the Build page.",
            ) from None

    def page(self, keys: Sequence[str], measure: bool = False) -> str:
        """A whole HTML page about engines. measure: also where the time of a call goes, which runs them."""
        from sdaccel.bench import op_times
        from sdaccel.listing import READY, list_engines
        from sdaccel.page import engines_page

        items = [item for item in list_engines(self.store) if item.key in keys]
        times = {}
        for item in items if measure else []:
            found = op_times(item.entry, self.store) if item.entry is not None and item.state == READY else None
            times.update({item.key: found} if found else {})
        return engines_page(items, times)

    def export_times(self) -> Path:
        """A file with what builds have measured on this GPU."""
        if self._exports is None:
            self._exports = tempfile.TemporaryDirectory(prefix="sdaccel-times-")
        path = Path(self._exports.name) / "sdaccel-timing-cache.json"
        path.unlink(missing_ok=True)
        export_timing_cache(self.store, path)
        return path

    def import_times(self, path: Any) -> int:
        self.host.permit("importing")
        if not path:
            raise SettingError("no file was given.", hint="Choose one that was exported on a machine of the same kind.")
        return import_timing_cache(self.store, Path(str(getattr(path, "name", path))))

    # ---- long work

    def _start(self, name: str, title: str, work: Callable[[Task], Any]) -> Task:
        with self._lock:
            known = self.tasks.get(name)
            if known is not None and known.running:
                raise SettingError(f"{known.title} is still under way.", hint="Wait for it, or stop it.")
            self.tasks[name] = Task(title, work)
            return self.tasks[name]

    def stop(self, name: str) -> None:
        if name in self.tasks:
            self.tasks[name].cancel()

    def forget(self, name: str) -> None:
        """Lets go of what has ended, so that no page shows it again."""
        with self._lock:
            if name in self.tasks and not self.tasks[name].running:
                del self.tasks[name]

    @property
    def studio(self) -> Studio:
        from sdaccel.ui.studio import Studio

        if self._studio is None:
            self._studio = Studio(self.store)
        return self._studio

    def verify(self, keys: Sequence[str]) -> Task:
        """Compares engines with torch, in a process of its own. The result is the JSON of ``sdaccel verify``."""
        rows = [row for row in self.engines() if row.key in keys]
        wanted: dict[str, list[str]] = {}
        for row in rows:
            entry = self.store.get("engines", row.key) if row.state != "broken" else None
            if entry is None or row.state != "ready":
                what = f"the engine {row.key[:12]}" + (f" of {row.component}" if row.component else "")
                raise SettingError(f"{what} is {row.state}: {row.reason.rstrip('.')}.", hint="Rebuild or delete it.")
            origin = entry.engine.origin
            if not Path(origin).exists():
                raise SettingError(f"{origin}, of which {row.component} was built, is not there.")
            wanted.setdefault(origin, []).append(row.component)
        if not wanted:
            raise SettingError("no engine is chosen.", hint="Choose some in the list above the buttons.")

        def work(task: Task) -> list[dict[str, Any]]:
            python, share = self._worker(task), 1 / len(wanted)
            found = []
            for number, (origin, components) in enumerate(wanted.items()):
                found.append(_verified(task, python, origin, components, self.store, number * share, share))
            for document in found:
                document["components"] = [check for check in document["components"] if check["engine"] in keys]
            return found

        return self._start("verify", "the comparison with torch", work)

    def compare(self, model: Any, request: Request) -> Task:
        """An image by torch and by engines: the result is a `sdaccel.ui.comparison.Comparison`."""
        from sdaccel.ui.comparison import compare_by

        path, request = self.model(model), _bounded(request)

        def work(task: Task) -> Any:
            python = self._worker(task)
            if python != sys.executable:
                return compare_by(python, self.store, path, request, task)
            try:
                return self.studio.compare(path, request, progress=task.progress, show=_show(task))
            finally:
                if self.host.name != Host.name:  # the host's own model needs the memory
                    self.studio.forget()

        return self._start("compare", "the comparison of images", work)

    def loras(self, text: Any) -> tuple[Lora, ...]:
        """``FILE`` or ``FILE:STRENGTH``, one a line. Raises SettingError."""
        lines = [line for line in str(text or "").splitlines() if line.strip()]
        if lines:
            self.host.permit("opening LoRA files")
        return chosen(lines)

    def draw(self, model: Any, request: Request, *, engines: bool = True) -> Task:
        """Images, saved in the output folder: the result is a `sdaccel.draw.Result`."""
        path, request = self.model(model), _bounded(request)

        def work(task: Task) -> Any:
            result = self.studio.draw(path, request, engines=engines, progress=task.progress, show=_show(task))
            if result.ok:
                self._save(result)
            return result

        return self._start("draw", "the drawing", work)

    def _save(self, result: Any) -> None:
        from sdaccel.draw import save

        folder = self.output_folder()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for drawn in result.images:
            name, number = f"{stamp}-{drawn.seed}", 1
            while (folder / f"{name}.png").exists():
                number += 1
                name = f"{stamp}-{drawn.seed}-{number}"
            save(drawn, folder / f"{name}.png")

    def output_folder(self) -> Path:
        """Made if it is not there. Raises SettingError."""
        folder = self.output or Path(platformdirs.user_data_dir("sdaccel", appauthor=False)) / "images"
        folder = expanded(folder).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"the folder {folder} cannot be made: {error.strerror or error}.") from None
        return folder

    def images(self, most: int = 24) -> list[Path]:
        """The newest images in the output folder."""
        found = []
        for path in self.output_folder().glob("*.png"):
            with suppress(OSError):  # deleted meanwhile
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)[:most]]


def _show(task: Task) -> Callable[[str], None]:
    def show(picture: str) -> None:
        task.preview = picture

    return show


def _bounded(request: Request) -> Request:
    """Raises SettingError for more than a page should ask of this machine, or for a size that no model takes."""
    for name, side in (("width", request.width), ("height", request.height)):
        if side is not None and (side % 8 or not 64 <= side <= MOST_SIDE):
            raise SettingError(
                f"{name} {side} cannot be drawn: sides are multiples of 8 from 64 to {MOST_SIDE}.",
                hint=f"Try {min(max(round(side / 8) * 8, 64), MOST_SIDE)}.",
            )
    if request.count > MOST_IMAGES:
        raise SettingError(f"{request.count} images are too many: at most {MOST_IMAGES} at once.")
    if not request.prompt.strip():
        raise SettingError("there is no prompt.", hint="Say what to draw.")
    return request


_STAGE = re.compile(r"sdaccel: +(\d+) % (.*)")


def _verified(
    task: Task, python: str, origin: str, components: Iterable[str], store: Store, begin: float, share: float
) -> dict[str, Any]:
    """What ``sdaccel verify`` says, run as a program: it needs the exporter, and may be stopped at any moment."""
    command = [python, "-m", "sdaccel", "verify", origin, "--json", "--store", str(store.root)]
    for component in dict.fromkeys(components):
        command += ["--component", component]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**environment(), "SDACCEL_DEBUG": "1"},
        )
        task.on_cancel = process.kill
        said = ""
        try:
            assert process.stderr is not None
            for line in process.stderr:
                match = _STAGE.match(line)
                if match:
                    task.progress(match[2], begin + share * int(match[1]) / 100)
                elif line.startswith(("error: ", "fault: ")):
                    said = line.partition(": ")[2].strip()
            code = process.wait()
        finally:
            task.on_cancel = lambda: None
            process.kill()
            process.wait()
        task.progress("done", begin + share)
        out.seek(0)
        text = out.read()
    if code not in (0, 3) or not text.strip():
        raise SdaccelError(said or f"the comparison ended with exit code {code}.")
    return {"origin": origin, **json.loads(text)}


# ---- checkpoints in a folder


def models_in(folder: Path) -> list[tuple[str, str]]:
    """(label, path) of the .safetensors files and the diffusers folders in ``folder``, at most two levels down."""
    found = []
    for pattern in ("*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            inside = any((parent / "model_index.json").is_file() for parent in path.parents)
            if not inside and (path.suffix == ".safetensors" or (path / "model_index.json").is_file()):
                found.append((path.relative_to(folder).as_posix(), str(path)))
    return found


__all__ = ["Host", "Services", "models_in"]
