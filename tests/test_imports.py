"""Imports run one way, and cost no more than they must."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sdaccel

PACKAGE = Path(sdaccel.__file__).parent
RANKS = [
    {"errors", "settings", "profile", "resources", "progress", "upload", "float32", "__init__"},
    {"models", "engine", "presets"},
    {"export", "graph", "backends", "eager"},
    {"builder", "runtime", "adapters"},
    {"integrations", "quality", "listing", "model_choice", "model_cache", "lora", "metadata"},
    {"bench", "draw", "jobs", "page", "verify", "quickstart", "doctor"},
    {"ui", "console", "cli", "__main__"},
]


def modules() -> list[Path]:
    program = PACKAGE / "models" / "demo" / "train.py"  # run by hand, imported by nothing
    return sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts and path != program)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank(name: str) -> int:
    found = [number for number, names in enumerate(RANKS) if name in names]
    assert found, f"sdaccel.{name} has no place in the order of imports (tests/test_imports.py)"
    return found[0]


def imported(path: Path) -> set[str]:
    """Full names of what a module of ours imports, inside functions too, but not for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_one_of_a_higher_rank(path):
    mine = rank(room(path))
    for name in imported(path):
        if name.startswith("sdaccel."):
            target = name.split(".")[1]
            if (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file():
                assert rank(target) <= mine, f"{path} imports {name}"


def test_graph_and_export_know_no_backend():
    for path in modules():
        if room(path) in ("graph", "export"):
            assert not any(name.startswith("sdaccel.backends") for name in imported(path)), path


def test_the_running_half_imports_no_host_and_no_exporter():
    for path in modules():
        if room(path) in ("backends", "runtime", "engine"):
            heavy = {name.split(".")[0] for name in imported(path)}
            assert not heavy & {"diffusers", "transformers", "onnxscript", "peft", "gradio"}, path


def loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh process has loaded after ``code``."""
    program = f"{code}\nimport sys\nprint('LOADED', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.rpartition("LOADED")[2].split())


HEAVY = {"torch", "diffusers", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy", "PIL"}


def test_importing_sdaccel_costs_nothing():
    assert not loaded_by("import sdaccel, sdaccel.cli, sdaccel.presets, sdaccel.engine.store, sdaccel.doctor") & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"], ["list"], ["list", "--json"]])
def test_light_commands_load_nothing_heavy(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("SDACCEL_STORE", str(tmp_path / "empty"))
    assert not loaded_by(f"from sdaccel.cli import run; assert run({arguments!r}) == 0") & HEAVY


def test_a_list_with_engines_needs_no_host_library(tiny_store):
    code = f"from sdaccel.cli import run; assert run(['list', '--store', {str(tiny_store.store)!r}]) == 0"
    assert not loaded_by(code) & {"diffusers", "transformers", "onnxscript"}


def test_engines_run_without_what_builds_them(tiny_store):
    """As in a host program, whose environment has its own versions of these or none."""
    code = f"""
from pathlib import Path
from sdaccel.backends.base import pick_backend
from sdaccel.backends.cuda import backend, executor, load_weights
from sdaccel.builder import engines_here
from sdaccel.engine.store import Store
from sdaccel.runtime import ExecutionContext, RunReport
import torch
store = Store(Path({str(tiny_store.store)!r}))
engines = store.find_engines(component="text_encoder")
report = RunReport()
context = ExecutionContext("text_encoder", store, pick_backend("onnxruntime"), engines)
context.run({{"input_ids": torch.zeros(1, 77, dtype=torch.int64)}}, report)
assert report.components["text_encoder"].calls == 1
"""
    assert not loaded_by(code) & {"diffusers", "transformers", "onnx", "onnx_ir", "onnxscript", "peft", "gradio"}


def test_help_answers_within_a_second():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "sdaccel", "--help"], capture_output=True, timeout=60, check=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0
