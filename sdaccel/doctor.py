"""What this machine has, what is wrong with it, and the exact command that puts it right.

Imports nothing but the standard library by itself: it must answer just when something is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PYTHON = ((3, 10), (3, 13))
GIB = 1 << 30


@dataclass(frozen=True)
class Package:
    """A dependency: the module to import, the oldest version that works, the newest that the tests ran with."""

    name: str
    module: str
    least: str
    tested: str
    required: bool = True


PACKAGES = (
    Package("torch", "torch", "2.10", "2.13.0"),
    Package("diffusers", "diffusers", "0.36", "0.42.1"),
    Package("transformers", "transformers", "5.0", "5.24.0"),
    Package("safetensors", "safetensors", "0.4.5", "0.8.0"),
    Package("onnx", "onnx", "1.19", "1.23.2"),
    Package("onnx-ir", "onnx_ir", "1.0", "1.1.0"),
    Package("onnxscript", "onnxscript", "0.7", "0.7.2"),
    Package("onnxruntime", "onnxruntime", "1.22", "1.32.0"),
    Package("numpy", "numpy", "1.26", "2.4.6"),
    Package("pillow", "PIL", "10.4", "12.2.0"),
    Package("filelock", "filelock", "3.16", "4.3.1"),
    Package("platformdirs", "platformdirs", "4.2", "4.14.9"),
    Package("psutil", "psutil", "5.9", "7.2.2"),
    Package("rich", "rich", "13.7", "15.0.0"),
    Package("typer", "typer", "0.15", "0.29.2"),
    Package("gradio", "gradio", "6", "6.31.0", required=False),
    Package("peft", "peft", "0.17", "0.21.2", required=False),
)


@dataclass(frozen=True)
class Problem:
    what: str
    fix: str
    """The command (or the setting) that puts it right."""
    blocks: bool
    """Whether nothing works before it is put right."""


@dataclass
class Diagnosis:
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section → name → value, in the order to show."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(problem.blocks for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **self.facts, "problems": [vars(problem) for problem in self.problems]}


def diagnose(store: Path | str | None = None) -> Diagnosis:
    """Looks at everything; a part that cannot be looked at is a problem of its own, never an exception."""
    found = Diagnosis()
    for name, look in _SECTIONS.items():
        facts: dict[str, Any] = {}
        found.facts[name] = facts
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some packages print when they cannot be imported
                look(facts, found.problems, store)
        except Exception as error:  # noqa: BLE001 - the doctor must go on
            found.problems.append(Problem(f"{name} could not be looked at: {_brief(error)}", _REINSTALL, False))
    return found


_REINSTALL = "python -m pip install --force-reinstall sdaccel"


def _system(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    try:
        facts["sdaccel"] = metadata.version("sdaccel")
    except metadata.PackageNotFoundError:
        facts["sdaccel"] = getattr(importlib.import_module("sdaccel"), "__version__", "unknown") + " (not installed)"
    facts["python"] = f"{platform.python_version()} ({sys.executable})"
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["cpu"] = f"{cpu_name()}, {os.cpu_count()} cores"
    if not PYTHON[0] <= sys.version_info[:2]:
        newest = ".".join(map(str, PYTHON[1]))
        problems.append(Problem(f"Python {platform.python_version()} is too old.", f"Install Python {newest}", True))
    memory = _memory()
    if memory is not None:
        total, free = memory
        facts["memory"] = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
        if total < 4 * GIB:
            problems.append(
                Problem(f"{total / GIB:.1f} GiB of memory hold SD 1.5 hardly and SDXL not at all.", "", False)
            )


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> tuple[int, int] | None:
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return None
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _packages(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    for package in PACKAGES:
        wanted = f"{package.least} or newer, tested up to {package.tested}"
        command = f'python -m pip install "{package.name}>={package.least}"'
        try:
            module = importlib.import_module(package.module)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == package.module
            facts[package.name] = "missing" if missing else f"cannot be imported: {_brief(error)}"
            if package.required:
                problems.append(Problem(f"{package.name} is {facts[package.name]}.", command, True))
            continue
        except Exception as error:  # noqa: BLE001 - a broken native library may raise anything
            facts[package.name] = f"cannot be imported: {_brief(error)}"
            again = f'python -m pip install --force-reinstall "{package.name}>={package.least}"'
            problems.append(Problem(f"{package.name} {facts[package.name]}", again, package.required))
            continue
        version = _version(package, module)
        facts[package.name] = f"{version} ({wanted})"
        if numbers(version) < numbers(package.least):
            what = f"{package.name} {version} is older than {package.least}."
            problems.append(Problem(what, command, package.required))


def _version(package: Package, module: Any) -> str:
    return installed(package.name) or str(getattr(module, "__version__", "0"))


def installed(name: str) -> str | None:
    """The version of a package that is installed under ``name``, or under that of its build for another device."""
    for form in (name, f"{name}-gpu", f"{name}-directml"):
        try:
            return metadata.version(form)
        except metadata.PackageNotFoundError:
            continue
    return None


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: ``2.13.0+cpu`` → (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version.lower())[0]))


def _gpu(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    driver = _nvidia_smi()
    facts["nvidia driver"] = driver or "none found (nvidia-smi does not answer)"
    try:
        torch = importlib.import_module("torch")
        seen = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["torch"] = ", ".join(seen) or f"{torch.__version__}: no GPU, the CPU is used"
    except ImportError:
        return
    if driver and not seen:
        what = f"there is an NVIDIA GPU, but torch {torch.__version__} does not see it."
        fix = "python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        problems.append(Problem(what, fix, False))


def _nvidia_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(answer.stdout.strip().splitlines()) or None


def _backends(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError:
        return  # said under packages
    facts["onnxruntime providers"] = ", ".join(ort.get_available_providers())
    backends = importlib.import_module("sdaccel.backends.base").backends()
    has_gpu = importlib.import_module("torch").cuda.is_available()
    for name, make in backends.items():
        reason = make().unavailable()
        facts[name] = "runs here" if reason is None else reason
        if name == "cuda" and has_gpu and reason is not None:
            command = re.search(r"pip install .*\"", reason)
            fix = f"python -m {command[0]}" if command else ""
            problems.append(Problem(f"the GPU is not used: {reason}", fix, False))


def _store(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    module = importlib.import_module("sdaccel.engine.store")
    opened = module.Store(store)
    root = Path(opened.root)
    facts["folder"] = str(root)
    existing = next(path for path in (root, *root.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    facts["disk"] = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < 5 * GIB:
        what = f"{usage.free / GIB:.1f} GiB are free for the store: SD 1.5 needs about 5, SDXL about 15."
        problems.append(
            Problem(what, "sdaccel rm --unused --yes, or set SDACCEL_STORE to a folder on another disk", False)
        )
    writable = _writable(existing)
    facts["writable"] = writable is None
    if writable is not None:
        where = "set SDACCEL_STORE (or --store) to a folder you can write"
        problems.append(Problem(f"the store {root} cannot be written: {writable}.", where, True))
    whole = {kind: opened.list(kind) for kind in opened.KINDS}
    for kind, entries in whole.items():
        facts[kind] = f"{len(entries)}, {sum(entry.nbytes for entry in entries) / 1e6:.1f} MB"
    lacking = importlib.import_module("sdaccel.listing").lacking
    broken = [f"{item.kind} {item.key[:12]}: {item.reason}" for item in opened.broken()]
    broken += [f"engines {e.key[:12]}: {reason}" for e in whole["engines"] if (reason := lacking(opened, e))]
    facts["broken"] = len(broken)
    if broken:
        problems.append(Problem(f"{len(broken)} entries are broken ({broken[0]})", "sdaccel rm --broken --yes", False))
    abandoned = len(list((root / "tmp").iterdir())) if (root / "tmp").is_dir() else 0
    facts["unfinished"] = abandoned
    if abandoned:
        what = f"{abandoned} unfinished builds lie in the store (or are under way)."
        problems.append(Problem(what, "sdaccel rm --broken --yes", False))


def _writable(folder: Path) -> str | None:
    """Why nothing can be written in ``folder``; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error.strerror or error)


def _settings(facts: dict[str, Any], problems: list[Problem], store: Path | str | None) -> None:
    settings = importlib.import_module("sdaccel.settings")
    for setting in settings.TABLE:
        from_environment = bool(os.environ.get(setting.name, "").strip())
        try:
            value = setting.value()
            facts[setting.name] = f"{value}{' (from the environment)' if from_environment else ''}"
        except ValueError as error:
            facts[setting.name] = str(error)
            remove = f"set {setting.name}=" if os.name == "nt" else f"unset {setting.name}"
            problems.append(Problem(str(error), remove, True))
    known = {setting.name for setting in settings.TABLE}
    for name in sorted(os.environ):
        if name.startswith("SDACCEL_") and name not in known:
            remove = f"set {name}=" if os.name == "nt" else f"unset {name}"
            problems.append(Problem(f"{name} is set, but there is no such setting.", remove, False))


_SECTIONS: dict[str, Callable[[dict[str, Any], list[Problem], Path | str | None], None]] = {
    "system": _system,
    "packages": _packages,
    "gpu": _gpu,
    "backends": _backends,
    "store": _store,
    "settings": _settings,
}


def _brief(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text[:200]}"


def lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as text."""
    found = []
    for section, facts in diagnosis.facts.items():
        found.append(section)
        found += [f"  {name}: {value}" for name, value in facts.items()]
    found.append("problems" if diagnosis.problems else "no problems")
    for problem in diagnosis.problems:
        found.append(f"  {'[blocks] ' if problem.blocks else ''}{problem.what}")
        found += [f"    fix: {problem.fix}"] if problem.fix else []
    return found


def without_cli(arguments: Sequence[str], missing: ModuleNotFoundError) -> int:
    """What ``python -m sdaccel`` does when the command line itself lacks a package. Returns the exit code."""
    if list(arguments[:1]) != ["doctor"]:
        command = "python -m pip install --force-reinstall sdaccel"
        print(
            f"sdaccel: the package {missing.name} is missing. Run: python -m sdaccel doctor, or {command}",
            file=sys.stderr,
        )
        return 1
    store = _option(arguments, "--store")
    diagnosis = diagnose(store)
    print(json.dumps(diagnosis.to_json(), indent=2) if "--json" in arguments else "\n".join(lines(diagnosis)))
    return 0 if diagnosis.ok else 1


def _option(arguments: Sequence[str], name: str) -> str | None:
    for at, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and at + 1 < len(arguments):
            return arguments[at + 1]
    return None
