"""Job files that are prompts and nothing else: .txt, a prompt a line, or, in a folder, a prompt a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sdaccel.jobs import fields
from sdaccel.jobs.job import JobError
from sdaccel.jobs.lines import LONGEST, Lines
from sdaccel.jobs.records import Found, Record

_RECORD = re.compile(r"""\[?\s*\{\s*("|'\w+'\s*:)|"\w+"\s*:""")


def read_prompts(lines: Lines, base: Path, name: str) -> Iterator[Found]:
    for line in lines:
        source, prompt = f"{name}:{lines.number}", line.strip(" \t")
        if lines.fault:
            yield JobError(lines.fault, source)
        elif not prompt or prompt.startswith("#"):
            continue
        elif _is_header(prompt):
            yield JobError(
                "this looks like the header of a spreadsheet. What follows was not read.",
                source,
                hint="Name the file .csv.",
            )
            return
        else:
            fault = prompt_fault(prompt)
            yield JobError(fault, source) if fault else Record({"prompt": prompt}, base, source)


def read_one_prompt(lines: Lines, base: Path, source: str) -> Found:
    """The whole text, its line breaks among it."""
    parts: list[str] = []
    size = 0
    for line in lines:
        parts.append(line)
        size += len(line) + 1
        if size > LONGEST and not lines.fault:
            return JobError(f"a prompt of more than {LONGEST:,} characters is not read.", source)
        if lines.fault:
            return JobError(lines.fault, f"{source}:{lines.number}")
    prompt = "\n".join(parts).strip()
    fault = prompt_fault(prompt) if prompt else "there is no prompt in it."
    return JobError(fault, source) if fault else Record({"prompt": prompt}, base, source)


def prompt_fault(text: str) -> str | None:
    """Why ``text`` is no prompt but something else that ended up in its place."""
    if _RECORD.match(text):
        return f"this looks like a record in JSON, not like a prompt: {fields.shown(text)}. Name the file .jsonl."
    if re.match(r"--[a-z]", text):
        return f"this looks like options of a command, not like a prompt: {fields.shown(text)}."
    return None


def _is_header(text: str) -> bool:
    cells = {cell.strip(' "') for cell in re.split("[,;\t]", text)}
    return "prompt" in cells and cells <= set(fields.NAMES)
