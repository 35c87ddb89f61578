"""Job files from a spreadsheet (.csv, .tsv): a header of field names, then a record a row, quoted as in RFC 4180."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdaccel.errors import SettingError
from sdaccel.jobs import fields
from sdaccel.jobs.job import JobError
from sdaccel.jobs.lines import LONGEST, Lines
from sdaccel.jobs.records import Found, Record


class _TooLong(Exception):
    pass


class _Rows:
    """The lines of `csv.reader`, which takes several for one record. ``first`` and ``fault`` are the record's."""

    def __init__(self, lines: Lines):
        self._lines = lines
        self.begin()

    def begin(self) -> None:
        self.first = self._lines.number + 1
        self.fault: str | None = None
        self._size = 0

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._size += len(line) + 1
        if self._lines.fault and self.fault is None:
            self.fault = f"line {self._lines.number}: {self._lines.fault}"
        if self._size > LONGEST or (self._lines.fault and not line):
            raise _TooLong
        return f"{line}\n"


def read_csv(lines: Lines, base: Path, name: str) -> Iterator[Found]:
    rows = _Rows(lines)
    told, head = None, ""
    with suppress(_TooLong):
        head = next(rows, "")
        told = re.fullmatch(r"sep=([,;\t|])\n", head)  # Excel's own word for it
        head = next(rows, "") if told else head
    delimiter = told.group(1) if told else max(",;\t", key=head.count)
    source = f"{name}:{max(1, lines.number)}"
    names = [cell.strip() for cell in head.rstrip("\n").split(delimiter)]
    names = [cell[1:-1].strip() if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell for cell in names]
    wrong = [rows.fault] if rows.fault else _header_faults(names)
    if wrong:
        yield from (JobError(fault, source) for fault in wrong)
        return
    reader = csv.reader(rows, delimiter=delimiter, strict=True)
    while True:
        rows.begin()
        source = f"{name}:{rows.first}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong) as error:
            fault = rows.fault or (str(error) or f"the record is longer than {LONGEST:,} characters")
            lost = f" (lines {rows.first} to {lines.number})" if lines.number > rows.first else ""
            yield JobError(
                f"this is no record{lost}: {fault.removesuffix('.')}.", source, hint="Is a quote not closed?"
            )
            continue
        if rows.fault:
            yield JobError(rows.fault, source)
        elif any(cell.strip() for cell in cells):
            yield from _row(names, cells, delimiter, base, source)


def _header_faults(names: list[str]) -> list[str]:
    wrong = []
    for name in filter(None, names):
        try:
            fields.known(name)
        except SettingError as error:
            wrong.append(f"the first line must be the names of the fields: {error}")
    wrong += [f"the field {name} is there twice." for name in dict.fromkeys(names) if name and names.count(name) > 1]
    return wrong if any(names) else ["the first line must be the names of the fields, such as prompt,seed,steps."]


def _row(names: list[str], cells: list[str], delimiter: str, base: Path, source: str) -> Iterator[Found]:
    nameless = [cell for cell, name in zip(cells, [*names, *[""] * len(cells)], strict=False) if not name]
    if len(cells) < len(names) or any(cell.strip() for cell in nameless):
        yield JobError(
            f"there are {len(cells)} cells for {len(names)} fields.",
            source,
            hint=f'A text with {_SIGNS.get(delimiter, repr(delimiter))} in it must be in quotes: "...".',
        )
        return
    values: dict[str, Any] = {}
    faults: list[Found] = []
    for name, cell in zip(names, cells, strict=False):
        if name and cell.strip():
            try:
                values[name] = fields.from_cell(name, cell.strip(), comma=delimiter != ",")
            except SettingError as error:
                faults.append(JobError(str(error), source))
    yield from faults or [Record(values, base, source)]


_SIGNS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
