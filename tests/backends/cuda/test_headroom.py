"""Values in front of normalization, kept smaller: the same results, and none of them infinite in float16."""

import dataclasses

import pytest
import torch

from sdaccel.backends.cuda.executor import Executor
from sdaccel.backends.cuda.headroom import EXPONENT, with_headroom
from sdaccel.backends.cuda.load_weights import load_weights
from sdaccel.backends.cuda.plan import ExecutionPlan, Step
from sdaccel.backends.cuda.timing_cache import Measured, TacticTable
from sdaccel.backends.cuda.tuner import relative_error
from sdaccel.engine.weights import FILE
from sdaccel.errors import BackendError
from sdaccel.export.components import component_spec
from tests.backends.cuda.test_executor import ENTRY, plan_of
from tests.tolerances import GROUP_NORM_MAX_ABS, VAE_FP16_REL

VAES = ("vae_decoder", "vae_encoder")
LARGE = 2.0**16
"""times a convolution's weights: they still fit into float16, what they give does not"""


class Torch(TacticTable):
    """Of every operator the way of torch, which runs on a CPU too."""

    def get(self, signature):
        return Measured("torch", 1.0, {}, {})


def executor_of(model, plan: ExecutionPlan, dtype: torch.dtype, factor: float = 1.0) -> Executor:
    entry = model.folder / "weights" / ENTRY
    entry.mkdir(parents=True, exist_ok=True)
    (entry / FILE).write_bytes(model.weights.read_bytes())
    weights = load_weights(plan, entry.parent, dtype, torch.device("cpu"))
    (first,) = [name for name in weights if name.endswith("coder.conv_in.weight")]
    weights[first].mul_(factor)
    return Executor(plan, weights, dtype, torch.device("cpu"), Torch())


def run(executor: Executor, model) -> torch.Tensor:
    inputs = component_spec(model.component, model.config).random_inputs({"batch": 2, "height": 16, "width": 8})
    (found,) = executor.run(inputs).values()
    return found.float()


@pytest.mark.parametrize("name", VAES)
def test_the_results_are_the_same(exported, name):
    model = exported(name)
    plan = plan_of(model)
    smaller = with_headroom(plan)
    assert set(smaller.exponents.values()) == {EXPONENT}
    residual = [name for name in plan.weights if name.endswith(("conv1.bias", "conv2.bias", "conv_shortcut.bias"))]
    assert residual and set(residual) <= set(smaller.exponents)
    expected, found = (run(executor_of(model, each, torch.float32), model) for each in (plan, smaller))
    assert (found - expected).abs().max() <= GROUP_NORM_MAX_ABS


@pytest.mark.parametrize("name", VAES)
def test_a_stream_that_float16_cannot_hold(exported, name):
    model = exported(name)
    plan = plan_of(model)
    exact = run(executor_of(model, plan, torch.float32, LARGE), model)
    assert exact.isfinite().all()
    assert not run(executor_of(model, plan, torch.float16, LARGE), model).isfinite().all()
    found = run(executor_of(model, with_headroom(plan), torch.float16, LARGE), model)
    assert relative_error(found, exact) <= VAE_FP16_REL


def test_values_that_others_read_stay(exported):
    """Queries, keys and values, inputs and outputs."""
    plan = with_headroom(plan_of(exported("vae_decoder")))
    kept = [name for name in plan.weights if any(part in name for part in ("to_q", "conv_out", "norm"))]
    assert kept and not set(kept) & set(plan.exponents)


def test_scaled_weights_are_not_the_module_s(exported):
    model = exported("vae_decoder")
    plan = with_headroom(plan_of(model))
    own = {
        name: torch.nn.Parameter(value)
        for name, value in executor_of(model, plan_of(model), torch.float32).weights.items()
    }
    before = {name: value.detach().clone() for name, value in own.items()}
    weights = load_weights(plan, model.folder / "weights", torch.float32, torch.device("cpu"), own)
    for name in plan.weights:
        power = plan.exponents.get(name, 0)
        assert torch.equal(weights[name], before[name] * 2.0**power)
        assert (weights[name].data_ptr() == own[name].data_ptr()) == (power == 0), name


def test_a_plan_keeps_its_exponents(exported, tmp_path):
    plan = with_headroom(plan_of(exported("vae_decoder")))
    plan.save(tmp_path)
    assert ExecutionPlan.read(tmp_path).exponents == plan.exponents


def test_a_weight_that_would_be_scaled_in_two_ways_is_named(exported):
    plan = plan_of(exported("vae_decoder"))
    step = next(step for step in plan.steps if step.inputs[1:] and step.inputs[1].endswith("conv_in.weight"))
    again = Step("again", "Conv", step.inputs, ("again",), step.attributes)
    twice = dataclasses.replace(plan, steps=(*plan.steps, again), outputs=(*plan.outputs, "again"))
    with pytest.raises(BackendError, match=r"conv_in\.weight would have to be scaled by 2\^0 and by 2\^-7"):
        with_headroom(twice)
