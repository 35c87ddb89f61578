"""How times are taken and summed, apart from any engine."""

from __future__ import annotations

import os

import pytest
import torch

from sdaccel import bench, eager
from sdaccel.engine.store import Store


def test_calls_take_turns_and_the_warm_up_is_left_out():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    times = bench.interleaved(calls, repeats=3, warmup=1, finish=lambda: None)
    assert {name: len(value.milliseconds) for name, value in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]


def test_short_calls_on_a_cpu_are_timed_when_the_threads_of_others_are_asleep(monkeypatch):
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    assert len(bench.interleaved(calls, repeats=1, warmup=0)["a"].milliseconds) == 1
    assert order == ["a", "a", "b", "b"]
    monkeypatch.setattr(bench, "SHORT", 0.0)
    bench.interleaved(calls, repeats=1, warmup=0)
    assert order[4:] == ["a", "b"]


def test_the_ratio_is_of_medians():
    times = {"torch": bench.Times((10.0, 30.0, 20.0)), "engine": bench.Times((5.0, 4.0, 90.0))}
    result = bench.ComponentBench("unet", "0" * 64, {}, times, 0.0)
    assert result.ratio == 4.0
    assert result.to_json()["milliseconds"]["engine"] == {
        "median": 5.0,
        "min": 4.0,
        "max": 90.0,
        "calls": [5.0, 4.0, 90.0],
    }
    result.overhead = {"swap": bench.Times((10.2,)), "session": bench.Times((10.0,))}
    assert result.overhead_percent == pytest.approx(2.0)


def test_threads_are_set_and_put_back(monkeypatch):
    monkeypatch.delenv("SDACCEL_THREADS", raising=False)
    before = torch.get_num_threads()
    with bench.using_threads(1):
        assert torch.get_num_threads() == 1 and os.environ["SDACCEL_THREADS"] == "1"
    assert torch.get_num_threads() == before and "SDACCEL_THREADS" not in os.environ
    monkeypatch.setenv("SDACCEL_THREADS", "3")
    with bench.using_threads(1):
        pass
    assert os.environ["SDACCEL_THREADS"] == "3"
    assert bench.default_threads() == 3


def test_times_by_operator_leave_the_first_call_of_each_node_out():
    def event(name: str, op: str, microseconds: int) -> dict:
        return {"cat": "Node", "name": f"{name}_kernel_time", "dur": microseconds, "args": {"op_name": op}}

    events = [event("c1", "Conv", 9000), event("c2", "Conv", 9000), event("m", "Mul", 9000)]
    events += [event("c1", "Conv", 1000), event("c2", "Conv", 2000), event("m", "Mul", 500)]
    events += [{"cat": "Session", "name": "model_run", "dur": 1}]
    assert bench._sum_ops(events, 1) == [bench.OpTime("Conv", 2, 3.0), bench.OpTime("Mul", 1, 0.5)]


def test_the_profile_of_an_engine_counts_all_its_nodes(tiny_store):
    store = Store(tiny_store.store)
    entry = next(e for e in store.list() if e.engine.component == "vae_decoder")
    found = bench.op_times(entry, store)
    assert found is not None
    shape, ops = found
    assert shape == {"batch": 1, "height": 8, "width": 8}
    counted = {item.op: item.count for item in ops}
    assert counted["Conv"] == entry.engine.details["ops"]["Conv"]
    assert all(item.milliseconds > 0 for item in ops[:3])


def test_the_torch_module_of_a_bench_is_the_model(tiny_store):
    from diffusers import UNet2DConditionModel

    from sdaccel.export.components import component_spec

    store = Store(tiny_store.store)
    entry = next(e for e in store.list() if e.engine.component == "unet")
    opened = store.open_engine(entry.key)
    module = bench.torch_module(entry, opened.weights[0])
    ours = eager.calls(module, "unet")
    plain = UNet2DConditionModel.from_pretrained(tiny_store.model / "unet").eval()
    inputs = component_spec("unet", entry.engine.config).random_inputs(
        {"batch": 2, "height": 8, "width": 8, "tokens": 77}
    )
    with torch.inference_mode():
        expected = plain(inputs["sample"], inputs["timestep"], inputs["encoder_hidden_states"], return_dict=False)[0]
        assert torch.equal(ours(inputs)[0], expected)
        assert not any(
            parameter.requires_grad for parameter in bench.torch_module(entry, opened.weights[0]).parameters()
        )
