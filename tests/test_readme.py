"""The README says what is so: its commands and examples run, its tables are those of the code."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from sdaccel import cli, console, settings
from sdaccel.presets import presets, read_preset

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def world(tiny_store, tmp_path, monkeypatch):
    """The examples' model and the default store, in small."""
    store = shutil.copytree(tiny_store.store, tmp_path / "store")
    monkeypatch.setenv("SDACCEL_STORE", str(store))
    monkeypatch.setattr("sdaccel.models.demo.demo_model_path", lambda: tiny_store.model)
    monkeypatch.chdir(tmp_path)
    return tiny_store


def test_it_opens_with_two_commands():
    first = README.splitlines()[:4]
    assert first == [
        "```sh",
        "python -m pip install . && python -m sdaccel quickstart",
        'python -m pip install ".[test]" && python -m pytest',
        "```",
    ]
    assert blocks("sh")[0].splitlines() == first[1:3]


def test_ci_runs_its_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "sed -n 3p" in script and "README.md" in script


SMALL = {'["256", "256x512"]': '["64", "64x128"]', "native=256": "native=64", '"steps": 20': '"steps": 1'}


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(world, number, capsys):
    code = blocks("python")[number]
    for large, small in SMALL.items():
        code = code.replace(large, small)
    names: dict[str, object] = {}
    exec(compile(code, f"README.md, python block {number + 1}", "exec"), names)  # noqa: S102
    out = capsys.readouterr().out
    if "pipe" in names:
        assert names["pipe"].sdaccel.last_report.fallbacks == []
        assert names["image"].size == (64, 64)
        assert "unet: engine" in out
    elif "run" in names:
        assert len(list(Path("circles").glob("*.png"))) == 3
        assert out.splitlines()[-1] == "3 images, 0 set aside"
    else:
        assert {line.split()[0] for line in out.splitlines()} == {"unet", "vae_decoder", "vae_encoder", "text_encoder"}


SMALLER = {"model.safetensors": None, "512": "64", "512-768": "64-128"}


def write_job_files() -> None:
    table, sweep = blocks("csv")[0], blocks("jsonl")[0]
    Path("shots.csv").write_text(table.replace("512", "64").replace("768", "128"), encoding="utf-8")
    Path("sweep.jsonl").write_text(sweep.replace("[10, 20]", "[1, 2]"), encoding="utf-8")
    Path("prompts").mkdir()
    for colour in ("red", "green"):
        Path("prompts", f"{colour}.txt").write_text(f"a {colour} circle", encoding="utf-8")


def test_shell_examples_run(world, capsys, monkeypatch):
    from sdaccel.jobs.pool import Here

    monkeypatch.setattr("sdaccel.jobs.command._workers", lambda options, *how: Here(options))  # a process takes longer
    write_job_files()
    ran = []
    for block in blocks("sh"):
        for line in block.splitlines():
            words = shlex.split(line)
            if "pip" in words:
                continue
            assert words[0] == "sdaccel"
            arguments = [SMALLER.get(word, word) or str(world.model) for word in words[1:]]
            if words[1] == "build":
                arguments += ["--component", "vae_decoder"]
            if words[1] in ("generate", "verify"):
                arguments += ["--steps", "1"]
            if words[1] in ("bench", "verify"):
                arguments += ["--component", "unet"]
            assert cli.run(arguments) == 0, (line, capsys.readouterr().err)
            ran.append(words[1])
    assert [len(list(Path(name).glob("*.png"))) for name in ("shots", "night", "again")] == [7, 2, 1]
    assert len(list(Path("sweep").glob("*.webp"))) == 12
    assert Path("again", "00001-1-a red circle, large, on a blue background.png").is_file()
    assert set(ran) >= {"batch", "grid", "build", "list", "inspect", "generate", "verify", "bench", "doctor", "rm"}
    assert Path("circle.png").is_file() and Path("engines.html").is_file()


def test_every_command_is_in_its_table():
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for name in commands:
        assert re.search(rf"^\| `{name}\b", README, re.MULTILINE), name


def test_the_table_of_settings_is_that_of_the_code():
    table = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", README, re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows == [[f"`{s.name}`", default_text(s), s.meaning] for s in settings.TABLE]


def default_text(setting: settings.Setting) -> str:
    if setting is settings.STORE:
        return "the user's data folder"
    if setting is settings.MODEL_CACHE:
        return "a quarter of the RAM"
    return "none" if setting.default is None else f"`{setting.default}`"


def test_exit_codes_are_those_of_the_code():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert codes == {
        console.OK, console.FAULT, console.USAGE, console.DIFFERS, console.CRASH, console.INTERRUPTED,
    }  # fmt: skip


def test_presets_are_all_named_and_the_example_is_one(tmp_path):
    for preset in presets():
        assert f"`{preset.name}`" in README
    path = tmp_path / "portrait.toml"
    path.write_text(blocks("toml")[0], encoding="utf-8")
    assert read_preset(path).image_profiles("sdxl", 1024)


def test_files_that_it_speaks_of_are_there():
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").startswith("# Changelog")
