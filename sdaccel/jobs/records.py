"""What readers of job files give: the records that are written there, unchecked, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdaccel.jobs.job import Job, JobError


@dataclass(frozen=True)
class Record:
    """What is written in one place of a file, as JSON has it."""

    values: Mapping[str, Any]
    base: Path
    """The folder that its paths start from."""
    source: str


Found = Record | Job | JobError
"""A `Job` where a file says all of it."""
