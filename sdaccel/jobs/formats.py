"""Job files: each format gives the records that are written in it, and an error for what is no record.

==================  ====================================================================================================
.jsonl, .ndjson     an object a line; blank lines and lines that begin with ``#`` are passed over
.json               a list of such objects, or one, or the sidecar of an image (`sdaccel.jobs.sidecar`)
.csv, .tsv          a header of field names, then a record a row. Commas, semicolons or tabs, as the header has them. An
                    empty cell is the default, an empty row is passed over. Several LoRAs in a cell: ``a:0.8; b``. With
                    semicolons or tabs a decimal comma is read, too
.txt                a prompt a line; blank lines and lines that begin with ``#`` are passed over
.png .jpg .webp     an image of ours gives its job: from the sidecar beside it, else from its own details
a folder            its files in natural order, without those of its sub-folders and those whose name begins with a dot:
                    a .txt is one prompt, whole; sidecars and images give their jobs. Of files of one name (``a.json``,
                    ``a.png``, ``a.txt``) the first of these that has one is taken. Others are passed over
``-``               standard input, as .jsonl
==================  ====================================================================================================
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sdaccel import metadata
from sdaccel.errors import SettingError
from sdaccel.jobs.job import JobError
from sdaccel.jobs.json_files import LARGEST, parse_json, read_json, read_json_lines, whole_text
from sdaccel.jobs.lines import LONGEST, Lines
from sdaccel.jobs.prompts import read_one_prompt, read_prompts
from sdaccel.jobs.records import Found
from sdaccel.jobs.sidecar import from_sidecar, is_sidecar
from sdaccel.jobs.spreadsheets import read_csv
from sdaccel.resources import expanded

_READERS: dict[str, Callable[[Lines, Path, str], Iterator[Found]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_prompts,
}


def records(path: str | Path) -> Iterator[Found]:
    """What a job file or folder holds, as it is read. Raises JobError for what cannot be opened as one."""
    if str(path) == "-":
        lines = Lines(sys.stdin.buffer)  # type: ignore[arg-type]
        try:
            yield from read_json_lines(lines, Path(), "stdin")
        finally:
            lines.close()
        return
    path = expanded(path)
    try:
        if path.is_dir():
            yield from _folder(path)
        elif not path.exists():
            raise JobError(f"{path} is not there.")
        elif path.suffix.lower() in metadata.SUFFIXES:
            yield _image(path, path.name) or _no_job(path, path.name)
        else:
            reader = _READERS.get(path.suffix.lower())
            if reader is None or not path.is_file():
                raise JobError(
                    f"{path} is no job file.",
                    hint=f"Such are {', '.join(_READERS)}, images, folders, and - for JSON lines from standard input.",
                )
            with _opened(path) as lines:
                yield from reader(lines, path.parent, path.name)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror or error}.") from None


@contextmanager
def _opened(path: Path) -> Iterator[Lines]:
    with path.open("rb") as file:
        lines = Lines(file, LARGEST if path.suffix.lower() == ".json" else LONGEST)
        try:
            yield lines
        finally:
            lines.close()


def _image(path: Path, source: str) -> Found | None:
    """None: it says nothing of a job of ours."""
    beside = path.with_suffix(".json")
    try:
        if beside.is_file():
            return _sidecar(beside, source)
        details = metadata.read(path).details
        return from_sidecar(details, path.parent, source) if details is not None and is_sidecar(details) else None
    except JobError as error:
        return error
    except SettingError as error:
        return JobError(str(error), source)


def _no_job(path: Path, source: str) -> JobError:
    return JobError(f"it says of no job of ours, and there is no {path.stem}.json beside it.", source)


def _sidecar(path: Path, source: str) -> Found:
    try:
        with _opened(path) as lines:
            text, faults = whole_text(lines)
        if faults:
            raise ValueError(next(iter(faults.values())).removesuffix("."))
        value = parse_json(text)
        if isinstance(value, dict) and is_sidecar(value):
            return from_sidecar(value, path.parent, source)
    except ValueError as error:
        return error if isinstance(error, JobError) else JobError(f"{path.name}: {error}.", source)
    return JobError(f"{path.name} is no sidecar of an image.", source, hint="Job files are given by their own name.")


def _folder(folder: Path) -> Iterator[Found]:
    by_stem: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir(), key=_natural):
        if not path.name.startswith(".") and path.is_file():
            by_stem.setdefault(path.stem, {}).setdefault(path.suffix.lower(), path)
    empty = True
    for files in by_stem.values():
        for found in _one_of(files, folder.name):
            empty = False
            yield found
    if empty:
        yield JobError("there is neither a prompt (.txt) nor an image or sidecar of ours in it.", str(folder))


def _one_of(files: dict[str, Path], folder: str) -> Iterator[Found]:
    def source(path: Path) -> str:
        return f"{folder}/{path.name}"

    strange = [files[suffix] for suffix in (".jsonl", ".ndjson", ".csv", ".tsv") if suffix in files]
    for path in strange:
        yield JobError("a job file in a folder is not read.", source(path), hint="Give it by its own name.")
    if ".json" in files:
        yield _sidecar(files[".json"], source(files[".json"]))
        return
    image = next((files[suffix] for suffix in metadata.SUFFIXES if suffix in files), None)
    found = _image(image, source(image)) if image is not None else None
    if found is not None:
        yield found
    elif ".txt" in files:
        with _opened(files[".txt"]) as lines:
            yield read_one_prompt(lines, files[".txt"].parent, source(files[".txt"]))
    elif image is not None:
        yield _no_job(image, source(image))


def _natural(path: Path) -> tuple[list[int | str], str]:
    parts = re.split("([0-9]+)", path.name)  # every second one is digits
    return [int(part) if at % 2 else part.casefold() for at, part in enumerate(parts)], path.name
