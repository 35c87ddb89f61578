"""Small random pipelines of every family, and the same weights written in the original layout."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sdaccel.models.single_file import published

KINDS = ("sd1", "sd1-inpaint", "sd1-edit", "sd1-lcm", "sd2", "sdxl", "sdxl-inpaint", "sdxl-refiner")
WORDS = ("a", "red", "blue", "circle", "square", "on", "background")


def unet(kind: str) -> UNet2DConditionModel:
    down, attends = "DownBlock2D", "CrossAttnDownBlock2D"
    up, attends_up = "UpBlock2D", "CrossAttnUpBlock2D"
    config: dict[str, Any] = {
        "sample_size": 8,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": (attends, down),
        "up_block_types": (up, attends_up),
        "cross_attention_dim": 64,
        "attention_head_dim": 8,
        "in_channels": {"inpaint": 9, "edit": 8}.get(kind.rpartition("-")[2], 4),
    }
    if kind == "sd1-lcm":
        config["time_cond_proj_dim"] = 16
    if kind == "sd2":
        config |= {"use_linear_projection": True, "attention_head_dim": (1, 1), "block_out_channels": (64, 64)}
    if kind.startswith("sdxl"):
        config |= {
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 64 + 6 * 256,
            "block_out_channels": (32, 64, 64),
            "down_block_types": (down, attends, attends),
            "up_block_types": (attends_up, attends_up, up),
            "transformer_layers_per_block": (1, 2, 3),
            "attention_head_dim": (1, 1, 1),
            "cross_attention_dim": 128,
            "layers_per_block": 2,
        }
    if kind == "sdxl-refiner":
        config |= {
            "block_out_channels": (32, 64, 64, 64),
            "down_block_types": (down, attends, attends, down),
            "up_block_types": (up, attends_up, attends_up, up),
            "transformer_layers_per_block": 2,
            "attention_head_dim": (1, 1, 1, 1),
            "cross_attention_dim": 64,
            "projection_class_embeddings_input_dim": 64 + 5 * 256,
        }
    return UNet2DConditionModel(**config)


def vae(xl: bool) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=16,
        scaling_factor=0.13025 if xl else 0.18215,
    )


def text_encoder(
    projects: bool, layers: int = 3, act: str = "quick_gelu"
) -> CLIPTextModel | CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=1,
        num_hidden_layers=layers,
        vocab_size=600,
        projection_dim=64,
        hidden_act=act,
        bos_token_id=0,
        eos_token_id=2,
    )
    return (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)


@cache
def tokenizer_files() -> dict[str, str]:
    """vocab.json and merges.txt of a byte-level vocabulary with a handful of words."""
    letters = [chr(code) for code in range(33, 127)]
    merges = []
    vocabulary = letters + [f"{letter}</w>" for letter in letters]
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merges.append(f"{parts[0]} {parts[1]}")
            parts[:2] = ["".join(parts[:2])]
            vocabulary.append(parts[0])
    vocabulary = list(dict.fromkeys([*vocabulary, "<|startoftext|>", "<|endoftext|>"]))
    ids = {token: index for index, token in enumerate(vocabulary)}
    return {"vocab.json": json.dumps(ids), "merges.txt": "#version: 0.2\n" + "\n".join(dict.fromkeys(merges)) + "\n"}


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def tokenizer(folder: Path, pad: str = "<|endoftext|>") -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(str(write_tokenizer(folder)), model_max_length=77, pad_token=pad)


def pipeline(kind: str, folder: Path, seed: int = 0) -> Any:
    """Random weights that half precision holds exactly, so that fp16 and fp32 files are the same model."""
    torch.manual_seed(seed)
    xl = kind.startswith("sdxl")
    parts: dict[str, Any] = {"unet": unet(kind), "vae": vae(xl), "text_encoder": None}
    if kind != "sdxl-refiner":
        parts["text_encoder"] = text_encoder(False, act="gelu" if kind == "sd2" else "quick_gelu")
        parts["tokenizer"] = tokenizer(folder / "tokenizer", "!" if kind == "sd2" else "<|endoftext|>")
    else:
        parts["tokenizer"] = None
    if xl:
        parts["text_encoder_2"] = text_encoder(True, act="gelu")
        parts["tokenizer_2"] = tokenizer(folder / "tokenizer_2", "!")
        parts["scheduler"] = EulerDiscreteScheduler.from_config(published("sdxl", "scheduler"))
    else:
        parts["scheduler"] = PNDMScheduler.from_config(published("sd15", "scheduler"))
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    for module in parts.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False).half().float()
    classes = {
        "sd1-inpaint": StableDiffusionInpaintPipeline,
        "sd1-edit": StableDiffusionInstructPix2PixPipeline,
        "sdxl": StableDiffusionXLPipeline,
        "sdxl-inpaint": StableDiffusionXLInpaintPipeline,
        "sdxl-refiner": StableDiffusionXLImg2ImgPipeline,
    }
    if kind == "sdxl-refiner":
        parts |= {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    pipe = classes.get(kind, StableDiffusionPipeline)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


IMG2IMG = StableDiffusionImg2ImgPipeline


# ---- diffusers → original layout, written down from the original code's module tree


def unet_names(unet: UNet2DConditionModel) -> dict[str, str]:
    layers = unet.config.layers_per_block
    names = {}
    for name in unet.state_dict():
        names[name] = "model.diffusion_model." + _unet_name(name, layers, unet)
    return names


_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTER = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "time_embedding.cond_proj": "time_embed.cond_proj",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def _unet_name(name: str, layers: int, unet: UNet2DConditionModel) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", stem):
        side, block, part, index, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
        number = block * (layers + 1) + index + (side == "down")
        slot = 0 if part == "resnets" else 1
        rest = _RESNET.get(rest, rest) if part == "resnets" else rest
        return f"{'input' if side == 'down' else 'output'}_blocks.{number}.{slot}.{rest}.{kind}"
    if match := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv", stem):
        return f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op.{kind}"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.conv", stem):
        block = int(match[1])
        slot = 2 if hasattr(unet.up_blocks[block], "attentions") else 1
        return f"output_blocks.{block * (layers + 1) + layers}.{slot}.conv.{kind}"
    if match := re.fullmatch(r"mid_block\.resnets\.(\d)\.(.+)", stem):
        return f"middle_block.{2 * int(match[1])}.{_RESNET[match[2]]}.{kind}"
    match = re.fullmatch(r"mid_block\.attentions\.0\.(.+)", stem)
    assert match, name
    return f"middle_block.1.{match[1]}.{kind}"


def vae_names(vae: AutoencoderKL) -> dict[str, str]:
    levels = len(vae.config.block_out_channels)
    names = {}
    for name in vae.state_dict():
        new = name
        new = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", new)
        new = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", new)
        new = re.sub(r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{levels - 1 - int(m[1])}.block", new)
        new = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample", new)
        new = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", new)
        new = new.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        new = re.sub(r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1", new)
        new = new.replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
        new = new.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        names[name] = "first_stage_model." + new
    return names


def clip_weights(encoder: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """As OpenAI's CLIP sits in SD 1 and SDXL files."""
    found = {}
    for name, tensor in encoder.state_dict().items():
        found[f"{prefix}text_model.{name.removeprefix('text_model.')}"] = tensor
    width = encoder.config.max_position_embeddings
    found[f"{prefix}text_model.embeddings.position_ids"] = torch.arange(width)[None]
    return found


def open_clip_weights(encoder: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    state = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    found = {
        "token_embedding.weight": state["embeddings.token_embedding.weight"],
        "positional_embedding": state["embeddings.position_embedding.weight"],
        "ln_final.weight": state["final_layer_norm.weight"],
        "ln_final.bias": state["final_layer_norm.bias"],
        "logit_scale": torch.tensor(4.6),
    }
    if "text_projection.weight" in state:
        found["text_projection"] = state["text_projection.weight"].t().contiguous()
    for layer in range(encoder.config.num_hidden_layers):
        old, new = f"encoder.layers.{layer}", f"transformer.resblocks.{layer}"
        for kind in ("weight", "bias"):
            parts = [state[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
            for theirs, ours in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                found[f"{new}.{ours}.{kind}"] = state[f"{old}.{theirs}.{kind}"]
    return {prefix + name: tensor for name, tensor in found.items()}


def original_weights(pipe: Any, kind: str, whole_open_clip: bool = True) -> dict[str, torch.Tensor]:
    """The pipeline as one state_dict of the original layout, with the extras that real files carry."""
    unet, vae = pipe.unet.state_dict(), pipe.vae.state_dict()
    found = {new: unet[old] for old, new in unet_names(pipe.unet).items()}
    for old, new in vae_names(pipe.vae).items():
        attention = ".attn_1." in new and new.endswith("weight") and ".norm." not in new
        found[new] = vae[old][:, :, None, None] if attention else vae[old]
    if kind.startswith("sd1"):
        found |= clip_weights(pipe.text_encoder, "cond_stage_model.transformer.")
    elif kind == "sd2":
        prefix = "cond_stage_model.model."
        found |= open_clip_weights(pipe.text_encoder, prefix)
        if whole_open_clip:
            last = pipe.text_encoder.config.num_hidden_layers
            previous = f"{prefix}transformer.resblocks.{last - 1}."
            again = {name: tensor for name, tensor in found.items() if name.startswith(previous)}
            found |= {name.replace(f".{last - 1}.", f".{last}.", 1): tensor + 1 for name, tensor in again.items()}
            found[f"{prefix}text_projection"] = torch.randn(64, 64)
    elif kind == "sdxl-refiner":
        found |= open_clip_weights(pipe.text_encoder_2, "conditioner.embedders.0.model.")
    else:
        found |= clip_weights(pipe.text_encoder, "conditioner.embedders.0.transformer.")
        found |= open_clip_weights(pipe.text_encoder_2, "conditioner.embedders.1.model.")
    found["alphas_cumprod"] = torch.linspace(1, 0, 10, dtype=torch.float64)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def averaged_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The UNet's weights under the names that the original EMA gave them: without dots."""
    prefix = "model."
    return {
        f"model_ema.{name[len(prefix) :].replace('.', '')}": tensor
        for name, tensor in weights.items()
        if name.startswith("model.diffusion_model.")
    }


def save_single_file(
    weights: dict[str, torch.Tensor], path: Path, dtype: torch.dtype = torch.float16, **metadata
) -> Path:
    floats = (torch.float32, torch.float16, torch.bfloat16)
    kept = {name: tensor.to(dtype) if tensor.dtype in floats else tensor for name, tensor in weights.items()}
    save_file({name: tensor.clone() for name, tensor in kept.items()}, str(path), metadata=metadata or None)
    return path
