"""What a glance between two looks notices, and when a glance is not enough."""

from __future__ import annotations

import math
from typing import Any

import peft
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from sdaccel.backends.cuda import fingerprint
from sdaccel.integrations import watch
from sdaccel.integrations.watch import ModuleWatch
from tests import pipelines
from tests.integrations.conftest import error, images, plain, reasons, same
from tests.tolerances import PIPELINE_MAX_ABS


class Louder(AttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class Watched:
    """A UNet with a forward of its own, as a swap gives it, at which no look is due for a long time."""

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

    def glance(self, due: bool = True) -> str | None:
        self.watch._glanced, self.watch._glance_cost = -math.inf, 0.0 if due else math.inf
        if not due:
            self.watch._glanced = math.inf
        return self.watch.reason()


def test_a_module_loaded_in_inference_mode_is_watched():
    with torch.inference_mode():
        module = nn.Linear(4, 4).eval()
    watched = ModuleWatch(module)
    assert watched.look_closer() is None
    with torch.inference_mode():
        module.weight.mul_(2)
    assert watched.look_closer() is None and watched.edits == ["weight"]


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
    "weights": (lambda unet: unet.load_state_dict({k: 2 * v for k, v in unet.state_dict().items()}), ""),
    "dtype": (lambda unet: unet.to(torch.float64), ""),
}


GLANCED = {"FreeU", "processors", "weights", "dtype"}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_noticed_at_once(name):
    watched = Watched()
    change, why = CHANGES[name]
    assert watched.glance() is None
    change(watched.unet)
    reason = watched.glance(due=name in GLANCED)
    assert watched.looks == 1
    if why:
        assert reason is not None and why in reason
        assert watched.glance(due=False) is not None, "and goes on noticing it"
    elif name == "dtype":
        assert watched.watch.dtype == torch.float64
    else:
        assert reason is None and len(watched.watch.edits) == len(list(watched.unet.parameters()))


def test_one_attention_of_many_is_noticed():
    watched = Watched()
    attention = watched.unet.up_blocks[-1].attentions[-1].transformer_blocks[-1].attn2
    attention.set_processor(Louder())
    assert "attention processor Louder" in str(watched.glance())
    attention.set_processor(AttnProcessor2_0())
    assert watched.glance() is None


def test_glances_cost_no_more_than_their_share(monkeypatch):
    watched = Watched()
    now = [100.0]
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now[0])
    glances = []

    def glance() -> bool:
        glances.append(now[0])
        watched.watch._glanced, watched.watch._glance_cost = now[0], 0.001
        return False

    watched.watch._glance = glance  # type: ignore[method-assign]
    watched.watch._looked = now[0]
    for _ in range(100):
        now[0] += 0.1
        assert watched.watch.reason() is None
    assert len(glances) * 0.001 <= 10 * watch.SHARE
    assert len(glances) > 15


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


def test_weights_read_at_once_are_read_as_one_by_one(monkeypatch):
    """What is done for weights on a GPU, here on the CPU: layouts, types and edits are seen alike."""

    def read(tensors):
        samples = torch.zeros(len(tensors), fingerprint.SAMPLES)
        for row, tensor in zip(samples, tensors, strict=True):
            offsets = torch.from_numpy(fingerprint._offsets(tuple(tensor.shape), tensor.stride()))
            row.copy_(tensor.as_strided((tensor.numel(),), (1,))[offsets])
        return [int(watch._sum_of_bits(tensor)) for tensor in tensors], samples

    unet = pipelines.make("sd1").unet
    unet.conv_in.weight.data = unet.conv_in.weight.data.contiguous(memory_format=torch.channels_last)
    singly = ModuleWatch(unet)
    monkeypatch.setattr(watch, "readable", lambda tensor: True)
    monkeypatch.setattr(watch, "fingerprints", lambda tensors: read([tensor.detach() for tensor in tensors]))
    together = ModuleWatch(unet)
    for one, other in zip(singly._weights, together._weights, strict=True):
        assert one._sum == other._sum and one._values == other._values, one.name
    unet.to(torch.float16)
    assert together.look_closer() is None
    unet.to(torch.float32).conv_in.weight.data.mul_(2)
    assert together.look_closer() is None and together.edits == ["conv_in.weight"]
    monkeypatch.setattr(
        watch, "fingerprints", lambda tensors: pytest.fail("read again, though nothing has changed since")
    )
    assert together.reason(careful=True) is None and together.edits == ["conv_in.weight"]


def test_adapters_need_no_look_at_every_step():
    """Around layers of the module itself too; a change of them is seen by the next look."""
    watched = Watched()
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "conv_in", "conv_out", "proj_in"])
    watched.unet.add_adapter(config, "style")
    watched.watch.unsettle()
    patches = [(watched.glance(), watched.watch.patches()) for _ in range(5)]
    assert watched.looks == 1 and patches == 5 * [(None, patches[0][1])]
    assert patches[0][1]["conv_in.weight"].adapters == ("style",)
    watched.unet.conv_in.scaling["style"] = 0.3
    assert watched.watch.reason(careful=True) is None
    again = watched.watch.patches()
    changed = {name for name, patch in again.items() if patch.key != patches[0][1][name].key}
    assert changed == {"conv_in.weight"}
