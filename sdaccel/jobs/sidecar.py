"""What every image of ours says of itself, in a PNG's details or a JSON file beside it: enough to draw it again.

    {"sdaccel": "<version>", "job": {...}, "batch": {"position": 1, "jobs": [{...}, {...}]}, ...}

``job`` is as `Job.to_json` has it, one image with its seed; ``batch``, which may be left out, is what it was drawn
together with, by the same model. What else is there tells of the run and is not read. Files travel: nothing of it is
believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdaccel.jobs.fields import checked, shown
from sdaccel.jobs.job import Job, JobError

_MOST_AT_ONCE = 1000


def to_sidecar(job: Job) -> dict[str, Any]:
    """The object, with nothing of the run."""
    from sdaccel import __version__

    found: dict[str, Any] = {"sdaccel": __version__, "job": job.to_json()}
    if job.batch:
        found["batch"] = {"position": job.position, "jobs": [each.to_json() for each in job.batch]}
    return found


def is_sidecar(value: Mapping[str, Any]) -> bool:
    return "sdaccel" in value and "job" in value


def from_sidecar(value: Mapping[str, Any], base: Path, source: str) -> Job:
    """Its job, with ``batch`` and ``position``. Raises JobError."""
    job = _single(value["job"], base, source, "job")
    batch = value.get("batch")
    if batch is None:
        return job
    jobs, position = (batch.get("jobs"), batch.get("position")) if isinstance(batch, Mapping) else (None, None)
    if not isinstance(jobs, list) or not 0 < len(jobs) <= _MOST_AT_ONCE:
        raise JobError(f"batch must have a list of jobs, 1 to {_MOST_AT_ONCE} of them.", source)
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < len(jobs):
        raise JobError(f"batch: position must be a number from 0 to {len(jobs) - 1}, not {shown(position)}.", source)
    together = tuple(_single(each, base, source, f"batch: job {at}") for at, each in enumerate(jobs))
    if {each.model for each in together} - {None, job.model}:
        raise JobError("batch: one call of a pipeline has one model.", source)
    together = tuple(replace(each, model=job.model) for each in together)
    if together[position] != job:
        raise JobError(f"batch: job {position} is not the job that the file is of.", source)
    return replace(job, batch=together, position=position)


def _single(value: Any, base: Path, source: str, what: str) -> Job:
    if not isinstance(value, Mapping):
        raise JobError(f"{what} must be an object, not {shown(value)}.", source)
    if far := next((text for text in _paths(value) if re.match(r"""["'\s]*[\\/]{2}""", text)), None):
        raise JobError(
            f"{what} names a file of another machine, {shown(far)}, which is not opened on the word of an image.",
            source,
            hint="Write it into a job file if you want it.",
        )
    found, wrong = checked(value, base)
    several = [name for name, values in found.items() if len(values) != 1]
    wrong += [f"{name} must be one value." for name in several]
    wrong += [f"{name} is missing." for name in ("prompt", "seed") if value.get(name) is None]
    if wrong:
        raise JobError(f"{what}: {' '.join(wrong)}", source)
    job = Job(**{name: values[0] for name, values in found.items()}, source=source)
    if job.n != 1:
        raise JobError(f"{what}: n must be 1, not {job.n}: a file is of one image.", source)
    if job.mask is not None and job.init_image is None:
        raise JobError(f"{what}: a mask needs an init_image.", source)
    return job


def _paths(value: Mapping[str, Any]) -> list[str]:
    loras = value.get("loras")
    found = [value.get(name) for name in ("init_image", "mask", "model")]
    for each in loras if isinstance(loras, list) else []:
        found.append(each.get("path") if isinstance(each, Mapping) else each)
    return [text for text in found if isinstance(text, str)]
