"""Names of tensors in adapter files: which layer each belongs to, and as what."""

from __future__ import annotations

import re
from typing import NamedTuple


class Key(NamedTuple):
    module: str
    """As the file writes it, with its prefix."""
    part: str
    """Our name of the part: "down", "up", "alpha", "hada_w1_a", …"""


_PARTS = {
    "down": r"lora_A(?:\.\w+)?\.weight|lora_down(?:\.\w+)?\.weight|lora\.down\.weight|lora_linear_layer\.down\.weight",
    "up": r"lora_B(?:\.\w+)?\.weight|lora_up(?:\.\w+)?\.weight|lora\.up\.weight|lora_linear_layer\.up\.weight",
    "mid": r"lora_mid\.weight",
    "up_bias": r"lora_B(?:\.\w+)?\.bias|lora_up\.bias",
    "dora_scale": r"dora_scale",
    "magnitude": r"lora_magnitude_vector(?:\.\w+)?(?:\.weight)?",
    "alpha": r"alpha|lora\.alpha|lora_alpha",
    "diff": r"diff",
    "diff_b": r"diff_b",
    "w_norm": r"w_norm",
    "b_norm": r"b_norm",
    "on_input": r"on_input",
    "ia3_l": r"ia3_l(?:\.\w+)?",
    "oft_diag": r"oft_diag",
    "oft_blocks": r"oft_blocks",
    "oft_R": r"oft_R(?:\.\w+)?(?:\.weight)?",
    "boft_R": r"boft_R(?:\.\w+)?",
    "boft_s": r"boft_s(?:\.\w+)?",
    "rescale": r"rescale",
    "scalar": r"scalar",
    "": r"(?P<same>hada_[wt][12](?:_[ab])?|lokr_[wt][12](?:_[ab])?)(?:\.\w+)?",
    "gl_": r"(?P<glora>a1|a2|b1|b2|bm)\.weight",
    "weight": r"weight",  # (IA)³ of LyCORIS
}
_KEYS = [(part, re.compile(rf"(?P<module>.+?)\.(?:{pattern})")) for part, pattern in _PARTS.items()]
_PROCESSOR = re.compile(r"(?P<module>.+)\.processor\.(?P<to>to_[qkv]|to_out)_lora\.(?P<part>down|up)\.weight")


def split_key(key: str) -> Key | None:
    """None for a name of no known format."""
    old = _PROCESSOR.fullmatch(key)
    if old:
        to = old["to"].replace("to_out", "to_out.0")
        return Key(f"{old['module']}.{to}", old["part"])
    for part, pattern in _KEYS:
        found = pattern.fullmatch(key)
        if found:
            groups = found.groupdict()
            return Key(found["module"], groups.get("same") or groups.get("glora") or part)
    return None


# ---- components


_COMPONENTS = {
    "lora_unet_": "unet",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te_": "text_encoder",
    "unet.": "unet",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder.": "text_encoder",
    "model.diffusion_model.": "unet",
    "diffusion_model.": "unet",
    "cond_stage_model.transformer.": "text_encoder",
    "conditioner.embedders.0.transformer.": "text_encoder",
    "conditioner.embedders.1.transformer.": "text_encoder_2",
    "lora_transformer_": "transformer",
    "transformer.": "transformer",
}
_WRAPPERS = ("base_model.model.", "lycoris_")
TEXT = re.compile(r"(text_model[._])?(encoder[._]layers[._]\d|text_projection|final_layer_norm|embeddings)")


def split_module(module: str) -> tuple[str, str]:
    """The component, "" when the file does not say, and the module's name in it, in the file's style."""
    component = ""
    for _ in range(4):
        before = module
        for wrapper in _WRAPPERS:
            module = module.removeprefix(wrapper)
        if not component:
            for prefix, name in _COMPONENTS.items():
                if module.startswith(prefix):
                    module, component = module[len(prefix) :], name
                    break
        if module == before:
            break
    return component or ("unet" if _UNET.match(module) else ""), module


_UNET = re.compile(r"(down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block|conv_in|time_embed)")
