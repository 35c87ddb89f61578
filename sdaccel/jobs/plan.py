"""Which images are drawn together: jobs → batches, always the same for the same jobs, models and engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sdaccel.draw import MAX_SEED, with_size
from sdaccel.errors import SdaccelError
from sdaccel.jobs.job import Job, JobError
from sdaccel.jobs.task import ImageTask, ModelFacts, image_key

Batch = tuple[str | None, tuple[ImageTask, ...], tuple[int, ...]]
"""(model, images, positions to be written)"""


@dataclass
class Plan:
    images: list[ImageTask] = field(default_factory=list)
    """All of the run, in the order of the jobs; none twice."""
    faults: list[JobError] = field(default_factory=list)
    contents: dict[str, tuple[str, str]] = field(default_factory=dict)
    """key → (hash of what is drawn, whatever draws it; engine settings as JSON)"""
    repeated: int = 0
    """Images that an earlier job asks for already, with the same seed: they are drawn once."""
    _fixed: dict[str, tuple[ImageTask, ...]] = field(default_factory=dict)
    _groups: dict[str, tuple[Hashable, ...]] = field(default_factory=dict)
    _facts: dict[str, ModelFacts] = field(default_factory=dict)

    def batches(self, keys: Iterable[str]) -> list[Batch]:
        """Those of ``keys`` in batches. Models, kinds of pipeline, LoRAs and sizes each come in a row."""
        wanted = set(keys)
        images = [image for image in self.images if image.key in wanted]
        free = [image for image in images if image.key not in self._fixed]
        found: list[Batch] = []
        for group in _in_rows(free, lambda image: self._groups[image.key]):
            facts = self._facts[group[0].key]
            request = group[0].job.request(facts.native, facts.guidance)
            most = facts.at_once[request.width or 0, request.height or 0]
            for first in range(0, len(group), most):
                part = tuple(group[first : first + most])
                found.append((facts.model, part, tuple(range(len(part)))))
        return found + self._again(image for image in images if image.key in self._fixed)

    def _again(self, images: Iterable[ImageTask]) -> list[Batch]:
        """Batches whose composition is given: they are drawn whole, those that were asked for are written."""
        together: dict[tuple[str, ...], dict[int, ImageTask]] = {}
        for image in images:
            composition = tuple(each.key for each in self._fixed[image.key])
            together.setdefault(composition, {})[image.job.position] = image
        found: list[Batch] = []
        for placed in together.values():
            some = next(iter(placed.values()))
            images = tuple(placed.get(i, each) for i, each in enumerate(self._fixed[some.key]))
            found.append((self._facts[some.key].model, images, tuple(sorted(placed))))
        return found


def plan(jobs: Sequence[Job], facts: Callable[[Job], ModelFacts]) -> Plan:
    """facts: of the model of a job. A job that cannot be drawn becomes a fault."""
    found = Plan()
    index = 0
    for job in jobs:
        try:
            known = facts(job)
        except SdaccelError as error:
            if job.model is None:  # the model of the run
                raise
            found.faults.append(_fault(error, job))
            index += job.n
            continue
        try:
            images = [_filled(job, known, each) for each in range(job.n)]
            keys = [image_key(image, known.content, known.settings) for image in images]
        except (SdaccelError, OSError) as error:
            found.faults.append(_fault(error, job))
            index += job.n
            continue
        for image, key in zip(images, keys, strict=True):
            index += 1
            if key in found.contents:
                found.repeated += 1
                continue
            task = ImageTask(key, image, index)
            found.images.append(task)
            found.contents[key] = _content(image, known)
            found._facts[key] = known
            found._groups[key] = _group(image, known)
            if job.batch:
                found._fixed[key] = tuple(_companion(each, known) for each in job.batch)
                found.contents |= {each.key: _content(each.job, known) for each in found._fixed[key]}
    return found


def _fault(error: Exception, job: Job) -> JobError:
    return error if isinstance(error, JobError) else JobError(str(error), job.source)


def _filled(job: Job, facts: ModelFacts, offset: int) -> Job:
    """The ``offset``-th image of a job, with all that is drawn spelled out."""
    if job.seed is None or job.seed + offset > MAX_SEED:
        raise JobError(f"the seed {job.seed} of image {offset + 1} is not between 0 and {MAX_SEED}.", job.source)
    sized = with_size(job.request(facts.native, facts.guidance), facts.native)
    return replace(job, n=1, seed=job.seed + offset, guidance=sized.guidance, width=sized.width, height=sized.height)


def _companion(job: Job, facts: ModelFacts) -> ImageTask:
    filled = _filled(job, facts, 0)
    return ImageTask(image_key(filled, facts.content, facts.settings), filled, 0)


def _content(job: Job, facts: ModelFacts) -> tuple[str, str]:
    return image_key(job, facts.content, {}), json.dumps(dict(facts.settings), sort_keys=True)


def _group(job: Job, facts: ModelFacts) -> tuple[Hashable, ...]:
    """What images have to share for one call of the pipeline; what costs most to change comes first."""
    kind = "inpaint" if job.mask else "image" if job.init_image else "text"
    strength = job.strength if job.init_image else None
    alike = (job.scheduler, job.steps, job.guidance, strength, bool(job.negative_prompt))
    return (facts.content, kind, job.loras, (job.width, job.height), alike)


def _in_rows(images: Sequence[ImageTask], group: Callable[[ImageTask], tuple[Hashable, ...]]) -> list[list[ImageTask]]:
    """Images by group; groups that share their beginnings follow each other, in the order of first appearance."""
    first: dict[tuple[Hashable, ...], int] = {}
    members: dict[tuple[Hashable, ...], list[ImageTask]] = {}
    for place, image in enumerate(images):
        key = group(image)
        members.setdefault(key, []).append(image)
        for depth in range(len(key)):
            first.setdefault(key[: depth + 1], place)
    order = sorted(members, key=lambda key: [first[key[: depth + 1]] for depth in range(len(key))])
    return [members[key] for key in order]
