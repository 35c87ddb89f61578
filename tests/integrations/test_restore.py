"""restore() puts back exactly what accelerate() found; copies are plain."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

import sdaccel
from tests import pipelines
from tests.integrations.conftest import images, plain, reasons, same, through_engines


def state(pipe: Any) -> dict[str, dict[str, Any]]:
    """Every instance attribute of the pipeline and its modules."""
    found = {"": dict(pipe.__dict__)}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            found |= {f"{name}.{inner}": dict(module.__dict__) for inner, module in part.named_modules()}
    return found


def check_same(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    assert before.keys() == after.keys()
    for name, attributes in before.items():
        assert attributes.keys() == after[name].keys(), name
        for key, value in attributes.items():
            now = after[name][key]
            assert now is value or now == value, f"{name}.{key}"


@pytest.fixture
def store():
    return pipelines.shared_store()


def test_restore_leaves_no_trace(store):
    pipe = pipelines.make("sd1")
    images(pipe, "sd1")
    before, kind = state(pipe), type(pipe)
    for times in (1, 2):
        for _ in range(times):
            sdaccel.accelerate(pipe, store=store)
        assert type(pipe) is not kind and isinstance(pipe, kind)
        assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1")) and through_engines(pipe)
        assert sdaccel.restore(pipe) is pipe
        assert type(pipe) is kind and not hasattr(pipe, "sdaccel")
        check_same(before, state(pipe))
        sdaccel.restore(pipe)
        check_same(before, state(pipe))


def test_restore_of_a_plain_pipeline_does_nothing():
    pipe = pipelines.make("sd1")
    before = state(pipe)
    assert sdaccel.restore(pipe) is pipe
    check_same(before, state(pipe))


def test_restore_keeps_a_forward_that_was_there(store):
    pipe = pipelines.make("sd1")
    kept = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    images(pipe, "sd1")
    before = state(pipe)
    sdaccel.accelerate(pipe, store=store)
    images(pipe, "sd1")
    sdaccel.restore(pipe)
    check_same(before, state(pipe))


def test_a_wrapper_set_meanwhile_survives_and_runs_torch(store):
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=store)
    kept = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    report = pipe.sdaccel.last_report
    sdaccel.restore(pipe)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert "unet" not in report.components


def offload(pipe: Any) -> None:
    for name in ("text_encoder", "unet", "vae"):
        cpu_offload_with_hook(getattr(pipe, name), "cpu")


def test_offload_hooks_set_before(store):
    pipe = pipelines.make("sd1")
    offload(pipe)
    images(pipe, "sd1")
    before = state(pipe)
    sdaccel.accelerate(pipe, store=store)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert through_engines(pipe), pipe.sdaccel.last_report
    sdaccel.restore(pipe)
    check_same(before, state(pipe))


def test_offload_hooks_set_after(store):
    pipe = pipelines.make("sd1")
    sdaccel.accelerate(pipe, store=store)
    offload(pipe)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert through_engines(pipe), pipe.sdaccel.last_report
    sdaccel.restore(pipe)
    for module in (pipe.unet, pipe.text_encoder):
        assert module._old_forward == type(module).forward.__get__(module)
        assert module.forward.__wrapped__ == module._old_forward
    assert "decode" not in pipe.vae.__dict__ and "encode" not in pipe.vae.__dict__
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_hooks_removed_while_accelerated(when, store):
    pipe = pipelines.make("sd1")
    if when == "before":
        offload(pipe)
    sdaccel.accelerate(pipe, store=store)
    if when == "after":
        offload(pipe)
    remove_hook_from_module(pipe.unet, recurse=True)
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1"))
    assert through_engines(pipe), pipe.sdaccel.last_report
    sdaccel.restore(pipe)
    assert pipe.unet.forward == type(pipe.unet).forward.__get__(pipe.unet)
    sdaccel.accelerate(pipe, store=store)
    images(pipe, "sd1")
    assert through_engines(pipe), pipe.sdaccel.last_report


# --- copies


def test_a_deep_copy_is_a_plain_pipeline(accelerated):
    pipe = accelerated("sd1")
    copied = copy.deepcopy(pipe)
    assert type(copied) is diffusers.StableDiffusionPipeline and not hasattr(copied, "sdaccel")
    copied.unet.conv_out.weight.data.mul_(2)
    images(pipe, "sd1")
    calls = pipe.sdaccel.last_report.components["unet"].calls
    changed = images(copied, "sd1")
    assert not same(changed, images(plain("sd1"), "sd1"))
    assert pipe.sdaccel.last_report.components["unet"].calls == calls
    assert same(images(pipe, "sd1"), images(plain("sd1"), "sd1")) and through_engines(pipe)
    sdaccel.accelerate(copied, store=pipelines.shared_store(), components=["text_encoder"])
    assert same(images(copied, "sd1"), changed)


def test_copies_of_modules_are_themselves(accelerated):
    pipe = accelerated("sd1")
    for copied in (copy.deepcopy(pipe.unet), pickle.loads(pickle.dumps(pipe.unet))):  # noqa: S301
        assert copied.forward.__self__ is copied
        assert copied.conv_in is not pipe.unet.conv_in
    vae = copy.deepcopy(pipe.vae)
    assert vae.decode.__self__ is vae and vae.encode.__self__ is vae


def test_pickles_are_plain_pipelines(accelerated):
    pipe = accelerated("sd1")
    again = pickle.loads(pickle.dumps(pipe))  # noqa: S301
    assert type(again) is diffusers.StableDiffusionPipeline
    assert same(images(again, "sd1"), images(plain("sd1"), "sd1"))
    shallow = copy.copy(pipe)
    assert type(shallow) is diffusers.StableDiffusionPipeline and shallow.unet is pipe.unet


def test_accelerated_pipelines_are_collected(accelerated):
    pipe = accelerated("sd1")
    images(pipe, "sd1")
    gone = [weakref.ref(pipe), weakref.ref(pipe.unet), weakref.ref(pipe.sdaccel)]
    del pipe
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_nothing_is_reported_for_a_module_in_use_elsewhere(accelerated):
    pipe = accelerated("sd1")
    images(pipe, "sd1")
    assert reasons(pipe) == {}


def test_copies_keep_a_forward_that_was_there(store):
    pipe = pipelines.make("sd1")
    kept = pipe.unet.forward
    replaced = pipe.unet.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    offload(pipe)
    sdaccel.accelerate(pipe, store=store)
    copied = copy.deepcopy(pipe.unet)
    assert copied._old_forward is replaced
    text_encoder = copy.deepcopy(pipe.text_encoder)
    assert text_encoder._old_forward.__self__ is text_encoder
