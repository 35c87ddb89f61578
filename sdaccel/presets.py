"""Build presets: named sets of profiles, in small TOML files.

    name = "sdxl"
    description = "SDXL at 1024x1024"
    family = "sdxl"                # sd1, sd2, sdxl, sdxl-refiner, or "any"; a list of them too

    [[profile]]                    # one or more; the values are what --res, --batch and --tokens take
    width = "1024"
    height = "768-1024-1216"       # min-opt-max
    batch = "1-4"                  # may be left out, as may tokens
    tokens = "77-231"

Any other key is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sdaccel.errors import ProfileError, SettingError
from sdaccel.profile import ImageProfile, parse_profiles
from sdaccel.resources import expanded, resource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAMILIES = ("sd1", "sd2", "sdxl", "sdxl-refiner")
_KEYS = ("name", "description", "family", "profile")
_PROFILE_KEYS = ("width", "height", "batch", "tokens")


@dataclass(frozen=True)
class Preset:
    """``profiles`` holds the texts as written; `image_profiles` reads them for a model."""

    name: str
    description: str
    families: tuple[str, ...]
    """Empty: any."""
    profiles: tuple[Mapping[str, str], ...]
    path: Path

    def image_profiles(self, family: str, native: int) -> tuple[ImageProfile, ...]:
        """The profiles for a model of ``family`` whose native side is ``native`` pixels. Raises SettingError."""
        if self.families and family not in self.families:
            raise SettingError(
                f"the preset {self.name} is for {' and '.join(self.families)}; the model is {family}.",
                hint=f"Presets for it: {', '.join(p.name for p in presets() if p.fits(family))}.",
            )
        found: dict[ImageProfile, None] = {}
        for number, texts in enumerate(self.profiles):
            batch, tokens = ([texts[key]] if key in texts else [] for key in ("batch", "tokens"))
            size = f"{texts['width']}x{texts['height']}"
            try:
                found.update(dict.fromkeys(parse_profiles([size], batch, tokens, native=native)))
            except ProfileError as error:
                raise SettingError(f"{self.path}: profile {number + 1}: {error}") from None
        return tuple(found)

    def fits(self, family: str) -> bool:
        return not self.families or family in self.families


def presets() -> list[Preset]:
    """The presets that the package ships, by name."""
    return [read_preset(path) for path in sorted(resource("presets").glob("*.toml"))]


def find_preset(name: str | Path) -> Preset:
    """The shipped preset ``name``, or the one in a .toml file. Raises SettingError."""
    if str(name).endswith(".toml"):
        return read_preset(expanded(name))
    shipped = {path.stem: path for path in resource("presets").glob("*.toml")}
    if str(name) not in shipped:
        raise SettingError(
            f"there is no preset {str(name)!r}: {', '.join(sorted(shipped))}, or a file that ends in .toml."
        )
    return read_preset(shipped[str(name)])


def read_preset(path: Path) -> Preset:
    """The preset in a file. Raises SettingError naming the line or field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"the preset {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # not UTF-8, or not TOML: the message has the line
        raise SettingError(f"{path}: {error}.") from None
    reader = _Reader(path, text)
    reader.known(document, _KEYS, None)
    name, description = (reader.text(document, key, None) for key in ("name", "description"))
    families = document.get("family", "any")
    families = [families] if isinstance(families, str) else families
    if not isinstance(families, list) or not all(family in (*FAMILIES, "any") for family in families) or not families:
        reader.fail("family", None, f"must be any, {', '.join(FAMILIES)}, or a list of these")
    tables = document.get("profile")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        reader.fail("profile", None, "must be one or more [[profile]] tables")
    for number, table in enumerate(tables):
        reader.known(table, _PROFILE_KEYS, number)
        for key in ("width", "height"):
            reader.text(table, key, number)
        for key in table:
            reader.text(table, key, number)
            if "x" in table[key].lower():
                reader.fail(key, number, f"must be one range such as 512-1024, not {table[key]!r}")
    chosen = () if "any" in families else tuple(families)
    return Preset(name, description, chosen, tuple(tables), path)


class _Reader:
    def __init__(self, path: Path, text: str):
        self.path = path
        self.lines = text.splitlines()

    def fail(self, key: str, profile: int | None, reason: str) -> NoReturn:
        where = f"{self.path}"
        line = self._line(key, profile)
        if line:
            where += f", line {line}"
        field = key if profile is None else f"profile {profile + 1}, {key}"
        raise SettingError(f"{where}: {field} {reason}.")

    def known(self, table: Mapping[str, Any], keys: tuple[str, ...], profile: int | None) -> None:
        for key in table:
            if key not in keys:
                self.fail(key, profile, f"is not known here: {', '.join(keys)}")

    def text(self, table: Mapping[str, Any], key: str, profile: int | None) -> str:
        if key not in table:
            self.fail(key, profile, "is missing")
        if not isinstance(table[key], str) or not table[key].strip():
            self.fail(key, profile, f'must be text in quotes, such as "{_EXAMPLES.get(key, "...")}"')
        return table[key]

    def _line(self, key: str, profile: int | None) -> int | None:
        """The line that sets ``key``, counted from 1, at the top or in the ``profile``-th table."""
        at = -1
        for number, line in enumerate(self.lines, 1):
            if re.match(r"\s*\[\[\s*profile\s*\]\]", line):
                at += 1
                if key == "profile" and profile is None:
                    return number
            elif re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=|\s*\[+\s*{re.escape(key)}\s*\]""", line) and at == (
                -1 if profile is None else profile
            ):
                return number
        return None


_EXAMPLES = {"width": "1024", "height": "512-1024", "batch": "1-4", "tokens": "77-231"}
