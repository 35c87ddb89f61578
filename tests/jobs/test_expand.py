"""``{a|b}`` in prompts: what is a group, every combination, picks that never change."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdaccel.jobs.expand import MOST_CHARACTERS, chosen, combinations, count, has_groups, literal
from sdaccel.jobs.job import MOST_IMAGES, JobError

words = st.text(st.characters(exclude_characters="{}|\\", exclude_categories=["Cs"]), max_size=6)
prompts = st.recursive(
    words,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "{" + "|".join(parts) + "}"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        inner.map(lambda text: "{" + text + "}"),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cat", ["a cat"]),
        ("", [""]),
        ("{a|b}", ["a", "b"]),
        ("{a|b} {c|d}", ["a c", "a d", "b c", "b d"]),
        ("x{|y}", ["x", "xy"]),
        ("{|}", ["", ""]),
        ("{a|{b|c} d}", ["a", "b d", "c d"]),
        ("{word} {}", ["{word} {}"]),
        ("{a {b|c}}", ["{a b}", "{a c}"]),
        ("{a|{b}}", ["a", "{b}"]),
        (r"\{a\|b\}", ["{a|b}"]),
        (r"{a\|b|c\}}", ["a|b", "c}"]),
        (r"\(x\) \\ \n", [r"\(x\) \\ \n"]),
        ("a | b", ["a | b"]),
        ("(word:1.2) [a:b:0.5] [a|b] <lora:x:1>", ["(word:1.2) [a:b:0.5] [a|b] <lora:x:1>"]),
        ("{(red:1.2)|[a:b:0.5]|<lora:x:1>}", ["(red:1.2)", "[a:b:0.5]", "<lora:x:1>"]),
    ],
)
def test_combinations(text, expected):
    assert combinations(text) == expected
    assert count(text) == len(expected)
    assert has_groups(text) == (len(expected) > 1)
    assert {chosen(text, seed) for seed in range(60)} == set(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a {b|c", "the brace in column 3 is never closed"),
        ("{a|b} {c {d}", "the brace in column 7 is never closed"),
        ("a|b}", "the brace in column 4 closes nothing"),
        ("{" * 60, "nest deeper than 50 in column 51"),
        ("{a|b}" * 17, "more than 100,000 combinations"),
        ("{a|b}" * 50_000, "more than 100,000 combinations"),
        ("{" + "|" * MOST_IMAGES + "}", "more than 100,000 combinations"),
        ("x" * (MOST_CHARACTERS // 1000) + "{a|b}" * 10, "too long ones"),
    ],
)
def test_what_is_no_prompt_is_said_at_once(text, said):
    start = time.perf_counter()
    with pytest.raises(JobError, match=re.escape(said)):
        combinations(text)
    assert time.perf_counter() - start < 2


def test_as_many_as_there_may_be():
    found = combinations("{a|b|c|d|e|f|g|h|i|j}" * 5)
    assert len(found) == len(set(found)) == MOST_IMAGES


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, "a big blue dog by Klimt"),
        (1, "a big blue cat"),
        (2, "a big green cat"),
        (4294967295, "a big green fox by Monet"),
    ],
)
def test_a_pick_is_the_same_in_every_version_and_on_every_machine(seed, expected):
    assert chosen("a {big|small} {red|green|blue} {cat|{dog|fox} by {Klimt|Monet}}", seed) == expected


def test_groups_pick_independently():
    for text, streams in (("{a|b}{a|b}", ("", "")), ("{a|b}", ("", "negative"))):
        picks = [(chosen(text, seed, streams[0]) + chosen(text, seed, streams[1]))[:2] for seed in range(400)]
        counts = {pair: picks.count(pair) for pair in set(picks)}
        assert set(counts) == {"aa", "ab", "ba", "bb"} and min(counts.values()) > 60, counts


def test_other_words_change_no_pick():
    for seed in range(20):
        before, after = (chosen(text, seed) for text in ("{a|b|c} cat, {d|e}", "{a|b|c} small dog, {d|e}"))
        assert before.replace("cat", "small dog") == after


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(0, 2**32 - 1))
def test_a_pick_is_one_of_the_combinations(text, seed):
    found = combinations(text)
    assert len(found) == count(text) >= 1
    assert chosen(text, seed) in found
    assert chosen(text, seed) == chosen(text, seed)


@settings(max_examples=150, deadline=None)
@given(prompts, prompts)
def test_prompts_side_by_side_multiply(left, right):
    assert combinations(left + right) == [a + b for a in combinations(left) for b in combinations(right)]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("{}|\\ab") | st.characters(), max_size=30), st.integers(0, 9))
def test_any_text_can_be_written(text, seed):
    written = literal(text)
    assert combinations(written) == [text] == [chosen(written, seed)]
    assert not has_groups(written)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("{}|\\a"), max_size=40))
def test_any_text_is_a_prompt_or_a_job_error(text):
    try:
        assert chosen(text, 0) in combinations(text)
    except JobError as error:
        assert "column" in str(error) or "combinations" in str(error)
