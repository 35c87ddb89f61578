"""Names and shapes of the weights of a Stable Diffusion model, in today's libraries and in the original layout.

Both follow from a component's config: ``places`` lists every weight with its diffusers/transformers name, its name in
the original layout ("LDM": CompVis/latent-diffusion, and Stability-AI/generative-models for SDXL) and its shape. The
other way round, ``infer_*`` read the config off the names and shapes that a file has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from sdaccel.errors import ModelError
from sdaccel.models.tensors import FLOATS, TensorRef

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Config = Mapping[str, Any]

MOST = 20_000  # SDXL's UNet has 1680


class Place(NamedTuple):
    name: str
    """In the state_dict of the diffusers or transformers module."""
    ldm: str
    """In the original layout, without the component's prefix."""
    shape: Shape


class Unmodelled(ModelError):
    """The config asks for a layer whose weights are not described here."""


def places(component: str, config: Config) -> list[Place]:
    """Every weight that a component of this config has. Raises Unmodelled for architectures outside the SD families."""
    describe = {"unet": _unet, "vae": _vae}.get(component, _clip)
    try:
        found = list(islice(describe(config), MOST + 1))
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise ModelError(f"the config of {component} is broken ({type(error).__name__}: {error}).") from None
    odd = next((place for place in found if not all(type(size) is int for size in place.shape)), None)
    if odd:
        raise ModelError(f"the config of {component} is broken ({odd.name} would be {str(odd.shape)[:80]}).")
    if len(found) > MOST:
        raise ModelError(f"the config of {component} is broken (it asks for more than {MOST} weights).")
    return found


# ---- layers


def _conv(name: str, ldm: str, into: int, out: int, kernel: int = 3) -> Iterator[Place]:
    yield Place(f"{name}.weight", f"{ldm}.weight", (out, into, kernel, kernel))
    yield Place(f"{name}.bias", f"{ldm}.bias", (out,))


def _linear(name: str, ldm: str, into: int, out: int, bias: bool = True) -> Iterator[Place]:
    yield Place(f"{name}.weight", f"{ldm}.weight", (out, into))
    if bias:
        yield Place(f"{name}.bias", f"{ldm}.bias", (out,))


def _norm(name: str, ldm: str, width: int) -> Iterator[Place]:
    yield Place(f"{name}.weight", f"{ldm}.weight", (width,))
    yield Place(f"{name}.bias", f"{ldm}.bias", (width,))


# ---- UNet2DConditionModel


_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "only_cross_attention": (False,),
    "dual_cross_attention": (False,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "addition_embed_type": (None, "text_time"),
    "resnet_time_scale_shift": ("default",),
    "time_embedding_type": ("positional",),
    "attention_type": ("default",),
    "cross_attention_norm": (None,),
    "class_embeddings_concat": (False,),
    "resnet_skip_time_act": (False,),
    "mid_block_type": (None, "UNetMidBlock2D", "UNetMidBlock2DCrossAttn"),
}
_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")


def _unet(config: Config) -> Iterator[Place]:
    for key, allowed in _DEFAULTS.items():
        if config.get(key, allowed[-1]) not in allowed and config.get(key) is not None:
            raise Unmodelled(f"the UNet's {key} is {config[key]!r}.")
    channels = [int(width) for width in config["block_out_channels"]]
    levels = len(channels)
    down, up = config["down_block_types"], config["up_block_types"]
    if len(down) != levels or len(up) != levels:
        raise ValueError(f"{len(down)} down and {len(up)} up blocks for {levels} levels")
    if not set(down) <= set(_DOWN) or not set(up) <= set(_UP):
        raise Unmodelled(f"the UNet's blocks are {down} and {up}.")
    layers = _per_level(config.get("layers_per_block", 2), levels)
    context = _per_level(config["cross_attention_dim"], levels)
    depth = _per_level(config.get("transformer_layers_per_block", 1), levels)
    up_depth = config.get("reverse_transformer_layers_per_block") or depth[::-1]
    linear = bool(config.get("use_linear_projection"))
    width = channels[0]
    time = int(config.get("time_embedding_dim") or 4 * width)

    yield from _conv(
        "conv_in", "input_blocks.0.0", config.get("in_channels", 4), width, config.get("conv_in_kernel", 3)
    )
    yield from _linear("time_embedding.linear_1", "time_embed.0", width, time)
    if config.get("time_cond_proj_dim") is not None:
        condition = config["time_cond_proj_dim"]
        yield from _linear("time_embedding.cond_proj", "time_embed.cond_proj", condition, width, bias=False)
    yield from _linear("time_embedding.linear_2", "time_embed.2", time, time)
    if config.get("addition_embed_type") == "text_time":
        yield from _linear(
            "add_embedding.linear_1", "label_emb.0.0", config["projection_class_embeddings_input_dim"], time
        )
        yield from _linear("add_embedding.linear_2", "label_emb.0.2", time, time)

    block = 1
    into = width
    for level, out in enumerate(channels):
        for layer in range(layers[level]):
            name, ldm = f"down_blocks.{level}", f"input_blocks.{block}"
            yield from _resnet(f"{name}.resnets.{layer}", f"{ldm}.0", into, out, time)
            if down[level] == "CrossAttnDownBlock2D":
                count = _at(depth[level], layer)
                yield from _transformer(f"{name}.attentions.{layer}", f"{ldm}.1", out, count, context[level], linear)
            into = out
            block += 1
        if level < levels - 1:
            yield from _conv(f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{block}.0.op", out, out)
            block += 1

    middle = config.get("mid_block_type", "UNetMidBlock2DCrossAttn")
    if middle is not None:
        yield from _resnet("mid_block.resnets.0", "middle_block.0", into, into, time)
    if middle == "UNetMidBlock2DCrossAttn":
        count = _at(depth[-1], 0)
        yield from _transformer("mid_block.attentions.0", "middle_block.1", into, count, context[-1], linear)
        yield from _resnet("mid_block.resnets.1", "middle_block.2", into, into, time)

    block = 0
    previous = into
    for level in range(levels):
        source = levels - 1 - level
        out, skip = channels[source], channels[max(source - 1, 0)]
        for layer in range(layers[source] + 1):
            last = layer == layers[source]
            name, ldm = f"up_blocks.{level}", f"output_blocks.{block}"
            joined = (previous if layer == 0 else out) + (skip if last else out)
            yield from _resnet(f"{name}.resnets.{layer}", f"{ldm}.0", joined, out, time)
            attends = up[level] == "CrossAttnUpBlock2D"
            if attends:
                count = _at(up_depth[level], layer)
                yield from _transformer(f"{name}.attentions.{layer}", f"{ldm}.1", out, count, context[source], linear)
            if last and level < levels - 1:
                yield from _conv(f"{name}.upsamplers.0.conv", f"{ldm}.{1 + attends}.conv", out, out)
            block += 1
        previous = out

    yield from _norm("conv_norm_out", "out.0", width)
    yield from _conv("conv_out", "out.2", width, config.get("out_channels", 4), config.get("conv_out_kernel", 3))


def _per_level(value: Any, levels: int) -> list[Any]:
    found = list(value) if isinstance(value, (list, tuple)) else [value] * levels
    if len(found) != levels:
        raise ValueError(f"{value} for {levels} levels")
    return found


def _at(value: Any, layer: int) -> int:
    return int(value[layer] if isinstance(value, (list, tuple)) else value)


def _resnet(name: str, ldm: str, into: int, out: int, time: int) -> Iterator[Place]:
    yield from _norm(f"{name}.norm1", f"{ldm}.in_layers.0", into)
    yield from _conv(f"{name}.conv1", f"{ldm}.in_layers.2", into, out)
    yield from _linear(f"{name}.time_emb_proj", f"{ldm}.emb_layers.1", time, out)
    yield from _norm(f"{name}.norm2", f"{ldm}.out_layers.0", out)
    yield from _conv(f"{name}.conv2", f"{ldm}.out_layers.3", out, out)
    if into != out:
        yield from _conv(f"{name}.conv_shortcut", f"{ldm}.skip_connection", into, out, 1)


def _transformer(name: str, ldm: str, width: int, depth: int, context: int, linear: bool) -> Iterator[Place]:
    """A spatial transformer; inside it both layouts use the same names."""

    def same(part: str) -> tuple[str, str]:
        return f"{name}.{part}", f"{ldm}.{part}"

    def project(part: str) -> Iterator[Place]:
        return _linear(*same(part), width, width) if linear else _conv(*same(part), width, width, 1)

    yield from _norm(*same("norm"), width)
    yield from project("proj_in")
    for index in range(depth):
        block = f"transformer_blocks.{index}"
        for number, seen in ((1, width), (2, context)):
            attention = f"{block}.attn{number}"
            yield from _norm(*same(f"{block}.norm{number}"), width)
            yield from _linear(*same(f"{attention}.to_q"), width, width, bias=False)
            yield from _linear(*same(f"{attention}.to_k"), seen, width, bias=False)
            yield from _linear(*same(f"{attention}.to_v"), seen, width, bias=False)
            yield from _linear(*same(f"{attention}.to_out.0"), width, width)
        yield from _norm(*same(f"{block}.norm3"), width)
        yield from _linear(*same(f"{block}.ff.net.0.proj"), width, 8 * width)  # GEGLU: value and gate, each 4 × width
        yield from _linear(*same(f"{block}.ff.net.2"), 4 * width, width)
    yield from project("proj_out")


# ---- AutoencoderKL


def _vae(config: Config) -> Iterator[Place]:
    channels = [int(width) for width in config["block_out_channels"]]
    layers = int(config.get("layers_per_block", 1))
    latent = int(config.get("latent_channels", 4))
    for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        if list(config[key]) != [kind] * len(channels):
            raise Unmodelled(f"the VAE's {key} are {config[key]}.")

    yield from _conv("encoder.conv_in", "encoder.conv_in", config.get("in_channels", 3), channels[0])
    into = channels[0]
    for level, out in enumerate(channels):
        name, ldm = f"encoder.down_blocks.{level}", f"encoder.down.{level}"
        for layer in range(layers):
            yield from _vae_resnet(f"{name}.resnets.{layer}", f"{ldm}.block.{layer}", into, out)
            into = out
        if level < len(channels) - 1:
            yield from _conv(f"{name}.downsamplers.0.conv", f"{ldm}.downsample.conv", out, out)
    yield from _vae_middle("encoder", into, config)
    yield from _norm("encoder.conv_norm_out", "encoder.norm_out", into)
    yield from _conv("encoder.conv_out", "encoder.conv_out", into, 2 * latent)

    yield from _conv("decoder.conv_in", "decoder.conv_in", latent, into)
    yield from _vae_middle("decoder", into, config)
    for level, out in enumerate(reversed(channels)):
        name, ldm = f"decoder.up_blocks.{level}", f"decoder.up.{len(channels) - 1 - level}"
        for layer in range(layers + 1):
            yield from _vae_resnet(f"{name}.resnets.{layer}", f"{ldm}.block.{layer}", into, out)
            into = out
        if level < len(channels) - 1:
            yield from _conv(f"{name}.upsamplers.0.conv", f"{ldm}.upsample.conv", out, out)
    yield from _norm("decoder.conv_norm_out", "decoder.norm_out", into)
    yield from _conv("decoder.conv_out", "decoder.conv_out", into, config.get("out_channels", 3))

    if config.get("use_quant_conv", True):
        yield from _conv("quant_conv", "quant_conv", 2 * latent, 2 * latent, 1)
    if config.get("use_post_quant_conv", True):
        yield from _conv("post_quant_conv", "post_quant_conv", latent, latent, 1)


def _vae_resnet(name: str, ldm: str, into: int, out: int) -> Iterator[Place]:
    yield from _norm(f"{name}.norm1", f"{ldm}.norm1", into)
    yield from _conv(f"{name}.conv1", f"{ldm}.conv1", into, out)
    yield from _norm(f"{name}.norm2", f"{ldm}.norm2", out)
    yield from _conv(f"{name}.conv2", f"{ldm}.conv2", out, out)
    if into != out:
        yield from _conv(f"{name}.conv_shortcut", f"{ldm}.nin_shortcut", into, out, 1)


def _vae_middle(half: str, width: int, config: Config) -> Iterator[Place]:
    name, ldm = f"{half}.mid_block", f"{half}.mid"
    yield from _vae_resnet(f"{name}.resnets.0", f"{ldm}.block_1", width, width)
    if config.get("mid_block_add_attention", True):
        attention, original = f"{name}.attentions.0", f"{ldm}.attn_1"
        yield from _norm(f"{attention}.group_norm", f"{original}.norm", width)
        for part, short in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            yield from _linear(f"{attention}.{part}", f"{original}.{short}", width, width)
    yield from _vae_resnet(f"{name}.resnets.1", f"{ldm}.block_2", width, width)


# ---- CLIPTextModel, CLIPTextModelWithProjection


def has_projection(config: Config) -> bool:
    return "CLIPTextModelWithProjection" in (config.get("architectures") or ())


def _clip(config: Config) -> Iterator[Place]:
    """Names as in transformers 5.6 and later; "ldm" is the form that OpenAI's CLIP has inside SD 1 and SDXL files."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    prefix = "text_model." if has_projection(config) else ""

    def both(part: str) -> tuple[str, str]:
        return f"{prefix}{part}", f"text_model.{part}"

    for kind, count in (
        ("token", config.get("vocab_size", 49408)),
        ("position", config.get("max_position_embeddings", 77)),
    ):
        name, ldm = both(f"embeddings.{kind}_embedding.weight")
        yield Place(name, ldm, (count, width))
    for layer in range(int(config["num_hidden_layers"])):
        block = f"encoder.layers.{layer}"
        yield from _norm(*both(f"{block}.layer_norm1"), width)
        for part in ("q", "k", "v", "out"):
            yield from _linear(*both(f"{block}.self_attn.{part}_proj"), width, width)
        yield from _norm(*both(f"{block}.layer_norm2"), width)
        yield from _linear(*both(f"{block}.mlp.fc1"), width, inner)
        yield from _linear(*both(f"{block}.mlp.fc2"), inner, width)
    yield from _norm(*both("final_layer_norm"), width)
    if prefix:
        yield from _linear("text_projection", "text_projection", width, int(config["projection_dim"]), bias=False)


_OPEN_CLIP = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_OPEN_CLIP_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_RESBLOCK = re.compile(r"transformer\.resblocks\.(\d+)\.([\w.]+?)[._](weight|bias)")


def from_open_clip(found: Mapping[str, TensorRef], layers: int) -> tuple[dict[str, TensorRef], list[str]]:
    """OpenCLIP's text tower as OpenAI's CLIP names it: byte ranges for query, key and value, a transposed projection.

    Returns the weights of the first ``layers`` blocks and the names of what was left over.
    """
    renamed: dict[str, TensorRef] = {}
    rest: list[str] = []
    for name, ref in found.items():
        block = _RESBLOCK.fullmatch(name)
        if name in _OPEN_CLIP:
            renamed[_OPEN_CLIP[name]] = ref
        elif name == "text_projection" and len(ref.shape) == 2:
            renamed["text_projection.weight"] = replace(ref, shape=ref.shape[::-1], transposed=not ref.transposed)
        elif name == "text_projection.weight":  # some tools store it as transformers does
            renamed[name] = ref
        elif block and int(block[1]) < layers and block[2] == "attn.in_proj" and ref.shape and ref.shape[0] % 3 == 0:
            third = ref.shape[0] // 3
            for index, part in enumerate("qkv"):
                new = f"text_model.encoder.layers.{block[1]}.self_attn.{part}_proj.{block[3]}"
                renamed[new] = ref.rows(index * third, (index + 1) * third, new)
        elif block and int(block[1]) < layers and block[2] in _OPEN_CLIP_BLOCK:
            renamed[f"text_model.encoder.layers.{block[1]}.{_OPEN_CLIP_BLOCK[block[2]]}.{block[3]}"] = ref
        else:
            rest.append(name)
    return renamed, rest


# ---- from what was found to what a component needs


def assemble(
    component: str, config: Config, found: Mapping[str, TensorRef], where: str, *, original: bool = False
) -> tuple[dict[str, TensorRef], list[str]]:
    """The component's weights by name, and the names of found tensors that it has no use for.

    original: ``found`` has the original layout's names. Raises ModelError, once for all that is missing or misshapen.
    """
    tensors: dict[str, TensorRef] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    unusable: list[str] = []
    used: set[str] = set()
    for place in places(component, config):
        name = place.ldm if original else place.name
        ref = found.get(name)
        if ref is None:
            missing.append(name)
            continue
        used.add(name)
        if _squeezed(ref.shape) != _squeezed(place.shape):
            misshapen.append(f"{name} is {_size(ref.shape)} instead of {_size(place.shape)}")
            continue
        if ref.dtype not in FLOATS:
            unusable.append(f"{name} as {ref.dtype}")
            continue
        tensors[place.name] = replace(ref, name=place.name, shape=place.shape)
    if missing:
        raise ModelError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}.", hint="Is it complete?")
    if misshapen:
        raise ModelError(f"{where}: {len(misshapen)} tensors do not fit the config: {_some(misshapen)}.")
    if unusable:
        raise ModelError(f"{where}: stores {_some(unusable)}.", hint="Use an fp16, bf16 or fp32 form of this model.")
    return tensors, sorted(found.keys() - used)


def _squeezed(shape: Shape) -> Shape:
    """A 1 × 1 convolution and a linear layer keep the same numbers in the same order."""
    return shape[:2] if len(shape) > 2 and set(shape[2:]) == {1} else shape


def _size(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _some(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


# ---- from what was found to the config


def infer_unet(shapes: Shapes, template: Config) -> dict[str, Any]:
    """The UNet's config, from shapes in the original layout; what shapes do not tell comes from the template."""
    channels: list[int] = []
    layers: list[int] = []
    down_depth: list[list[int]] = []
    for block in range(1, children(shapes, "input_blocks")):
        if f"input_blocks.{block}.0.op.weight" in shapes:
            channels, layers, down_depth = [*channels, 0], [*layers, 0], [*down_depth, []]
            continue
        if not channels:
            channels, layers, down_depth = [0], [0], [[]]
        channels[-1] = _shape(shapes, f"input_blocks.{block}.0.in_layers.2.weight", 4)[0]
        layers[-1] += 1
        down_depth[-1].append(children(shapes, f"input_blocks.{block}.1.transformer_blocks"))
    levels = len(channels)
    if not levels or not all(channels):
        raise ModelError("the UNet's input blocks are incomplete.")
    up_depth: list[list[int]] = []
    block = 0
    for level in reversed(range(levels)):
        blocks = range(block, block + layers[level] + 1)
        up_depth.append([children(shapes, f"output_blocks.{index}.1.transformer_blocks") for index in blocks])
        block = blocks.stop
    context = {shape[-1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight") and len(shape) == 2}
    if len(context) != 1:
        raise ModelError(f"the UNet has {len(context)} widths of cross-attention instead of one.")
    middle = children(shapes, "middle_block.1.transformer_blocks")
    projections = [shape for name, shape in shapes.items() if name.endswith("1.proj_in.weight")]
    linear = bool(projections) and len(projections[0]) == 2

    config = dict(template)
    config["in_channels"] = _shape(shapes, "input_blocks.0.0.weight", 4)[1]
    config["out_channels"] = _shape(shapes, "out.2.weight", 4)[0]
    config["block_out_channels"] = channels
    config["layers_per_block"] = layers[0] if len(set(layers)) == 1 else layers
    config["down_block_types"] = [_DOWN[any(depths)] for depths in down_depth]
    config["up_block_types"] = [_UP[any(depths)] for depths in up_depth]
    config["cross_attention_dim"] = context.pop()
    config["use_linear_projection"] = linear
    if not middle:
        config["mid_block_type"] = "UNetMidBlock2D" if children(shapes, "middle_block") else None
    config |= _depths(down_depth, middle, up_depth)
    if isinstance(template.get("attention_head_dim"), (list, tuple)):  # the number of heads, despite its name
        config["attention_head_dim"] = [max(width // 64, 1) for width in channels]
    if "label_emb.0.0.weight" in shapes:
        config["projection_class_embeddings_input_dim"] = _shape(shapes, "label_emb.0.0.weight", 2)[1]
    if "time_embed.cond_proj.weight" in shapes:
        config["time_cond_proj_dim"] = _shape(shapes, "time_embed.cond_proj.weight", 2)[1]
    return {key: value for key, value in config.items() if key in template or value != _IMPLIED.get(key, ...)}


_IMPLIED = {
    "use_linear_projection": False,
    "transformer_layers_per_block": 1,
    "reverse_transformer_layers_per_block": None,
}


def _depths(down: list[list[int]], middle: int, up: list[list[int]]) -> dict[str, Any]:
    """Transformer depths as the config writes them: one number, one a level, or one a layer."""
    if all(len(set(depths)) == 1 for depths in down):
        found = [depths[0] for depths in down]
        # A level without attention has no depth of its own; the middle block reads the last level's.
        if not found[-1] and middle:
            found[-1] = middle
        found = [depth or (middle if set(filter(None, found)) == {middle} else 1) for depth in found]
        mirrored = all(set(depths) <= {0, depth} for depths, depth in zip(up, reversed(found), strict=True))
        if mirrored and all(len(set(depths)) == 1 for depths in up):
            value = found[0] if len(set(found)) == 1 else found
            return {"transformer_layers_per_block": value, "reverse_transformer_layers_per_block": None}
        return {"transformer_layers_per_block": found, "reverse_transformer_layers_per_block": up}
    return {"transformer_layers_per_block": down, "reverse_transformer_layers_per_block": up}


def infer_vae(shapes: Shapes, template: Config) -> dict[str, Any]:
    """The VAE's config, from shapes in the original layout or in diffusers' own."""
    original = any(name.startswith("encoder.down.") for name in shapes)
    level, block = ("encoder.down.", ".block") if original else ("encoder.down_blocks.", ".resnets")
    levels = children(shapes, level.rstrip("."))
    if not levels:
        raise ModelError("the VAE has no encoder.")
    config = dict(template)
    config["block_out_channels"] = [
        _shape(shapes, f"{level}{index}{block}.0.conv1.weight", 4)[0] for index in range(levels)
    ]
    config["layers_per_block"] = children(shapes, f"{level}0{block}")
    config["down_block_types"] = ["DownEncoderBlock2D"] * levels
    config["up_block_types"] = ["UpDecoderBlock2D"] * levels
    config["in_channels"] = _shape(shapes, "encoder.conv_in.weight", 4)[1]
    config["out_channels"] = _shape(shapes, "decoder.conv_out.weight", 4)[0]
    config["latent_channels"] = _shape(shapes, "decoder.conv_in.weight", 4)[1]
    for part in ("quant_conv", "post_quant_conv"):
        if f"{part}.weight" not in shapes:
            config[f"use_{part}"] = False
    return config


def infer_clip(shapes: Shapes, template: Config) -> dict[str, Any]:
    """The text encoder's config, from shapes as OpenAI's CLIP names them. Every CLIP text tower has heads 64 wide."""
    config = dict(template)
    vocabulary, width = _shape(shapes, "text_model.embeddings.token_embedding.weight", 2)
    config["vocab_size"] = vocabulary
    config["hidden_size"] = width
    config["max_position_embeddings"] = _shape(shapes, "text_model.embeddings.position_embedding.weight", 2)[0]
    config["num_hidden_layers"] = children(shapes, "text_model.encoder.layers")
    config["intermediate_size"] = _shape(shapes, "text_model.encoder.layers.0.mlp.fc1.weight", 2)[0]
    config["num_attention_heads"] = max(width // 64, 1)
    if has_projection(config):
        config["projection_dim"] = _shape(shapes, "text_projection.weight", 2)[0]
    return config


def open_clip_layers(names: Iterable[str], projects: bool) -> int:
    """How many blocks of an OpenCLIP tower the model uses.

    SD 2 takes the output of the last block but one, so its 24-block files lose one; files written back from diffusers
    have 23 and no text_projection.
    """
    names = set(names)
    blocks = children({name: () for name in names}, "transformer.resblocks")
    whole = not names.isdisjoint(("text_projection", "text_projection.weight")) or blocks == 24
    return blocks if projects or not whole else blocks - 1


def children(shapes: Shapes, prefix: str) -> int:
    """How many numbered children the prefix has: 1 + the highest number."""
    start = len(prefix) + 1
    numbers = {name[start:].split(".", 1)[0] for name in shapes if name.startswith(f"{prefix}.")}
    return 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 5), default=-1)


def _shape(shapes: Shapes, name: str, rank: int) -> Shape:
    shape = shapes.get(name)
    if shape is None:
        raise ModelError(f"the tensor {name} is missing.", hint="Is the file complete?")
    if len(shape) != rank:
        raise ModelError(f"the tensor {name} is {_size(shape)}; {rank} dimensions were expected.")
    return shape


# ---- averaged weights, whose names have lost their dots


_EMA_TOKEN = re.compile(
    r"input_blocks(?P<input>\d+)(?P<i>\d)|output_blocks(?P<output>\d+)(?P<o>\d)|label_emb(?P<l>\d)(?P<m>\d)"
    r"|middle_block|transformer_blocks|in_layers|out_layers|emb_layers|skip_connection|time_embed|cond_proj"
    r"|proj_in|proj_out|attn[12]|norm[123]?|to_q|to_k|to_v|to_out|ff|net|proj|op|conv|out|weight|bias|\d+"
)


def with_dots(flat: str) -> str | None:
    """ "input_blocks11in_layers0weight" → "input_blocks.1.1.in_layers.0.weight"; None when it is no UNet weight."""
    parts: list[str] = []
    position = 0
    while position < len(flat):
        match = _EMA_TOKEN.match(flat, position)
        if match is None:
            return None
        kind, numbers = re.match(r"([a-z_]*)", match[0]), [value for value in match.groups() if value is not None]
        parts += [kind[1], *numbers] if numbers and kind else [match[0]]
        position = match.end()
    return ".".join(parts)
