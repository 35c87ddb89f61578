"""Names of files: good on every system, whatever the prompt."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path, PureWindowsPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdaccel.errors import SettingError
from sdaccel.jobs.job import Job
from sdaccel.jobs.names import DEFAULT, MOST_BYTES, Pattern

JOB = Job("a cat", seed=7, width=512, height=768, guidance=7.5, scheduler="euler", model="org/some.model")
RESERVED = {"CON", "PRN", "AUX", "NUL", "CLOCK$", "CONIN$", "CONOUT$"}
RESERVED |= {f"{port}{n}" for port in ("COM", "LPT") for n in "0123456789¹²³"}
AWKWARD = [
    "/", "\\", "..", ".", " ", "-", ":", "CON", "nul", "LPT¹", "COM1.txt", "~", "$(x)", "`", "\0", "\n",
    "\u2028", "\u202e",
    "\ud800", "\uffff", "e\u0301", "\u0301", "\u0958", "ǖ\u0323", "猫" * 40, "👩\u200d👩\u200d👧" * 9,
    "🇩🇪" * 20, "👍🏽", "a" * 300,
]  # fmt: skip
PROMPTS = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=6), max_size=12).map("".join)


def name(prompt: str, pattern: str = DEFAULT, **changes) -> str:
    return Pattern(pattern).name(replace(JOB, prompt=prompt, **changes), 3, ".png")


def check(found: str) -> None:
    assert found not in ("", ".png") and found[0] not in ".- "
    assert not set(found) & set('<>:"/\\|?*') and not any(unicodedata.category(c) in ("Cc", "Cs") for c in found)
    assert found == unicodedata.normalize("NFC", found)
    assert len(found.encode()) + len("-12.part") <= MOST_BYTES + len("-12")
    stem, suffix = found[:-4], found[-4:]
    assert suffix == ".png" and stem[-1] not in ". "
    assert stem.split(".")[0].rstrip(" ").upper() not in RESERVED
    assert PureWindowsPath(found).name == found and Path(found).name == found


@given(
    PROMPTS, st.sampled_from([DEFAULT, "{prompt}", "{prompt}-{model}", "{seed}{prompt}.{scheduler}", "x{prompt:.9}"])
)
@example("CON", "{prompt}")
@example("nul .x", "{prompt}")
@example("", "{prompt}")
@settings(max_examples=400, deadline=None)
def test_any_prompt_gives_a_good_name(prompt, pattern):
    found = name(prompt, pattern, model=prompt, scheduler="com1")
    check(found)
    if pattern == DEFAULT:
        assert found.startswith("00003-7")
    assert name(prompt, pattern, model=prompt, scheduler="com1") == found


@given(st.lists(PROMPTS, max_size=4))
@settings(max_examples=30, deadline=None)
def test_files_can_be_made_and_no_two_are_one(tmp_path_factory, prompts):
    folder, held = tmp_path_factory.mktemp("names"), set()
    for prompt in prompts * 3:
        found = Pattern("{prompt}").name(replace(JOB, prompt=prompt), 1, ".png", lambda each: each.casefold() in held)
        held.add(found.casefold())
        with (folder / f"{found}.part").open("xb"):
            pass
        (folder / f"{found}.part").rename(folder / found)
    assert {path.name.casefold() for path in folder.iterdir()} == held and len(held) == len(prompts) * 3


def test_usual_names():
    assert name("a cat, sitting") == "00003-7-a cat, sitting.png"
    assert name("a/b:c\td\n\ne") == "00003-7-abc d e.png"
    assert (
        name("x", "{model} {width}x{height} {steps} {guidance:g} {scheduler}") == "some.model 512x768 20 7.5 euler.png"
    )
    assert name("x", "{model}-{scheduler}", model=None, scheduler=None) == "default-default.png"
    assert name("x", "{model}", model="C:\\models\\xl.safetensors") == "xl.png"
    assert name("x", "{{{index}}}") == "{3}.png"
    assert name("... -rf /", "{prompt}") == "rf.png"
    assert name("LPT1", "{prompt}") == "_LPT1.png"
    assert name("console", "{prompt}") == "console.png"
    assert name("", "{prompt}") == name("///", "{prompt}") == "00003.png"


def test_the_prompt_is_what_is_cut():
    found = name("word " * 100, "{prompt}-{model}-{seed:012d}", model="m" * 60)
    assert (
        found.endswith(f"-{'m' * 60}-000000000007.png")
        and MOST_BYTES - 14 <= len(found) + len("-12.part") <= MOST_BYTES
    )
    assert len(name("a", "{model}-{prompt}", model="m" * 400)) == MOST_BYTES - len("_-12.part")


@pytest.mark.parametrize("seen", ["猫", "é", "e\u0323\u0307", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "❤\ufe0f"])
def test_it_is_cut_between_characters_as_people_see_them(seen):
    seen = unicodedata.normalize("NFC", seen)
    for before in range(12):
        kept = name("a" * before + seen * 200, "{prompt}").removesuffix(".png").lstrip("a")
        assert kept == seen * (len(kept) // len(seen))
        assert MOST_BYTES - len((kept + seen).encode()) - before < len("_-12.part.png")


def test_numbers_for_what_is_taken():
    pattern, long = Pattern("{prompt}"), replace(JOB, prompt="é" * 300)
    held: set[str] = set()
    for number in range(1, 400):
        found = pattern.name(long, 1, ".jpeg", held.__contains__)
        assert found not in held and len(f"{found}.part".encode()) <= MOST_BYTES
        assert found.endswith(f"é-{number}.jpeg" if number > 1 else "é.jpeg")
        held.add(found)
    many = replace(JOB, prompt="a" * 300)
    late = pattern.name(many, 1, ".png", lambda each: "-" not in each or int(each[:-4].rpartition("-")[2]) < 90_000)
    assert late.endswith("a-90000.png") and len(f"{late}.part") <= MOST_BYTES
    asked: list[str] = []
    found = pattern.name(JOB, 1, ".png", lambda each: asked.append(each) or len(asked) < 110)
    assert len(asked) < 140 and found.startswith("a cat-")
    with pytest.raises(SettingError, match="files of one name already"):
        pattern.name(JOB, 1, ".png", lambda each: True)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "cannot be empty"),
        ("{date}", "{date} in the pattern '{date}' is none of {index}, {seed}"),
        ("{}", "is none of"),
        ("{0}", "is none of"),
        ("{prompt.__class__}", "is none of"),
        ("{prompt[0]}", "is none of"),
        ("{prompt!r}", "has no meaning"),
        ("{index:{seed}}", "longer than names are"),
        ("{index:099999d}", "longer than names are"),
        ("{index:0300d}", "leaves no room"),
        ("{index:c}", "in the pattern"),
        ("{prompt:d}", "in the pattern"),
        ("{seed:x!}", "in the pattern"),
        ("{index", "cannot be read"),
        ("index}", "cannot be read"),
        ("{seed}/{index}", "names no folder"),
        ("{seed}\\x", "names no folder"),
        ("..\\{seed}", "names no folder"),
        ("a\n{seed}", "can be in no file's name"),
        (".{seed}", "begins with '.'"),
        ("-{seed}", "begins with '-'"),
        ("{seed}.PNG", "has a suffix"),
        ("x" * 200, "leaves no room"),
    ],
)
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(SettingError) as caught:
        Pattern(pattern)
    assert message in str(caught.value)


def test_a_job_that_lacks_a_field():
    with pytest.raises(SettingError, match="a job without seed has no name"):
        name("a", seed=None)
