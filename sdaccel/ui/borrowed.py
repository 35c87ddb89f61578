"""Leaves of the packages that an environment borrows from another only those that it needs.

Run by the environment's own Python as ``python -m sdaccel.ui.borrowed FOLDER...``, FOLDERs being where the other's
packages are. Whatever else is there is hidden: diffusers and transformers look for many packages and use those they
find, and an old one fails them.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from sdaccel import doctor

PTH = "borrowed.pth"

ROOTS = (
    "sdaccel",
    *(package.name for package in doctor.PACKAGES if package.required),
    *("onnxruntime-gpu", "onnxruntime-directml"),
    *("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cudnn-frontend"),
)

FINDER = '''"""Written by sdaccel.ui.borrowed: the packages that this environment takes from another one."""

import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder

FOLDERS = {folders!r}
MODULES = frozenset({modules!r})
PACKAGES = frozenset({packages!r})


class Borrowed(metadata.DistributionFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, FOLDERS) if path is None and name in MODULES else None

    @classmethod
    def find_distributions(cls, context=metadata.DistributionFinder.Context()):
        there = metadata.DistributionFinder.Context(name=context.name, path=FOLDERS)
        for found in metadata.MetadataPathFinder.find_distributions(there):
            if re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower() in PACKAGES:
                yield found


sys.meta_path.append(Borrowed)
'''


def needed(roots: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Name → package, of ``roots`` and all that they require, as far as it is installed."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    waiting = [plain(name) for name in roots]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(plain(requirement.name))
    return found


def modules_of(package: metadata.Distribution) -> set[str]:
    """What can be imported of it, by its top-level names."""
    tops = {path.parts[0] for path in package.files or () if path.parts and path.parts[0] != ".."}
    if not tops:
        tops = set((package.read_text("top_level.txt") or package.metadata["Name"].replace("-", "_")).split())
    return {
        top.partition(".")[0] for top in tops if not re.search(r"\.(dist|egg)-info$|\.(pth|data)$|^__pycache__$", top)
    }


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(folders: list[str]) -> None:
    others = {Path(folder).resolve() for folder in folders}
    borrowed = {
        name: package
        for name, package in needed(ROOTS).items()
        if Path(str(package.locate_file(""))).resolve() in others
    }
    modules = sorted(set[str]().union(*map(modules_of, borrowed.values())))
    own = Path(sysconfig.get_path("purelib"))
    text = FINDER.format(folders=folders, modules=modules, packages=sorted(borrowed))
    (own / "_borrowed.py").write_text(text, encoding="utf-8")
    (own / PTH).write_text("import _borrowed\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
