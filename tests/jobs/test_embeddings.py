"""Prompts: encoded once each, by themselves, and what encoded them is told for every image."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sdaccel.jobs import embeddings
from sdaccel.jobs.embeddings import Embeddings
from sdaccel.runtime import RunReport


class Pipe:
    """Notes what it encodes; an embedding is the prompt's length, of a negative one with a minus."""

    _execution_device = "cpu"

    def __init__(self, pooled=True, steps_width=None):
        self.unet = SimpleNamespace(config=SimpleNamespace(time_cond_proj_dim=steps_width))
        self.pooled, self.asked = pooled, []

    def encode_prompt(self, prompt, device, num_images_per_prompt, do_classifier_free_guidance, negative_prompt):
        self.asked.append((prompt, negative_prompt, do_classifier_free_guidance))
        positive = torch.full((1, 2, 3), float(len(prompt[0])))
        negative = torch.full((1, 2, 3), -float(len(negative_prompt[0]) if negative_prompt else 0))
        if not do_classifier_free_guidance:
            negative = None
        pair = (positive, negative)
        return (*pair, *(None if each is None else each[:, 0] for each in pair)) if self.pooled else pair


def run(call):
    report = RunReport()
    report.ran_torch("text_encoder", 1.0)
    return call(), report


def arguments(*texts, negative=None, guidance=7.5):
    return {"prompt": list(texts), "negative_prompt": negative, "guidance_scale": guidance}


def column(values):
    return [float(row.flatten()[0]) for row in values]


@pytest.mark.parametrize("pooled", [True, False])
def test_each_is_encoded_once_and_alone(pooled):
    pipe, kept = Pipe(pooled), Embeddings()
    found, _ = kept.of(pipe, arguments("a", "bb", "a", negative=["xxx", "xxx", "yyyy"]), (), run)
    assert column(found["prompt_embeds"]) == [1, 2, 1]
    assert column(found["negative_prompt_embeds"]) == [-3, -3, -4]
    assert found["prompt_embeds"].shape == (3, 2, 3) and len(found) == (4 if pooled else 2)
    assert sorted(asked[0][0] if not asked[2] else asked[1][0] for asked in pipe.asked) == ["a", "bb", "xxx", "yyyy"]
    assert all(len(asked[0]) == 1 for asked in pipe.asked)
    again, _ = kept.of(pipe, arguments("bb", negative=["yyyy"]), (), run)
    assert len(pipe.asked) == 4 and column(again["negative_prompt_embeds"]) == [-4]


def test_no_negative_prompt_is_not_an_empty_one():
    pipe, kept = Pipe(), Embeddings()
    kept.of(pipe, arguments("a"), (), run)
    kept.of(pipe, arguments("a", negative=[""]), (), run)
    assert [asked[1] for asked in pipe.asked] == [None, None, [""]]


@pytest.mark.parametrize(("pipe", "guidance"), [(Pipe(), 1.0), (Pipe(steps_width=6), 7.5)])
def test_without_guidance_there_is_no_negative_half(pipe, guidance):
    found, _ = Embeddings().of(pipe, arguments("a", guidance=guidance), (), run)
    assert set(found) == {"prompt_embeds", "pooled_prompt_embeds"} and len(pipe.asked) == 1


def test_other_weights_are_other_embeddings():
    pipe, kept = Pipe(), Embeddings()
    for weights in ((), ("lora",), ()):
        kept.of(pipe, arguments("a", guidance=1.0), weights, run)
    assert len(pipe.asked) == 2


def test_what_encoded_a_prompt_is_told_again_with_it():
    pipe, kept = Pipe(), Embeddings()
    _, (first,) = kept.of(pipe, arguments("a", guidance=1.0), (), run)
    _, reports = kept.of(pipe, arguments("b", "a", guidance=1.0), (), run)
    assert len(reports) == 2 and first in reports
    assert all(report.components["text_encoder"].torch_calls == 1 for report in reports)


def test_what_is_not_usable_is_not_kept():
    def broken(call):
        result, report = run(call)
        report.fail("text_encoder: NaN")
        return result, report

    pipe, kept = Pipe(), Embeddings()
    _, (report,) = kept.of(pipe, arguments("a", guidance=1.0), (), broken)
    _, (again,) = kept.of(pipe, arguments("a", guidance=1.0), (), run)
    assert not report.ok and again.ok and len(pipe.asked) == 2


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(embeddings, "KEPT", 2)
    pipe, kept = Pipe(), Embeddings()
    for text in ("a", "b", "a", "c", "a"):
        kept.of(pipe, arguments(text, guidance=1.0), (), run)
    assert [asked[0][0] for asked in pipe.asked] == ["a", "b", "c"]
    kept.of(pipe, arguments("b", guidance=1.0), (), run)
    assert len(pipe.asked) == 4
