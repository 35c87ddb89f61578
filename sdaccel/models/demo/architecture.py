"""The demo model's parts, in the form of SD 1.x and about 1/110 of its size: 7.7 million parameters."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sdaccel.models.demo.scenes import words

TOKENS = 77
BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def build_vae() -> AutoencoderKL:
    """Factor 8, 4 latent channels."""
    return AutoencoderKL(
        sample_size=256,
        block_out_channels=(32, 64, 96, 80),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
    )


def build_unet() -> UNet2DConditionModel:
    """Attention at 1/2 to 1/8 of the latent's side, so that a layout is decided globally at every size."""
    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 96, 96, 96),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=128,
        attention_head_dim=3,  # diffusers' name for the number of heads
        norm_num_groups=16,
    )


def build_text_encoder(vocabulary: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            hidden_act="quick_gelu",
            projection_dim=128,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )


def build_scheduler() -> DDIMScheduler:
    """SD 1.x noise; "trailing" starts sampling at the last timestep, where pure noise belongs."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="trailing",
    )


def write_tokenizer(folder: Path) -> None:
    """CLIP's byte-level BPE: the captions' words are one token each, anything else falls back to pieces and bytes."""
    symbols = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + n) for n in range(256 - len(symbols))]  # byte-level BPE's letters for the other bytes
    merges = _merges([word for word in words() if word.isalpha()])
    tokens = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in merges), BEGIN, END]
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "vocab.json": {token: number for number, token in enumerate(tokens)},
        "special_tokens_map.json": {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": END},
        "tokenizer_config.json": {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": TOKENS,
            "do_lower_case": True,
            "bos_token": BEGIN,
            "eos_token": END,
            "unk_token": END,
            "pad_token": END,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def _merges(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, commonest first, until every word is one token."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in vocabulary]
    merges = []
    while any(len(word) > 1 for word in spelled):
        pairs = Counter(pair for word in spelled for pair in pairwise(word))
        a, b = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((a, b))
        for word in spelled:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1
    return merges


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def save_pipeline(
    folder: Path, vae: AutoencoderKL, text_encoder: CLIPTextModel, unet: UNet2DConditionModel, tokenizer: CLIPTokenizer
) -> None:
    """A diffusers folder that `StableDiffusionPipeline.from_pretrained` opens; weights in fp16."""
    StableDiffusionPipeline(
        vae=vae.to("cpu", torch.float16),
        text_encoder=text_encoder.to("cpu", torch.float16),
        tokenizer=tokenizer,
        unet=unet.to("cpu", torch.float16),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    shutil.rmtree(folder / "tokenizer")
    write_tokenizer(folder / "tokenizer")
    weights = folder / "text_encoder" / "model.safetensors"
    tensors = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})  # the names that every version of transformers opens
    config = folder / "text_encoder" / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):  # transformers would otherwise open it in fp16, and diffusers the rest in fp32
        settings.pop(key, None)
    settings["dtype"] = settings["torch_dtype"] = "float32"
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
