"""The whole way from a checkpoint to an image in folders with awkward names (G16)."""

import os
import shutil

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import sdaccel
from sdaccel import Store
from tests.tolerances import PIPELINE_MAX_ABS

OPTIONS = {"num_inference_steps": 2, "height": 64, "width": 72, "output_type": "np"}


@pytest.mark.parametrize("name", ["Zoë's modèle", "日本語 ストア", "v1.5.final.", "long"])
def test_model_and_store_of_every_kind_of_path(name, tiny_store, tmp_path):
    folder = tmp_path / name if name != "long" else tmp_path.joinpath(*["long" * 25] * 3)
    model = shutil.copytree(tiny_store.model, folder / "model")
    store = shutil.copytree(tiny_store.store, folder / "store")
    pipe = StableDiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe("a b", generator=_seeded(), **OPTIONS).images
    sdaccel.accelerate(pipe, store=Store(store), build="never")
    found = pipe("a b", generator=_seeded(), **OPTIONS).images
    assert pipe.sdaccel.last_report.fallbacks == []
    assert np.abs(found - expected).max() <= PIPELINE_MAX_ABS


@pytest.mark.skipif(os.name == "nt", reason="names are UTF-16 there")
def test_a_model_whose_name_is_not_utf_8(tiny_store, tmp_path):
    """As an old archive unpacks: what a manifest says of it is for people."""
    try:
        model = shutil.copytree(tiny_store.model, tmp_path / os.fsdecode(b"mod\xe8le"))
    except OSError:
        pytest.skip("this file system takes no such name")
    (entry,) = sdaccel.build(model, components=["text_encoder"], store=Store(tmp_path / "store"))
    assert entry.engine.model == "mod?le" and entry.engine.origin.endswith("mod?le")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
