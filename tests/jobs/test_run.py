"""Runs: what is drawn together, once, and what becomes of crashes. The workers here paint without a model."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sdaccel.errors import StoreError
from sdaccel.jobs.display import summary_lines
from sdaccel.jobs.job import Job
from sdaccel.jobs.journal import Journal
from sdaccel.jobs.run import Run
from sdaccel.jobs.storage import ABANDONED, OWN, DiskFull, Folder
from sdaccel.jobs.task import BatchTask, Options
from tests.jobs.drawing import AT_ONCE, Painters, jobs, pixels

ROOT = Path(__file__).parents[2]


def draw(folder: Path, wanted: list[Job], painters: Painters | None = None, **options) -> tuple[Run, Painters]:
    painters = painters or Painters(Options(out=str(folder)))
    run = Run(wanted, Options(out=str(folder)), workers=painters, **options)
    run.results = list(run)  # type: ignore[attr-defined]
    return run, painters


def test_each_image_is_drawn_once_in_full_batches(tmp_path):
    run, painters = draw(tmp_path, [Job("a", seed=1, n=4), Job("b", seed=7, n=3)])
    assert [len(batch.images) for batch in painters.drawn] == [3, 3, 1]
    assert sorted(result.index for result in run.results) == [1, 2, 3, 4, 5, 6, 7]
    assert len(pixels(tmp_path)) == 7
    assert run.summary.ok and run.summary.drawn == run.summary.asked == 7 and painters.closed == 1
    assert [entry.name for entry in run.entries()] == sorted(pixels(tmp_path))


def test_what_cannot_be_drawn_together_is_not(tmp_path):
    base = Job("a", seed=1)
    different = [
        replace(base, width=16),
        replace(base, steps=3),
        replace(base, guidance=2.0),
        replace(base, scheduler="ddim"),
        replace(base, negative_prompt="x"),
        replace(base, model="other"),
    ]
    _, painters = draw(tmp_path, [base, *different, replace(base, seed=2, prompt="b")])
    assert sorted(len(batch.images) for batch in painters.drawn) == [1] * len(different) + [2]


def test_models_then_sizes_come_in_a_row(tmp_path):
    kinds = zip("xyxyxy", (8, 8, 16, 16, 8, 8), strict=True)
    wanted = [Job("a", seed=i, model=model, width=width) for i, (model, width) in enumerate(kinds)]
    _, painters = draw(tmp_path, wanted)
    order = [(batch.model, batch.images[0].job.width) for batch in painters.drawn]
    assert order == [("x", 8), ("x", 16), ("y", 8), ("y", 16)]
    assert painters.prepared == ["x", "y"]


def test_the_same_image_twice_is_drawn_once_and_said(tmp_path):
    run, _ = draw(tmp_path, [Job("a", seed=1, n=2), Job("a", seed=2), Job("b", seed=2)])
    assert run.summary.asked == run.summary.drawn == 3 and run.summary.repeated == 1


def test_a_second_run_needs_resume_and_draws_what_is_missing(tmp_path):
    draw(tmp_path, jobs(3))
    before = pixels(tmp_path)
    with pytest.raises(StoreError, match=r"6 of these 9 images are in .* already.*--resume"):
        draw(tmp_path, jobs(5))
    run, painters = draw(tmp_path, jobs(5), resume=True)
    assert run.summary.before == 6 and run.summary.drawn == 3
    assert {image.job.seed for batch in painters.drawn for image in batch.writing} == {3, 4, 5}
    assert before.items() <= pixels(tmp_path).items() and len(pixels(tmp_path)) == 9


def test_nothing_that_is_there_is_overwritten(tmp_path):
    (tmp_path / "00001-1-a.png").write_bytes(b"mine")
    (tmp_path / "00002-2-A.json").write_bytes(b"mine too")
    draw(tmp_path, [Job("a", seed=1, n=2)])
    assert (tmp_path / "00001-1-a.png").read_bytes() == b"mine"
    assert {"00001-1-a-2.png", "00002-2-a-2.png"} <= {path.name for path in tmp_path.iterdir()}


def test_a_file_that_came_in_the_meantime_is_not_overwritten(tmp_path):
    def meanwhile(batch: BatchTask) -> None:
        (tmp_path / batch.images[0].name).write_bytes(b"mine")

    run, _ = draw(tmp_path, [Job("a", seed=1)], Painters(Options(out=str(tmp_path)), meanwhile))
    assert (tmp_path / "00001-1-a.png").read_bytes() == b"mine"
    assert [result.name for result in run.results] == ["00001-1-a-2.png"]


def test_other_engine_settings_are_not_mixed_in(tmp_path):
    draw(tmp_path, [Job("a", seed=1)])
    others = Painters(Options(out=str(tmp_path)))
    others.settings = {"backend": "dabblers"}
    with pytest.raises(StoreError, match="were drawn with painters, not with dabblers"):
        draw(tmp_path, [Job("a", seed=1), Job("b", seed=1)], others, resume=True)


def crashing(*seeds: int) -> Callable[[BatchTask], Exception | None]:
    def fault(batch: BatchTask) -> Exception | None:
        return ValueError("no such colour") if any(image.job.seed in seeds for image in batch.images) else None

    return fault


def test_a_job_that_crashes_twice_is_set_aside_and_takes_no_other_along(tmp_path):
    run, painters = draw(tmp_path, [Job("a", seed=1, n=5)], Painters(Options(out=str(tmp_path)), crashing(2)))
    tried = Counter(tuple(image.job.seed for image in batch.images) for batch in painters.drawn)
    assert tried == {(1, 2, 3): 1, (1,): 1, (2,): 1, (3,): 1, (4, 5): 1}
    assert run.summary.drawn == 4 and run.summary.failed == 1 and not run.summary.ok
    assert run.summary.errors == {"ValueError: no such colour": 1}
    assert [result.error for result in run.results if not result.ok] == ["ValueError: no such colour"]
    assert [entry.error for entry in run.entries()].count("ValueError: no such colour") == 1


def test_what_was_set_aside_stays_so_until_retry(tmp_path):
    wanted = [Job("a", seed=1, n=3)]
    draw(tmp_path, wanted, Painters(Options(out=str(tmp_path)), crashing(2)))
    run, painters = draw(tmp_path, wanted, resume=True)
    assert not painters.drawn and run.summary.failed == 1 and run.summary.before == 2
    run, _ = draw(tmp_path, wanted, retry=True)
    assert run.summary.drawn == 1 and run.summary.failed == 0 and len(pixels(tmp_path)) == 3


def test_a_full_disk_stops_the_run_and_resume_goes_on(tmp_path, monkeypatch):
    write = Folder.write
    room = [4]

    def full(self, name, data, ours):
        room[0] -= 1
        if room[0] < 0:
            raise DiskFull("the disk is full.")
        return write(self, name, data, ours)

    monkeypatch.setattr(Folder, "write", full)

    class Careful(Painters):
        def submit(self, batch: BatchTask) -> None:
            try:
                super().submit(batch)
            except DiskFull as error:
                from sdaccel.jobs.pool import crash

                self.events.put(crash(batch, error))

    run, _ = draw(tmp_path, jobs(6), Careful(Options(out=str(tmp_path))))
    assert run.summary.stopped == "the disk is full." and not run.summary.ok and run.summary.missing > 0
    monkeypatch.undo()
    again, _ = draw(tmp_path, jobs(6), resume=True)
    assert again.summary.ok and again.summary.before + again.summary.drawn == 12
    draw(tmp_path / "whole", jobs(6))
    assert pixels(tmp_path) == pixels(tmp_path / "whole")


def test_a_disk_that_is_full_is_told_in_our_words(tmp_path, monkeypatch):
    folder = Folder(tmp_path)

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sdaccel.jobs.storage.os.fsync", fsync)
    with pytest.raises(DiskFull, match=r"is full.*--resume"):
        folder.write("a.png", b"data", lambda path: False)
    assert not list(tmp_path.glob("*.png")) and not list((tmp_path / OWN / "parts").iterdir())


@pytest.fixture(params=[errno.ENOTSUP, errno.EINVAL])
def no_links(request, monkeypatch):
    def link(source, target):
        raise OSError(request.param, "not supported")

    monkeypatch.setattr("sdaccel.jobs.storage.os.link", link)


def test_a_name_is_given_back_where_the_file_cannot_have_it(tmp_path, monkeypatch, no_links):
    def replace(self, target):
        raise PermissionError(errno.EACCES, "held by another program")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(StoreError, match="held by another program"):
        Folder(tmp_path).write("a.png", b"1", lambda path: False)
    assert [path.name for path in tmp_path.iterdir()] == [OWN]


def test_a_disk_without_links_is_written_too(tmp_path, no_links):
    folder = Folder(tmp_path)
    assert [folder.write("a.png", data, lambda path: False) for data in (b"1", b"2")] == ["a.png", "a-2.png"]
    assert (tmp_path / "a.png").read_bytes() == b"1" and (tmp_path / "a-2.png").read_bytes() == b"2"


def test_batches_of_a_living_process_are_left_to_it(tmp_path):
    class Dead(BaseException):
        pass

    def die(batch: BatchTask) -> Exception | None:
        if batch.images[0].job.seed == 4:
            raise Dead
        return None

    with pytest.raises(Dead):
        draw(tmp_path, [Job("a", seed=1, n=6)], Painters(Options(out=str(tmp_path)), die))
    other = Journal(tmp_path / OWN)
    (first, second) = (batch[0] for batch in other._all("SELECT id FROM batches ORDER BY id"))
    keys = set(other.states(second))
    assert [len(task.images) for task in other.claim(second, keys) or []] == [AT_ONCE]
    mine = Journal(tmp_path / OWN)
    assert mine.claim(second, keys) is None
    other.close()
    assert [len(task.images) for task in mine.claim(second, keys) or []] == [AT_ONCE]
    mine.close()
    assert first != second


def run_child(folder: Path, count: int, line: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.jobs.drawing", str(folder), str(count), str(line)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(300)
def test_killed_at_any_point_each_image_comes_once_and_is_the_same(tmp_path):
    count = 6
    draw(tmp_path / "whole", jobs(count))
    whole = pixels(tmp_path / "whole")
    lines = random.Random(5)
    kills = 0
    for chain in range(100):
        folder = tmp_path / f"killed {chain}"
        for _ in range(8):
            kills += (killed := run_child(folder, count, lines.randint(1, 1500)).returncode != 0)
            if not killed:
                break
        done = run_child(folder, count, 0)
        assert done.returncode == 0, done.stderr
        assert pixels(folder) == whole
        assert run_child(folder, count, 0).stdout.split()[:2] == [str(len(whole)), "0"]
        if kills >= 50:
            return
    raise AssertionError(f"only {kills} kills")


@pytest.mark.timeout(120)
def test_two_processes_on_one_folder_overwrite_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.jobs.drawing", str(tmp_path), "12", "0"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=100)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    names = pixels(tmp_path)
    draw(tmp_path / "whole", jobs(12))
    assert names == pixels(tmp_path / "whole")
    assert sum(int(drawn) for _, drawn, _ in told) == len(names)


def test_an_image_whose_file_is_gone_is_drawn_again_and_said(tmp_path):
    draw(tmp_path, jobs(4))
    before = pixels(tmp_path)
    for name in list(before)[1:3]:
        (tmp_path / name).unlink()
    run, painters = draw(tmp_path, jobs(4), resume=True)
    assert pixels(tmp_path) == before and run.summary.drawn == 2 and run.summary.before == 5
    assert run.summary.ok and run.summary.notes == {"gone from the folder, and drawn again": 2}
    again, painters = draw(tmp_path, jobs(4), resume=True)
    assert again.summary.before == 7 and not painters.drawn and not again.summary.notes


def test_resuming_with_another_model_is_said(tmp_path):
    draw(tmp_path, [Job("a", seed=1, n=2)])
    run, _ = draw(tmp_path, [Job("a", seed=1, n=2, model="other")], resume=True)
    (note,) = run.summary.notes.items()
    assert "another model" in note[0] and note[1] == 2 and run.summary.drawn == 2 and len(pixels(tmp_path)) == 4


def test_a_journal_that_is_none_is_told(tmp_path):
    (tmp_path / OWN / "journal.sqlite").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"the journal .* cannot be used"):
        Journal(tmp_path / OWN)
    assert not list((tmp_path / OWN / "owners").iterdir())


def test_what_a_killed_process_was_writing_is_cleared_away_in_time(tmp_path):
    Folder(tmp_path)
    parts = tmp_path / OWN / "parts"
    for name, age in (("old", 2 * ABANDONED), ("new", 0)):
        (parts / name).write_bytes(b"half")
        os.utime(parts / name, (time.time() - age,) * 2)
    Folder(tmp_path)
    assert [path.name for path in parts.iterdir()] == ["new"]


def test_a_plan_is_safe_from_a_loss_of_power_and_each_image_does_not_wait_for_the_disk(tmp_path):
    journal = Journal(tmp_path / OWN)
    with journal.planning():
        assert journal._one("PRAGMA synchronous") == (2,)
    assert journal._one("PRAGMA synchronous") == (1,)
    journal.close()


def test_images_that_are_there_in_another_format_are_told(tmp_path):
    draw(tmp_path, jobs(4))
    chosen = Options(out=str(tmp_path), format="webp")
    run = Run(jobs(4), chosen, workers=Painters(chosen), resume=True)
    assert not list(run) and run.summary.before == 7
    assert run.summary.notes == {"there already as .png, so not drawn as .webp": 7}


def test_a_summary_of_thousands_of_notes_is_short(tmp_path):
    run = Run([], Options(str(tmp_path)))
    run.summary.notes = {f"note {number}": 1 for number in range(3000)} | {"often": 9}
    lines = [line for line in summary_lines(run) if line.startswith("note")]
    assert len(lines) == 21 and lines[0] == "note, 9 images: often" and "2981 more" in lines[-1]
