"""The Python that builds for a program that cannot: an environment of its own, made at the first build.

A web UI has its own versions of transformers and the rest, mostly older ones, and none of them may change. What
building needs is installed aside, into <store>/python/<id>, and what is new enough there is borrowed: torch above all,
since an engine is for the torch that built it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sdaccel import doctor
from sdaccel.engine import disk
from sdaccel.engine.locks import hold
from sdaccel.errors import BackendError
from sdaccel.ui.borrowed import PTH
from sdaccel.ui.process import environment

Progress = Callable[[str, float], None]

NEEDED = ("torch", "diffusers", "transformers", "safetensors", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
READY = "ready.json"
_CHECK = """
import onnx, onnxscript, torch
from diffusers import AutoPipelineForText2Image, StableDiffusionPipeline, StableDiffusionXLPipeline
from transformers import CLIPTextModel, CLIPTokenizer
import sdaccel.builder, sdaccel.export.to_onnx
"""


def lacking() -> list[str]:
    """What building needs and this Python lacks or has too old, each with the version it has."""
    unfit = [package.name for package in _packages() if not _fits(package)]
    return [f"{name} {doctor.installed(name) or ''}".rstrip() for name in unfit]


def folder(store: Path) -> Path:
    """Where this Python's environment for builds is, or would be."""
    name = hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:12]
    return store / "python" / f"{sys.version_info[0]}.{sys.version_info[1]}-{name}"


def is_ready(store: Path) -> bool:
    """Whether nothing has to be installed before a build."""
    return not lacking() or _complete(folder(store))


def ready(store: Path, progress: Progress) -> str:
    """The Python to build with: this one where it can, else that of the environment, which is made first if need be.

    Takes minutes and a network then. Raises BackendError with what to do.
    """
    missing = lacking()
    if not missing:
        return sys.executable
    _need_torch()
    place = folder(store)
    with disk.clear_errors(store):
        place.parent.mkdir(parents=True, exist_ok=True)
    with hold(place.parent, place.name, waiting=lambda who: progress(who, 0.0)):
        if not _complete(place):
            progress(f"preparing to build, once: this Python lacks {', '.join(missing)}", 0.0)
            _make(place, progress)
    return str(_python(place))


def _make(place: Path, progress: Progress) -> None:
    shutil.rmtree(place, ignore_errors=True)
    pip_too = [] if importlib.util.find_spec("pip") is None else ["--without-pip"]  # it is borrowed like the rest
    _run([sys.executable, "-m", "venv", *pip_too, str(place)], "an environment for builds cannot be made")
    python = str(_python(place))
    where = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "its folders are unknown")
    folders = _site_folders()
    (Path(where.strip()) / PTH).write_text("".join(f"{path}\n" for path in folders), encoding="utf-8")
    constraints = place / "constraints.txt"
    constraints.write_text(f"torch=={doctor.installed('torch')}\n", encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]

    def tell(line: str) -> None:
        what, _, rest = line.strip().partition(" ")
        if what in ("Collecting", "Downloading", "Installing"):
            name = re.split(r"[-<>=!~; (]", rest)[0] if what != "Installing" else f"{rest.count(',') + 1} packages"
            progress(f"preparing to build, once: {what.lower()} {name[:40]}", 0.0)

    _run(
        [*pip, "-c", str(constraints), *map(_requirement, _packages())],
        "pip could not install what building needs",
        tell,
    )
    _run([python, "-m", "sdaccel.ui.borrowed", *folders], "what is borrowed cannot be told from the rest")
    _run([python, "-c", _CHECK], "what building needs is installed, but does not work")
    disk.overwrite(place / READY, json.dumps(_identity(), indent=1).encode())


def _run(command: Sequence[str], failure: str, tell: Callable[[str], None] | None = None) -> str:
    """What ``command`` prints; its lines also go to the log, and one by one to ``tell``. Raises BackendError."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment(),
        )
    except OSError as error:
        raise BackendError(f"{failure}: {error}.", hint=_OTHERWISE) from error
    assert process.stdout is not None
    lines = []
    try:
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                print(line, end="", file=sys.stderr, flush=True)
                if tell is not None:
                    tell(line)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code:
        said = [line.strip() for line in lines if line.strip() and not line.startswith(("WARNING", "[notice]"))]
        raise BackendError(f"{failure}: {' '.join(said[-2:])[-600:]}", hint=_OTHERWISE)
    return "".join(lines)


_OTHERWISE = "Retry with a network, or choose another Python that builds engines in Settings: one that has sdaccel."


def _need_torch() -> None:
    torch = next(package for package in _packages() if package.name == "torch")
    if not _fits(torch):
        raise BackendError(
            f"building needs torch {torch.least} or newer, and engines run with the torch that built them; here is "
            f"{doctor.installed('torch') or 'none'}.",
            hint="Bring a newer torch into this program first (A1111 and Forge: TORCH_COMMAND and --reinstall-torch).",
        )


def _packages() -> list[doctor.Package]:
    return [package for package in doctor.PACKAGES if package.name in NEEDED]


def _requirement(package: doctor.Package) -> str:
    """What is there already and new enough, else a version that the tests ran with."""
    return f"{package.name}>={package.least}" + ("" if _fits(package) else f",<={package.tested}")


def _fits(package: doctor.Package) -> bool:
    version = doctor.installed(package.name)
    return version is not None and doctor.numbers(version) >= doctor.numbers(package.least)


def _site_folders() -> list[str]:
    """Where this Python's packages are, first what it imports first."""
    known = {os.path.normcase(path) for path in (*site.getsitepackages(), site.getusersitepackages())}
    return [path for path in sys.path if path and os.path.normcase(path) in known and Path(path).is_dir()]


def _identity() -> dict[str, object]:
    packages = list(map(_requirement, _packages()))
    return {"python": sys.version, "prefix": sys.prefix, "torch": doctor.installed("torch"), "packages": packages}


def _complete(place: Path) -> bool:
    try:
        found = json.loads((place / READY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return found == _identity() and _python(place).exists()


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
