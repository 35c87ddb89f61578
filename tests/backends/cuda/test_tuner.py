"""What the tuner asks of the device and of the host's settings; its measurements need a GPU."""

from types import SimpleNamespace

import pytest
import torch

from sdaccel.backends.cuda import tuner
from sdaccel.backends.cuda.executor import Chooser
from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.tactic import Tactic
from sdaccel.backends.cuda.timing_cache import Measured, TacticTable


@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_references_are_computed_whatever_tf32_setting_the_host_has(precision):
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = precision
    try:
        (seen,) = tuner._in_float32(lambda x: setting.fp32_precision, (torch.ones(1),), {})
        assert seen != "tf32" and (setting.fp32_precision == "tf32") == (precision == "tf32")
    finally:
        setting.fp32_precision = before


def test_memory_that_is_too_short_to_poison_rules_no_tactic_out(monkeypatch):
    """Four results' worth of it: more than the call itself takes."""
    left = [torch.zeros(4, dtype=torch.uint8)]

    def empty(*_, **__):
        if not left:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return left.pop()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    expected = torch.ones(2)
    timer = tuner.Tuner(Device.cpu(), TacticTable())
    assert timer._wrong(Tactic("torch", expected.clone), (expected,)) is None
    assert "its error" in timer._wrong(Tactic("wrong", lambda: 2 * expected), (expected,))


def test_where_memory_is_short_the_reference_rounds_too(monkeypatch):
    asked = []

    def reference(x, scale):
        asked.append(x.dtype)
        if x.dtype == torch.float32:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return x * scale

    x = torch.ones(4, dtype=torch.float16)
    rounded = SimpleNamespace(reference=reference)
    ((value,), slack) = tuner._reference(rounded, (x,), {"scale": 2.0})
    assert asked == [torch.float32, torch.float16] and value.dtype == torch.float16 and slack == 2.0
    timer = tuner.Tuner(Device.cpu(), TacticTable())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tuner, "_poison", lambda results: None)
    off = Tactic("off", lambda: value * (1 + 2 * 2**-10))
    assert timer._wrong(off, (value,), slack) is None and "its error" in timer._wrong(off, (value,))


class op:
    """One whose tactics have other names at every shape."""

    @staticmethod
    def tactics(device, x):
        return [Tactic(name, lambda name=name: name) for name in ("wrong", f"ours<rows={len(x)}>", "torch")]


@pytest.mark.parametrize(("rows", "tactic"), [(2, "ours<rows=2>"), (3, "ours<rows=3>")])
def test_a_tactic_that_was_found_wrong_runs_at_no_other_shape(rows, tactic):
    chooser = Chooser(Device.cpu(), torch.float32, TacticTable(), ())
    found = Measured("ours<rows=2>", 1.0, {"ours<rows=2>": 1.0, "torch": 2.0}, {"wrong": "its error is 0.3"})
    chooser.table.put(chooser._signature(op, (torch.ones(2, 8),), {}), found)
    assert chooser.run(op, torch.ones(rows, 8)) == tactic
