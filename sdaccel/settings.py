"""Every SDACCEL_* environment variable, in one table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from sdaccel.errors import SettingError


def _whole_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _counting_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e6:
        raise ValueError
    return number


def _yes_or_no(text: str) -> int:
    number = int(text)
    if number not in (0, 1):
        raise ValueError
    return number


@dataclass(frozen=True)
class Setting:
    name: str
    default: Any
    parse: Callable[[str], Any]
    allowed: str
    meaning: str

    def value(self) -> Any:
        """The value in force: the environment's, else the default. Raises SettingError for one we cannot use."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise SettingError(f"{self.name}={text!r} is not {self.allowed}.") from None


STORE = Setting(
    "SDACCEL_STORE",
    Path(platformdirs.user_data_dir("sdaccel", appauthor=False)) / "store",
    Path,
    "a folder",
    "where engines, graphs and weights are kept",
)
MODEL = Setting("SDACCEL_MODEL", None, str, "a path", "the model used when a command names none")
BACKEND = Setting("SDACCEL_BACKEND", "auto", str, "a backend's name", "the backend used when none is named")
THREADS = Setting("SDACCEL_THREADS", 0, _whole_number, "a whole number", "CPU threads an engine uses; 0: one a core")
GRAPHS = Setting("SDACCEL_GRAPHS", 8, _counting_number, "a number from 1", "CUDA graphs (one a shape) an engine keeps")
MODEL_CACHE = Setting(
    "SDACCEL_MODEL_CACHE",
    None,
    _amount,
    "a number of GiB from 0",
    "GiB of RAM for models that were used last and may be used again; 0: none is kept",
)
SPIN_LIMIT = Setting(
    "SDACCEL_SPIN_LIMIT",
    0,
    _whole_number,
    "a whole number",
    "milliseconds after which a kernel that waits gives up with an error; 0: never",
)
ALLOW_REMOTE = Setting(
    "SDACCEL_ALLOW_REMOTE",
    0,
    _yes_or_no,
    "0 or 1",
    "1: whoever reaches a page from elsewhere may build, delete and import too",
)
DEBUG = Setting("SDACCEL_DEBUG", 0, _whole_number, "a whole number", "1 stages, 2 fusions and tactics, 3 launches")

TABLE = (STORE, MODEL, BACKEND, THREADS, GRAPHS, MODEL_CACHE, SPIN_LIMIT, ALLOW_REMOTE, DEBUG)
