"""What a wheel holds, and that its folders are found installed and editable."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sdaccel
from sdaccel.errors import SdaccelError
from sdaccel.resources import resource

ROOT = Path(__file__).parents[1]
MOST_BYTES = 17_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    hatchling = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("dist")
    builder = hatchling.WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_it_holds_all_that_ships(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in [*(ROOT / "sdaccel").rglob("*.py"), *(ROOT / "sdaccel" / "models" / "configs").rglob("*.json")]:
        assert path.relative_to(ROOT).as_posix() in names
    for folder in ("presets", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            assert path.is_dir() or f"sdaccel/_data/{path.relative_to(ROOT).as_posix()}" in names
    demo = ROOT / "sdaccel" / "models" / "demo"
    for path in demo.rglob("*.safetensors"):
        assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name or name.endswith(".pyc")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_it_is_small(wheel):
    assert wheel.stat().st_size < MOST_BYTES


def test_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert (metadata["Name"], metadata["Version"]) == ("sdaccel", sdaccel.__version__)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) >= {"cuda", "ui", "test", "dev"}
    assert "sdaccel = sdaccel.cli:main" in entry_points


def test_folders_are_found_editable():
    assert resource("presets") == ROOT / "presets"
    assert (resource("kernels") / "README.md").is_file()


def test_folders_are_found_installed(wheel, tmp_path):
    site = tmp_path / "site packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "from sdaccel.resources import resource; from sdaccel.presets import presets; "
        "print(resource('kernels')); print(len(presets()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True, check=True)
    kernels, count = done.stdout.splitlines()
    assert Path(kernels) == site / "sdaccel" / "_data" / "kernels"
    assert int(count) == len(list((ROOT / "presets").glob("*.toml")))


def test_a_missing_folder_is_said():
    with pytest.raises(SdaccelError, match="the folder nothing/ is missing"):
        resource("nothing")
