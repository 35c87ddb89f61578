"""Tiny random pipelines of every family, small in every way but with the published structure, and one store for all.

Factor 8, native side 64: 8x8 latents. Every kind shares its VAE and the architecture of its text encoders with the
others, so that a run of the tests exports each graph once.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdaccel.engine.store import Store
from tests.models.tiny import tokenizer

PROMPT = "a red circle on a blue background"

_SD1: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 12,
    "norm_num_groups": 4,
}
# Variants differ at the edges of the network alone: attention in the middle block will do.
_EDGES = _SD1 | {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
_XL: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
}
UNETS: dict[str, dict[str, Any]] = {
    "sd1": _SD1,
    "sd2": _SD1 | {"attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True},
    "inpaint": _EDGES | {"in_channels": 9},
    "edit": _EDGES | {"in_channels": 8},
    "lcm": _EDGES | {"time_cond_proj_dim": 6},
    # Three levels, so that an odd side is halved twice; transformers of two layers.
    "sdxl": _SD1
    | _XL
    | {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4, 4),
        "transformer_layers_per_block": (1, 1, 2),
        "cross_attention_dim": 24,
        "projection_class_embeddings_input_dim": 10 + 6 * 4,
    },
    "refiner": _SD1 | _XL | {"projection_class_embeddings_input_dim": 12 + 5 * 4},
}
_VAE: dict[str, Any] = {
    "block_out_channels": (4, 4, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": 64,
}
_TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 10,
}
_PIPELINES: dict[str, Any] = {
    "sd1": StableDiffusionPipeline,
    "img2img": StableDiffusionImg2ImgPipeline,
    "inpaint4": StableDiffusionInpaintPipeline,
    "sd2": StableDiffusionPipeline,
    "lcm": StableDiffusionPipeline,
    "inpaint": StableDiffusionInpaintPipeline,
    "edit": StableDiffusionInstructPix2PixPipeline,
    "controlnet": StableDiffusionControlNetPipeline,
    "controlnet-img2img": StableDiffusionControlNetImg2ImgPipeline,
    "controlnet-inpaint": StableDiffusionControlNetInpaintPipeline,
    "adapter": StableDiffusionAdapterPipeline,
    "sdxl": StableDiffusionXLPipeline,
    "sdxl-controlnet": StableDiffusionXLControlNetPipeline,
    "sdxl-controlnet-img2img": StableDiffusionXLControlNetImg2ImgPipeline,
    "sdxl-controlnet-inpaint": StableDiffusionXLControlNetInpaintPipeline,
    "sdxl-img2img": StableDiffusionXLImg2ImgPipeline,
    "sdxl-inpaint": StableDiffusionXLInpaintPipeline,
    "refiner": StableDiffusionXLImg2ImgPipeline,
}


def _unet_of(kind: str) -> str:
    if kind in UNETS:
        return kind
    return "sdxl" if kind.startswith("sdxl") else "sd1"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Kept to the end of the run."""
    return tempfile.TemporaryDirectory(prefix="sdaccel-tests-", ignore_cleanup_errors=True)


def _files() -> Path:
    return Path(_folder().name)


@cache
def shared_store() -> Store:
    """One store for the whole run. Graphs, engines and weights in it are keyed by what they are, so tests may share."""
    return Store(Path(os.environ["TEST_STORE"]))


def scaled(module: torch.nn.Module, seed: int) -> Any:
    """Random weights of a scale that keeps activations of order one, so that an error anywhere shows in the image."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            noise = noise / parameter[0].numel() ** 0.5
        else:
            noise = 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        parameter.data.copy_(noise)
    return module.eval().requires_grad_(False)


def make(kind: str, *, seed: int = 0, controlnets: int = 1, **config: Any) -> Any:
    """A pipeline of ``kind`` in float32 on the CPU; equal arguments give equal weights. ``config`` changes its UNet."""
    xl = kind.startswith(("sdxl", "refiner"))
    unet = scaled(UNet2DConditionModel(**UNETS[_unet_of(kind)] | config), seed)
    vae = scaled(AutoencoderKL(**_VAE, scaling_factor=0.13025 if xl else 0.18215, force_upcast=xl), seed + 1)
    act = "gelu" if kind == "sd2" else "quick_gelu"
    parts: dict[str, Any] = {"unet": unet, "vae": vae, "text_encoder": None, "tokenizer": None}
    tokens = tokenizer(_files() / "tokenizer")
    if kind != "refiner":
        first = CLIPTextConfig(
            **_TEXT, hidden_act=act, bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id
        )
        parts["text_encoder"] = scaled(CLIPTextModel(first), seed + 2)
        parts["tokenizer"] = tokens
    if xl:
        widths = _TEXT | ({"projection_dim": _TEXT["hidden_size"]} if kind == "refiner" else {})
        second = CLIPTextConfig(**widths, hidden_act="gelu", bos_token_id=0, eos_token_id=2)
        parts["text_encoder_2"] = scaled(CLIPTextModelWithProjection(second), seed + 3)
        parts["tokenizer_2"] = tokens
        parts["scheduler"] = EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        )
        if kind == "refiner":
            parts |= {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    else:
        parts["scheduler"] = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type="v_prediction" if kind == "sd2" else "epsilon",
        )
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if "controlnet" in kind:
        nets = [
            scaled(ControlNetModel.from_unet(unet, conditioning_channels=3), seed + 4 + index)
            for index in range(controlnets)
        ]
        parts["controlnet"] = nets if controlnets > 1 else nets[0]
    if "adapter" in kind:
        widths = list(unet.config.block_out_channels)
        adapter = T2IAdapter(3, widths, num_res_blocks=1)
        parts["adapter"] = scaled(adapter, seed + 4)
    pipe = _PIPELINES[kind](**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(width: int = 64, height: int = 64, seed: int = 3) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height // 8, width // 8, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def mask(width: int = 64, height: int = 64) -> Image.Image:
    image = Image.new("L", (width, height), 0)
    image.paste(255, (width // 4, height // 4, width // 4 * 3, height // 4 * 3))
    return image


def inputs(kind: str, **changed: Any) -> dict[str, Any]:
    """What a call of a pipeline of ``kind`` takes, with a fixed seed and numpy images as its output."""
    call: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "np"}
    call["generator"] = torch.Generator().manual_seed(5)
    edits = kind == "refiner" or "img2img" in kind or "inpaint" in kind
    if edits or "controlnet" in kind or "adapter" in kind or kind == "edit":
        call["image"] = picture()
    if "inpaint" in kind:
        call["mask_image"] = mask()
    if edits:
        call |= {"strength": 0.9, "num_inference_steps": 3}
    if edits and "controlnet" in kind:
        call["control_image"] = picture(seed=4)
    return call | changed
