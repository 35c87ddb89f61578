"""Weights of a CUDA engine, written in place: step by step on the CPU, as CUDA graphs on a GPU (tests/integrations)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from sdaccel.backends.cuda.backend import CudaEngine
from sdaccel.backends.cuda.executor import Executor
from sdaccel.backends.cuda.headroom import with_headroom
from sdaccel.backends.cuda.load_weights import load_weights
from sdaccel.backends.cuda.ops import upsample_conv
from sdaccel.engine.patch import NOTHING, Patch
from sdaccel.export.components import component_spec
from tests.backends.cuda.test_executor import executor_of, plan_of
from tests.tolerances import EXPORT_MAX_ABS

NAMES = ("unet-sd1", "vae_decoder", "text_encoder")


def inputs_of(model):
    spec = component_spec(model.component, model.config)
    return spec.random_inputs({"batch": 2, "height": 8, "width": 8, "tokens": 77})


def patches_of(plan, seed: int, names=None):
    """Other values for weights, as something that depends on the base."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names if names is not None else plan.weights:
        noise = torch.randn(plan.weights[name].shape, generator=generator)
        found[name] = Patch((seed, name), lambda base, noise=noise: base + 0.1 * base.abs().mean() * noise)
    return found


def run(engine, inputs):
    results = engine.run(inputs)
    return results[min(results)]


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_to_and_fro(exported, name):
    model = exported(name)
    engine, inputs = CudaEngine(executor_of(model)), inputs_of(model)
    plan = engine.executor.plan
    base = run(engine, inputs)
    first, second = patches_of(plan, 1), patches_of(plan, 2, list(plan.weights)[::2])
    engine.refit(first)
    found = run(engine, inputs)
    merged = {key: first[key].apply(value) for key, value in load_file(model.weights).items() if key in first}
    other = Executor(plan, _joined(plan, merged), torch.float32, torch.device("cpu"))
    assert torch.allclose(found, run(CudaEngine(other), inputs), atol=EXPORT_MAX_ABS)
    engine.refit(second)
    assert not torch.equal(run(engine, inputs), found)
    engine.refit(first)
    assert torch.equal(run(engine, inputs), found)
    engine.refit(NOTHING)
    assert torch.equal(run(engine, inputs), base)


def _joined(plan, weights):
    whole = {name: torch.cat([weights[part] for part in parts]) for name, parts in plan.joined.items()}
    return {**weights, **whole}


def test_buffers_stay_where_they_are(exported):
    """What a CUDA graph has recorded is still what is read."""
    engine = CudaEngine(executor_of(exported("unet-sd1")))
    plan = engine.executor.plan
    engine.refit(patches_of(plan, 1))
    places = {name: tensor.data_ptr() for name, tensor in engine.executor.weights.items()}
    engine.refit(patches_of(plan, 2))
    engine.refit(NOTHING)
    assert {name: tensor.data_ptr() for name, tensor in engine.executor.weights.items()} == places


def test_the_module_s_own_weights_are_never_written(exported):
    model = exported("unet-sd1")
    own = {name: torch.nn.Parameter(value) for name, value in load_file(model.weights).items()}
    plan = plan_of(model)
    weights = load_weights(plan, model.folder, torch.float32, torch.device("cpu"), own)
    shared = frozenset(plan.weights)
    engine = CudaEngine(Executor(plan, weights, torch.float32, torch.device("cpu")), shared)
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    some = list(plan.weights)[::3]
    edited = {name: Patch(0, lambda base: base, edit=True) for name in plan.weights}
    engine.refit(edited)
    assert engine.shared == shared, "what the module shares needs no copy"
    engine.refit(edited | patches_of(plan, 1, some))
    assert not engine.shared & set(some) and engine.shared
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert not engine.shares_no_longer(own)
    with torch.no_grad():
        own[some[0]].mul_(2)
    engine.refit(NOTHING)
    assert torch.equal(engine.executor.weights[some[0]], own[some[0]]), "the base is what the module holds"


def test_scaled_weights(exported):
    """Those that the plan keeps smaller, in float16, get patches of the same size."""
    model = exported("vae_decoder")
    plan = with_headroom(plan_of(model))
    assert plan.exponents
    executor_of(model)
    weights = load_weights(plan, model.folder / "weights", torch.float32, torch.device("cpu"))
    engine = CudaEngine(Executor(plan, weights, torch.float32, torch.device("cpu")))
    plain = CudaEngine(executor_of(model))
    inputs = inputs_of(model)
    for each in (engine, plain):
        each.refit(patches_of(plan, 1))
    assert torch.allclose(run(engine, inputs), run(plain, inputs), atol=EXPORT_MAX_ABS)


def test_a_refit_that_fails_leaves_nothing_half_done(exported):
    engine, inputs = CudaEngine(executor_of(exported("unet-sd1"))), inputs_of(exported("unet-sd1"))
    plan = engine.executor.plan
    base = run(engine, inputs)
    good = patches_of(plan, 1)

    def fail(base):
        raise MemoryError

    last = list(plan.weights)[-1]
    with pytest.raises(MemoryError):
        engine.refit(good | {last: Patch("bad", fail)})
    engine.refit(NOTHING)
    assert torch.equal(run(engine, inputs), base)


def test_an_embedding_that_grows(exported):
    model = exported("text_encoder")
    engine, inputs = CudaEngine(executor_of(model)), inputs_of(model)
    name = "embeddings.token_embedding.weight"
    name = next(each for each in engine.executor.plan.weights if each.endswith(name))
    base = run(engine, inputs)
    rows = engine.executor.weights[name].shape[0]
    engine.refit({name: Patch("grown", lambda base: torch.cat([base, 3 * base[:2]]))})
    assert torch.equal(run(engine, inputs), base)
    changed = {**inputs, "input_ids": torch.full_like(inputs["input_ids"], rows + 1)}
    assert torch.isfinite(run(engine, changed)).all()
    engine.refit(NOTHING)
    assert engine.executor.weights[name].shape[0] == rows and torch.equal(run(engine, inputs), base)


def test_what_is_made_of_an_edited_weight_is_made_again(exported, monkeypatch):
    """Where it lies, without a copy of the weight."""
    model = exported("unet-sd1")
    own = {name: torch.nn.Parameter(value) for name, value in load_file(model.weights).items()}
    plan = plan_of(model)
    weights = load_weights(plan, model.folder, torch.float32, torch.device("cpu"), own)
    derived = frozenset(step.inputs[1] for step in plan.steps if step.op == "UpsampleConv")
    assert derived
    engine = CudaEngine(Executor(plan, weights, torch.float32, torch.device("cpu")), frozenset(), derived)
    made = []
    monkeypatch.setattr(upsample_conv, "refresh", lambda weight: made.append(weight.data_ptr()))
    (name, *_) = derived
    for key in (1, 2):
        engine.refit({name: Patch(key, lambda base: base, edit=True)})
    engine.refit(NOTHING)
    assert made == 3 * [own[name].data_ptr()] and not engine.executor.own
