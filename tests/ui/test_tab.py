"""The tab's events, called as Gradio calls them: what they change, what they refuse, what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import gradio as gr
import pytest
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file

from sdaccel.engine.store import Store
from sdaccel.errors import SettingError, StoreError
from sdaccel.lora import Lora
from sdaccel.ui import fragments as html
from sdaccel.ui import services as services_module
from sdaccel.ui import tab as module
from sdaccel.ui.preflight import Part, Preflight
from sdaccel.ui.queue import Job
from sdaccel.ui.requests import BuildRequest
from sdaccel.ui.rows import EngineRow
from sdaccel.ui.services import Host, Services, models_in
from sdaccel.ui.tab import Watchers, build_tab, drawing, guarded, watch
from sdaccel.ui.tasks import Task
from tests.integrations.test_patches import lora

EVIL = '"><script>alert(1)</script>'


@pytest.fixture
def services(tiny_store, tmp_path):
    store = shutil.copytree(tiny_store.store, tmp_path / "store")
    found = Services(Store(store), Host("test", lambda: [("tiny", str(tiny_store.model))]), tmp_path / "images")
    yield found
    found.close()


class Page:
    """The events of a tab by name, each called with plain values; updates by the component's label or kind."""

    def __init__(self, services: Services):
        self.blocks = build_tab(services)

    def call(self, name: str, *values):
        events = [event.fn for event in self.blocks.fns.values() if getattr(event.fn, "__name__", "") == name]
        assert events, name
        found = events[0](*values)
        return list(found)[-1] if hasattr(found, "__next__") else found

    def said(self, name: str, *values) -> str:
        return " ".join(str(value) for value in self.call(name, *values).values() if isinstance(value, str))


def engines(services, component):
    return [label for label in module._engine_choices(services.engines()) if label.startswith(component)]


def test_it_builds_with_a_button_for_each_thing(services):
    page = build_tab(services)
    labels = {block.value for block in page.blocks.values() if isinstance(block, gr.Button)}
    assert labels >= {"Inspect", "Verify", "Rebuild", "Delete", "Build", "Cancel build", "Build again", "Compare"}


def test_nothing_chosen_and_what_is_gone_are_said(services):
    page = Page(services)
    assert "No engine is chosen" in page.said("inspect_", [])
    assert "any more" in page.said("verify", ["UNet · gone"])
    assert "No checkpoint is chosen" in page.said("build", [], "", None, "", "", "", [], None, False)


def test_deleting_asks_first_and_says_what_was_freed(services):
    page = Page(services)
    (label,) = engines(services, "VAE encoder")
    asking = next(
        event.fn for event in page.blocks.fns.values() if getattr(event.fn, "__name__", "") == "asking"
    )  # of Rebuild
    assert "Build VAE encoder" in str(asking([label]).values())
    keys = module._engine_choices(services.engines())[label]
    before = len(services.engines())
    said = page.said("do", ["deleting", keys])
    assert "1 engine deleted" in said and "freed" in said
    assert len(services.engines()) == before - 1
    assert "no such engine any more" in page.said("do", ["deleting", keys]) and len(services.engines()) == before - 1


def test_a_rebuild_that_cannot_be_deletes_nothing(services, tmp_path, monkeypatch):
    page = Page(services)
    keys = [row.key for row in services.engines() if row.component == "vae_encoder"]
    asked = services_module.rebuild_request
    gone = str(tmp_path / "renamed disk" / "tiny")
    monkeypatch.setattr(services_module, "rebuild_request", lambda entry: replace(asked(entry), model=gone))
    assert "no such file" in page.said("do", ["rebuilding", keys])
    assert set(keys) < {row.key for row in services.engines()} and not services.queue.jobs()
    services.delete(keys)  # in another window, after it was asked in this one
    assert "has been deleted meanwhile" in page.said("do", ["rebuilding", keys])


def test_all_of_a_checkpoint_can_be_chosen_at_once(services):
    choices = module._engine_choices(services.engines())
    (everything,) = [label for label in choices if label.startswith("all of ")]
    assert sorted(choices[everything]) == sorted(row.key for row in services.engines())


def test_inspecting_shows_the_page_that_runs_no_scripts(services):
    page = Page(services)
    (label,) = engines(services, "VAE decoder")
    shown = page.said("inspect_", [label])
    assert "<iframe" in shown and " sandbox " in shown and "Where time goes" in shown


def test_problems_of_all_fields_are_said_at_once(services, tiny_store):
    page = Page(services)
    found = page.call("check", ["tiny"], "", module.CUSTOM, "60", "none", "x", ["unet"], "fp31", False)
    said = " ".join(filter(None, map(str, found.values())))
    for text in (
        "Width 60 cannot be built",
        "Batch &#x27;none&#x27; cannot be read",
        "&#x27;x&#x27; cannot be read",
        "fp31",
    ):
        assert text in said, text
    fine = page.call("check", ["tiny"], "", module.CUSTOM, "64", "1", "77", ["unet"], "fp32", False)
    said = " ".join(filter(None, map(str, fine.values())))
    assert "sd-problem" not in said and "Every figure is an estimate" in said


def test_several_checkpoints_are_a_build_each(services, tiny_store):
    page = module.BuildPage
    form = (
        ["tiny"],
        f"{tiny_store.model}\n/nowhere/x.safetensors\n",
        "sd15: text",
        "1",
        "2",
        "3",
        [],
        module.OWN,
        True,
    )
    found = page.requests(SimpleNamespace(services=services), *form)
    assert [request.model for request in found] == [str(tiny_store.model), "/nowhere/x.safetensors"]
    assert found[0] == BuildRequest(model=str(tiny_store.model), preset="sd15", allow_pickle=True)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_page_that_others_reach_changes_nothing_unless_allowed(services, monkeypatch, allowed):
    services.host = replace(services.host, remote=True)
    if allowed:
        monkeypatch.setenv("SDACCEL_ALLOW_REMOTE", "1")
    page = Page(services)
    (label,) = engines(services, "VAE encoder")
    keys = module._engine_choices(services.engines())[label]
    said = [
        page.said("asking", [label]),
        page.said("do", ["deleting", keys]),
        page.said("build", ["tiny"], "", module.CUSTOM, "64", "", "", ["no such"], module.OWN, False),
        page.said("cancel", "nothing"),
        page.said("retry", "nothing"),
        page.said("forget"),
        page.said("import_", None),
    ]
    assert [("refused" in text and "SDACCEL_ALLOW_REMOTE=1" in text) for text in said] == [not allowed] * len(said)
    assert len([row for row in services.engines() if row.key in keys]) == (0 if allowed else 1)
    if not allowed:
        with pytest.raises(SettingError, match="only the checkpoints in the list"):
            services.model("/etc")
        assert services.model("tiny") in dict(services.models()).values()


def test_a_fault_is_a_message_and_not_a_traceback():
    @guarded("here")
    def event(kind):
        raise kind("what <b>went</b> wrong")

    assert "What &lt;b&gt;went" in event(StoreError)["here"]
    said = event(ZeroDivisionError)["here"]
    assert "ZeroDivisionError: what &lt;b&gt;" in said and "fault of sdaccel" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("field", "value"), [("steps", "many"), ("seed", 1.5), ("width", float("nan")), ("guidance", object()),
                         ("height", 1e300), ("seed", -1), ("count", 0.5), ("steps", 0), ("count", 0)],
)  # fmt: skip
def test_numbers_of_a_form_are_checked(field, value):
    form = {"width": 64, "height": 64, "steps": 1, "seed": 0, "guidance": 1.0, field: value}
    with pytest.raises(SettingError):
        drawing("a circle", **form)


def test_a_hosts_checkpoints_come_before_the_demo(services, monkeypatch):
    found = [path for _, path in services.models()]
    monkeypatch.setattr(services, "host", replace(services.host, name=Host.name))
    assert found[-1] == "demo" and [path for _, path in services.models()] == ["demo", *found[:-1]]


def test_what_would_be_drawn_is_bounded(services):
    for change in ({"width": 60}, {"height": 8192}, {"count": 17}, {"prompt": " "}):
        asked = replace(drawing("a circle", 64, 64, 1, 0, 1.0), **change)
        with pytest.raises(SettingError):
            services.draw("tiny", asked)
    assert not services.tasks


def test_comparing_gives_both_images_and_what_differs(services):
    task = services.compare("tiny", drawing("circle", 64, 64, 2, 3, 5.0))
    with pytest.raises(SettingError, match="still under way"):
        services.compare("tiny", drawing("circle", 64, 64, 2, 3, 5.0))
    assert task.wait(60) and task.state == "done", task.message
    found = task.result
    assert found.by_engines and found.psnr >= found.limit and found.torch.size == found.difference.size == (64, 64)
    assert task.preview.startswith("data:image/jpeg;base64,")
    shown = module._compared(found)
    assert shown.count("<img ") == 3 and ("PSNR" in shown or "equal to the last bit" in shown)


@pytest.mark.skipif(os.name == "nt", reason="the other Python is a shell script")
@pytest.mark.parametrize("chosen", [False, True])
def test_another_python_compares_where_this_one_cannot(chosen, services, tmp_path, monkeypatch):
    from sdaccel.ui import builder_python

    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec {sys.executable} "$@"\n', encoding="utf-8")
    other.chmod(0o755)
    if chosen:
        services.work_by(str(other))
        assert services.queue.command[0] == str(other)
    else:
        monkeypatch.setattr(builder_python, "ready", lambda store, progress: str(other))
    here, request = services.studio, drawing("circle", 64, 64, 2, 3, 5.0)
    monkeypatch.setattr(here, "compare", None)
    task = services.compare("tiny", request)
    assert task.wait(120) and task.state == "done", task.message
    found = task.result
    assert found.by_engines and found.equal and found.seed == 3 and found.torch.size == (64, 64)
    assert task.preview.startswith("data:image/jpeg;base64,") and module._compared(found).count("<img ") == 3
    assert (tmp_path / "asked").read_text().split()[:2] == ["-m", "sdaccel.ui.comparison"]

    task = services.compare("tiny", drawing("circle", 64, 64, 900, 3, 5.0))
    while task.running and not task.preview:
        time.sleep(0.05)
    services.stop("compare")
    assert task.wait(10) and task.state == "cancelled"
    task = services.compare(str(tmp_path / "none.safetensors"), request)
    assert task.wait(60) and task.state == "failed" and "none.safetensors" in task.message


def test_loras_are_files_one_a_line(services, tmp_path, monkeypatch):
    style = tmp_path / "ink.safetensors"
    style.touch()
    assert services.loras("") == services.loras(None) == ()
    assert services.loras(f"\n {style}\n{style}:0.5 ") == (Lora(style), Lora(style, 0.5))
    for text, said in (
        (f"{style}:20", "not between"),
        (tmp_path / "no.safetensors", "is not there"),
        (tmp_path, "no .saf"),
    ):
        with pytest.raises(SettingError, match=said):
            services.loras(text)
    monkeypatch.setattr(services, "host", Host("test", remote=True))
    with pytest.raises(SettingError, match="opening LoRA files is refused"):
        services.loras(style)


def test_drawing_saves_what_it_drew_and_stops_when_asked(services):
    task = services.draw("tiny", drawing("circle", 64, 64, 2, 3, 5.0, 2))
    assert task.wait(60) and task.state == "done", task.message
    assert len(services.images()) == 2 and all(path.parent == services.output_folder() for path in services.images())
    long = services.draw("tiny", drawing("circle", 64, 64, 500, 3, 5.0))
    while long.running and not long.preview:
        time.sleep(0.01)
    services.stop("draw")
    assert long.wait(10) and long.state == "cancelled" and len(services.images()) == 2


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege")
def test_an_image_that_goes_away_is_left_out(services):
    (services.output_folder() / "there.png").touch()
    (services.output_folder() / "gone.png").symlink_to("nowhere")
    assert [path.name for path in services.images()] == ["there.png"]


def test_the_report_names_the_loras_of_what_ran(services, tmp_path):
    (_, model), *_ = services.models()
    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet")
    save_file(lora(unet, "unet", ("to_q",), 1), tmp_path / "ink & oil.safetensors")
    request = drawing("circle", 64, 64, 1, 3, 5.0)
    task = services.draw("tiny", replace(request, loras=services.loras(tmp_path / "ink & oil.safetensors:0.5")))
    assert task.wait(60) and task.state == "done", task.message
    told = html.report(task.result)
    assert told.count(" with ink &amp; oil:0.5</td>") == 1


def test_verifying_runs_as_a_program_with_progress(services):
    keys = [row.key for row in services.engines() if row.component == "text_encoder"]
    task = services.verify(keys)
    assert task.wait(120) and task.state == "done", task.message
    (document,) = task.result
    assert document["ok"] and {check["engine"] for check in document["components"]} == set(keys)
    assert "Equal to torch" in html.verification(task.result)


def test_a_watcher_tells_each_change_once_and_ends_when_nothing_is_under_way(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.05)
    values = iter([1, 1, 2, 2])
    latest = {}

    def changes(sent):
        latest["x"] = next(values, 2)
        return {"x": latest["x"]} if module.fresh(sent, "x", latest["x"]) else {}

    watchers = Watchers()
    assert list(watch(watchers, changes, lambda: False)) == [{"x": 1}, {"x": 2}]
    assert not watchers._alive
    marks = [watchers.enter() for _ in range(module.MOST_WATCHERS + 1)]
    assert not watchers.stays(marks[0]) and watchers.stays(marks[-1])


def test_names_of_others_are_text():
    job = Job(id="1", request=BuildRequest(model=EVIL), state="failed", message=EVIL, stage=EVIL, notes=(EVIL,))
    row = EngineRow(
        "0" * 64, EVIL, EVIL, (EVIL,), (EVIL,), (EVIL,), EVIL, EVIL, 1, 1, None, None, "broken", EVIL
    )  # fmt: skip
    part = Part(EVIL, "fp32", 1, 1.0, "table", None, False)
    needs = {name: None for name in Preflight.__dataclass_fields__} | {
        "parts": (part,), "disk": 1, "disk_free": 1, "memory": 1, "seconds": 1.0, "seconds_from": EVIL, "device": EVIL,
        "covered": (), "warnings": (EVIL,), "notes": (EVIL,),
    }  # fmt: skip
    check = {
        "component": EVIL,
        "engine": EVIL,
        "shape": {EVIL: 1},
        "error": None,
        "limit": 1,
        "problem": EVIL,
        "ok": False,
    }
    pieces = [
        html.engines([row]),
        html.jobs_now([replace(job, state="running")]),
        html.jobs_past([job], {"1": EVIL}),
        html.log(EVIL),
        html.notice(EVIL),
        html.problem(EVIL),
        html.needs(EVIL, Preflight(**needs)),
        html.verification([{"origin": EVIL, "components": [check], "image": None}]),
        html.frame(EVIL, EVIL),
        html.task(
            SimpleNamespace(running=True, fraction=0, title=EVIL, stage=EVIL, seconds=1, seconds_left=1, preview="")
        ),
    ]
    for piece in pieces:
        assert "alert(1)" in piece and EVIL not in piece and "<script" not in piece


def test_a_task_tells_its_error_with_the_hint():
    def work(task):
        raise SettingError("no such thing.", hint="Try another.")

    task = Task("the thing", work)
    assert task.wait(5) and (task.state, task.message) == ("failed", "no such thing. Try another.")
    assert "Try another" in html.task(task)


def test_checkpoints_are_found_in_a_folder(tmp_path):
    for name in (
        "a.safetensors",
        "more/b.safetensors",
        "more/deep/c.safetensors",
        "pipe/unet/x.safetensors",
        "note.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "pipe" / "model_index.json").write_text("{}", encoding="utf-8")
    assert {label for label, _ in models_in(tmp_path)} == {"a.safetensors", "more/b.safetensors", "pipe"}


BLOCKED = """
import sys
from pathlib import Path

class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "sdaccel.export.to_onnx":
            raise AssertionError("the exporter is imported in the process of the pages")

sys.meta_path.insert(0, Block())
from sdaccel.engine.store import Store
from sdaccel.ui.requests import BuildRequest
from sdaccel.ui.services import Host, Services
from sdaccel.ui.tab import build_tab

services = Services(Store(sys.argv[1]), Host("test", lambda: [("tiny", sys.argv[2])]))
page = build_tab(services)
request = BuildRequest(model=sys.argv[2], resolutions=("64",), components=("text_encoder",))
assert len(services.engines()) == 4 and services.check(request) [0] == {}
(job,) = services.build([request])
services.cancel(job.id)
services.rebuild([row.key for row in services.engines() if row.component == "text_encoder"])
for job in services.queue.jobs():
    services.cancel(job.id)
for entry in page.fns.values():
    assert callable(entry.fn)
services.close()
print("fine")
"""


def test_the_process_of_the_pages_never_imports_the_exporter(tiny_store, tmp_path):
    store = shutil.copytree(tiny_store.store, tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(store), str(tiny_store.model)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-2000:]
