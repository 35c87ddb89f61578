"""Job files: what becomes of a line, which line is said to be wrong, and that a bad one is never a prompt."""

from __future__ import annotations

import io
import json
import random
import sys
import time
import tracemalloc
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from PIL import Image

from sdaccel import metadata
from sdaccel.draw import MAX_SEED, Request
from sdaccel.jobs import fields as job_fields
from sdaccel.jobs import json_files, lines, reading, spreadsheets
from sdaccel.jobs.expand import combinations, literal
from sdaccel.jobs.job import MOST_IMAGES, Job, JobError
from sdaccel.jobs.reading import Reading, jobs_from, read_defaults, read_jobs
from sdaccel.jobs.sidecar import to_sidecar
from sdaccel.lora import Lora


@pytest.fixture
def read(tmp_path):
    """read(name, text or bytes, ...) of a file in a folder where a.png, m.png, a.safetensors and b.safetensors are."""
    for name in ("a.png", "m.png", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")

    def read(name: str, content: str | bytes, *args: object, **options: object) -> Reading:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_jobs(path, *args, **options)

    return read


def prompts(found: Reading) -> list[str]:
    assert not found.faults, found.faults
    return [job.prompt for job in found.jobs]


def faults(found: Reading) -> list[str]:
    return [str(fault) for fault in found.faults]


# ---- one line


def test_every_field_of_a_job_can_be_written():
    assert set(job_fields.NAMES) == {field.name for field in fields(Job)} - {"source", "batch", "position"}


def test_a_whole_job(read, tmp_path):
    line = {
        "prompt": "a cat",
        "negative_prompt": "dog",
        "seed": 7,
        "steps": 20.0,
        "guidance": 5,
        "scheduler": "euler",
        "width": 512,
        "height": 768,
        "n": 2,
        "init_image": "a.png",
        "mask": str(tmp_path / "m.png"),
        "strength": 1,
        "loras": ["a.safetensors:0.5", {"path": "b.safetensors"}, {"path": "b.safetensors", "scale": -2}],
        "model": "x.safetensors",
    }
    found = read("jobs.jsonl", json.dumps(line))
    assert not found.faults
    a, b = (tmp_path / f"{name}.safetensors" for name in "ab")
    assert found.jobs == [
        Job(
            "a cat", "dog", 7, 20, 5.0, "euler", 512, 768, 2, tmp_path / "a.png", tmp_path / "m.png", 1.0,
            (Lora(a, 0.5), Lora(b), Lora(b, -2.0)), "x.safetensors", source="jobs.jsonl:1",
        )
    ]  # fmt: skip
    assert isinstance(found.jobs[0].steps, int) and isinstance(found.jobs[0].guidance, float)
    assert read("again.jsonl", json.dumps(found.jobs[0].to_json())).jobs == [
        replace(found.jobs[0], source="again.jsonl:1")
    ]


BAD = [
    ('{"prompt": "x", "steps": 20.5}', "steps must be a whole number, not 20.5."),
    ('{"prompt": "x", "steps": true}', "steps must be a whole number, not true."),
    ('{"prompt": "x", "steps": "20"}', 'steps must be a whole number, not "20".'),
    ('{"prompt": "x", "steps": null}', "steps must be a whole number, not null."),
    ('{"prompt": "x", "steps": 0}', "steps 0 is not between 1 and 1000."),
    ('{"prompt": "x", "steps": 1e300}', "steps is too large a number."),
    ('{"prompt": "x", "steps": 1e999}', "steps must be a whole number, not Infinity."),
    ('{"prompt": "x", "guidance": 1e999}', "guidance must be a finite number."),
    ('{"prompt": "x", "guidance": NaN}', "NaN is no number that JSON knows."),
    ('{"prompt": "x", "guidance": -Infinity}', "-Infinity is no number that JSON knows."),
    ('{"prompt": "x", "guidance": false}', "guidance must be a number, not false."),
    ('{"prompt": "x", "guidance": 101}', "guidance 101.0 is not between 0 and 100."),
    ('{"prompt": "x", "strength": -0.1}', "strength -0.1 is not between 0 and 1."),
    ('{"prompt": "x", "n": 1001}', "n 1001 is not between 1 and 1000."),
    ('{"prompt": "x", "seed": -1}', "seed -1 is not between 0 and 4294967295."),
    ('{"prompt": "x", "seed": 4294967296}', "seed 4294967296 is not between 0 and 4294967295."),
    ('{"prompt": "x", "seed": 4294967295, "n": 2}', "seed 4294967295 is too high for 2 images"),
    ('{"prompt": "x", "seed": 123456789012345678901}', "12345678901234567890... is too large a number."),
    ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "99999999999999999999... is too large a number."),
    ('{"prompt": "x", "width": 100}', "width 100 cannot be built: sides are multiples of 8 from 64 to 8192."),
    ('{"prompt": "x", "height": 100000}', "height 100000 cannot be built"),
    ('{"prompt": "x", "height": 0}', "height must be a number of pixels, not 0."),
    ('{"prompt": "x", "scheduler": "eulr"}', "there is no scheduler 'eulr': ddim,"),
    ('{"prompt": "x", "scheduler": ""}', "scheduler is empty"),
    ('{"prompt": "x", "model": 5}', "model must be text, not 5."),
    ('{"prompt": 5}', "prompt must be text, not 5."),
    ('{"prompt": null}', "prompt must be text, not null."),
    ('{"prompt": []}', "prompt is an empty list"),
    ('{"prompt": [["x"]]}', 'prompt must be text, not ["x"].'),
    ('{"prompt": {"a": "b"}}', 'prompt must be text, not {"a": "b"}.'),
    ('{"prompt": "a\\u0000b"}', "prompt: there is a NUL character in column 2."),
    ('{"prompt": "\\ud800"}', "prompt: there is half a character (U+D800) in column 1."),
    ('{"prompt": "a {b|c"}', "prompt: the brace in column 3 is never closed."),
    ('{"prompt": "x", "negative_prompt": "b}"}', "negative_prompt: the brace in column 2 closes nothing."),
    ("{}", "there is no prompt."),
    ('{"steps": 5}', "there is no prompt."),
    ('{"promt": "x"}', 'there is no field "promt". Did you mean prompt?'),
    ('{"prompt": "x", "negative": "y"}', 'there is no field "negative". Did you mean negative_prompt?'),
    ('{"prompt": "x", "Seed": 1}', 'there is no field "Seed". Did you mean seed?'),
    ('{"prompt": "x", "cfg": 7}', 'there is no field "cfg". The fields are prompt, negative_prompt, seed,'),
    ('{"prompt": "x", "source": "y"}', 'there is no field "source".'),
    ('{"prompt": "x", "batch": []}', 'there is no field "batch".'),
    ('{"prompt": "x", "position": 0}', 'there is no field "position".'),
    ('{"prompt": "x", "\\u001b[31m": 0}', 'there is no field "\\u001b[31m".'),
    ('{"prompt": "x", "mask": "m.png"}', "a mask needs an init_image."),
    ('{"prompt": "x", "init_image": ["a.png", null], "mask": "m.png"}', "a mask needs an init_image."),
    ('{"prompt": "x", "init_image": "nope.png"}', "nope.png is not there."),
    ('{"prompt": "x", "init_image": "' + "n" * 5000 + '"}', "init_image"),
    ('{"prompt": "x", "init_image": "~nobody-here/a.png"}', "is not there."),
    ('{"prompt": "x", "init_image": "."}', "is not there."),
    ('{"prompt": "x", "loras": "a.safetensors"}', 'loras must be a list such as ["style.safetensors:0.8"]'),
    ('{"prompt": "x", "loras": ["a.ckpt"]}', "a.ckpt is no .safetensors file"),
    ('{"prompt": "x", "loras": ["c.safetensors"]}', "c.safetensors is not there."),
    ('{"prompt": "x", "loras": ["~nobody-here/c.safetensors"]}', "is not there."),
    ('{"prompt": "x", "loras": ["a.safetensors:11"]}', "is not between -10 and 10"),
    ('{"prompt": "x", "loras": [{"path": "a.safetensors", "scale": "1"}]}', 'loras: scale must be a number, not "1".'),
    ('{"prompt": "x", "loras": [{"path": "a.safetensors", "size": 1}]}', "and nothing else."),
    ('{"prompt": "x", "loras": [{"scale": 1}]}', "must have a path"),
    ('{"prompt": "x", "loras": [["a.safetensors"], "b.safetensors"]}', "loras must be text"),
    ('{"prompt": "x", "prompt": "y"}', '"prompt" is there twice.'),
    ('{"prompt": "x"', "this is no JSON: Expecting ',' delimiter"),
    ("{'prompt': 'x'}", "this is no JSON: Expecting property name"),
    ('{"prompt": "x"} {"prompt": "y"}', "this is no JSON: Extra data (column 17)."),
    ('{"prompt": "a\tb"}', "this is no JSON: Invalid control character at (column 14)."),
    ("a cat", "this is no JSON"),
    ("\f", "this is no JSON"),
    ('"a cat"', 'a job must be an object such as {"prompt": "a cat"}, not "a cat".'),
    ('["a cat"]', "a job must be an object"),
    ("[" * 100_000, "its lists or objects nest too deeply."),
    ('{"prompt": "' + "x" * lines.LONGEST + '"}', "the line is longer than 1,000,000 characters."),
    ('{"sdaccel": "1", "job": {"prompt": "x"}}', "job: seed is missing."),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_bad_lines_are_named_and_the_others_are_read(read, end):
    content = end.join(["# bad ones", "", *(f'{line}{end}{{"prompt": "good"}}' for line, _ in BAD)])
    found = read("jobs.jsonl", content)
    assert [job.source for job in found.jobs] == [f"jobs.jsonl:{4 + 2 * at}" for at in range(len(BAD))]
    assert {job.prompt for job in found.jobs} == {"good"}
    for at, ((line, said), fault) in enumerate(zip(BAD, found.faults, strict=True)):
        assert fault.source == f"jobs.jsonl:{3 + 2 * at}", line[:80]
        assert str(fault).startswith(f"{fault.source}: ") and said in str(fault), (line[:80], str(fault))
        assert "\n" not in str(fault) and "\x1b" not in str(fault)


def test_every_fault_of_a_line_is_kept(read):
    found = read("jobs.jsonl", '{"prompt": 1, "steps": 0, "sead": 4}')
    assert len(found.faults) == 3 and {fault.source for fault in found.faults} == {"jobs.jsonl:1"}


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        (b'{"prompt": "a\xff"}', 1, "byte 14 of the line (0xff) is no UTF-8"),
        (b'{"prompt": "\xc3\xa4\xe9"}', 1, "byte 15 of the line (0xe9) is no UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', 1, "byte 13 of the line (0xed) is no UTF-8"),
        (b'{"prompt": "a\0"}', 1, "a NUL character in column 14"),
        (b'\n\n{"prompt": "a\xff"}', 3, "no UTF-8"),
        ('{"prompt": "a"'.encode("utf-16") + b"\x00\xd8", 1, "half a character"),
        ('{"prompt": "a"}\n'.encode("utf-16") + b"\x00", 2, "cannot be read from here on"),
        ('{"prompt": "a"}'.encode("utf-16-le"), 1, "NUL character in column 2"),
        ('{"prompt": "a"}'.encode("utf-32"), 1, "NUL character"),
        (random.Random(5).randbytes(3000).replace(b"\r", b"").replace(b"\n", b""), 1, "no UTF-8"),
    ],
)
def test_bytes_that_are_no_text(read, content, line, said):
    found = read("jobs.jsonl", content)
    assert found.faults[0].source == f"jobs.jsonl:{line}" and said in str(found.faults[0])


def test_bytes_that_are_no_text_elsewhere(read):
    for name, content in (
        ("p.txt", b"a\n\xff\nb"),
        ("l.json", b'[{"prompt": "a"},\n{"prompt": "\xff"}, {"prompt": "b"}]'),
    ):
        found = read(name, content)
        assert [job.prompt for job in found.jobs] == ["a", "b"]
        assert [fault.source for fault in found.faults] == [f"{name}:2"] and "(0xff) is no UTF-8" in faults(found)[0]


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0b", "\f", "\x1c", "\x1e"])
def test_only_line_ends_end_lines(read, sign):
    assert prompts(read("jobs.jsonl", json.dumps({"prompt": f"a{sign}b"}) + '\n{"prompt": "c"}')) == [f"a{sign}b", "c"]
    assert prompts(read("jobs.txt", f"a{sign}b\rc\r\nd")) == [f"a{sign}b", "c", "d"]
    assert prompts(read("jobs.csv", f"prompt,seed\na{sign}b,1\nc,2")) == [f"a{sign}b", "c"]
    found = read("bad.txt", f"a{sign}b\n--bad")
    assert [fault.source for fault in found.faults] == ["bad.txt:2"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_with_a_mark(read, encoding):
    assert prompts(read("a.jsonl", '{"prompt": "Kätzchen"}\n{"prompt": "猫 🐈"}'.encode(encoding))) == [
        "Kätzchen",
        "猫 🐈",
    ]
    assert prompts(read("a.json", '[{"prompt": "猫 🐈"}]'.encode(encoding))) == ["猫 🐈"]
    assert prompts(read("a.txt", "Kätzchen\r\n猫 🐈\r\n".encode(encoding))) == ["Kätzchen", "猫 🐈"]
    assert prompts(read("a.csv", "prompt\tseed\r\n猫 🐈\t5\r\n".encode(encoding))) == ["猫 🐈"]


def test_files_that_were_joined_have_marks_in_the_middle(read):
    line = '{"prompt": "a"}\n'.encode("utf-8-sig")
    assert prompts(read("a.jsonl", line + line)) == ["a", "a"]


# ---- .json


def test_a_list_of_jobs(read):
    found = read(
        "jobs.json", '\n[\n {"prompt": "a"},\n {"prompt": 5},\n\n {"prompt": "b",\n "seed": NaN}, 5,\n {"prompt": "c"}]'
    )
    assert [(job.prompt, job.source) for job in found.jobs] == [("a", "jobs.json:3"), ("c", "jobs.json:8")]
    assert [fault.source for fault in found.faults] == ["jobs.json:4", "jobs.json:6", "jobs.json:7"]
    assert prompts(read("job.json", '{"prompt": "a"}')) == ["a"]


@pytest.mark.parametrize(
    ("text", "good", "line", "said"),
    [
        (
            '[{"prompt": "a"},\n{"prompt": ]',
            1,
            2,
            "this is no JSON: Expecting value (column 12). What follows was not read.",
        ),
        ('[{"prompt": "a"}\n\n', 1, 2, "a comma or ] must follow"),
        ('[{"prompt": "a"},\n\n', 1, 2, "the list is never closed"),
        ('[{"prompt": "a"},\n]', 1, 2, "a comma after the last job"),
        ('[{"prompt": "a"}]\n]', 1, 2, "something follows the end"),
        ('{"prompt": "a"}\n{"prompt": "b"}', 1, 2, ".jsonl"),
        ('\n"a"', 0, 2, "must be a list of jobs or one object"),
        ('[{"prompt": "a"},\n' + "[" * 100_000, 1, 2, "nest too deeply"),
        ('[{"prompt": "a"},\n{"prompt": "b\0"}, {"prompt": "c"},\n{"prompt": "d"}]', 3, 2, "line 2: there is a NUL"),
    ],
)
def test_a_list_that_is_broken(read, text, good, line, said):
    found = read("jobs.json", text)
    assert len(found.jobs) == good
    assert found.faults[0].source == f"jobs.json:{line}" and said in str(found.faults[0])


def test_a_list_may_be_one_long_line_but_has_an_end(read, monkeypatch):
    assert len(read("jobs.json", json.dumps([{"prompt": "x" * 100_000}] * 20)).jobs) == 20
    monkeypatch.setattr(json_files, "LARGEST", 1000)
    with pytest.raises(JobError, match="more than 1,000 characters"):
        read("jobs.json", '[{"prompt": "a"}' + "\n" * 1000 + "]")


# ---- .csv


def test_what_spreadsheets_write(read, tmp_path):
    text = (
        "prompt;negative_prompt;seed;guidance;n;loras;;\r\n"
        '"a cat; ""big""";"two\r\nlines";20,0;7,5;2;" a.safetensors:0.5; b.safetensors";;\r\n'
        ";;;;;;;\r\n"
        "\r\n"
        "  a dog ;;;;;;;\r\n"
    )
    found = read("jobs.csv", text, {"steps": 30, "seed": 9})
    assert not found.faults
    cat, dog = found.jobs
    loras = (Lora(tmp_path / "a.safetensors", 0.5), Lora(tmp_path / "b.safetensors"))
    assert cat == Job('a cat; "big"', "two\nlines", 20, 30, 7.5, n=2, loras=loras, source="jobs.csv:2")
    assert dog == Job("a dog", seed=9, steps=30, source="jobs.csv:6")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,b,1", "there are 3 cells for 2 fields"),
        ("a", "there are 1 cells for 2 fields"),
        ("a,x", 'seed must be a whole number, not "x".'),
        ("a,1.5", 'seed must be a whole number, not "1.5".'),
        ("a,0x10", "seed must be a whole number"),
        ("a,1_000", "seed must be a whole number"),
        ("a,4.29E+09", "The spreadsheet has rounded it"),
        ("a,TRUE", "seed must be a whole number"),
        ("a,-1", "seed -1 is not between"),
        ("a,٣", "seed must be a whole number"),
        ("a," + "9" * 30, "seed is too large a number"),
        (",5", "there is no prompt"),
        ('"a" b,5', "this is no record: ',' expected after '\"'"),
        ("a\0b,5", "NUL character in column 2"),
        ("x" * 200_000 + ",5", "larger than field limit"),
        ("x" * lines.LONGEST + ",5", "the line is longer than"),
    ],
)
def test_bad_rows(read, row, said):
    found = read("jobs.csv", f"prompt,seed\ngood,1\n{row}\nfine,2\n")
    assert [job.prompt for job in found.jobs] == ["good", "fine"]
    assert [fault.source for fault in found.faults] == ["jobs.csv:3"] and said in faults(found)[0]


def test_a_quote_that_is_not_closed_names_the_lines_it_takes_along(read):
    found = read("jobs.csv", 'prompt,seed\na,1\n"b,2\nc,3\n')
    assert prompts(Reading(found.jobs)) == ["a"]
    assert "jobs.csv:3: this is no record (lines 3 to 4)" in faults(found)[0]


def test_a_record_over_many_lines_is_given_up(read, monkeypatch):
    monkeypatch.setattr(spreadsheets, "LONGEST", 3000)
    found = read("jobs.csv", 'prompt,seed\n"' + "lost,1\n" * 400 + "good,2\n" * 100)
    assert [fault.source for fault in found.faults] == ["jobs.csv:2"]
    assert "no record (lines 2 to 430): the record is longer than" in faults(found)[0]
    assert found.jobs[-1].prompt == "good"


def test_bad_bytes_in_a_cell_of_many_lines_spoil_that_row_alone(read):
    found = read("jobs.csv", b'prompt,seed\n"a\n\xff\nb",1\nc,2\n')
    assert [job.prompt for job in found.jobs] == ["c"]
    assert faults(found) == ["jobs.csv:2: line 3: byte 1 of the line (0xff) is no UTF-8. Save the file as UTF-8."]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("prompt,sead", 'there is no field "sead". Did you mean seed?'),
        ("prompt,seed,seed", "the field seed is there twice"),
        ("", "the first line must be the names of the fields"),
        ("a cat on a mat", "the first line must be the names of the fields"),
        ("prompt\0", "NUL character"),
        ("prompt" + " " * lines.LONGEST, "the line is longer"),
    ],
)
def test_a_header_that_is_none_stops_it(read, head, said):
    found = read("jobs.csv", f"{head}\na,b\n")
    assert not found.jobs and found.faults[0].source == "jobs.csv:1" and said in faults(found)[0]


@pytest.mark.parametrize(
    "text", ["prompt\na; b", "sep=;\nprompt;seed\na;1", '"prompt"\t"seed"\n"a"\t1', "seed|prompt\n1|a"]
)
def test_delimiters(read, text):
    found = read("jobs.tsv", text)
    assert len(found.jobs) == (0 if "|" in text else 1)


# ---- .txt and folders


def test_a_prompt_a_line(read):
    found = read("p.txt", "  a cat \n\n# a comment\n\ta, dog: {red|blue} (big:1.2)\n")
    assert [job.source for job in found.jobs] == ["p.txt:1", "p.txt:4"]
    assert found.jobs[1].prompt in combinations("a, dog: {red|blue} (big:1.2)")


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "x"}',
        '{"prompt": "x"',
        '{ "prompt',
        '[{"prompt": "x"},',
        '"prompt": "x",',
        "{'prompt': 'x'}",
        "--prompt x",
        "\0",
        "{",
        '{"a"|"b"}',
    ],
)
def test_a_line_of_something_else_is_no_prompt(read, line):
    found = read("p.txt", f"good\n{line}\nfine")
    assert [job.prompt for job in found.jobs] == ["good", "fine"]
    assert [fault.source for fault in found.faults] == ["p.txt:2"]
    assert line in ("\0",) or jobs_from([line]).faults


def test_a_spreadsheet_named_txt_is_not_drawn(read):
    found = read("p.txt", "prompt;seed\na cat;5\n")
    assert not found.jobs and "header of a spreadsheet" in faults(found)[0]


def test_a_folder(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, text in {
        "10.txt": "ten",
        "2.txt": "two\r\nlines\n",
        "B.TXT": "b",
        "c.txt": "",
        "d.jsonl": "{}",
        "e.txt": '{"prompt": 1}',
    }.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    for name in (".hidden.txt", "notes.md", "list.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    Image.new("RGB", (8, 8)).save(folder / "10.png")  # a captioned picture
    Image.new("RGB", (8, 8)).save(folder / "strange.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "sub.txt").mkdir()
    found = read_jobs(folder)
    assert [(job.prompt, job.source) for job in found.jobs] == [
        ("two\nlines", "prompts/2.txt"), ("ten", "prompts/10.txt"), ("b", "prompts/B.TXT"),
    ]  # fmt: skip
    said = {fault.source: str(fault) for fault in found.faults}
    assert list(said) == [
        f"prompts/{name}" for name in ("broken.png", "c.txt", "d.jsonl", "e.txt", "list.json", "strange.png")
    ]
    assert "no prompt in it" in said["prompts/c.txt"] and "no sidecar" in said["prompts/list.json"]


# ---- images and sidecars


@pytest.fixture
def drawn(tmp_path):
    """(job in its batch, folder with one.png of it, two.jpg with a sidecar, three.json alone)"""
    single = [Job(f"a {{b|c}} {at}", seed=at, guidance=5.0, width=64, height=64) for at in range(3)]
    job = replace(single[1], batch=tuple(single), position=1)
    side = to_sidecar(job)
    image = Image.new("RGB", (64, 64))
    (tmp_path / "one.png").write_bytes(metadata.encode(image, ".png", details=side | {"reports": []}, key="ab" * 32))
    (tmp_path / "two.jpg").write_bytes(metadata.encode(image, ".jpg", key="ab" * 32))
    for name in ("two.json", "three.json"):
        (tmp_path / name).write_text(json.dumps(side | {"key": "ab" * 32}), encoding="utf-8")
    return job, tmp_path


def same(found: Reading, *jobs: Job) -> bool:
    def bare(job: Job) -> Job:
        return replace(job, source="", batch=tuple(replace(each, source="") for each in job.batch))

    assert not found.faults, found.faults
    return [bare(job) for job in found.jobs] == list(jobs)


@pytest.mark.parametrize("name", ["one.png", "two.jpg", "two.json", "three.json"])
@pytest.mark.parametrize("expand", reading.EXPAND)
def test_an_image_gives_its_job_as_it_was(drawn, name, expand):
    job, folder = drawn
    assert same(read_jobs(folder / name, {"steps": 50, "negative_prompt": "x"}, expand), job)


def test_a_folder_of_images_gives_each_once(drawn):
    job, folder = drawn
    (folder / "one.txt").write_text("what another program wrote beside it", encoding="utf-8")
    assert same(read_jobs(folder), job, job, job)


def test_sidecars_may_be_lines(drawn, read):
    job, _ = drawn
    assert same(read("all.jsonl", f"{json.dumps(to_sidecar(job))}\n" * 2), job, job)


def test_the_model_of_a_batch_is_that_of_its_job(drawn, read):
    job, _ = drawn
    side = to_sidecar(job)
    side["job"]["model"] = "m"
    found = read("side.json", json.dumps(side))
    assert {each.model for each in (*found.jobs, *found.jobs[0].batch)} == {"m"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": 5}, "job must be an object, not 5."),
        ({"job": {"prompt": "x", "seed": 1, "n": 2}}, "job: n must be 1, not 2"),
        ({"job": {"prompt": "x"}}, "job: seed is missing."),
        ({"job": {"prompt": "x", "seed": [1, 2]}}, "job: seed must be one value."),
        ({"job": {"prompt": "x", "seed": 1, "steps": 9999}}, "steps 9999 is not between"),
        ({"job": {"prompt": "x", "seed": 1, "mask": "m.png"}}, "a mask needs an init_image"),
        ({"job": {"prompt": "x", "seed": 1, "init_image": r"\\host\a.png"}}, "a file of another machine"),
        ({"job": {"prompt": "x", "seed": 1, "model": "//host/m"}}, "a file of another machine"),
        ({"job": {"prompt": "x", "seed": 1, "loras": [' "\\/host/a.safetensors"']}}, "a file of another machine"),
        ({"job": {"prompt": "x", "seed": 1, "loras": [{"path": "//host/a.safetensors"}]}}, "a file of another machine"),
        ({"job": {"prompt": "x", "seed": 1}}, "batch: job 1 is not the job that the file is of."),
        ({"batch": 5}, "batch must have a list of jobs"),
        ({"batch": {"position": 0, "jobs": []}}, "batch must have a list of jobs"),
        ({"batch": {"position": True, "jobs": [{"prompt": "x", "seed": 1}]}}, "position must be a number from 0 to 0"),
        ({"batch": {"position": 1, "jobs": [{"prompt": "x", "seed": 1}]}}, "position must be a number from 0 to 0"),
        ({"batch": {"position": 0, "jobs": [{"prompt": "x"}]}}, "batch: job 0: seed is missing."),
        ({"batch": {"position": 0, "jobs": [{"prompt": "x", "seed": 1, "model": "y"}]}}, "has one model"),
    ],
)
def test_a_sidecar_is_not_believed(drawn, read, change, said):
    job, folder = drawn
    side = to_sidecar(job) | change
    found = read("side.json", json.dumps(side))
    assert not found.jobs and len(found.faults) == 1 and said in faults(found)[0] and "side.json:1" in faults(found)[0]
    image = Image.new("RGB", (64, 64))
    (folder / "bad.png").write_bytes(metadata.encode(image, ".png", details=side))
    found = read_jobs(folder / "bad.png")
    assert not found.jobs and said in faults(found)[0]


def test_an_image_of_others_says_so(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(metadata.encode(Image.new("RGB", (8, 8)), ".png", details={"components": {}}))
    (tmp_path / "c.webp").write_bytes(b"RIFF")
    for name in ("a.png", "b.png", "c.webp"):
        found = read_jobs(tmp_path / name)
        assert not found.jobs and found.faults[0].source == name


# ---- lists, braces, seeds, defaults


def test_lists_make_their_product_in_the_order_of_writing(read):
    found = read("j.jsonl", '{"prompt": ["a", "b"], "steps": [1, 2], "scheduler": [null, "euler"], "seed": 3}')
    assert [(job.prompt, job.steps, job.scheduler) for job in found.jobs] == [
        (prompt, steps, scheduler) for prompt in "ab" for steps in (1, 2) for scheduler in (None, "euler")
    ]
    found = read("j.jsonl", '{"steps": [1, 2], "prompt": ["a", "b"], "seed": 3}')
    assert [(job.steps, job.prompt) for job in found.jobs] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_loras_have_lists_of_lists(read):
    found = read("j.jsonl", '{"prompt": "a", "loras": [[], ["a.safetensors"], ["a.safetensors:0.5", "b.safetensors"]]}')
    assert [[lora.scale for lora in job.loras] for job in found.jobs] == [[], [1.0], [0.5, 1.0]]
    assert [job.loras for job in read("j.jsonl", '{"prompt": "a", "loras": []}').jobs] == [()]


def test_random_picks_one_for_each_image(read):
    text = '{"prompt": "a {red|blue|green} cat", "negative_prompt": "{x|y}", "n": 40, "seed": 5}'
    found = read("j.jsonl", text)
    assert [(job.n, job.seed) for job in found.jobs] == [(1, 5 + i) for i in range(40)]
    assert {job.prompt for job in found.jobs} == {"a red cat", "a blue cat", "a green cat"}
    assert len({(job.prompt, job.negative_prompt) for job in found.jobs}) == 6
    one = read("j.jsonl", text.replace('"n": 40, "seed": 5', '"seed": 17')).jobs[0]
    assert one == found.jobs[12]
    plain = read("j.jsonl", '{"prompt": "a {red} \\\\{b\\\\|c\\\\}", "n": 4, "seed": 5}').jobs
    assert [(job.prompt, job.n) for job in plain] == [("a {red} {b|c}", 4)]


def test_all_and_none(read):
    text = '{"prompt": ["{a|b}", "c"], "negative_prompt": "{x|y}", "n": 3, "seed": 1}'
    assert [(job.prompt, job.negative_prompt, job.n) for job in read("j.jsonl", text, {}, "all").jobs] == [
        (prompt, negative, 3) for prompt in "abc" for negative in "xy"
    ]
    assert [(job.prompt, job.negative_prompt) for job in read("j.jsonl", text, {}, "none").jobs] == [
        ("{a|b}", "{x|y}"), ("c", "{x|y}"),
    ]  # fmt: skip
    assert prompts(read("j.jsonl", '{"prompt": "\\\\{a"}', {}, "none")) == ["\\{a"]
    assert prompts(read("j.jsonl", '{"prompt": "{a"}', expand="none")) == ["{a"]
    with pytest.raises(JobError, match="expand 'some' is none of random, all, none"):
        read("j.jsonl", text, expand="some")


def test_seeds_never_change_and_equal_lines_differ(read, tmp_path):
    text = '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a"}\n{"prompt": "a", "steps": 20}\n{"prompt": "a", "n": 9}'
    seeds = [job.seed for job in read("j.jsonl", text).jobs]
    assert seeds == [3678313109, 384155162, 174226079, 2821350531, 2539041326]
    assert seeds == [job.seed for job in read("other name.jsonl", f"# moved\n{text}").jobs]
    assert seeds[:2] == [job.seed for job in read("j.txt", "a\nb").jobs] == [job.seed for job in jobs_from("ab").jobs]
    other = [job.seed for job in read("j.jsonl", text, base_seed=1).jobs]
    assert len({*seeds, *other}) == 10
    assert all(isinstance(seed, int) and 0 <= seed <= MAX_SEED for seed in seeds)


def test_seeds_stay_when_a_folder_moves(tmp_path):
    seeds = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("a.png", "a.safetensors"):
            (folder / file).write_bytes(b"")
        line = {"prompt": "a", "init_image": "a.png", "loras": ["a.safetensors"]}
        (folder / "jobs.jsonl").write_text(json.dumps(line), encoding="utf-8")
        seeds.append(read_jobs(folder / "jobs.jsonl").jobs[0].seed)
    assert seeds[0] == seeds[1]


def test_the_last_seed_is_one(monkeypatch):
    monkeypatch.setattr(reading, "MAX_SEED", 10)
    jobs = jobs_from([{"prompt": str(at), "n": 8} for at in range(50)]).jobs
    assert {job.seed for job in jobs} == {0, 1, 2, 3}


def test_defaults(tmp_path, read):
    text = (
        'steps = 30\nguidance = 6\nscheduler = "euler"\n'
        'init_image = "a.png"\nstrength = [0.2, 0.4]\nloras = ["a.safetensors:0.5"]\n'
    )
    (tmp_path / "d.toml").write_text(text, encoding="utf-8-sig")
    (tmp_path / "sub").mkdir()
    found = read(
        "sub/j.jsonl", '{"prompt": "a"}\n{"prompt": "b", "steps": 5, "scheduler": null, "strength": 1}', {}, "none"
    )
    assert not found.faults
    defaults = read_defaults(tmp_path / "d.toml")
    found = read_jobs(tmp_path / "sub" / "j.jsonl", defaults)
    assert not found.faults
    facts = [(job.prompt, job.steps, job.guidance, job.scheduler, job.strength, job.init_image) for job in found.jobs]
    image = tmp_path / "a.png"
    assert facts == [
        ("a", 30, 6.0, "euler", 0.2, image),
        ("a", 30, 6.0, "euler", 0.4, image),
        ("b", 5, 6.0, None, 1.0, image),
    ]
    assert {job.loras for job in found.jobs} == {(Lora(tmp_path / "a.safetensors", 0.5),)}


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("steps = 30\n\nstepz = 4", "d.toml:3", 'there is no field "stepz". Did you mean steps?'),
        ("# steps\n  'steps' = 0", "d.toml:2", "steps 0 is not between 1 and 1000."),
        ("guidance = nan", "d.toml:1", "guidance must be a finite number."),
        ("seed = 1979-05-27", "d.toml:1", "seed must be a whole number, not a date."),
        ("\n[job]\nsteps = 4", "d.toml:2", 'there is no field "job".'),
        ("\njob.steps = 4", "d.toml:2", 'there is no field "job".'),
        ("steps = 1\nsteps = 2", "d.toml", "this is no TOML"),
        ("\nsteps = ", "d.toml", "this is no TOML"),
        ('init_image = "nope.png"', "d.toml:1", "nope.png is not there."),
        ("steps = []", "d.toml:1", "steps is an empty list"),
    ],
)
def test_bad_defaults(tmp_path, text, place, said):
    path = tmp_path / "d.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError) as found:
        read_defaults(path)
    assert str(found.value).startswith(f"{place}") and said in str(found.value)


def test_defaults_that_are_no_text_or_not_there(tmp_path):
    (tmp_path / "d.toml").write_bytes(b"\xff")
    for path in (tmp_path / "d.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(JobError):
            read_defaults(path)
    with pytest.raises(JobError, match='defaults: there is no field "sampler"'):
        jobs_from(["a"], {"sampler": "euler"})


# ---- from Python


def test_jobs_from_python(tmp_path):
    image = tmp_path / "a.png"
    image.write_bytes(b"")
    mapping = {"prompt": "{a|b}", "seed": 4, "init_image": image, "strength": 0.5}
    job = Job("{a|b}", seed=4, n=2)
    found = jobs_from(
        ["{a|b}", mapping, job, 5, {1: 2}, replace(job, steps=0), replace(job, width=65), Job("a")], {"steps": 9}
    )
    assert [(each.steps, each.source) for each in found.jobs] == [
        (9, "job 1"),
        (9, "job 2"),
        (20, "job 3"),
        (20, "job 8"),
    ]
    assert found.jobs[0].prompt in "ab" and found.jobs[2] == replace(job, source="job 3")
    assert found.jobs[1].init_image == image and found.jobs[3].seed is not None
    assert [fault.source for fault in found.faults] == ["job 4", "job 5", "job 6", "job 7"]


def test_jobs_that_were_read_may_be_given_again(read):
    found = read("j.jsonl", '{"prompt": "{a|b} \\\\{c", "n": 3, "loras": ["a.safetensors:0.1"]}')
    assert same(jobs_from(found.jobs), *(replace(job, source="") for job in found.jobs))


def test_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    values = {"prompt": "a", "steps": np.int64(5), "guidance": np.float32(2.5), "seed": np.uint32(7)}
    (job,) = jobs_from([values]).jobs
    assert (job.steps, job.guidance, job.seed) == (5, 2.5, 7) and type(job.steps) is int and type(job.guidance) is float


def test_any_prompt_can_be_written():
    text = 'a {b|c} \\{ "Steps: 5"'
    assert prompts(jobs_from([literal(text)])) == [text]


# ---- limits


def test_too_many_images_are_refused_before_they_take_memory(read):
    tracemalloc.start()
    start = time.perf_counter()
    sides = json.dumps(list(range(64, 8192, 8)))
    content = (
        f'{{"prompt": "x", "width": {sides}, "height": {sides}}}\n'
        f'{{"prompt": {json.dumps(["{a|b}" * 10] * 100)}}}\n'
        f'{{"prompt": "{"{a|b}" * 30}"}}\n'
        f'{{"prompt": "x", "n": {json.dumps([1000] * 101)}}}\n'
        '{"prompt": "good"}\n'
    )
    found = read("j.jsonl", content, {}, "all")
    assert [job.prompt for job in found.jobs] == ["good"]
    assert [fault.source for fault in found.faults] == [f"j.jsonl:{line}" for line in range(1, 5)]
    assert "j.jsonl:1: this asks for 1,032,256 images; a run has at most 100,000." in faults(found)
    assert tracemalloc.get_traced_memory()[1] < 30e6 and time.perf_counter() - start < 5
    tracemalloc.stop()


def test_a_run_has_an_end(read):
    found = read("j.jsonl", '{"prompt": "x", "n": 1000}\n' * (MOST_IMAGES // 1000 + 5))
    assert sum(job.n for job in found.jobs) == MOST_IMAGES
    assert faults(found) == [
        "j.jsonl:101: a run has at most 100,000 images, and this one would go beyond. What follows was not read."
    ]

    def endless():
        while True:
            yield {"prompt": "x", "n": 1000}

    assert len(jobs_from(endless()).jobs) == MOST_IMAGES // 1000


def test_faults_have_an_end(read, monkeypatch):
    monkeypatch.setattr(reading, "MOST_FAULTS", 50)
    found = read("j.txt", "--bad\n" * 200 + "good")
    assert len(found.faults) == 51 and not found.jobs
    assert faults(found)[-1] == "j.txt:50: there are 50 faults. What follows was not read."


@pytest.mark.parametrize(("name", "head"), [("a.jsonl", ""), ("a.csv", "prompt\n"), ("a.txt", "")])
def test_large_files_are_not_held(tmp_path, name, head):
    path = tmp_path / name
    with path.open("w", encoding="utf-8") as file:
        file.write(head)
        for _ in range(40):
            file.write("#" + "x" * 999_999 + "\n")
        file.write("#" + "x" * 20_000_000)
    tracemalloc.start()
    found = read_jobs(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert found.faults and "longer than" in faults(found)[-1]


# ---- what cannot be opened


def test_standard_input(monkeypatch):
    source = io.BufferedReader(io.BytesIO(b'\xef\xbb\xbf{"prompt": "a"}\r\nbad\r\n'))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source, encoding="utf-8"))
    found = read_jobs("-")
    assert [job.source for job in found.jobs] == ["stdin:1"] and [fault.source for fault in found.faults] == ["stdin:2"]
    assert not source.closed


@pytest.mark.parametrize("name", ["none.jsonl", "jobs.yaml", "jobs"])
def test_what_is_no_job_file(tmp_path, name):
    if not name.startswith("none"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    with pytest.raises(JobError):
        read_jobs(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv"])
def test_an_empty_file_is_a_fault(read, name):
    assert len(read(name, "").faults) == 1 and len(read(name, "\n\n").faults) == 1


def test_an_empty_folder_is_a_fault(tmp_path):
    assert len(read_jobs(tmp_path).faults) == 1


def test_jobs_are_requests(read):
    """Whatever is read can be asked for."""
    for job in read("j.jsonl", "\n".join(f'{{"prompt": "x", "steps": {steps}}}' for steps in range(-1, 1003))).jobs:
        assert isinstance(job.request(512, 7.5), Request)


PIECES = [
    b'{"prompt": "', b'"}', b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xfe", b"\xef\xbb\xbf", b'"', b",", b";", b"\t",
    b"[", b"]", b"{", b"|", b"}", b":", b'"seed"', b"1e999", b"NaN", b"prompt", b"seed", b"\\", b"\\ud800", b"loras",
    b"sep=;",
    "\u2028ä猫".encode(), b"-", b"#", b'{"sdaccel": 1, "job": {}}', b"null", b"true",
]  # fmt: skip


def noise(chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return chance.randbytes(chance.randrange(200))
    content = b"".join(chance.choices(PIECES, k=chance.randrange(1, 40)))
    return content.decode("utf-8", "ignore").encode("utf-16") if chance.random() < 0.2 else content


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("a.jsonl", b""),
        ("a.json", b"["),
        ("a.csv", b"prompt,seed\n"),
        ("a.csv", b""),
        ("a.txt", b""),
        ("a.webp", b"RIFF"),
    ],
)
def test_random_bytes_give_job_errors_alone(tmp_path, name, head):
    chance = random.Random(name)
    path = tmp_path / name
    seen = 0
    for _ in range(250):
        path.write_bytes(chance.choice([head, b""]) + noise(chance))
        found = read_jobs(path, {}, chance.choice(reading.EXPAND))
        for fault in found.faults:
            assert isinstance(fault, JobError) and fault.source and len(str(fault)) < 2000
        for job in found.jobs:
            assert job.seed is not None and "\0" not in job.prompt and job.prompt.encode()
        seen += len(found.faults)
    assert seen > 200


def test_random_defaults_give_job_errors_alone(tmp_path):
    chance = random.Random(3)
    for _ in range(250):
        (tmp_path / "d.toml").write_bytes(chance.choice([b"steps = ", b""]) + noise(chance))
        with suppress(JobError):
            read_defaults(tmp_path / "d.toml")


def test_damaged_images_give_job_errors_alone(drawn):
    _, folder = drawn
    whole = (folder / "one.png").read_bytes()
    chance = random.Random(4)
    for _ in range(150):
        damaged = bytearray(whole[: chance.choice([len(whole), chance.randrange(1, len(whole))])])
        for _ in range(chance.randrange(4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (folder / "bad.png").write_bytes(damaged)
        found = read_jobs(folder / "bad.png")
        assert len(found.jobs) + len(found.faults) == 1
