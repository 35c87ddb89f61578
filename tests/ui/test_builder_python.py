"""The Python that builds where the host's cannot: made once, with what the host has, and the worker that uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from sdaccel import doctor
from sdaccel.errors import BackendError
from sdaccel.ui import builder_python
from sdaccel.ui.requests import BuildRequest

ABSENT = doctor.Package("sdaccel-tests-absent", "sdaccel_tests_absent", "1.0", "1.5")
TORCH = next(package for package in doctor.PACKAGES if package.name == "torch")


def wheel(folder: Path, version: str) -> None:
    name = ABSENT.module
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {ABSENT.name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def lacks_one(tmp_path, monkeypatch):
    """This Python lacks one package, which pip finds in a folder alone."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setattr(builder_python, "_packages", lambda: [TORCH, ABSENT])
    monkeypatch.setattr(builder_python, "_CHECK", f"import numpy, {ABSENT.module}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return shelf


def test_this_python_builds_where_it_can(tmp_path):
    said: list[str] = []
    assert builder_python.lacking() == []
    assert builder_python.ready(tmp_path, lambda stage, fraction: said.append(stage)) == sys.executable
    assert not said and not list(tmp_path.iterdir()) and builder_python.is_ready(tmp_path)


def test_what_is_missing_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(builder_python, "_packages", lambda: [doctor.Package("numpy", "numpy", "99", "99.1"), ABSENT])
    old, absent = builder_python.lacking()
    assert old.startswith("numpy ") and absent == ABSENT.name


def test_an_environment_is_made_once_and_borrows_what_fits(tmp_path, lacks_one):
    wheel(lacks_one, "1.2")
    wheel(lacks_one, "1.9")  # newer than what the tests ran with
    said: list[str] = []
    store = tmp_path / "a store"
    python = builder_python.ready(store, lambda stage, fraction: said.append(stage))
    assert Path(python).is_relative_to(store) and builder_python.is_ready(store)
    assert ABSENT.name in said[0] and "installing 1 packages" in said[-1]
    code = f"import torch, sys, {ABSENT.module} as new; print(torch.__file__, new.version, sys.prefix)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    hidden = "from importlib import metadata, util; print(util.find_spec('gradio'), metadata.version('torch'))"
    seen = subprocess.run([python, "-c", hidden], capture_output=True, text=True, check=True).stdout.split()
    import torch

    assert seen == ["None", metadata.version("torch")], "only what is needed is borrowed"
    assert torch.__file__ in found and " 1.2 " in found and "a store" in found
    assert builder_python.lacking() == [ABSENT.name], "this Python is as it was"

    said.clear()
    made = (builder_python.folder(store) / builder_python.READY).stat().st_mtime_ns
    assert builder_python.ready(store, lambda stage, fraction: said.append(stage)) == python and not said
    assert (builder_python.folder(store) / builder_python.READY).stat().st_mtime_ns == made


def test_without_a_network_it_says_what_to_do(tmp_path, lacks_one):
    with pytest.raises(BackendError, match=r"pip could not install what building needs.*Retry with a network"):
        builder_python.ready(tmp_path, lambda stage, fraction: None)
    assert not builder_python.is_ready(tmp_path)


def test_torch_is_never_replaced(tmp_path, monkeypatch):
    newer = doctor.Package("torch", "torch", "99.0", "99.1")
    monkeypatch.setattr(builder_python, "_packages", lambda: [newer])
    with pytest.raises(BackendError, match=r"needs torch 99\.0 or newer.*--reinstall-torch"):
        builder_python.ready(tmp_path, lambda stage, fraction: None)
    assert not list(tmp_path.iterdir())


# --- the worker


def worker(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    """A worker whose Python that builds is a program of ours; its request is sent."""
    python = tmp_path / "other python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    code = f"""
from sdaccel.ui import builder_python, worker
builder_python.ready = lambda store, progress: {str(python)!r}
worker.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    request = BuildRequest(model=str(tmp_path / "no model")).to_json()
    process.stdin.write(json.dumps({"store": str(tmp_path / "store"), "request": request}) + "\n")
    process.stdin.flush()
    return process


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_another_python_builds_and_is_heard(tmp_path):
    with worker(tmp_path, f'echo "$@" >&2; exec {sys.executable} "$@"') as process:
        said = [json.loads(line) for line in process.stdout]
        assert "-m sdaccel.ui.worker --here" in process.stderr.read()
    assert said[-1]["event"] == "failed" and "no model" in said[-1]["message"] and process.returncode == 1


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_another_python_does_not_outlive_the_worker(tmp_path):
    with worker(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60") as process:
        until = time.monotonic() + 30
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
            assert time.monotonic() < until
            time.sleep(0.05)
        other = psutil.Process(int((tmp_path / "pid").read_text()))
        process.stdin.close()
        process.wait(15)
    assert not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
