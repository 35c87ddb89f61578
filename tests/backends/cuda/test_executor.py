"""Plans of whole components: lowered, saved, and run step by step in torch; on a GPU as CUDA graphs too."""

import dataclasses
import json
import threading

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file

from sdaccel.backends.cuda.backend import PROMPT as PROMPT_INPUTS
from sdaccel.backends.cuda.executor import Executor, _skippable
from sdaccel.backends.cuda.launch import KernelCache
from sdaccel.backends.cuda.load_weights import load_weights
from sdaccel.backends.cuda.lower import lower
from sdaccel.backends.cuda.ops import standard
from sdaccel.backends.cuda.plan import CONSTANTS, PLAN, ExecutionPlan
from sdaccel.engine.weights import FILE
from sdaccel.errors import BackendError, EngineBroken, UnsupportedCall
from sdaccel.export.components import component_spec
from sdaccel.export.to_onnx import bind_weights, check_graph
from sdaccel.graph.hoist import invariant
from sdaccel.graph.optimize import optimize
from tests import shapes
from tests.exported import Exported
from tests.tolerances import EXPORT_MAX_ABS

ENTRY = "0" * 64
UNETS = ("unet-sd1", "unet-sdxl", "unet-lcm-8-channel")
LISTS = json.dumps({"format": 2} | {field.name: [] for field in dataclasses.fields(ExecutionPlan)}).encode()
NAMES = (*UNETS, "vae_decoder", "vae_encoder", "text_encoder", "text_encoder_2", "controlnet", "controlnet-sdxl")


def plan_of(model: Exported) -> ExecutionPlan:
    graph = ir.from_proto(bind_weights(model.graph, model.layout))
    optimize(graph, "cuda")
    return lower(ir.to_proto(graph), ENTRY, model.layout, invariant(graph, PROMPT_INPUTS))


def executor_of(model: Exported, device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> Executor:
    plan = plan_of(model)
    entry = model.folder / "weights" / ENTRY
    entry.mkdir(parents=True, exist_ok=True)
    (entry / FILE).write_bytes(model.weights.read_bytes())
    weights = load_weights(plan, entry.parent, dtype, torch.device(device))
    return Executor(plan, weights, dtype, torch.device(device), **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_equals_torch(exported, name):
    """Batch 1 to 4, non-square, odd, 77 to 231 tokens; at the last shape with the optional inputs."""
    model = exported(name)
    executor = executor_of(model)
    results = check_graph(executor.run, model.component, model.config, model.weights, model.layout)
    assert max(result.error for result in results) <= EXPORT_MAX_ABS


def test_odd_latents_equal_torch(exported):
    model = exported("unet-sdxl")
    odd = [{"batch": 1, "height": h, "width": w, "tokens": 77} for h, w in shapes.ODD_LATENTS[:1]]
    check_graph(executor_of(model).run, model.component, model.config, model.weights, model.layout, shapes=odd)


def test_what_depends_on_the_prompt_alone_is_in_the_prologue(exported):
    plan = plan_of(exported("unet-sdxl"))
    assert {step.inputs[0] for step in plan.prologue if step.op == "Linear"} >= {"encoder_hidden_states", "y"}
    made = {name for step in plan.prologue for name in step.outputs}
    assert not any({"sample", "timestep"} & set(step.inputs) for step in plan.prologue)
    assert any(made & set(step.inputs) for step in plan.steps)


def test_what_the_prologue_may_skip_outlives_it(exported):
    """Its products of the prompt, whatever reads them: memory of others must not be laid over them."""
    plan = plan_of(exported("unet-sdxl"))
    skipped = _skippable(plan, PROMPT_INPUTS)
    of_prompt = {step.outputs[0] for step in plan.prologue if step.inputs[0] in PROMPT_INPUTS}
    assert skipped == of_prompt
    assert skipped - {name for step in plan.steps for name in step.inputs}


@pytest.mark.parametrize("name", ["unet-sd1", "unet-sdxl"])
def test_residuals_that_are_left_out_cost_nothing(exported, name):
    """No sum is computed for them, and calls that have them change nothing for those that have not."""
    model = exported(name)
    executor = executor_of(model)
    spec = component_spec(model.component, model.config)
    given = spec.random_inputs({"batch": 2, "height": 8, "width": 6, "tokens": 77}, optional=True)
    plain = {tensor.name: given[tensor.name] for tensor in spec.inputs if not tensor.optional}
    before = executor.run(plain)["sample_out"]
    x = torch.ones(1)
    assert standard.add({}, x, None) is x and standard.add({}, None, x) is x
    assert (executor.run(given)["sample_out"] - before).abs().max() > 0.01
    assert torch.equal(executor.run(plain)["sample_out"], before)
    zeros = {name: torch.zeros_like(value) for name, value in given.items() if name not in plain}
    assert torch.equal(executor.run({**plain, **zeros})["sample_out"], before)


def test_every_weight_is_read_once_and_joined_ones_share_memory(exported):
    executor = executor_of(exported("unet-sd1"))
    assert executor.plan.joined
    for name, parts in executor.plan.joined.items():
        whole = executor.weights[name]
        assert torch.equal(whole, torch.cat([executor.weights[part] for part in parts]))
        first, last = whole.data_ptr(), whole.data_ptr() + whole.nbytes
        assert all(first <= executor.weights[part].data_ptr() < last for part in parts)


def test_weights_are_the_module_s_own_where_they_can_be(exported):
    model = exported("unet-sd1")
    own = {name: torch.nn.Parameter(value) for name, value in load_file(model.weights).items()}
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    plan = plan_of(model)
    weights = load_weights(plan, model.folder / "nowhere", torch.float32, torch.device("cpu"), own)
    assert set(plan.weights) <= set(own)
    for name in plan.weights:
        assert own[name].data_ptr() == weights[name].data_ptr()
        assert torch.equal(own[name], before[name])
    again = load_weights(plan, model.folder / "nowhere", torch.float32, torch.device("cpu"), own)
    assert {name: value.data_ptr() for name, value in again.items()} == {
        name: value.data_ptr() for name, value in weights.items()
    }


def test_weights_that_a_host_cut_out_of_one_buffer_begin_where_kernels_can_read_them(exported):
    model = exported("unet-sd1")
    values = load_file(model.weights)
    buffer = torch.empty(1 + sum(value.numel() for value in values.values()))
    own, start = {}, 1
    for name, value in values.items():
        place = buffer[start : start + value.numel()].view(value.shape)
        own[name] = torch.nn.Parameter(place.copy_(value))
        start += value.numel()
    plan = plan_of(model)
    weights = load_weights(plan, model.folder / "nowhere", torch.float32, torch.device("cpu"), own)
    assert all(weight.data_ptr() % 16 == 0 for weight in weights.values())
    for name in plan.weights:
        assert own[name].data_ptr() == weights[name].data_ptr() and torch.equal(weights[name], values[name])


def test_weights_of_another_type_are_not_shared(exported):
    model = exported("unet-sd1")
    own = {name: torch.nn.Parameter(value.half()) for name, value in load_file(model.weights).items()}
    with pytest.raises(EngineBroken, match="does not hold"):
        load_weights(plan_of(model), model.folder / "nowhere", torch.float32, torch.device("cpu"), own)


def test_a_plan_is_read_as_it_was_saved(exported, tmp_path):
    plan = plan_of(exported("text_encoder"))
    plan.save(tmp_path)
    again = ExecutionPlan.read(tmp_path)
    for field in dataclasses.fields(plan):
        if field.name != "constants":
            assert getattr(again, field.name) == getattr(plan, field.name), field.name
    assert all(torch.equal(again.constants[name], value) for name, value in plan.constants.items())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (PLAN, b""),
        (PLAN, b"{}"),
        (PLAN, b'{"format": 9}'),
        (
            PLAN,
            b'{"format": 2, "inputs": [], "optional": [], "outputs": [], "prologue": [], "steps": [], "weights": []}',
        ),
        (CONSTANTS, b""),
        (CONSTANTS, b"\0" * 99),
    ],
)
def test_a_damaged_plan_is_refused(exported, tmp_path, name, content):
    plan_of(exported("vae_decoder")).save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineBroken, match=r"cannot be read|which we read"):
        ExecutionPlan.read(tmp_path)


def test_weights_that_are_missing_are_named(exported, tmp_path):
    plan = plan_of(exported("vae_decoder"))
    with pytest.raises(EngineBroken, match="does not hold"):
        load_weights(plan, tmp_path, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_what_the_host_has_set_changes_nothing(exported, mode):
    model = exported("vae_decoder")
    executor = executor_of(model)
    inputs = component_spec(model.component, model.config).random_inputs({"batch": 1, "height": 8, "width": 8})
    expected = executor.run(inputs)["image"]
    with mode():
        found = executor.run(inputs)["image"]
    assert torch.equal(found, expected) and not found.is_inference()


def test_every_recording_gets_what_is_used():
    cache = KernelCache()
    cache.add("key", b"cubin")
    with cache.recording() as outer:
        with cache.recording() as inner:
            pass
        cache.used("key")
    assert outer == {"key": b"cubin"} and not inner


def test_an_unknown_input_is_refused(exported):
    with pytest.raises(UnsupportedCall, match="no input style"):
        executor_of(exported("vae_decoder")).run({"style": torch.zeros(1)})


def test_an_operator_without_a_way_to_run_is_named(exported):
    model = bind_weights(exported("vae_decoder").graph, exported("vae_decoder").layout)
    model.graph.node[0].op_type = "Erf"
    with pytest.raises(BackendError, match=r"does not run the operator ai\.onnx\.Erf"):
        lower(model, ENTRY, exported("vae_decoder").layout)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def inputs_of(model: Exported, seed: int, device: str = "cuda", **shape: int) -> dict[str, torch.Tensor]:
    sizes = {"batch": 2, "height": 16, "width": 8, "tokens": 77, **shape}
    found = component_spec(model.component, model.config).random_inputs(sizes, seed=seed)
    return {name: value.to(device) for name, value in found.items()}


def stepwise(executor: Executor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return executor._step_by_step(inputs, executor.plan.outputs)["sample_out"]


@pytest.fixture
def unet(exported):
    return exported("unet-sdxl")


@pytest.mark.gpu
def test_a_replay_equals_the_steps(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    for seed, shape in enumerate(({}, {"height": 8}, {"batch": 5}, {"tokens": 231}, {})):
        inputs = inputs_of(unet, seed, **shape)
        for _ in range(2):
            assert torch.equal(executor.run(inputs)["sample_out"], stepwise(executor, inputs))


@pytest.mark.gpu
def test_a_prompt_that_changes_in_place_is_noticed(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    inputs = inputs_of(unet, 0)
    before = executor.run(inputs)["sample_out"]
    for name in PROMPT_INPUTS:
        inputs[name].data.mul_(-1)  # the same address, the same version
        after = executor.run(inputs)["sample_out"]
        assert torch.equal(after, stepwise(executor, inputs)) and not torch.equal(after, before)
        before = after


@pytest.mark.gpu
def test_an_edit_of_what_the_prompt_meets_is_seen_after_renew(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    inputs = inputs_of(unet, 0)
    before = executor.run(inputs)["sample_out"]
    for step in executor.plan.prologue:
        if step.op == "Linear":
            executor.weights[step.inputs[1]].mul_(-1)
    executor.renew()
    after = executor.run(inputs)["sample_out"]
    assert torch.equal(after, stepwise(executor, inputs)) and not torch.equal(after, before)


@pytest.mark.gpu
def test_calls_in_and_outside_of_inference_mode(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    inputs = inputs_of(unet, 0)
    with torch.inference_mode():
        before = executor.run(inputs)["sample_out"]
    assert torch.equal(executor.run(inputs)["sample_out"], before)


@pytest.mark.gpu
def test_optional_inputs_in_float32(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    sizes = {"batch": 2, "height": 16, "width": 8, "tokens": 77}
    inputs = component_spec(unet.component, unet.config).random_inputs(sizes, optional=True)
    assert {name for name in inputs if name in executor.plan.optional}
    assert executor.run(inputs)["sample_out"].isfinite().all()


@pytest.mark.gpu
def test_outputs_are_not_overwritten_by_later_calls(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    first = executor.run(inputs_of(unet, 0))["sample_out"]
    kept = first.clone()
    executor.run(inputs_of(unet, 1))
    executor.run(inputs_of(unet, 2, height=8))
    assert torch.equal(first, kept)


@pytest.mark.gpu
def test_few_graphs_are_kept(unet):
    executor = executor_of(unet, "cuda", torch.float16, graphs=2)
    for height in (8, 16, 24, 8):
        inputs = inputs_of(unet, height, height=height)
        assert torch.equal(executor.run(inputs)["sample_out"], stepwise(executor, inputs))
    assert len(executor._captured) == 2


@pytest.mark.gpu
def test_runs_again_after_its_graphs_are_gone(unet):
    """Results of the last graph still lie in its memory when the next is captured."""
    executor, inputs = executor_of(unet, "cuda", torch.float16), inputs_of(unet, 0)
    expected = executor.run(inputs)["sample_out"]
    kept = next(iter(executor._captured.values())).outputs
    executor.forget()
    assert torch.equal(executor.run(inputs)["sample_out"], expected)
    assert kept["sample_out"].shape == expected.shape


@pytest.mark.gpu
def test_engines_in_two_threads_and_side_streams(unet, exported):
    """Two engines share one pool: their replays must not overlap, whatever stream they are called on."""
    executors = [executor_of(unet, "cuda", torch.float16), executor_of(exported("unet-sd1"), "cuda", torch.float16)]
    models = [unet, exported("unet-sd1")]
    cases = [[inputs_of(model, seed) for seed in range(4)] for model in models]
    expected = [
        [stepwise(executor, inputs) for inputs in each] for executor, each in zip(executors, cases, strict=True)
    ]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(which: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(40):
                found = executors[which].run(cases[which][turn % 4])["sample_out"]
                stream.synchronize()
                if not torch.equal(found, expected[which][turn % 4]):
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


@pytest.mark.gpu
def test_out_of_memory_is_ours_and_passes(unet):
    executor = executor_of(unet, "cuda", torch.float16)
    inputs = inputs_of(unet, 1)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(BackendError, match="out of GPU memory"):
            executor.run(inputs_of(unet, 0, batch=16, height=256, width=256))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(executor.run(inputs)["sample_out"], stepwise(executor, inputs))
