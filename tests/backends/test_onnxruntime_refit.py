"""Every weight of every component can be changed in an ONNX Runtime engine, and only those asked for are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdaccel.backends import onnxruntime_refit
from sdaccel.engine.patch import NOTHING, Patch
from sdaccel.runtime import RunReport
from tests import pipelines
from tests.integrations.conftest import images

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
def test_all_weights_at_once(kind, accelerated_of):
    """An engine of one model with the weights of another gives what the other gives."""
    pipe = accelerated_of(kind)
    other = pipelines.make(kind, seed=50)
    images(pipe, kind)
    for component, context in pipe.sdaccel.contexts.items():
        if component not in pipe.sdaccel.last_report.components:
            continue
        (engine,) = context._loaded.values()
        assert not engine._weights._fixed
        source = {"vae_decoder": "vae"}.get(component, component)
        state = getattr(other, source).state_dict()
        assert {name for name in state if engine._weights.takes(name)}
        patches = {name: Patch(0, lambda base, value=value: value) for name, value in state.items()}
        swap = pipe.sdaccel.swaps[component]
        feed = _inputs(swap, engine)
        before = context.run(feed, RunReport())
        changed = context.run(feed, RunReport(), None, patches)
        again = context.run(feed, RunReport(), None, NOTHING)
        name = next(iter(before))
        assert all(torch.equal(before[name], again[name]) for name in before)
        other_context = accelerated_of(kind, seed=50).sdaccel.contexts[component]
        expected = other_context.run(feed, RunReport())
        assert not torch.equal(before[name], changed[name])
        for name in expected:
            assert (changed[name] - expected[name]).abs().max() <= 1e-5 * max(1.0, float(expected[name].abs().max()))


def _inputs(swap, engine):
    from sdaccel.export.components import component_spec

    config = dict(swap.module.config) if hasattr(swap.module.config, "items") else swap.module.config.to_dict()
    spec = component_spec(swap.component, config)
    sizes = {"batch": 2, "height": 8, "width": 8, "tokens": 77}
    return {name: value for name, value in spec.random_inputs(sizes).items() if name in engine._dtypes}


@pytest.fixture
def accelerated_of():
    import sdaccel

    def make(kind, seed=0):
        return sdaccel.accelerate(pipelines.make(kind, seed=seed), store=pipelines.shared_store())

    return make
