"""Files that are no checkpoint: one error that says what they are and what is expected (case G13)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sdaccel.errors import ModelError, PickleRefused
from sdaccel.models import open_checkpoint
from tests.models import tiny

UNET = "model.diffusion_model."
KINDS = {
    "LoRA": ["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"],
    "LoRA, diffusers": ["unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight"],
    "LoRA ": ["lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_a"],
    "ControlNet": ["control_model.input_blocks.0.0.weight", "control_model.zero_convs.0.0.weight"],
    "ControlNet, diffusers": ["controlnet_cond_embedding.conv_in.weight", "conv_in.weight"],
    "Stable Diffusion 3": [f"{UNET}joint_blocks.0.context_block.adaLN_modulation.1.bias"],
    "Flux": [f"{UNET}double_blocks.0.img_attn.norm.key_norm.scale"],
    "Stable Cascade": ["clip_txt_mapper.weight", "down_blocks.0.0.channelwise.0.weight"],
    "video model": [f"{UNET}input_blocks.1.0.time_stack.in_layers.0.weight"],
    "EDM model": ["edm_mean", f"{UNET}input_blocks.0.0.weight"],
    "upscaler": [f"{UNET}label_emb.weight", f"{UNET}input_blocks.0.0.weight"],
    "IP-Adapter": ["image_proj.proj.weight"],
    "T2I-Adapter": ["body.0.block1.weight"],
    "textual inversion": ["emb_params"],
    "textual inversion ": ["<cat-toy>"],
    "textual inversion, SDXL": ["clip_l", "clip_g"],
    "diffusers pipeline in one file": ["unet.conv_in.weight", "vae.encoder.conv_in.weight", "text_encoder.x.weight"],
    "diffusers UNet alone": ["conv_in.weight", "down_blocks.0.resnets.0.conv1.weight"],
    "UNet alone": ["input_blocks.0.0.weight", "out.2.weight"],
    "VAE alone": ["encoder.down.0.block.0.conv1.weight", "decoder.conv_in.weight"],
    "VAE alone, diffusers": ["encoder.down_blocks.0.resnets.0.conv1.weight"],
    "VAE alone ": ["first_stage_model.encoder.conv_in.weight"],
    "text encoder alone": ["text_model.encoder.layers.0.mlp.fc1.weight"],
    "not a Stable Diffusion checkpoint": ["layer1.weight"],
    "none at all": [],
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(kind, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(2, 2) for name in KINDS[kind]}, str(path))
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert kind.split(",")[0].strip() in message and str(path) in message and "\n" not in message


def test_expectation_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"double_blocks.0.img_attn.norm.key_norm.scale": torch.zeros(2)}, str(path))
    with pytest.raises(ModelError, match=r"Expected Stable Diffusion 1\.x, .* 2\.x, .* XL, .* refiner\."):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["text", "unet"])
def test_parts_of_pipelines_saved_alone(kind, tmp_path):
    pipe = tiny.pipeline("sd1", tmp_path / "tokenizer")
    part = {"text": pipe.text_encoder, "unet": pipe.unet}[kind]
    part.save_pretrained(tmp_path / "part")
    (file,) = (tmp_path / "part").glob("*.safetensors")
    with pytest.raises(ModelError, match=f"{kind}.* alone|{kind.upper()}|UNet alone"):
        open_checkpoint(file)


def test_unclip(tmp_path):
    pipe = tiny.pipeline("sdxl", tmp_path / "tokenizer")
    weights = tiny.original_weights(pipe, "sdxl") | {"cond_stage_model.model.ln_final.bias": torch.zeros(64)}
    with pytest.raises(ModelError, match="unCLIP"):
        open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["model.ckpt", "model.PT", "model.bin", "model.pth"])
def test_pickles_by_their_names(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(PickleRefused, match=rf"{name} .*--allow-pickle"):
        open_checkpoint(tmp_path / name)


def test_an_unet_with_nothing_else_of_use(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({f"{UNET}input_blocks.0.0.weight": torch.zeros(2, 2)}, str(path))
    with pytest.raises(ModelError, match="input blocks are incomplete"):
        open_checkpoint(path)
