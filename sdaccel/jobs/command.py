"""`sdaccel batch`: a job file drawn, shown while it goes on, and a contact sheet at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from sdaccel.errors import SdaccelError
from sdaccel.jobs.display import Display
from sdaccel.jobs.job import JobError
from sdaccel.jobs.names import Pattern
from sdaccel.jobs.reading import read_defaults, read_jobs
from sdaccel.jobs.run import Run
from sdaccel.jobs.sheet import SheetRow, write_sheet
from sdaccel.jobs.storage import is_address
from sdaccel.jobs.task import Options
from sdaccel.lora import Lora
from sdaccel.resources import expanded

SHEET = "contact-sheet.html"


def draw_jobs(
    jobs: str,
    options: Options,
    display: Display,
    *,
    defaults: Path | None = None,
    loras: Sequence[Lora] = (),
    expand: str = "random",
    seed: int = 0,
    pattern: str | None = None,
    workers: int = 1,
    ray: str | None = None,
    resume: bool = False,
    retry: bool = False,
    sheet: bool = True,
) -> Run:
    """Draws what can be drawn; the run's summary tells the rest. Raises SdaccelError before anything is drawn.

    ``loras``: of jobs that name none; they take the place of the defaults' own.
    """
    usual = read_defaults(defaults) if defaults else {}
    usual |= {"loras": list(loras)} if loras else {}
    found = read_jobs(jobs, usual, expand, seed)
    if not found.jobs:
        for fault in found.faults[:-1]:
            display.fault(str(fault))
        raise found.faults[-1] if found.faults else JobError("there is no job in it.", jobs)
    names = Pattern(pattern) if pattern is not None else None
    drawing = _workers(options, workers, ray, display)
    try:
        run = Run(
            found.jobs,
            options,
            workers=drawing,
            pattern=names,
            resume=resume,
            retry=retry,
            faults=found.faults,
        )
    except BaseException:
        drawing.close(now=True)
        raise

    def write() -> None:
        if sheet and run.images and not is_address(options.out):
            rows = [_row(entry) for entry in run.entries(others=True)]
            folder = expanded(options.out)
            write_sheet(folder / SHEET, folder.absolute().name, rows)

    try:
        with closing(iter(run)) as results:
            for result in results:
                display.image(run, result)
    except BaseException:
        with suppress(SdaccelError):  # what ended the run is what is told
            write()
        raise
    with suppress(SdaccelError) if run.summary.stopped else nullcontext():
        write()
    return run


def _workers(options: Options, count: int, ray: str | None, display: Display) -> Any:
    if ray is not None:
        from sdaccel.jobs.cluster import Cluster

        return Cluster(options, ray, progress=display.stage)
    from sdaccel.jobs.pool import Processes, check_count

    return Processes(options, check_count(count), display.stage)


def _row(entry: Any) -> SheetRow:
    job = entry.image.job
    facts = {"seed": job.seed, "steps": job.steps, "guidance": job.guidance, "size": f"{job.width}x{job.height}"}
    facts |= {"scheduler": job.scheduler, "model": job.model}
    facts |= {"LoRA": ", ".join(f"{lora.name}:{lora.scale:g}" for lora in job.loras)}
    return SheetRow(
        name=entry.name,
        prompt=job.prompt,
        negative=job.negative_prompt,
        seed=job.seed or 0,
        facts={name: str(value) for name, value in facts.items() if value not in (None, "")},
        seconds=entry.seconds,
        error=entry.error,
    )
