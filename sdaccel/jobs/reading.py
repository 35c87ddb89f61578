"""Job files → jobs: defaults, lists of values, ``{a|b}``, seeds. Formats: `sdaccel.jobs.formats`.

A field may have a list of values: the job is drawn with each. Several lists make the product, the field that is written
first changing slowest. A job without a seed gets one of its content and its place among the jobs of equal content:
the same file gives the same seeds, and two equal lines two images.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from sdaccel.draw import MAX_SEED
from sdaccel.errors import SettingError
from sdaccel.jobs import expand as braces
from sdaccel.jobs.fields import NAMES, checked
from sdaccel.jobs.formats import records
from sdaccel.jobs.job import MOST_IMAGES, Job, JobError
from sdaccel.jobs.prompts import prompt_fault
from sdaccel.jobs.records import Found, Record
from sdaccel.resources import expanded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPAND = ("random", "all", "none")
"""What becomes of ``{a|b}``: each image picks by its seed, each combination becomes a job, it stays as it is."""
MOST_FAULTS = 10_000
_TEXTS = ("prompt", "negative_prompt")


@dataclass
class Reading:
    """The jobs, whose prompts are final and which have seeds, and what could not be read as one, in order."""

    jobs: list[Job] = field(default_factory=list)
    faults: list[JobError] = field(default_factory=list)


def read_jobs(
    path: str | Path, defaults: Mapping[str, Any] | None = None, expand: str = "random", base_seed: int = 0
) -> Reading:
    """The jobs of a file, a folder, or standard input (``-``); see `sdaccel.jobs.formats`.

    defaults: of fields that a job does not have; an image or sidecar has all of them. base_seed: another one gives
    other seeds to the jobs without. Raises JobError for a file that cannot be opened as one, and for bad defaults.
    """
    reader = _Reader(defaults or {}, expand, base_seed)
    reader.read(records(path))
    if not reader.reading.jobs and not reader.reading.faults:
        reader.reading.faults.append(JobError("there is no job in it.", str(path)))
    return reader.reading


def jobs_from(
    values: Iterable[str | Mapping[str, Any] | Job],
    defaults: Mapping[str, Any] | None = None,
    expand: str = "random",
    base_seed: int = 0,
) -> Reading:
    """As `read_jobs`, of prompts, of mappings as a line of a job file has them, and of jobs.

    Jobs are drawn as they are: without defaults, their braces are text. Paths start from the current folder.
    """
    reader = _Reader(defaults or {}, expand, base_seed)
    reader.read(_from_value(value, f"job {number}") for number, value in enumerate(values, 1))
    return reader.reading


def read_defaults(path: str | Path) -> dict[str, Any]:
    """The fields in a TOML file, checked, for `read_jobs`. Its paths start from its folder. Raises JobError."""
    path = expanded(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        written = tomllib.loads(text)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise JobError("its lists or tables nest too deeply.", path.name) from None
    except ValueError as error:  # not UTF-8, or not TOML
        line = re.search(r"line (\d+)", str(error))
        raise JobError(f"this is no TOML: {error}.", f"{path.name}:{line.group(1)}" if line else path.name) from None
    found: dict[str, Any] = {}
    for name, value in written.items():
        values, wrong = checked({name: value}, path.parent)
        if wrong:
            raise JobError(wrong[0], f"{path.name}{_line_of(name, text)}")
        found[name] = values[name] if len(values[name]) > 1 else values[name][0]
    return found


def _line_of(name: str, text: str) -> str:
    key = rf"""[ \t]*(\[+[ \t]*)?["']?{re.escape(name)}["']?[ \t]*[].=]"""
    return next((f":{number}" for number, line in enumerate(text.split("\n"), 1) if re.match(key, line)), "")


def _from_value(value: Any, source: str) -> Found:
    if isinstance(value, Job):
        found, wrong = checked({name: getattr(value, name) for name in NAMES}, Path())
        wrong += [] if wrong else _faults_together(found)
        if wrong:
            return JobError(" ".join(wrong), source)
        return replace(value, **{name: values[0] for name, values in found.items()}, source=source)
    if isinstance(value, str):
        fault = prompt_fault(value.strip())
        return JobError(fault, source) if fault else Record({"prompt": value}, Path(), source)
    if isinstance(value, Mapping):
        return Record(value, Path(), source)
    return JobError(f"a job must be a prompt, a mapping or a Job, not a {type(value).__name__}.", source)


class _Full(Exception):
    """No more is read."""


class _Reader:
    def __init__(self, defaults: Mapping[str, Any], expand: str, base_seed: int):
        if expand not in EXPAND:
            raise JobError(f"expand {expand!r} is none of {', '.join(EXPAND)}.")
        self.defaults, wrong = checked(defaults, Path())
        if wrong:
            raise JobError(wrong[0], "defaults")
        self.expand, self.base_seed = expand, base_seed
        self.reading = Reading()
        self.images = 0
        self.full = ""
        """Why nothing more is read."""
        self.seen: Counter[bytes] = Counter()

    def read(self, found: Iterable[Found]) -> None:
        for each in found:
            try:
                self._add(each)
            except JobError as error:
                self._fault(error)
            except SettingError as error:
                self._fault(JobError(str(error), each.source))
            if self.full:
                self._fault(JobError(f"{self.full} What follows was not read.", each.source))
                return

    def _fault(self, error: JobError) -> None:
        self.reading.faults.append(error)
        if len(self.reading.faults) == MOST_FAULTS:
            self.full = f"there are {MOST_FAULTS:,} faults."

    def _add(self, found: Found) -> None:
        if isinstance(found, JobError):
            raise found
        if isinstance(found, Job):
            if self._has_room(found.n):
                self.reading.jobs.append(found if found.seed is not None else replace(found, seed=self._seed(found)))
            return
        lists, wrong = checked(found.values, found.base)
        lists |= {name: values for name, values in self.defaults.items() if name not in found.values}
        wrong = wrong or _faults_together(lists)
        forms = {name: self._forms(name, lists[name], wrong) for name in _TEXTS if name in lists}
        for text in wrong:
            self._fault(JobError(text, found.source))
        sizes = [forms.get(name, len(values)) for name, values in lists.items() if name != "n"]
        if wrong or not self._has_room(prod(sizes) * sum(lists.get("n", [1]))):
            return
        if self.expand == "all":
            lists |= {name: [form for text in lists[name] for form in braces.combinations(text)] for name in forms}
        for values in product(*lists.values()):
            job = Job(**dict(zip(lists, values, strict=True)), source=found.source)
            self.reading.jobs += self._picked(job, self._seed(job, found.base))

    def _forms(self, name: str, texts: Iterable[str], wrong: list[str]) -> int:
        """How many texts they become. What is wrong with their braces is added to ``wrong``."""
        found = 0
        for text in texts:
            try:
                found += braces.count(text) if self.expand == "all" else 1
                if self.expand == "random":
                    braces.has_groups(text)
            except JobError as error:
                wrong.append(f"{name}: {error}")
        return found

    def _has_room(self, images: int) -> bool:
        if images > MOST_IMAGES:
            raise SettingError(f"this asks for {images:,} images; a run has at most {MOST_IMAGES:,}.")
        if self.images + images > MOST_IMAGES:
            self.full = f"a run has at most {MOST_IMAGES:,} images, and this one would go beyond."
            return False
        self.images += images
        return True

    def _picked(self, job: Job, seed: int) -> list[Job]:
        if self.expand != "random":
            return [replace(job, seed=seed)]
        apart = any(map(braces.has_groups, (job.prompt, job.negative_prompt)))
        return [
            replace(
                job,
                prompt=braces.chosen(job.prompt, each),
                negative_prompt=braces.chosen(job.negative_prompt, each, "negative"),
                seed=each,
                n=1 if apart else job.n,
            )
            for each in range(seed, seed + (job.n if apart else 1))
        ]

    def _seed(self, job: Job, base: Path | None = None) -> int:
        """The job's own, else that of its content."""
        if job.seed is not None:
            return job.seed
        content = json.dumps(_content(job, (base or Path()).absolute()), sort_keys=True).encode()
        digest = hashlib.sha256(content).digest()
        self.seen[digest] += 1
        mixed = hashlib.sha256(b"%d:%d:" % (self.base_seed, self.seen[digest]) + content).digest()
        return int.from_bytes(mixed[:4], "big") % (MAX_SEED - job.n + 2)


def _content(job: Job, base: Path) -> dict[str, Any]:
    """What is drawn, its files named from the folder ``base``: both may move."""

    def near(path: Path) -> str:
        return (path.relative_to(base) if path.is_relative_to(base) else path).as_posix()

    found = job.to_json()
    found |= {name: near(path) for name, path in (("init_image", job.init_image), ("mask", job.mask)) if path}
    return found | {"loras": [[near(lora.path), lora.scale] for lora in job.loras]}


def _faults_together(lists: Mapping[str, list[Any]]) -> list[str]:
    wrong = []
    if "prompt" not in lists:
        wrong.append("there is no prompt.")
    if any(lists.get("mask", [])) and not all(lists.get("init_image", [None])):
        wrong.append("a mask needs an init_image.")
    first, n = max((seed or 0 for seed in lists.get("seed", [])), default=0), max(lists.get("n", [1]))
    if first + n - 1 > MAX_SEED:
        wrong.append(f"seed {first} is too high for {n} images: the last one's would be above {MAX_SEED}.")
    return wrong
