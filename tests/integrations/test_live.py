"""Engines follow the adapters of a pipeline, whatever kind they are and however often they change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch

from tests import pipelines
from tests.integrations.conftest import images, plain, reasons, same, through_engines
from tests.integrations.test_patches import load

LINEARS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "time_emb_proj"]
CONVOLUTIONS = ["conv_in", "conv1", "conv2", "conv_shortcut", "proj_in", "downsamplers.0.conv", "upsamplers.0.conv"]
KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=2, target_modules=LINEARS + CONVOLUTIONS),
    "LoRA with biases": lambda: peft.LoraConfig(r=2, lora_bias=True, target_modules=["to_out.0", "ff.net.2"]),
    "rank-stabilized": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=LINEARS),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=LINEARS + CONVOLUTIONS),
    "LoHa": lambda: peft.LoHaConfig(r=4, alpha=2, target_modules=LINEARS),
    "LoKr": lambda: peft.LoKrConfig(r=4, alpha=4, target_modules=LINEARS),
    "IA3": lambda: peft.IA3Config(target_modules=["to_k", "to_v", "ff.net.2"], feedforward_modules=["ff.net.2"]),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["to_q", "to_v"]),
    "LayerNorm tuning": lambda: peft.LNTuningConfig(target_modules=["norm1", "norm2"]),
}


def add(pipe: Any, name: str, kind: str = "LoRA", seed: int = 1) -> None:
    """An adapter with values that nobody would start to train from: the image must show it."""
    module = pipe.unet
    before = {id(parameter) for parameter in module.parameters()}
    module.add_adapter(KINDS[kind](), name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in module.named_parameters():
        if id(parameter) not in before:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(parameter.data + noise if "magnitude" in key or "ia3" in key else noise)
            parameter.requires_grad_(False)


@pytest.fixture
def pair(accelerated) -> tuple[Any, Any]:
    """A pipeline with engines, and the same one in torch."""
    return accelerated("sd1"), pipelines.make("sd1")


def equal(pair: tuple[Any, Any], adapters: list[str], **changed: Any) -> np.ndarray:
    found, expected = (images(pipe, "sd1", **changed) for pipe in pair)
    report = pair[0].sdaccel.last_report
    assert same(found, expected)
    assert through_engines(pair[0]), report
    assert report.components["unet"].adapters == adapters
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter(kind, pair):
    base = equal(pair, [])
    for pipe in pair:
        add(pipe, "style", kind)
    assert not same(equal(pair, ["style"]), base)
    for pipe in pair:
        pipe.unet.disable_adapters()
    assert np.array_equal(equal(pair, []), base)


def test_a_b_a_and_back_is_the_same_to_the_bit(pair):
    base = equal(pair, [])
    for pipe in pair:
        add(pipe, "a", seed=1)
        add(pipe, "b", "DoRA", seed=2)
    seen: dict[str, np.ndarray] = {}
    for turn in range(20):
        name = "ab"[turn % 2]
        for pipe in pair:
            pipe.unet.set_adapters([name], [0.7])
        found = equal(pair, [name]) if turn < 4 else images(pair[0], "sd1")
        assert np.array_equal(found, seen.setdefault(name, found))
    assert not same(seen["a"], seen["b"])
    for pipe in pair:
        pipe.unet.unload_lora()
    assert np.array_equal(equal(pair, []), base)


def test_weights_for_each_block(pair):
    for pipe in pair:
        load(pipe, "style")
        pipe.set_adapters("style", {"unet": {"down": 0.2, "mid": 1.0, "up": {"block_0": 0.9, "block_1": 0.0}}})
    equal(pair, ["style"])


def test_the_scale_of_a_call(pair):
    for pipe in pair:
        load(pipe, "style", text=True)
    whole = equal(pair, ["style"])
    half = equal(pair, ["style"], cross_attention_kwargs={"scale": 0.5})
    assert not same(half, whole)
    assert np.array_equal(equal(pair, ["style"]), whole)
    for pipe in pair:
        pipe.unload_lora_weights()
    base = equal(pair, [])
    assert np.array_equal(equal(pair, [], cross_attention_kwargs={"scale": 0.5}), base)


@pytest.mark.filterwarnings("ignore:Scaling operation for OFT")
def test_the_scale_of_a_call_for_an_adapter_that_has_none(pair):
    for pipe in pair:
        add(pipe, "style", "OFT")
    whole = equal(pair, ["style"])
    found, expected = (images(pipe, "sd1", cross_attention_kwargs={"scale": 0.5}) for pipe in pair)
    assert same(found, expected)
    assert "has no scale" in reasons(pair[0])["unet"]
    assert np.array_equal(equal(pair, ["style"]), whole)


def test_hotswap(pair):
    """Values are exchanged in place: nothing else tells."""
    for pipe in pair:
        load(pipe, "style", seed=1)
    first = equal(pair, ["style"])
    for pipe in pair:
        load(pipe, "style", seed=2, hotswap=True)
    second = equal(pair, ["style"])
    assert not same(second, first)
    for pipe in pair:
        for name, parameter in pipe.unet.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.5)
    assert not same(equal(pair, ["style"]), second)


def test_weights_edited_under_an_adapter(pair):
    for pipe in pair:
        add(pipe, "style", "DoRA")
    before = equal(pair, ["style"])
    for pipe in pair:
        pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q.base_layer.weight.data.mul_(3)
    assert not same(equal(pair, ["style"]), before)


def test_an_adapter_that_peft_cannot_merge_runs_in_torch(pair):
    for pipe in pair:
        pipe.unet.add_adapter(
            peft.LoraConfig(r=2, lora_bias=True, init_lora_weights=False, target_modules=["to_q"]), "style"
        )
    pair[1].unet.load_state_dict(pair[0].unet.state_dict())
    assert same(images(pair[0], "sd1"), images(pair[1], "sd1"))
    assert "style around" in reasons(pair[0])["unet"] and "cannot be merged" in reasons(pair[0])["unet"]


def test_an_adapter_in_training_with_dropout_runs_in_torch(pair):
    pipe = pair[0]
    pipe.unet.add_adapter(peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["to_q"]), "style")
    for name, module in pipe.unet.named_modules():
        if "lora_dropout" in name:
            module.train()
    images(pipe, "sd1")
    assert "in training mode and has dropout" in reasons(pipe)["unet"]


def test_threads_that_draw_while_adapters_change(accelerated):
    """Each image is one of A's or one of B's: no call computes with half of each."""
    pipe = accelerated("sd1")
    add(pipe, "a", seed=1)
    add(pipe, "b", seed=2)
    wanted = []
    for name in "ab":
        pipe.unet.set_adapters([name])
        wanted.append(images(pipe, "sd1"))
    found: list[np.ndarray] = []
    guard = threading.Lock()

    def work(name: str) -> None:
        for _ in range(3):
            with guard:
                pipe.unet.set_adapters([name])
                image = images(pipe, "sd1")
            found.append(image)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(any(np.array_equal(image, each) for each in wanted) for image in found)


def test_sdxl_and_both_text_encoders(accelerated):
    pair = accelerated("sdxl"), pipelines.make("sdxl")
    for pipe in pair:
        load(pipe, "style", text=True)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]), pipe.text_encoder_2, "style"
        ) if pipe is pair[0] else None
    for name, parameter in pair[0].text_encoder_2.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), pair[1].text_encoder_2, "style")
    pair[1].text_encoder_2.load_state_dict(pair[0].text_encoder_2.state_dict())
    found, expected = (images(pipe, "sdxl") for pipe in pair)
    assert same(found, expected) and not same(found, images(plain("sdxl"), "sdxl"))
    assert through_engines(pair[0]), pair[0].sdaccel.last_report
    for component in ("unet", "text_encoder", "text_encoder_2"):
        assert pair[0].sdaccel.last_report.components[component].adapters == ["style"]
