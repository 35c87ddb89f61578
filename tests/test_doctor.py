"""The doctor, on a machine that is well and on some that are not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdaccel import doctor
from sdaccel.backends import base
from sdaccel.cli import run
from sdaccel.engine.store import Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def problems(found: doctor.Diagnosis) -> str:
    return "\n".join(f"{p.what} | {p.fix} | {p.blocks}" for p in found.problems)


def test_a_machine_that_is_well(tmp_path, capsys):
    assert run(["doctor", "--store", str(tmp_path / "store"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"]
    assert set(facts) == {"ok", "system", "packages", "gpu", "backends", "store", "settings", "problems"}
    assert facts["backends"]["onnxruntime"] == "runs here"
    assert "CPUExecutionProvider" in facts["backends"]["onnxruntime providers"]
    assert facts["store"]["writable"] is True
    assert not [problem for problem in facts["problems"] if problem["blocks"]]
    assert not (tmp_path / "store").exists()


def test_a_gpu_that_engines_cannot_use_is_a_problem(tmp_path, monkeypatch):
    reason = 'cuda-python is not installed: pip install "sdaccel[cuda]".'
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(base, "backends", lambda: {"cuda": lambda: SimpleNamespace(unavailable=lambda: reason)})
    (problem,) = [each for each in doctor.diagnose(tmp_path).problems if "GPU is not used" in each.what]
    assert problem.fix == 'python -m pip install "sdaccel[cuda]"' and not problem.blocks


def test_a_whole_store_is_counted(tiny_store, capsys):
    assert run(["doctor", "--store", str(tiny_store.store)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"engines: 4, \d", out) and "broken: 0" in out and "unfinished: 0" in out


def test_what_is_broken_comes_with_the_command_that_fixes_it(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "engines" / ("a" * 64)).mkdir(parents=True)
    (tmp_path / "tmp" / f"engines-{'a' * 64}-{'b' * 16}").mkdir(parents=True)
    found = doctor.diagnose(tmp_path)
    assert found.ok
    assert "1 entries are broken" in problems(found) and "1 unfinished builds" in problems(found)
    assert run(["rm", "--broken", "--yes", "--store", str(tmp_path)]) == 0
    assert not store.broken()
    assert "entries are broken" not in problems(doctor.diagnose(tmp_path))


def test_a_store_that_cannot_be_written_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_writable", lambda folder: "Permission denied")
    found = doctor.diagnose(tmp_path)
    assert not found.ok
    assert f"the store {tmp_path} cannot be written: Permission denied." in problems(found)


@pytest.mark.skipif(os.name == "nt" or getattr(os, "geteuid", lambda: 1)() == 0, reason="root may write everywhere")
def test_writing_is_tried(tmp_path):
    tmp_path.chmod(0o500)
    assert doctor._writable(tmp_path)


def test_settings_that_cannot_be_used_and_unknown_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("SDACCEL_THREADS", "many")
    monkeypatch.setenv("SDACCEL_TRHEADS", "2")
    found = doctor.diagnose(tmp_path)
    assert not found.ok
    assert "SDACCEL_THREADS='many' is not a whole number." in problems(found)
    assert "SDACCEL_TRHEADS is set, but there is no such setting." in problems(found)


def test_an_old_package_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_version", lambda package, module: "0.1" if package.name == "onnx" else "99")
    found = doctor.diagnose(tmp_path)
    assert not found.ok
    assert 'onnx 0.1 is older than 1.19. | python -m pip install "onnx>=1.19" | True' in problems(found)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("1.23.2rc1", (1, 23, 2)), ("2.9.0a0+git12", (2, 9, 0))],
)
def test_versions_compare_as_numbers(text, numbers):
    assert doctor.numbers(text) == numbers
    assert doctor.numbers("2.13") > doctor.numbers("2.8")


BLOCK = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.blocked = sys.argv.pop(1)
sys.meta_path.insert(0, Blocked())
sys.argv[0] = "sdaccel"
runpy.run_module("sdaccel", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["typer", "filelock", "torch"])
def test_it_answers_whatever_is_missing(name, tmp_path):
    command = [sys.executable, "-c", BLOCK, name, "doctor", "--json", "--store", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert not facts["ok"]
    (missing,) = [p for p in facts["problems"] if p["what"] == f"{name} is missing."]
    assert missing["blocks"] and missing["fix"].startswith(f'python -m pip install "{name}>=')


def test_without_its_packages_another_command_says_what_to_run():
    done = subprocess.run([sys.executable, "-c", BLOCK, "typer", "list"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("sdaccel: the package typer is missing. Run: python -m sdaccel doctor")


def test_the_table_of_packages_is_that_of_the_package():
    """Oldest versions as in pyproject.toml, tested ones as pinned for CI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]
    least = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in needed)
    pins = dict(
        line.split("==")
        for line in (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()
        if "==" in line
    )
    for package in doctor.PACKAGES:
        assert least[package.name] == package.least
        assert pins[package.name] == package.tested
    required = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert required - {"tomli"} == {package.name for package in doctor.PACKAGES if package.required}
