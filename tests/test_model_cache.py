"""Models that were used last stay in RAM, within a budget."""

from __future__ import annotations

import gc
import operator
import weakref
from dataclasses import dataclass, field

import psutil
import pytest
import torch

from sdaccel import model_cache
from sdaccel.errors import SettingError
from sdaccel.model_cache import GIB, HostWeights, ModelCache
from sdaccel.upload import upload
from tests import pipelines


@dataclass(eq=False)
class Fake:
    nbytes: int
    done: list[str] = field(default_factory=list)

    def park(self):
        self.done.append("parked")

    def close(self):
        self.done.append("closed")


def test_the_least_recently_used_goes_first_and_the_budget_is_kept():
    cache, models = ModelCache(10), [Fake(4) for _ in range(4)]
    for key in (0, 1):
        cache.keep(key, models[key])
    again = cache.take(0)
    assert again is models[0] and cache.keys() == [1]
    cache.keep(0, again)
    cache.keep(2, models[2])
    assert cache.keys() == [0, 2] and cache.nbytes == 8 and models[1].done == ["parked", "closed"]
    assert cache.take(1) is None and cache.take("unknown") is None
    large = Fake(11)
    cache.keep(3, large)
    assert large.done == ["closed"] and cache.keys() == [0, 2]
    cache.keep(3, Fake(10))
    assert cache.keys() == [3] and cache.nbytes == 10
    cache.clear()
    assert not cache.keys() and not cache.nbytes


def test_what_goes_is_freed():
    cache, model = ModelCache(10), Fake(6)
    gone = weakref.ref(model)
    cache.keep(0, model)
    del model
    assert gone() is not None
    cache.keep(1, Fake(6))
    assert gone() is None


def test_the_budget_is_a_setting(monkeypatch):
    monkeypatch.delenv("SDACCEL_MODEL_CACHE", raising=False)
    assert ModelCache().budget == psutil.virtual_memory().total // 4
    monkeypatch.setenv("SDACCEL_MODEL_CACHE", "1.5")
    assert ModelCache().budget == 3 * GIB // 2
    monkeypatch.setenv("SDACCEL_MODEL_CACHE", "0")
    cache, model = ModelCache(), Fake(1)
    cache.keep(0, model)
    assert model.done == ["closed"]
    for wrong in ("-1", "much", "nan"):
        monkeypatch.setenv("SDACCEL_MODEL_CACHE", wrong)
        with pytest.raises(SettingError, match="not a number of GiB from 0"):
            ModelCache()


def test_a_pipeline_leaves_its_device_and_comes_back(monkeypatch):
    """Copies stand for the memory of a GPU: nothing of them is left where the pipeline was."""
    monkeypatch.setattr(model_cache, "upload", lambda tensors, device: [tensor.clone() for tensor in tensors])
    pipe = pipelines.make("sdxl")
    modules = (pipe.unet, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    before = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    values, places = [tensor.clone() for tensor in before], [tensor.data_ptr() for tensor in before]
    host = HostWeights(pipe)
    assert host.nbytes == sum(tensor.nbytes for tensor in before)
    for _ in range(2):
        assert host.move("cuda:0") is pipe
        there = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        assert all(map(operator.is_, there, before)) and all(map(torch.equal, there, values))
        assert not {tensor.data_ptr() for tensor in there} & {*places}
        pipe.vae.to(torch.float64)
        host.leave()
        assert [tensor.data_ptr() for tensor in there] == places and pipe.vae.dtype == torch.float32
    found = [weakref.ref(tensor) for tensor in before]
    del pipe, host, modules, before, there
    gc.collect()
    assert not any(reference() is not None for reference in found)


@pytest.mark.gpu
def test_uploads_are_copies():
    mixed = [torch.randn(5_000_001), torch.arange(7), torch.randn(3, 5).half().t(), torch.empty(0), torch.tensor(2.5)]
    for found, tensor in zip(upload(mixed, torch.device("cuda", 0)), mixed, strict=True):
        assert found.is_cuda and found.shape == tensor.shape and torch.equal(found.cpu(), tensor)
