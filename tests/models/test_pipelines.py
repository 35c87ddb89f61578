"""Live pipelines: weights referenced under plain names, whatever is wrapped around the modules (case G4)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderTiny, AutoPipelineForImage2Image
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from sdaccel.errors import ModelError
from sdaccel.models import Family, open_checkpoint
from sdaccel.models.pipeline import load_pipeline
from tests.models import tiny


@pytest.fixture
def pipe(tmp_path):
    return tiny.pipeline("sd1", tmp_path)


def names(checkpoint):
    return {name: component.tensors.keys() for name, component in checkpoint.components.items()}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_family(kind, tmp_path):
    pipe = tiny.pipeline(kind, tmp_path)
    checkpoint = open_checkpoint(pipe)
    assert checkpoint.family.value == kind if kind in ("sd2", "sdxl", "sdxl-refiner") else kind.split("-")[0]
    assert checkpoint.kind == "pipeline" and checkpoint.origin == f"pipeline {type(pipe).__name__}"
    assert checkpoint.path is None and checkpoint.notes == () and checkpoint.ignored == ()
    for name, component in checkpoint.components.items():
        state = getattr(pipe, name).state_dict()
        assert component.tensors.keys() == state.keys()
        for key, ref in component.tensors.items():
            assert ref.read().data_ptr() == state[key].data_ptr()  # referenced, not copied
    with pytest.raises(ModelError, match="Use that pipeline itself"):
        load_pipeline(checkpoint)


def test_adapters_and_compilation_leave_names_and_hash_alone(pipe):
    plain = open_checkpoint(pipe)
    hashes = {name: component.content_hash for name, component in plain.components.items()}
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "conv1", "proj_in"]))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), pipe.text_encoder)
    wrapped = open_checkpoint(pipe)
    assert names(wrapped) == names(plain)
    assert {name: component.content_hash for name, component in wrapped.components.items()} == hashes
    assert wrapped.ignored and all("lora_" in name for name in wrapped.ignored)
    pipe.unet = torch.compile(pipe.unet)
    pipe.vae.decoder = torch.compile(pipe.vae.decoder)
    compiled = open_checkpoint(pipe)
    assert names(compiled) == names(plain) and compiled.ignored == wrapped.ignored
    assert {name: component.content_hash for name, component in compiled.components.items()} == hashes


def test_a_fused_adapter_is_another_model(pipe):
    before = open_checkpoint(pipe).components["unet"].content_hash
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.unet.fuse_lora()
    assert open_checkpoint(pipe).components["unet"].content_hash != before


def test_peft_model_around_an_encoder(pipe):
    plain = open_checkpoint(pipe)
    pipe.text_encoder = get_peft_model(pipe.text_encoder, LoraConfig(r=2, target_modules=["q_proj"]))
    assert names(open_checkpoint(pipe)) == names(plain)


def test_a_grown_vocabulary(pipe):
    pipe.text_encoder.resize_token_embeddings(605)
    checkpoint = open_checkpoint(pipe)
    assert checkpoint.components["text_encoder"].config["vocab_size"] == 605
    assert checkpoint.components["text_encoder"].tensors["embeddings.token_embedding.weight"].shape == (605, 64)


def test_other_pipelines_of_the_same_parts(pipe):
    again = AutoPipelineForImage2Image.from_pipe(pipe)
    assert (
        open_checkpoint(again).components["unet"].content_hash == open_checkpoint(pipe).components["unet"].content_hash
    )


def test_a_tiny_vae_and_a_missing_encoder(pipe):
    pipe.vae = AutoencoderTiny()
    pipe.text_encoder = None
    checkpoint = open_checkpoint(pipe)
    assert checkpoint.components.keys() == {"unet"} and checkpoint.vae_factor == 8
    assert checkpoint.notes == ("vae is a AutoencoderTiny: it stays in torch.",)
    assert checkpoint.family is Family.SD1


def test_subclasses(pipe):
    before = open_checkpoint(pipe).components["unet"].content_hash
    pipe.unet.__class__ = type("PatchedUNet", (type(pipe.unet),), {})
    assert open_checkpoint(pipe).components["unet"].content_hash == before


def test_offloaded_weights(pipe):
    pipe.unet.to("meta")
    with pytest.raises(ModelError, match=r"meta device.*remove_all_hooks"):
        open_checkpoint(pipe)


def test_integer_weights(pipe):
    pipe.unet.conv_in.weight = torch.nn.Parameter(torch.zeros(32, 4, 3, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"conv_in\.weight as int8"):
        open_checkpoint(pipe)


def test_not_a_pipeline():
    for thing in (None, 5, torch.nn.Linear(1, 1)):
        with pytest.raises(ModelError, match="neither a path nor a pipeline"):
            open_checkpoint(thing)
    with pytest.raises(ModelError, match="has no UNet"):
        open_checkpoint(SimpleNamespace(unet=None, scheduler=SimpleNamespace(config={})))
