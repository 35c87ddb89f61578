"""A contact sheet: many images on one, small, each with its label."""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from sdaccel import metadata
from sdaccel.errors import SettingError

LABELS = ("name", "none", "seed", "prompt")
MOST_IMAGES = 10_000
MOST_PIXELS = 2**27
"""Of the sheet: 134 million, in memory 400 MB."""
MOST_PIXELS_EACH = 2**26
SIDE = 256
SIDES = (16, 2048)

_GAP = 8
_GROUND, _TEXT = (255, 255, 255), (40, 40, 40)
_FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass
class ContactSheet:
    """``image``: a PIL image in RGB. ``skipped``: what could not be read, and why."""

    image: Any
    shown: int
    columns: int
    skipped: dict[Path, str] = field(default_factory=dict)


def find_images(places: Sequence[Path], besides: Path | None = None) -> list[Path]:
    """The files named, and those of the folders named (not of folders in these), as people count: 2 before 10.

    besides: a file that is left out where a folder holds it. Raises SettingError where there is none, or too many.
    """
    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            found |= dict.fromkeys(path for path in _inside(place) if besides is None or not _same(path, besides))
        elif place.exists():
            found[place] = None
        else:
            raise SettingError(f"{place} is not there.")
    if not found:
        raise SettingError(f"there is no image in {', '.join(map(str, places))}: {', '.join(metadata.SUFFIXES)}.")
    if len(found) > MOST_IMAGES:
        raise SettingError(f"{len(found)} images are more than the {MOST_IMAGES} of a sheet.", hint="Name fewer.")
    return list(found)


def _inside(folder: Path) -> list[Path]:
    try:
        files = [path for path in folder.iterdir() if path.suffix.lower() in metadata.SUFFIXES and path.is_file()]
    except OSError as error:
        raise SettingError(f"{folder} cannot be read: {error.strerror or error}.") from None
    return sorted(files, key=_natural)


def _same(path: Path, other: Path) -> bool:
    return path.name == other.name and path.resolve() == other.resolve()


def _natural(path: Path) -> list[tuple[int, int, str]]:
    parts = re.findall(r"[0-9]+|[^0-9]+", path.name.casefold())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def contact_sheet(
    paths: Sequence[Path],
    *,
    columns: int | None = None,
    side: int = SIDE,
    label: str = "name",
    progress: Callable[[str, float], None] | None = None,
) -> ContactSheet:
    """Each image in a square of ``side`` pixels, its aspect ratio kept, row by row in the order of ``paths``.

    columns: default, so many that the sheet is about square. label: of `LABELS`; where a file does not say its seed or
    prompt, its name. What cannot be read is left out and told. Raises SettingError for a sheet that would be too large.
    """
    if label not in LABELS:
        raise SettingError(f"there is no label {label!r}: {', '.join(LABELS)}.")
    if not SIDES[0] <= side <= SIDES[1]:
        raise SettingError(f"side {side} is not between {SIDES[0]} and {SIDES[1]} pixels.")
    if columns is not None and not 1 <= columns <= MOST_IMAGES:
        raise SettingError(f"columns {columns} is not between 1 and {MOST_IMAGES}.")
    across = min(len(paths), columns or math.ceil(math.sqrt(len(paths))))
    down = math.ceil(len(paths) / across)
    font: Any = ImageFont.load_default(size=max(10, side / 16))
    line = sum(font.getmetrics())
    lines = {"none": 0, "prompt": 3}.get(label, 1)
    wide, high = side + _GAP, side + _GAP + line * lines
    if (across * wide + _GAP) * (down * high + _GAP) > MOST_PIXELS:
        raise SettingError(
            f"{len(paths)} images of {side} pixels a side are more than the {MOST_PIXELS >> 20} megapixels of a sheet.",
            hint="Choose a smaller --side, or fewer images.",
        )
    sheet = Image.new("RGB", (across * wide + _GAP, down * high + _GAP), _GROUND)
    pen = ImageDraw.Draw(sheet)
    found = ContactSheet(sheet, 0, across)
    for number, path in enumerate(paths):
        try:
            small = _thumbnail(path, side)
            text = _label(path, label)
        except SettingError as error:
            found.skipped[path] = str(error)
            continue
        left = _GAP + found.shown % across * wide
        top = _GAP + found.shown // across * high
        sheet.paste(small, (left + (side - small.width) // 2, top + (side - small.height) // 2))
        for row, part in enumerate(_wrapped(text, font, side, lines)):
            pen.text((left, top + side + row * line), part, _TEXT, font)
        found.shown += 1
        if progress is not None:
            progress(path.name, (number + 1) / len(paths))
    if not found.shown:
        raise SettingError(f"none of {len(paths)} images can be read: {next(iter(found.skipped.values()))}")
    used = math.ceil(found.shown / across) * high + _GAP
    found.image = sheet.crop((0, 0, min(across, found.shown) * wide + _GAP, used))
    return found


def _thumbnail(path: Path, side: int) -> Any:
    """At most ``side`` pixels a side, on white where it is transparent; never enlarged."""
    try:
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS_EACH:
                raise SettingError(f"{path} has {image.width}x{image.height} pixels, too many to be read.")
            image.draft("RGB", (side, side))
            seen_through = image.has_transparency_data
            small = ImageOps.exif_transpose(image).convert("RGBA" if seen_through else "RGB")
            small.thumbnail((side, side), Image.Resampling.LANCZOS)
            if seen_through:
                small = Image.alpha_composite(Image.new("RGBA", small.size, (*_GROUND, 255)), small).convert("RGB")
            return small
    except SettingError:
        raise
    except UnidentifiedImageError:
        raise SettingError(f"{path} is no PNG, JPEG or WebP image.") from None
    except Exception as error:  # noqa: BLE001 - damaged files make Pillow raise whatever it met
        raise SettingError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _label(path: Path, label: str) -> str:
    if label == "none":
        return ""
    said = metadata.read(path).parameters if label != "name" else None
    text = "" if said is None else said.prompt if label == "prompt" else said.facts.get("Seed", "")
    return _in_ascii(text or path.name)


def _in_ascii(text: str) -> str:
    """Letters without their accents: Pillow's own font has no others, and shows boxes for what is left."""
    return "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))


def _wrapped(text: str, font: Any, width: int, lines: int) -> list[str]:
    """``text`` in at most so many lines of ``width`` pixels, the last with an ellipsis where there is more."""
    rest = " ".join(text[: 200 * lines].split())
    found: list[str] = []
    while rest and len(found) < lines:
        end = bisect_right(range(1, len(rest) + 1), width, key=lambda count: font.getlength(rest[:count]))
        last = len(found) == lines - 1
        if end < len(rest):
            blank = rest.rfind(" ", 1, end + 1)
            end = max(1, end - 1 if last else blank if blank > 0 else end)
        found.append(rest[:end].strip() + ("…" if last and end < len(rest) else ""))
        rest = rest[end:].strip()
    return found
