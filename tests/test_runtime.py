"""Dispatch and reports, with engines that only pretend."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdaccel.engine.manifest import TensorSpec
from sdaccel.errors import BackendError, EngineBroken, EngineNotFound, OutOfMemory, ProfileError, UnsupportedCall
from sdaccel.profile import OptimizationProfile, Range
from sdaccel.runtime import ExecutionContext, RunReport, unusable

INPUTS = (
    TensorSpec("sample", "float32", ("batch", 4, "height", "width")),
    TensorSpec("text", "float32", ("batch", "tokens", 8)),
    TensorSpec("extra", "float32", ("extra_batch", 1), optional=True),
)


def profile(low: int, opt: int, high: int) -> OptimizationProfile:
    side = Range(low, opt, high)
    return OptimizationProfile.make(batch=Range(1, 2, 4), height=side, width=side, tokens=Range(77, 77, 231))


def entry(key: str, *profiles: OptimizationProfile, plan: str = "") -> Any:
    engine = SimpleNamespace(component="unet", profiles=profiles, inputs=INPUTS, backend="pretended")
    files = {"plan": SimpleNamespace(sha256=(plan or key,))}
    return SimpleNamespace(key=key, engine=engine, path=Path(key), files=files)


@dataclass
class Pretended:
    """A store and a backend in one. ``broken``: key → what opening it raises."""

    broken: dict[str, Exception] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    ran: list[tuple[str, int]] = field(default_factory=list)
    root: Path = Path("nowhere")
    name: str = "pretended"

    def open_engine(self, key: str) -> None:
        if key in self.broken:
            raise self.broken[key]

    def note_use(self, key: str) -> None:
        self.used.append(key)

    def device_type(self) -> str:
        return "cpu"

    def load(self, folder: Path, weights: Path, inputs: Any, shared: Any = None) -> Any:
        self.loads.append(str(folder))

        def run(given, outputs, index):
            self.ran.append((str(folder), index))
            return {"out": given["sample"] + 1}

        return SimpleNamespace(run=run, renew=lambda: None, shares_no_longer=lambda parameters: False)


def context(host: Pretended, *entries: Any) -> ExecutionContext:
    return ExecutionContext("unet", host, host, entries)  # type: ignore[arg-type]


def call(side: int = 8, batch: int = 1, tokens: int = 77, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"sample": torch.zeros(batch, 4, side, side), "text": torch.zeros(batch, tokens, 8), **more}


def test_the_containing_profile_with_the_nearest_opt_runs():
    host = Pretended()
    runs = context(host, entry("a", profile(4, 4, 16), profile(8, 12, 32)), entry("b", profile(30, 32, 64)))
    report = RunReport()
    for side in (4, 9, 11, 12, 20, 31, 64):
        runs.run(call(side), report)
    assert host.ran == [("a", 0), ("a", 1), ("a", 1), ("a", 1), ("a", 1), ("b", 0), ("b", 0)]
    assert host.loads == host.used == ["a", "b"]
    run = report.components["unet"]
    assert run.calls == 7 and {key: len(profiles) for key, profiles in run.engines.items()} == {"a": 2, "b": 1}


def test_of_equally_near_profiles_the_first_runs():
    host = Pretended()
    runs = context(host, entry("new", profile(8, 8, 8)), entry("old", profile(8, 8, 8)))
    runs.run(call(), RunReport())
    assert host.ran == [("new", 0)]


def test_engines_that_differ_in_profiles_alone_are_loaded_once():
    host = Pretended()
    runs = context(host, entry("a", profile(8, 8, 8), plan="same"), entry("b", profile(16, 16, 16), plan="same"))
    runs.run(call(8), RunReport())
    runs.run(call(16), RunReport())
    assert host.loads == ["a"] and sorted(host.used) == ["a", "b"]


@pytest.mark.parametrize(
    "given, kind, why",
    [
        (call(40), ProfileError, "height 40 is outside 4-16; height 40 is outside 8-32"),
        (call(8, batch=5), ProfileError, "batch 5 is outside 1-4"),
        (call(8, tokens=308), ProfileError, "tokens 308 is outside 77-231"),
        (call(8, nonsense=torch.zeros(1)), UnsupportedCall, "has no input nonsense"),
        ({"sample": torch.zeros(1, 4, 8, 8)}, UnsupportedCall, "needs text"),
        ({"sample": torch.zeros(1, 4, 8), "text": torch.zeros(1, 77, 8)}, UnsupportedCall, r"sample is \[1, 4, 8\]"),
        ({"sample": torch.zeros(1, 9, 8, 8), "text": torch.zeros(1, 77, 8)}, UnsupportedCall, "sample is"),
        ({"sample": torch.zeros(1, 4, 8, 8), "text": torch.zeros(2, 77, 8)}, UnsupportedCall, "text is"),
    ],
)
def test_calls_that_no_engine_takes(given, kind, why):
    host = Pretended()
    runs = context(host, entry("a", profile(4, 4, 16), profile(8, 12, 32)))
    with pytest.raises(kind, match=why):
        runs.run(given, RunReport())
    runs.run(call(8, extra=torch.zeros(3, 1)), RunReport())
    assert len(host.ran) == 1


def test_without_engines():
    with pytest.raises(UnsupportedCall, match="no engine of unet is in the store"):
        context(Pretended()).run(call(), RunReport())


@pytest.mark.parametrize("error", [EngineBroken("torn"), EngineNotFound("torn"), BackendError("torn"), OSError("torn")])
def test_a_broken_engine_is_left_out(error):
    host = Pretended(broken={"a": error})
    runs = context(host, entry("a", profile(8, 8, 16)), entry("b", profile(8, 16, 16)))
    for _ in range(2):
        report = RunReport()
        runs.run(call(8), report)
        (note,) = report.notes
        assert note.startswith("unet: the engine a is left out: ") and "torn" in note
    assert host.ran == [("b", 0), ("b", 0)]
    host.broken["b"] = EngineBroken("torn too")
    alone = context(host, entry("a", profile(8, 8, 16)), entry("b", profile(8, 8, 16)))
    for _ in range(2):
        with pytest.raises((EngineBroken, EngineNotFound, BackendError), match="torn"):
            alone.run(call(8), RunReport())


def test_too_little_memory_is_tried_again_in_the_next_generation():
    """In between, a call at each step that fails would cost more than torch."""
    host = Pretended(broken={"a": OutOfMemory("too little")})
    runs = context(host, entry("a", profile(8, 8, 16)))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            runs.run(call(8), RunReport())
    host.broken.clear()
    with pytest.raises(OutOfMemory):
        runs.run(call(8), RunReport())
    runs.renew()
    report = RunReport()
    runs.run(call(8), report)
    assert host.ran == [("a", 0)] and not report.notes


def test_a_shape_that_finds_too_little_memory_leaves_others_alone():
    host = Pretended()
    runs = context(host, entry("a", profile(8, 8, 16)))
    runs.run(call(8), RunReport())
    engine = next(iter(runs._loaded.values()))
    tries = []

    def full(*_):
        tries.append(1)
        raise OutOfMemory("too little")

    plain, engine.run = engine.run, full
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            runs.run(call(16), RunReport())
    assert len(tries) == 1
    engine.run = plain
    runs.run(call(8), RunReport())
    with pytest.raises(OutOfMemory):
        runs.run(call(16), RunReport())
    runs.renew()
    runs.run(call(16), RunReport())


# --- reports


def test_a_report_turns_into_json_and_reads_well():
    report = RunReport()
    for _ in range(20):
        report.ran_engine("unet", "f" * 64, "pretended", "batch=1", 1.5)
    report.ran_torch("unet", 4.0, ["style"])
    report.fell_back("unet", "adapters are active")
    report.fell_back("unet", "adapters are active")
    report.note("a note")
    report.note("a note")
    found = json.loads(json.dumps(report.to_json()))
    run = found["components"]["unet"]
    assert (run["calls"], run["milliseconds"], run["torch_calls"], run["adapters"]) == (20, 30.0, 1, ["style"])
    assert found["fallbacks"] == [{"component": "unet", "reason": "adapters are active", "calls": 2}]
    assert found["notes"] == ["a note"] and found["ok"] is True
    assert str(report).splitlines() == [
        "unet with style: engine ffffffffffff (pretended) 20 calls, 30 ms; torch 1 call, 4 ms",
        "in torch: unet, 2 calls: adapters are active",
        "a note",
    ]
    report.fail("vae_decoder gives NaN")
    assert not report.ok and not report.to_json()["ok"]
    run["engines"].clear()
    assert report.to_json()["components"]["unet"]["engines"], "a copy"


def test_a_report_is_written_and_read_by_many_threads():
    report = RunReport()

    def work(number: int) -> None:
        for step in range(200):
            report.ran_engine(f"part {step % 50}", "a", "pretended", "batch=1", 1.0)
            report.fell_back("unet", f"reason {step % 7}")
            assert str(report) and report.to_json()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(run.calls for run in report.components.values()) == 800
    assert sum(fallback.calls for fallback in report.fallbacks) == 800


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unusable_outputs(dtype):
    fine = torch.linspace(-1, 1, 9, dtype=dtype)
    assert unusable(fine) is None
    for value, name in ((float("nan"), "NaN"), (float("inf"), "infinite values"), (float("-inf"), "infinite values")):
        spoiled = fine.clone()
        spoiled[4] = value
        assert unusable(spoiled) == name
    assert unusable(torch.zeros(4, dtype=dtype)) == "the constant 0"
    assert unusable(torch.zeros(1, dtype=dtype)) is None and unusable(torch.zeros(0, dtype=dtype)) is None


def test_unusable_says_the_same_of_few_values_and_of_many():
    few, many = torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 20_000)
    for values in (few, many, few.view(3, 3).t(), 1e38 * few, few.requires_grad_()):
        assert unusable(values) is None
    assert unusable(torch.tensor([1.0, 2.0, 1.0])) is None
    assert unusable(torch.tensor([float("inf"), float("-inf"), 0.0])) == "infinite values"
    assert unusable(torch.full((20_000,), 3e38)) == unusable(torch.full((4,), 3e38)) == "the constant 3e+38"
