"""Paths: those that users write, and the folders that ship beside the code (presets/ and kernels/)."""

from __future__ import annotations

import os
from pathlib import Path

from sdaccel.errors import SdaccelError


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with ~ filled in; as it is where there is no such user, for a name may begin with ~ as well."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises RuntimeError there


def resource(name: str) -> Path:
    """The folder ``name`` (``presets`` or ``kernels``): inside an installed wheel, else beside an editable checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise SdaccelError(
        f"the folder {name}/ is missing from this installation.",
        hint="Run: python -m pip install --force-reinstall sdaccel",
    )
