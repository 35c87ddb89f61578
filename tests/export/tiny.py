"""Tiny random models in the published forms: one config for each kind of checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sdaccel.engine.weights import TensorPlace
from sdaccel.export.components import component_spec
from sdaccel.models.tensors import read_header

SD1: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 12,
    "norm_num_groups": 4,
}
# Attention in the middle block alone: enough where a form differs in how a block, or an edge of the network, is made.
SMALL = {**SD1, "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
SD2 = {**SMALL, "attention_head_dim": [2, 4], "use_linear_projection": True, "upcast_attention": True}
# Three levels, so that an odd side is halved twice, and more than one transformer a block.
SDXL = {
    **SD2,
    "block_out_channels": [8, 16, 16],
    "down_block_types": ["DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D"],
    "attention_head_dim": [2, 4, 4],
    "transformer_layers_per_block": [1, 1, 2],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 10 + 6 * 4,
}
REFINER = {
    **SD2,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 10 + 5 * 4,
}
INPAINT = {**SMALL, "in_channels": 9}
LCM_8_CHANNELS = {**SMALL, "in_channels": 8, "time_cond_proj_dim": 6}
UNETS = {
    "sd1": SD1,
    "sd2": SD2,
    "sdxl": SDXL,
    "refiner": REFINER,
    "inpaint": INPAINT,
    "lcm-8-channel": LCM_8_CHANNELS,
}

# The down half of a UNet, and an image eight times the latent's size.
_CONTROL = {"_class_name": "ControlNetModel", "conditioning_embedding_out_channels": [4, 4, 8, 8]}
CONTROLNET = {**SD1, **_CONTROL}
CONTROLNET_SDXL = {**SDXL, **_CONTROL}

VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [4, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
}

TEXT: dict[str, Any] = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "vocab_size": 60,
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 77,
    "eos_token_id": 59,
    "hidden_act": "quick_gelu",
}
# As SDXL's second encoder: projected, another activation, and the end-of-text id that old configs carry.
TEXT_2 = {
    **TEXT,
    "architectures": ["CLIPTextModelWithProjection"],
    "hidden_act": "gelu",
    "projection_dim": 10,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"unet-{name}": ("unet", config) for name, config in UNETS.items()},
    "vae_decoder": ("vae_decoder", VAE),
    "vae_encoder": ("vae_encoder", VAE),
    "text_encoder": ("text_encoder", TEXT),
    "text_encoder_2": ("text_encoder_2", TEXT_2),
    "controlnet": ("controlnet", CONTROLNET),
    "controlnet-sdxl": ("controlnet", CONTROLNET_SDXL),
}


def write_weights(component: str, config: dict[str, Any], path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Random weights of a scale that keeps activations of order one, under the names of a checkpoint."""
    spec = component_spec(component, config)
    generator = torch.Generator().manual_seed(7)
    with torch.device("meta"):
        parameters = dict(spec.build_module().named_parameters())
    state = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            noise = noise / parameter[0].numel() ** 0.5
        else:
            noise = 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        state[spec.weight_name(name)] = noise.to(dtype).contiguous()
    save_file(state, path)


def places(path: Path) -> dict[str, TensorPlace]:
    tensors, _ = read_header(path)
    return {
        name: TensorPlace(offset, nbytes, tuple(shape), dtype)
        for name, (dtype, shape, offset, nbytes) in tensors.items()
    }
