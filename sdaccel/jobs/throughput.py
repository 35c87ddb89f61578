"""How much of the engines' speed a run of many images keeps: its images a second beside those of UNet and VAE alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdaccel.bench import default_threads, machine_facts
from sdaccel.errors import BackendError, SettingError
from sdaccel.jobs.job import Job
from sdaccel.jobs.pool import Here
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import open_storage
from sdaccel.jobs.task import BatchTask, ImageTask, Options
from sdaccel.jobs.worker import Worker

Progress = Callable[[str, float], None]
Calls = list[tuple[Any, Mapping[str, Any], Any, Any]]
"""(engines, inputs, outputs, patches of their weights) in the order in which they ran"""


@dataclass(frozen=True)
class Throughput:
    """Rates are images a second. bare: the same engine calls in a row, and nothing else. loop: `Run`, files and all."""

    machine: Mapping[str, Any]
    model: str
    width: int
    height: int
    steps: int
    at_once: int
    images: int
    bare: tuple[float, ...]
    loop: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.loop) / statistics.median(self.bare)

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "machine"}
        medians = {"bare_median": statistics.median(self.bare), "loop_median": statistics.median(self.loop)}
        return {**self.machine, **facts, **medians, "ratio": self.ratio}


def bench_batch(
    options: Options,
    *,
    width: int | None = None,
    height: int | None = None,
    steps: int = 20,
    batches: int = 8,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Throughput:
    """Draws ``batches`` full batches by a run and by bare engine calls, in turn, ``repeats`` times each.

    Images go to a temporary folder. Raises SettingError, and BackendError where engines do not run it all.
    """
    if batches < 1 or repeats < 1:
        raise SettingError(f"batches {batches} and repeats {repeats}: at least 1 each.")
    report = progress or (lambda stage, fraction: None)
    with tempfile.TemporaryDirectory(prefix="sdaccel-bench-") as folder:
        worker = Worker(replace(options, out=f"{folder}/warm"), open_storage(f"{folder}/warm"), progress)
        try:
            job = Job(
                "a photograph of a lighthouse on a cliff at dusk", width=width, height=height, steps=steps, seed=1
            )
            facts = worker.prepare(options.model, [job])
            width, height = width or facts.native, height or facts.native
            at_once = facts.at_once[width, height]
            calls = _calls_of_a_batch(worker, replace(job, width=width, height=height), options.model, at_once)
            bare, loop = [], []
            for number in range(repeats):
                report("engine calls alone", number / repeats)
                bare.append(at_once * batches / _seconds_of(calls, batches))
                report("a run", (number + 0.5) / repeats)
                jobs = [replace(job, n=at_once * batches, seed=1000 * number, width=width, height=height)]
                chosen = replace(options, out=f"{folder}/{number}")
                worker.storage = open_storage(chosen.out)
                run = Run(jobs, chosen, workers=Here(chosen, worker=worker))
                for result in run:
                    if not result.ok:
                        raise BackendError(f"an image could not be drawn: {result.error}.")
                loop.append(run.summary.drawn / run.summary.seconds)
        finally:
            worker.close()
    device = "cuda" if facts.settings["backend"] == "cuda" else "cpu"
    machine = {**machine_facts(default_threads(), device), **facts.settings}
    total = at_once * batches
    return Throughput(machine, facts.name, width, height, steps, at_once, total, tuple(bare), tuple(loop))


def _calls_of_a_batch(worker: Worker, job: Job, model: str | None, at_once: int) -> Calls:
    """Draws one batch, twice so that all is warm, and returns what it asked of UNet and VAE decoder."""
    from sdaccel.engine.patch import NOTHING, Patches
    from sdaccel.runtime import ExecutionContext

    jobs = [replace(job, seed=number) for number in range(at_once)]
    images = tuple(ImageTask(f"{number:064x}", each, number + 1, f"{number}.png") for number, each in enumerate(jobs))
    batch = BatchTask(0, model, images, tuple(range(at_once)))
    worker.draw(batch).result()
    calls: Calls = []
    run = ExecutionContext.run

    def noted(
        self: Any, inputs: Mapping[str, Any], report: Any, outputs: Any = None, patches: Patches = NOTHING
    ) -> Any:
        if not self.component.startswith("text_encoder"):
            calls.append((self, dict(inputs), outputs, patches))
        return run(self, inputs, report, outputs, patches)

    ExecutionContext.run = noted  # type: ignore[method-assign]
    try:
        results = worker.draw(batch).result()
    finally:
        ExecutionContext.run = run  # type: ignore[method-assign]
    asked = {context.component for context, *_ in calls}
    fallbacks = [note for result in results for note in result.notes]
    if asked != {"unet", "vae_decoder"} or any("in torch" in note for note in fallbacks):
        raise BackendError(f"engines do not run it all: {'; '.join(fallbacks) or asked}.", hint="Run: sdaccel build")
    return calls


def _seconds_of(calls: Calls, batches: int) -> float:
    import torch

    from sdaccel.runtime import RunReport

    on_gpu = any(context.device == "cuda" for context, *_ in calls)
    report = RunReport()
    with torch.inference_mode():
        start = time.perf_counter()
        for _ in range(batches):
            for context, inputs, outputs, patches in calls:
                context.run(inputs, report, outputs, patches)
        if on_gpu:
            torch.cuda.synchronize()
    return time.perf_counter() - start
