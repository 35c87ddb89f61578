"""Every weight of every component can be changed in an ONNX Runtime engine, and only those asked for are."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import sdaccel
from sdaccel.backends import onnxruntime_refit
from tests import pipelines
from tests.integrations.conftest import images, reasons, same, through_engines

BLOCKS = [(16, 16, 3, 3), (20, 24, 3, 3), (4, 33, 1, 1), (32, 4, 3, 3)]


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("block", [4, 8, 16])
def test_layouts_hold_each_value_in_its_place(shape, block):
    """Against the definition, value by value: output o, input i lies at (o div B, i div B, y, x, i mod B, o mod B)."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    both = onnxruntime_refit.laid_out(weight, f"both {block}")
    outputs = onnxruntime_refit.laid_out(weight, f"outputs {block}")
    for o in range(0, shape[0], 3):
        for i in range(0, shape[1], 5):
            found = both[o // block, i // block, :, :, i % block, o % block]
            assert np.array_equal(found, weight[o, i]) and np.array_equal(outputs[o // block, i, ..., o % block], found)
    assert np.abs(both).sum() == pytest.approx(np.abs(weight).sum(), rel=1e-5), "padding is zero"
    bias = onnxruntime_refit.laid_out(weight[:, 0, 0, 0], f"padded {block}")
    assert len(bias) % block == 0 and np.array_equal(bias[: shape[0]], weight[:, 0, 0, 0])


def test_a_layout_that_does_not_show_is_that_of_its_reader():
    """A convolution of zeros fits every layout."""
    zeros = np.zeros((16, 32, 1, 1), np.float32)
    layouts = onnxruntime_refit._matching(zeros, zeros)
    shown = onnxruntime_refit._Match("a", ["both 8"], (16, 16, 3, 3), True)
    hidden = onnxruntime_refit._Match("b", layouts, zeros.shape, True)
    assert len(layouts) > 3 and onnxruntime_refit._block_in_use([hidden, shown]) == 8
    assert hidden.layout(8) == "both 8" and hidden._replace(shape=(16, 4, 1, 1)).layout(8) == "outputs 8"
    assert hidden._replace(blocked=False).layout(8) == "plain"
    assert hidden.layout(0) is None, "better not at all than in the wrong places"


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_all_weights_at_once(kind):
    """Engines of one model give another model's images when they get its weights, and their own with their own."""
    pipe = sdaccel.accelerate(pipelines.make(kind), store=pipelines.shared_store())
    own, other = pipelines.make(kind), pipelines.make(kind, seed=50)
    before = images(pipe, kind)
    for source in (other, own):
        for name, module in source.components.items():
            if isinstance(module, torch.nn.Module):
                getattr(pipe, name).load_state_dict(module.state_dict())
        found = images(pipe, kind)
        assert through_engines(pipe), pipe.sdaccel.last_report
        assert same(found, images(source, kind))
    assert np.array_equal(found, before)
    for component in pipe.sdaccel.last_report.components:
        (engine,) = pipe.sdaccel.contexts[component]._loaded.values()
        assert not engine._weights._fixed, component


@pytest.mark.parametrize("loss", ["removed", "cut off"])
def test_weights_that_go_while_an_engine_is_in_use(loss, tmp_path):
    """`sdaccel rm` beside a running program: what needs them runs in torch, with the reason."""
    store = shutil.copytree(pipelines.shared_store().root, tmp_path / "store")
    pipe = sdaccel.accelerate(pipelines.make("sd1"), store=sdaccel.Store(store), components=["unet"])
    images(pipe, "sd1")
    for entry in sdaccel.Store(store).list("weights"):
        if loss == "removed":
            shutil.rmtree(entry.path)
        else:
            entry.file("weights.safetensors").write_bytes(b"")
    own = pipelines.make("sd1")
    for changed in (pipe, own):
        with torch.no_grad():
            for parameter in changed.unet.parameters():
                parameter.mul_(0.99)
    assert same(images(pipe, "sd1"), images(own, "sd1"))
    assert "was removed or changed while its engine was in use" in reasons(pipe)["unet"]
