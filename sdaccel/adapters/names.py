"""Modules as adapter files name them (diffusers or original layout, dots or underscores) → state_dict names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_BLOCK = re.compile(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(?:\.(.+))?")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")


def original_names(modules: Iterable[str]) -> dict[str, str]:
    """A UNet's modules in diffusers' names → the names of the original (LDM) layout."""
    modules = list(modules)
    counts: dict[tuple[str, int, str], int] = {}
    for module in modules:
        found = _BLOCK.match(module)
        if found:
            key = found[1], int(found[2]), found[3]
            counts[key] = max(counts.get(key, 0), int(found[4]) + 1)
    starts = {side: _starts(counts, side) for side in ("down_blocks", "up_blocks")}
    names = {}
    for module in modules:
        name = _original(module, counts, starts)
        if name:
            names[module] = name
    return names


def _starts(counts: Mapping[tuple[str, int, str], int], side: str) -> dict[int, int]:
    levels = sorted({level for where, level, _ in counts if where == side})
    starts, block = {}, 1 if side == "down_blocks" else 0
    for level in levels:
        starts[level] = block
        block += counts.get((side, level, "resnets"), 0) + counts.get((side, level, "downsamplers"), 0)
    return starts


def _original(
    module: str, counts: Mapping[tuple[str, int, str], int], starts: Mapping[str, Mapping[int, int]]
) -> str | None:
    if module in _ENDS:
        return _ENDS[module]
    middle = _MIDDLE.fullmatch(module)
    if middle:
        kind, index, rest = middle[1], int(middle[2]), middle[3]
        if kind == "attentions":
            return f"middle_block.{2 * index + 1}.{rest}"
        return f"middle_block.{2 * index}.{_RESNET[rest]}" if rest in _RESNET else None
    found = _BLOCK.fullmatch(module)
    if not found:
        return None
    side, level, kind, index, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    start, layers = starts[side][level], counts.get((side, level, "resnets"), 0)
    name = "input_blocks" if side == "down_blocks" else "output_blocks"
    if kind == "resnets":
        return f"{name}.{start + index}.0.{_RESNET[rest]}" if rest in _RESNET else None
    if kind == "attentions":
        return f"{name}.{start + index}.1.{rest}"
    if kind == "downsamplers":
        return f"{name}.{start + layers}.0.op" if rest == "conv" else None
    attends = (side, level, "attentions") in counts
    return f"{name}.{start + layers - 1}.{1 + attends}.conv" if rest == "conv" else None


class Modules:
    """The modules of one component, found by any of their names."""

    def __init__(self, tensors: Iterable[str]):
        self._tensors = {name: None for name in tensors}
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in self._tensors))
        names: dict[str, str] = {}
        for module, original in original_names(modules).items():
            names[original] = module
        for module in modules:
            names[module] = module
            short = module.removeprefix("text_model.")
            if short.split(".")[0] in ("encoder", "embeddings", "final_layer_norm") and "down_blocks" not in short:
                names.setdefault(short, module)
                names.setdefault(f"text_model.{short}", module)
        self._names = names
        self._flat = {name.replace(".", "_"): module for name, module in names.items()}

    def find(self, module: str) -> str | None:
        return self._names.get(module) or self._flat.get(module.replace(".", "_"))
