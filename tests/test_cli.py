"""The command line: output, files, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import sdaccel
from sdaccel import console
from sdaccel import draw as images
from sdaccel.cli import run
from sdaccel.engine.store import Store
from sdaccel.errors import SettingError
from sdaccel.quickstart import quickstart
from tests import pipelines
from tests.conftest import Built

QUICK = dict(quickstart.__kwdefaults__)
DRAW = ["--steps", "2", "--seed", "7", "--build", "never"]


class Said:
    """What one command printed and returned."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Said:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        return Said(code, *capfd.readouterr())

    return call


@pytest.fixture
def own_store(tiny_store: Built, tmp_path: Path) -> Path:
    """A copy of the built store, to be spoilt."""
    return Path(shutil.copytree(tiny_store.store, tmp_path / "own store"))


# ---- usage


def test_version_and_help(cli):
    assert cli("--version").out == f"sdaccel {sdaccel.__version__}\n"
    said = cli("--help")
    for name in (
        "quickstart",
        "build",
        "list",
        "inspect",
        "rm",
        "generate",
        "batch",
        "grid",
        "verify",
        "bench",
        "doctor",
    ):
        assert re.search(rf"\b{name}\b", said.out)
    assert said.code == 0


@pytest.mark.parametrize("arguments", [["no-such"], ["build", "--no-such"], ["inspect"], ["bench", "--repeats", "a"]])
def test_wrong_usage_is_2(cli, arguments):
    said = cli(*arguments)
    assert said.code == 2
    assert not said.out and said.err


def test_our_errors_are_1_and_one_paragraph(cli, tmp_path):
    said = cli("build", tmp_path / "none.safetensors")
    assert (said.code, said.out) == (1, "")
    assert said.err.splitlines() == [
        f"error: {tmp_path / 'none.safetensors'}: no such file or folder. "
        "Name a diffusers folder or a .safetensors file."
    ]


def test_an_html_page_named_safetensors(cli, tmp_path):
    path = tmp_path / "model é.safetensors"
    path.write_text("<!DOCTYPE html><html><body>log in</body></html>", encoding="utf-8")
    said = cli("build", path)
    assert said.code == 1
    assert "not a safetensors file, but an HTML page" in said.err
    assert "Traceback" not in said.err


def test_debug_shows_the_traceback(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("SDACCEL_DEBUG", "1")
    assert "Traceback" in cli("build", tmp_path / "none").err


def test_a_fault_of_ours_is_70_and_says_how_to_report_it(cli, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("sdaccel.listing.list_engines", broken)
    said = cli("list")
    assert said.code == 70
    assert said.err.startswith("fault: RuntimeError: two lines. ")
    assert "sdaccel doctor" in said.err and len(said.err.splitlines()) == 1


def test_a_setting_that_cannot_be_used(cli, monkeypatch):
    monkeypatch.setenv("SDACCEL_DEBUG", "loud")
    said = cli("list")
    assert (said.code, said.err) == (1, "error: SDACCEL_DEBUG='loud' is not a whole number.\n")


def test_python_m_sdaccel(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sdaccel", "list", "--store", str(tmp_path), "--json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# ---- build


def test_what_is_built_is_there_and_not_built_again(cli, tiny_store):
    sizes = ["--res", "64-128", "--batch", "1-2", "--tokens", "77-154"]
    said = cli("build", tiny_store.model, "--store", tiny_store.store, *sizes, "--json")
    assert said.code == 0
    rows = said.json()
    assert [row["component"] for row in rows] == ["unet", "vae_decoder", "vae_encoder", "text_encoder"]
    assert {row["built"] for row in rows} == {False}
    assert {row["state"] for row in rows} == {"ready"}
    assert all(0 <= row["error"] <= 1e-4 for row in rows)
    table = cli("build", tiny_store.model, "--store", tiny_store.store, *sizes)
    assert table.err == f"model: {tiny_store.model}\n"
    for row in rows:
        covers = (
            "1-8 prompts, tokens 1-77" if row["component"] == "text_encoder" else "64-128, batch 1-2, tokens 77-154"
        )
        assert re.search(rf"{row['component']} +{row['id'][:12]} +{covers}", table.out)


def test_the_model_is_said_when_none_is_named(cli, tiny_store, monkeypatch):
    monkeypatch.setenv("SDACCEL_MODEL", str(tiny_store.model))
    said = cli("verify", "--store", tiny_store.store, "--component", "text_encoder", "--no-image")
    assert f"model: {tiny_store.model} (from SDACCEL_MODEL)" in said.err
    assert said.code == 0


def test_another_size_of_a_known_architecture_exports_nothing(cli, tiny_store, own_store):
    graphs = {entry.key: entry.path.stat().st_mtime_ns for entry in Store(own_store).list("graphs")}
    arguments = ["--component", "text_encoder", "--component", "vae_decoder", "--res", "72x64", "--no-check", "--json"]
    said = cli("build", tiny_store.model, "--store", own_store, *arguments)
    decoder, encoder = said.json()
    assert decoder["built"] and decoder["error"] is None
    assert decoder["image_profiles"][0]["width"] == [72, 72, 72]
    assert decoder["image_profiles"][0]["height"] == [64, 64, 64]
    assert decoder["profiles"][0]["width"] == [9, 9, 9]
    assert encoder["component"] == "text_encoder"
    assert {entry.key for entry in Store(own_store).list("graphs")} == graphs.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--res", "100"], "width 100 cannot be built: sides are multiples of 8 from 64 to 8192. Try 96."),
        (["--res", "axb"], "cannot be read"),
        (["--batch", "4-1"], "min <= opt <= max"),
        (["--component", "controlnet"], "has no weights for controlnet"),
        (["--component", "text_encoder_2"], "has no weights for text_encoder_2"),
        (["--precision", "int3"], "does not build int3. It builds fp32"),
        (["--backend", "tensorflow"], "there is no backend 'tensorflow'"),
        (["--preset", "nine"], "there is no preset 'nine'"),
        (["--preset", "sdxl"], "the preset sdxl is for sdxl; the model is sd1"),
        (["--preset", "sd15", "--res", "64"], "a preset brings its own profiles"),
        (["--variant", "fp16"], "no component has a variant 'fp16'"),
    ],
)
def test_options_that_cannot_be_used(cli, tiny_store, arguments, message):
    said = cli("build", tiny_store.model, "--store", tiny_store.store, *arguments)
    assert said.code == 1
    assert message in said.err


def test_a_preset_of_ones_own(cli, tiny_store, own_store, tmp_path):
    preset = tmp_path / "two.toml"
    preset.write_text(
        'name = "two"\ndescription = "d"\n[[profile]]\nwidth = "64"\nheight = "64"\nbatch = "1"\n'
        '[[profile]]\nwidth = "64-128"\nheight = "64-128"\nbatch = "1"\n',
        encoding="utf-8",
    )
    said = cli(
        "build", tiny_store.model, "--store", own_store, "--preset", preset, "--component", "vae_decoder", "--json"
    )
    (engine,) = said.json()
    assert [p["width"] for p in engine["image_profiles"]] == [[64, 64, 64], [64, 64, 128]]


# ---- list, inspect


def test_list_json_is_whole(cli, tiny_store):
    rows = cli("list", "--store", tiny_store.store, "--json").json()
    assert {row["component"] for row in rows} == {"unet", "vae_decoder", "vae_encoder", "text_encoder"}
    for row in rows:
        assert row["state"] == "ready" and row["family"] == "sd1" and row["backend"] == "onnxruntime"
        assert row["bytes"] > 0 and row["shared_bytes"] > 0


def test_states_ready_stale_broken(cli, own_store, monkeypatch):
    by_name = {entry.engine.component: entry for entry in Store(own_store).list()}
    (by_name["unet"].path / "engine.json").write_text("{}", encoding="utf-8")
    shutil.rmtree(own_store / "weights" / by_name["text_encoder"].engine.weights_entries[0])
    monkeypatch.setattr("sdaccel.backends.onnxruntime.OnnxRuntime.versions", lambda self: {"onnxruntime": "9.9"})
    from sdaccel.listing import _backend_now

    _backend_now.cache_clear()
    try:
        rows = cli("list", "--store", own_store, "--json").json()
        text = cli("list", "--store", own_store).out
    finally:
        _backend_now.cache_clear()
    found = {row.get("component"): row for row in rows}
    assert found[None]["state"] == "broken" and "changed" in found[None]["reason"]
    assert found["text_encoder"]["state"] == "broken" and "missing" in found["text_encoder"]["reason"]
    assert found["vae_decoder"]["state"] == "stale"
    assert "onnxruntime 1." in found["vae_decoder"]["reason"] and "now 9.9" in found["vae_decoder"]["reason"]
    assert text.count("stale: ") == 2 and text.count("broken: ") == 2


def test_inspect(cli, tiny_store):
    rows = cli("list", "--store", tiny_store.store, "--json").json()
    unet = next(row for row in rows if row["component"] == "unet")
    said = cli("inspect", unet["id"][:8], "--store", tiny_store.store)
    for text in (unet["id"], "unet of model (sd1)", str(tiny_store.model), "ops: ", "fusions: ", "64-128, batch 1-2"):
        assert text in said.out
    (whole,) = cli("inspect", unet["id"], "--store", tiny_store.store, "--json").json()
    assert whole["manifest"]["config"]["cross_attention_dim"] == 64
    assert sum(whole["files"].values()) == whole["bytes"]
    assert len(cli("inspect", "all", "--store", tiny_store.store, "--json").json()) == 4


def test_inspect_what_is_not_there(cli, tiny_store):
    said = cli("inspect", "0123456789ab", "--store", tiny_store.store)
    assert (said.code, said.out) == (1, "") and "sdaccel list" in said.err


@pytest.mark.parametrize("name", ["~no.such.user/model.safetensors", f"{'m' * 300}.safetensors"])
@pytest.mark.parametrize("command", ["inspect", "build", "verify"])
def test_a_name_that_no_path_can_have(cli, command, name, tmp_path):
    said = cli(command, name, "--store", tmp_path)
    assert (said.code, said.out) == (1, "") and name in said.err


def test_names_that_begin_with_a_tilde(cli, tiny_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_store.model, "~model")
    assert cli("inspect", "~model", "--json").json()["name"] == "~model"
    assert cli("list", "--store", "~store", "--json").json() == []


def test_inspect_a_model(cli, tiny_store):
    facts = cli("inspect", tiny_store.model, "--json").json()
    assert (facts["family"], facts["native_side"], facts["vae_factor"]) == ("sd1", 64, 8)
    assert set(facts["components"]) == {"unet", "vae", "text_encoder"}
    assert "components" not in cli("inspect", tiny_store.model).out


class Page(HTMLParser):
    VOID = frozenset({"meta", "br", "rect", "line", "circle"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_asks_for_nothing(cli, tiny_store, own_store, tmp_path):
    evil = '<script>alert(1)</script>" onload="x'
    model = tmp_path / "m & <b>"
    shutil.copytree(tiny_store.model, model)
    arguments = ["--component", "vae_decoder", "--res", "64", "--batch", "1", "--no-check"]
    assert cli("build", model, "--store", own_store, *arguments).code == 0
    entry = next(e for e in Store(own_store).list() if e.engine.model == "m & <b>")
    said = cli("inspect", entry.key, "--store", own_store, "--html", tmp_path / "page.html")
    assert said.code == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "b", "object"} & set(tags)
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "onload"))
    assert "http:" not in text and "https:" not in text and "url(" not in text
    assert "m &amp; &lt;b&gt;" in text
    assert "prefers-color-scheme" in text
    assert tags.count("svg") >= 5  # profiles, time by operator, operators, fusions, sizes
    assert "Where time goes" in text and ">Conv<" in text

    from sdaccel.page import bars

    assert "<script" not in bars({evil: 1.0}, "{:.0f}")


# ---- rm


def test_rm_one_engine_keeps_what_others_use(cli, own_store):
    before = {entry.engine.component: entry for entry in Store(own_store).list()}
    said = cli("rm", before["vae_decoder"].key[:10], "--store", own_store, "--yes", "--json")
    assert said.json()["removed"] == [before["vae_decoder"].key]
    assert said.json()["freed_bytes"] > before["vae_decoder"].nbytes
    left = {row["component"]: row["state"] for row in cli("list", "--store", own_store, "--json").json()}
    assert left == {"unet": "ready", "vae_encoder": "ready", "text_encoder": "ready"}


def test_rm_asks_for_yes_where_it_cannot_ask(cli, own_store, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull, encoding="utf-8"))  # noqa: PTH123, SIM115
    said = cli("rm", "--all", "--store", own_store)
    assert said.code == 1 and "--yes" in said.err
    assert len(Store(own_store).list()) == 4
    assert cli("rm", "--store", own_store).code == 1


def test_rm_all_leaves_nothing(cli, own_store):
    said = cli("rm", "--all", "--yes", "--store", own_store)
    assert said.code == 0 and said.out.startswith("4 engines removed")
    assert [path for kind in Store.KINDS for path in (own_store / kind).iterdir()] == []


def test_rm_broken_leaves_the_whole(cli, own_store):
    victim = next(entry for entry in Store(own_store).list() if entry.engine.component == "unet")
    (victim.path / "engine.json").write_bytes(b"")
    (own_store / "tmp" / f"engines-{'0' * 64}-{'1' * 16}").mkdir()
    said = cli("rm", "--broken", "--yes", "--store", own_store, "--json")
    assert said.json()["removed"] == [victim.key]
    store = Store(own_store)
    assert len(store.list()) == 3 and not store.broken()
    assert not list((own_store / "tmp").iterdir())


def test_rm_broken_takes_engines_without_what_they_stand_on(cli, own_store):
    store = Store(own_store)
    (graph,) = {e.engine.architecture for e in store.list() if e.engine.component == "unet"}
    (store.root / "graphs" / graph / "graph.onnx").write_bytes(b"cut off")
    shutil.rmtree(next(e.path for e in store.list("weights") if e.key == _weights_of(store, "text_encoder")))
    states = {item["component"]: item["state"] for item in cli("list", "--store", own_store, "--json").json()}
    assert [states[name] for name in ("unet", "text_encoder", "vae_decoder")] == ["broken", "broken", "ready"]
    assert cli("doctor", "--store", own_store, "--json").json()["store"]["broken"] == 3
    assert cli("rm", "--broken", "--yes", "--store", own_store).code == 0
    assert {e.engine.component for e in store.list()} == {"vae_decoder", "vae_encoder"} and store.broken() == []
    assert cli("doctor", "--store", own_store, "--json").json()["store"]["broken"] == 0


def _weights_of(store: Store, component: str) -> str:
    return next(e.engine.weights_entries[0] for e in store.list() if e.engine.component == component)


def test_rm_unused_takes_the_stale(cli, own_store, monkeypatch):
    from sdaccel.listing import _backend_now

    assert cli("rm", "--unused", "--yes", "--store", own_store, "--json").json()["removed"] == []
    monkeypatch.setattr("sdaccel.backends.onnxruntime.OnnxRuntime.device", lambda self: {"kind": "cpu", "isa": "other"})
    _backend_now.cache_clear()
    try:
        assert len(cli("rm", "--unused", "--yes", "--store", own_store, "--json").json()["removed"]) == 4
    finally:
        _backend_now.cache_clear()


# ---- generate


def draw(cli, built: Built, *arguments: object) -> Said:
    return cli("generate", "a red circle é", "-m", built.model, "--store", built.store, *DRAW, *arguments)


def test_an_image_by_engines_says_how_it_was_made(cli, tiny_store, tmp_path):
    said = draw(cli, tiny_store, "--res", "64", "--negative", "blue", "-o", "out.png", "--json")
    assert said.code == 0, said.err
    facts = said.json()
    assert facts["images"] == [{"path": "out.png", "seed": 7}]
    (report,) = facts["reports"]
    assert report["fallbacks"] == [] and set(report["components"]) == {"unet", "vae_decoder", "text_encoder"}
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (64, 64)
        lines = image.text["parameters"].splitlines()
        assert json.loads(image.text["sdaccel"]) == report
    assert lines[:2] == ["a red circle é", "Negative prompt: blue"]
    assert lines[2].startswith(
        "Steps: 2, Sampler: PLMS, CFG scale: 7.5, Seed: 7, Size: 64x64, Model: model, Version: sda"
    )


@pytest.mark.parametrize("name", ["out.jpg", "out.webp"])
def test_other_formats_say_it_in_exif(cli, tiny_store, tmp_path, name):
    from sdaccel.metadata import read

    assert draw(cli, tiny_store, "--res", "64", "--negative", "blue", "-o", name).code == 0
    found = read(tmp_path / name).parameters
    assert found is not None and (found.prompt, found.negative, found.facts["Seed"]) == ("a red circle é", "blue", "7")
    with Image.open(tmp_path / name) as image:
        assert image.format == {".jpg": "JPEG", ".webp": "WEBP"}[Path(name).suffix] and image.size == (64, 64)


def test_engines_draw_what_torch_draws(cli, tiny_store, tmp_path):
    import numpy as np

    assert draw(cli, tiny_store, "-o", "engine.png", "--scheduler", "euler").code == 0
    said = draw(cli, tiny_store, "-o", "torch.png", "--scheduler", "euler", "--no-engine")
    assert said.code == 0 and "in plain torch, as asked" in said.out
    one, other = (np.asarray(Image.open(tmp_path / f"{name}.png"), np.int16) for name in ("engine", "torch"))
    assert np.abs(one - other).max() <= 1
    assert one.std() > 0


def test_several_images_have_seeds_in_a_row_and_equal_single_ones(cli, tiny_store, tmp_path):
    said = draw(cli, tiny_store, "-n", "3", "-o", "{index}-{seed}.png", "--json")
    assert [image["path"] for image in said.json()["images"]] == ["1-7.png", "2-8.png", "3-9.png"]
    assert len(said.json()["reports"]) == 2  # the engines take two at once
    assert all(report["fallbacks"] == [] for report in said.json()["reports"])
    assert draw(cli, tiny_store, "--seed", "9", "-o", "single.png").code == 0
    with Image.open(tmp_path / "single.png") as single, Image.open(tmp_path / "3-9.png") as third:
        assert single.tobytes() == third.tobytes()


def test_files_are_never_overwritten_unasked(cli, tiny_store, tmp_path):
    (tmp_path / "out.png").write_bytes(b"mine")
    said = draw(cli, tiny_store, "-o", "out.png")
    assert said.code == 1 and "is there already" in said.err
    assert (tmp_path / "out.png").read_bytes() == b"mine"
    assert draw(cli, tiny_store, "-o", "out.png", "--force").code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_what_no_engine_holds_runs_in_torch_and_says_why(cli, tiny_store):
    said = draw(cli, tiny_store, "--res", "136", "-o", "x.png")
    assert said.code == 0
    assert re.search(r"not by an engine: unet, \d calls: no profile .* height 17 is outside 8-16", said.out)
    said = draw(cli, tiny_store, "--res", "136", "-o", "y.png", "--no-fallback")
    assert said.code == 1 and "height 17 is outside 8-16" in said.err
    assert not Path("y.png").exists()


def test_missing_engines_are_built_for_the_size(cli, tiny_store, own_store):
    arguments = ["--store", own_store, "--build", "if-missing", "--res", "136x64", "-o", "x.png", "--json"]
    said = draw(cli, tiny_store, *arguments)
    assert said.code == 0, said.err
    assert said.json()["reports"][0]["fallbacks"] == []
    sizes = [tuple(row["image_profiles"][0]["width"]) for row in cli("list", "--store", own_store, "--json").json()]
    assert sizes.count((136, 136, 136)) == 2  # unet and decoder; the text encoder has no size


def test_a_side_that_the_host_refuses(cli, tiny_store):
    said = draw(cli, tiny_store, "--width", "427", "--height", "640", "-o", "x.png")
    assert said.code == 1
    assert "divisible by 8" in said.err and "427" in said.err


def test_from_an_image(cli, tiny_store, tmp_path):
    Image.new("RGB", (96, 64), "red").save(tmp_path / "in.png")
    said = draw(cli, tiny_store, "--image", "in.png", "--strength", "0.5", "--steps", "4", "-o", "x.png", "--json")
    assert said.code == 0, said.err
    (report,) = said.json()["reports"]
    assert report["fallbacks"] == [] and "vae_encoder" in report["components"]
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (96, 64) and "Denoising strength: 0.5" in image.text["parameters"]
    Image.new("L", (96, 64), 255).save(tmp_path / "mask.png")
    said = draw(cli, tiny_store, "--image", "in.png", "--mask", "mask.png", "--steps", "4", "-o", "y.png", "--json")
    assert said.code == 0, said.err
    assert said.json()["reports"][0]["fallbacks"] == []


def test_an_image_that_is_no_good_is_not_saved(cli, tiny_store, tmp_path, monkeypatch):
    real = images.open_accelerated

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        pipe, at_once = real(*args, **kwargs)
        pipe.vae.decoder.conv_out.bias.data = torch.full((3,), torch.nan)
        return pipe, at_once

    monkeypatch.setattr(images, "open_accelerated", spoilt)
    said = draw(cli, tiny_store, "-o", "x.png")
    assert said.code == 3
    assert "Nothing was saved: vae_decoder gives NaN" in said.err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--res", "64-128"], "is a range"),
        (["--res", "64", "--width", "64"], "says both sides"),
        (["--steps", "0"], "steps 0 is not between 1 and 1000"),
        (["--seed", "-1"], "seed -1"),
        (["--scheduler", "magic"], "no scheduler 'magic': ddim"),
        (["--mask", "m.png"], "a mask needs the image"),
        (["--image", "none.png"], "none.png cannot be read"),
        (["-o", "x.gif"], ".gif is none that images are saved as: .png"),
        (["-o", "no-folder/x.png"], "is not there"),
        (["--build", "always"], "neither if-missing nor never"),
        (["--no-engine", "--no-fallback"], "exclude each other"),
    ],
)
def test_requests_that_cannot_be_met(cli, tiny_store, arguments, message):
    said = draw(cli, tiny_store, *arguments)
    assert said.code == 1
    assert message in said.err


# ---- verify


def test_verify_finds_engines_equal(cli, tiny_store):
    said = cli("verify", tiny_store.model, "--store", tiny_store.store, "--steps", "2", "--json")
    assert said.code == 0, said.out
    facts = said.json()
    assert facts["ok"] and facts["image"]["ok"] and facts["image"]["fallbacks"] == []
    shapes = {(c["component"], c["shape"].get("width")) for c in facts["components"]}
    assert ("unet", 9) in shapes and {name for name, _ in shapes} >= {"vae_decoder", "vae_encoder", "text_encoder"}


def test_verify_finds_an_engine_that_differs(cli, tiny_store, monkeypatch):
    from sdaccel.backends.onnxruntime import _Engine

    real = _Engine.run

    def off(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {name: value + 0.5 if name == "image" else value for name, value in real(self, *args, **kwargs).items()}

    monkeypatch.setattr(_Engine, "run", off)
    arguments = ["--component", "vae_decoder", "--component", "unet", "--steps", "1", "--json"]
    said = cli("verify", tiny_store.model, "--store", tiny_store.store, *arguments)
    assert said.code == 3
    facts = said.json()
    assert {c["component"] for c in facts["components"] if not c["ok"]} == {"vae_decoder"}
    assert not facts["image"]["ok"]


def test_verify_refuses_a_damaged_engine(cli, tiny_store, own_store):
    entry = next(e for e in Store(own_store).list() if e.engine.component == "unet")
    path = entry.file("model.onnx")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = cli("verify", tiny_store.model, "--store", own_store)
    assert said.code == 1 and "model.onnx has changed since it was built" in said.err


@pytest.mark.parametrize("kind", ["weights", "graphs"])
def test_building_again_mends_what_engines_share(cli, tiny_store, own_store, kind):
    for entry in Store(own_store).list(kind):
        file = entry.path / next(iter(entry.files))
        file.write_bytes(bytes(file.stat().st_size))
    arguments = [tiny_store.model, "--store", own_store, "--component", "vae_decoder", "--component", "text_encoder"]
    said = cli("verify", *arguments, "--no-image")
    assert said.code == 1 and "Build again" in said.err
    size = ["--res", "64-128", "--batch", "1-2", "--tokens", "77-154"]
    assert all(item["built"] for item in cli("build", *arguments, *size, "--json").json())
    assert cli("verify", *arguments, "--no-image").code == 0
    assert not any(item["built"] for item in cli("build", *arguments, *size, "--json").json())


def test_verify_without_engines_says_how_to_build_them(cli, tiny_store, tmp_path):
    said = cli("verify", tiny_store.model, "--store", tmp_path / "empty")
    assert said.code == 1 and f'Run: sdaccel build "{tiny_store.model}"' in said.err


# ---- bench


def test_bench(cli, tiny_store):
    arguments = ["--res", "64", "--repeats", "3", "--threads", "1", "--component", "unet", "--json"]
    said = cli("bench", tiny_store.model, "--store", tiny_store.store, *arguments)
    assert said.code == 0, said.err
    facts = said.json()
    assert facts["threads"] == 1 and facts["versions"]["torch"] and facts["cpu"] and facts["date"]
    (result,) = facts["results"]
    assert result["shape"] == {"batch": 2, "height": 8, "tokens": 77, "width": 8}
    assert result["error"] <= 1e-4
    times = result["milliseconds"]
    assert len(times["torch"]["calls"]) == len(times["engine"]["calls"]) == 3
    assert result["ratio"] == pytest.approx(times["torch"]["median"] / times["engine"]["median"], rel=1e-3)
    assert set(result["overhead"]) == {"swap", "session"}
    table = cli("bench", tiny_store.model, "--store", tiny_store.store, *arguments[:-1])
    assert re.search(r"unet +batch 2 height 8 width 8 tokens 77 .*x ", table.out)
    assert "session alone" in table.out and "1 threads" in table.out


def test_bench_without_an_engine_for_the_size(cli, tiny_store):
    said = cli("bench", tiny_store.model, "--store", tiny_store.store, "--res", "256", "--batch", "8")
    assert said.code == 1
    assert f'Run: sdaccel build "{tiny_store.model}" --res 256x256 --batch 8' in said.err  # it would build the demo's


# ---- quickstart


def test_quickstart_says_when_the_image_does_not_show_its_prompt(cli, tiny_store, own_store, tmp_path, monkeypatch):
    """A random model draws no circle: all ran through engines and equals torch, and yet it is no success."""
    monkeypatch.setattr("sdaccel.models.demo.demo_model_path", lambda: tiny_store.model)
    monkeypatch.setattr(quickstart, "__kwdefaults__", {**QUICK, "side": 64, "steps": 2})
    said = cli("quickstart", "--store", own_store, "-o", "first.png", "--json")
    assert said.code == 3, said.err
    facts = said.json()
    assert not facts["ok"] and not facts["shown"] and facts["reasons"]
    assert facts["all_by_engines"] and (facts["psnr"] is None or facts["psnr"] > 50)
    assert facts["built"] == 2  # the text encoder, which has no size, was there
    assert set(facts["engines"]) == {"unet", "vae_decoder", "text_encoder"}
    again = cli("quickstart", "--store", own_store)
    assert again.code == 3 and "engines were there already" in again.out
    assert f"image: {tmp_path / 'sdaccel-quickstart.png'}" in again.out
    assert "the image shows its prompt: no: " in again.out and "next:" not in again.out
    assert cli("quickstart", "--store", own_store, "-o", "first.png").code == 1  # never overwrites


@pytest.mark.slow
def test_quickstart_on_a_fresh_machine(cli, tmp_path):
    start = time.monotonic()
    said = cli("quickstart", "--store", tmp_path / "store", "-o", "circle.png", "--json")
    assert said.code == 0, said.out
    facts = said.json()
    assert facts["shown"] and facts["all_by_engines"] and facts["built"] == 3
    assert facts["seconds"] < facts["torch_seconds"]
    assert time.monotonic() - start < 180


# ---- Ctrl-C


CHILD = """
import sys, time
from sdaccel import cli
from sdaccel.backends.onnxruntime import OnnxRuntime

def native(self, *args):  # as deep in native code as a thread can be: nothing reaches it
    print("native", flush=True)
    time.sleep(120)

def busy(*args, **kwargs):
    print("busy", flush=True)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            pass

if sys.argv[1] == "native":
    OnnxRuntime._session = native
else:
    import sdaccel.listing
    sdaccel.listing.list_engines = busy
sys.argv[1:] = sys.argv[2:]
cli.main()
"""


def interrupted(arguments: list[str]) -> tuple[int, float, str]:
    """(exit code, seconds, stderr) of a command that is stopped once it has printed a line."""
    flags = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if os.name == "nt" else {}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **flags
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline().strip() == arguments[0]
        time.sleep(0.3)
        start = time.monotonic()
        child.send_signal(signal.CTRL_BREAK_EVENT if os.name == "nt" else signal.SIGINT)
        _, err = child.communicate(timeout=30)
        return child.returncode, time.monotonic() - start, err
    finally:
        child.kill()


def test_ctrl_c_in_native_code_leaves_the_store_clean_at_once(tiny_store, own_store):
    before = {entry.key for entry in Store(own_store).list()}
    arguments = ["native", "build", str(tiny_store.model), "--store", str(own_store), "--component", "vae_decoder"]
    code, seconds, err = interrupted([*arguments, "--res", "80"])
    assert code == 130, err
    assert seconds < 5
    assert "stopped" in err and "Traceback" not in err
    store = Store(own_store)
    assert not list((own_store / "tmp").iterdir())
    assert {entry.key for entry in store.list()} == before and not store.broken()


def test_ctrl_c_ends_a_command_that_does_not_listen(own_store):
    code, seconds, _ = interrupted(["busy", "list", "--store", str(own_store)])
    assert code == 130
    assert seconds < 5


def test_ctrl_c_raised_in_the_library_is_130(cli, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sdaccel.listing.list_engines", stopped)
    said = cli("list")
    assert (said.code, said.out) == (130, "") and said.err.startswith("stopped")


def test_codes_are_the_documented_ones():
    assert (console.OK, console.FAULT, console.USAGE, console.DIFFERS, console.CRASH, console.INTERRUPTED) == (
        0, 1, 2, 3, 70, 130,
    )  # fmt: skip
    assert issubclass(SettingError, ValueError)


def test_steps_that_a_scheduler_cannot_take_are_refused():
    def pipe(**arguments):
        raise IndexError("index 1000 is out of bounds")

    pipe.scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    with pytest.raises(SettingError, match=r"SimpleNamespace cannot draw in 1000 steps.*Below 1000 it can"):
        images.draw(pipe, images.Request("x", steps=1000))
    with pytest.raises(IndexError):
        images.draw(pipe, images.Request("x", steps=20))


def test_generate_has_no_image_for_a_controlnet(cli, tmp_path):
    pipelines.make("controlnet").save_pretrained(tmp_path / "model")
    said = cli("generate", "x", "--model", tmp_path / "model", "--no-engine", "-o", tmp_path / "x.png")
    assert said.code == 1 and "needs an image to follow" in said.err
