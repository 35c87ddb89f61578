"""What a glance between two looks notices, and when a glance is not enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from sdaccel.integrations import watch
from sdaccel.integrations.watch import ModuleWatch
from tests import pipelines
from tests.integrations.conftest import error, images, plain, reasons, same
from tests.tolerances import PIPELINE_MAX_ABS


class Louder(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class Watched:
    """A UNet with a forward of its own, as a swap gives it, of which nothing but glances is due for a long time."""

    def __init__(self) -> None:
        self.unet = pipelines.make("sd1").unet
        self.watch = ModuleWatch(self.unet)
        self.unet.forward = lambda *args, **kwargs: None
        assert self.watch.reason() is None
        self.watch._cost = math.inf
        self.looks = 0
        look = self.watch._look

        def counted() -> str | None:
            self.looks += 1
            return look()

        self.watch._look = counted  # type: ignore[method-assign]


def test_a_swap_alone_needs_no_second_look():
    watched = Watched()
    assert [watched.watch.reason() for _ in range(20)] == [None] * 20
    assert watched.looks == 0
    assert watched.watch.reason(careful=True) is None and watched.looks == 1
    watched.watch.unsettle()
    assert watched.watch.reason() is None and watched.looks == 2
    watched.watch._looked = -math.inf
    watched.watch._cost = 0.0
    assert watched.watch.reason() is None and watched.looks == 3


def test_outside_of_a_generation_every_call_looks():
    watched = Watched()
    watched.watch._closer_cost = math.inf
    assert [watched.watch.look() for _ in range(3)] == [None] * 3
    assert watched.looks == 3


def _merging(unet: Any) -> None:
    unet.__class__ = type("Merging", (type(unet),), {})


CHANGES: dict[str, tuple[Any, str]] = {
    "class": (_merging, "has become a Merging"),
    "attribute": (lambda unet: setattr(unet, "num_upsamplers", 7), "num_upsamplers of UNet2DConditionModel"),
    "method": (lambda unet: setattr(unet, "get_time_embed", lambda **_: None), "get_time_embed of UNet2D"),
    "layer": (lambda unet: setattr(unet, "conv_out", nn.Conv2d(8, 4, 3, padding=1)), "conv_out has been replaced"),
    "inner hook": (lambda unet: unet.mid_block.register_forward_hook(lambda *_: None), "mid_block has a forward hook"),
    "FreeU": (lambda unet: unet.enable_freeu(0.9, 0.2, 1.5, 1.6), "FreeU is on"),
    "processors": (lambda unet: unet.set_attn_processor(Louder()), "attention processor Louder"),
    "weights": (lambda unet: unet.load_state_dict({k: 2 * v for k, v in unet.state_dict().items()}), "weights differ"),
    "dtype": (lambda unet: unet.to(torch.float64), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_glance_notices_at_once(name):
    watched = Watched()
    change, why = CHANGES[name]
    assert watched.watch.reason() is None
    change(watched.unet)
    reason = watched.watch.reason()
    assert watched.looks == 1
    if why:
        assert reason is not None and why in reason
        assert watched.watch.reason() is not None, "and goes on noticing it"
    else:
        assert watched.watch.dtype == torch.float64


def test_glances_go_round():
    """One attention of many, one weight of many."""
    watched = Watched()
    attention = watched.unet.up_blocks[-1].attentions[-1].transformer_blocks[-1].attn2
    attention.set_processor(Louder())
    found = [watched.watch.reason() for _ in range(watch.STRIDE)]
    assert "attention processor Louder" in str(found[-1])
    attention.set_processor(AttnProcessor2_0())
    assert watched.watch.reason() is None
    watched.unet.conv_out.bias.add_(1.0)
    count = len(watched.watch._weights)
    assert "conv_out.bias first" in str([watched.watch.reason() for _ in range(count)][-1])


# --- other code in the middle of a generation


def _louder_block(pipe: Any) -> None:
    block = pipe.unet.mid_block.resnets[0]
    forward = type(block).forward
    block.forward = lambda *args, **kwargs: 1.5 * forward(block, *args, **kwargs)


def _once(change: Any, pipe: Any, call: int) -> Any:
    calls = []

    def step(*_: Any) -> None:
        calls.append(None)
        if len(calls) == call:
            change(pipe)

    return step


def _around_forward(pipe: Any) -> None:
    """A wrapper around the UNet's calls that patches a block before the second."""
    forward, step = pipe.unet.forward, _once(_louder_block, pipe, 2)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        step()
        return forward(*args, **kwargs)

    pipe.unet.forward = wrapped


def _in_a_hook(pipe: Any) -> None:
    pipe.unet.register_forward_pre_hook(_once(_louder_block, pipe, 2))


def _in_the_pipeline(pipe: Any) -> None:
    """The pipeline's own code, once a call has begun and before it calls the UNet."""
    encode = pipe.encode_prompt

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        _louder_block(pipe)
        return encode(*args, **kwargs)

    pipe.encode_prompt = encode_prompt


@pytest.mark.parametrize("patch", [_around_forward, _in_a_hook, _in_the_pipeline])
def test_patches_of_a_block_in_mid_generation(patch, accelerated):
    pipe, other = accelerated("sd1"), pipelines.make("sd1")
    for each in (pipe, other):
        patch(each)
    expected = images(other, "sd1")
    assert error(expected, images(plain("sd1"), "sd1")) > PIPELINE_MAX_ABS, "the patch changes nothing"
    assert same(images(pipe, "sd1"), expected)
    assert "forward of mid_block.resnets.0 has been replaced" in reasons(pipe)["unet"]
