"""`sdaccel batch` as it is typed: what it prints, leaves behind and ends with."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sdaccel import console
from sdaccel.cli import run
from sdaccel.jobs.pool import Here
from tests.conftest import Built

GOOD = '{"prompt": "a red circle", "seed": 1, "steps": 1, "width": 64, "height": 64}'
BAD = '{"prompt": "a circle", "negative": "blue"}\n{"prompt": "a circle", "steps": 0}\nno json\n'


@pytest.fixture
def batch(tiny_store: Built, tmp_path: Path, capsys, monkeypatch):
    """Types ``sdaccel batch`` with a job file of this text; (exit code, stdout, stderr)."""
    monkeypatch.setattr("sdaccel.jobs.command._workers", lambda options, *how: Here(options))  # a process takes longer

    def typed(text: str, *arguments: object, name: str = "jobs.jsonl") -> tuple[int, str, str]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        model = ["--model", tiny_store.model, "--store", tiny_store.store, "--build", "never"]
        words = ["batch", tmp_path / name, "--out", tmp_path / "out", *model, *arguments]
        code = run([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return typed


def test_good_jobs_are_drawn_bad_ones_are_told_with_their_lines(batch, tmp_path):
    code, out, err = batch(f"{GOOD}\n{BAD}")
    assert code == 1
    assert "1 of 1 image drawn" in out and "jobs that could not be used: 3" in out
    assert "unet: engine ran 1 image" in out
    assert [line.partition(": ")[2].partition(": ")[0] for line in err.splitlines() if line.startswith("error")] == [
        "jobs.jsonl:2",
        "jobs.jsonl:3",
        "jobs.jsonl:4",
    ]
    assert "negative_prompt" in err and "between 1 and 1000" in err
    assert (tmp_path / "out" / "00001-1-a red circle.png").is_file()
    assert "a red circle" in (tmp_path / "out" / "contact-sheet.html").read_text(encoding="utf-8")


def test_loras_for_jobs_that_name_none(batch, tmp_path):
    for name in ("ink", "oil"):
        weights = {"lora_unet_time_embedding_linear_1.diff_b": torch.full((32,), 0.5)}
        save_file(weights, tmp_path / f"{name}.safetensors")
    own = GOOD.replace('"seed"', '"loras": ["oil.safetensors"], "seed"')
    code, _, err = batch(f"{GOOD}\n{own}", "--lora", f"{tmp_path / 'ink.safetensors'}:0.5")
    assert code == 0, err
    texts = [str(Image.open(path).text) for path in sorted((tmp_path / "out").glob("*.png"))]
    assert [("ink:0.5" in text, "oil" in text) for text in texts] == [(True, False), (False, True)]
    assert batch(GOOD, "--lora", tmp_path / "none.safetensors")[0] == 1


def test_events_are_a_line_each(batch):
    code, out, _ = batch(GOOD.replace('"seed"', '"n": 2, "seed"'), "--json")
    events = [json.loads(line) for line in out.splitlines()]
    images = [event for event in events if event["event"] == "image"]
    assert code == 0 and [event["name"] for event in images] == [
        "00001-1-a red circle.png",
        "00002-2-a red circle.png",
    ]
    assert images[-1]["run"] == {"asked": 2, "before": 0, "drawn": 2, "failed": 0} and images[-1]["engines"]
    assert events[-1]["event"] == "summary" and events[-1]["ok"] and events[-1]["missing"] == 0


def test_the_contact_sheet_is_of_the_folder_not_of_the_last_jobs(batch, tmp_path):
    batch(GOOD)
    batch(GOOD.replace("red circle", "blue star"), name="others.jsonl")
    page = (tmp_path / "out" / "contact-sheet.html").read_text(encoding="utf-8")
    assert "a red circle" in page and "a blue star" in page


def test_again_needs_resume(batch):
    assert batch(GOOD)[0] == 0
    code, _, err = batch(GOOD)
    assert code == 1 and "--resume" in err
    code, out, _ = batch(GOOD, "--resume")
    assert code == 0 and "1 image there already" in out


def test_an_image_that_is_set_aside_is_a_difference(batch):
    bad = GOOD.replace('"steps": 1,', '"steps": 1000, "scheduler": "lms",')
    code, out, _ = batch(f"{GOOD}\n{bad}")
    assert code == 3 and "1 image set aside" in out and "LMSDiscreteScheduler" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "many"], "--batch-size many is no number from 1 to 64, nor auto"),
        (["--format", "bmp"], "bmp"),
        (["--quality", "0"], "between 1 and 100"),
        (["--expand", "some"], "random, all, none"),
        (["--name", "{prompt.__class__}"], "prompt.__class__"),
        (["--build", "often"], "neither if-missing nor never"),
        (["--workers", "1", "--ray", "auto"], "Leave one of them out"),
    ],
)
def test_wrong_options_are_told_before_anything_is_drawn(batch, tmp_path, arguments, said):
    code, _, err = batch(GOOD, *arguments)
    assert code == 1 and said in err, err
    assert not list(tmp_path.glob("out/*.png"))


def test_nothing_to_draw_is_an_error(batch):
    code, _, err = batch(BAD)
    assert code == 1 and "jobs.jsonl:1" in err


def test_where_no_job_can_be_used_each_fault_is_told(batch):
    code, _, err = batch(BAD)
    assert code == 1 and [f"jobs.jsonl:{line}" in err for line in (1, 2, 3)] == [True] * 3


def test_no_number_of_workers_is_taken_for_another(batch, monkeypatch):
    monkeypatch.undo()
    code, _, err = batch(GOOD, "--workers", "0")
    assert code == 1 and "workers=0 is not between 1 and 64" in err


def test_ctrl_c_says_how_to_go_on_and_keeps_the_sheet(batch, tmp_path, monkeypatch):
    def interrupted(shown, run, result):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sdaccel.jobs.display._Bar.image", interrupted)
        code, _, err = batch(GOOD)
    assert code == 130 and "with --resume" in err and "Traceback" not in err
    assert "a red circle" in (tmp_path / "out" / "contact-sheet.html").read_text(encoding="utf-8")
    code, out, _ = batch(GOOD, "--resume")
    assert code == 0 and "1 image there already" in out


def test_a_run_that_cannot_begin_leaves_no_worker(batch, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Here, "close", lambda self, *, now=False: closed.append(now))
    (tmp_path / "out" / ".sdaccel" / "journal.sqlite").mkdir(parents=True)
    code, _, err = batch(GOOD)
    assert code == 1 and "journal" in err and closed == [True]


def test_an_empty_pattern_is_not_taken_for_none(batch):
    code, _, err = batch(GOOD, "--name", "")
    assert code == 1 and "cannot be empty" in err


def test_an_import_that_ctrl_c_cuts_off_is_no_fault_of_ours(capsys):
    def app(arguments, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    assert console.run(app, []) == console.INTERRUPTED
    assert capsys.readouterr().err.startswith("stopped")
