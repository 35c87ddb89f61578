"""How each component of a Stable Diffusion model is exported: its torch module, inputs, outputs and dynamic axes.

Everything is read from the component's config, so nine-channel inpainting UNets, LCM's ``timestep_cond`` or SDXL's
vector ``y`` need no table of model names. All tensors are float32, except token ids (int64).

unet            sample [batch, C, height, width], timestep [batch], encoder_hidden_states [batch, tokens, D],
                y [batch, V] (SDXL: pooled text, then Fourier features of the time ids; hosts compute it),
                timestep_cond [batch, E] (LCM, optional), down_residual_0.. and mid_residual (ControlNet, optional)
                -> sample_out [batch, C', height, width]
vae_decoder     latents [batch, 4, height, width] -> image [batch, 3, 8 height, 8 width]
vae_encoder     image [batch, 3, height, width] -> moments [batch, 2 * 4, height / 8, width / 8] (mean, log variance)
text_encoder(2) input_ids [batch, tokens] -> hidden_0 (embeddings), hidden_1.. (after each layer) [batch, tokens, D],
                last_hidden_state (hidden_L after the final LayerNorm), pooled [batch, D or projection_dim]
controlnet      sample, timestep, encoder_hidden_states, y as the UNet's,
                controlnet_cond [batch, 3, image_height, image_width] (RGB in 0..1, 8 pixels a latent)
                -> down_residual_0.. and mid_residual as the UNet takes them, before any scale

A pipeline's further ControlNets are its components ``controlnet_1``, ``controlnet_2``, ..: all of one kind.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sdaccel.engine.manifest import TensorSpec
from sdaccel.errors import ExportError

COMPONENTS = ("unet", "vae_decoder", "vae_encoder", "text_encoder", "text_encoder_2", "controlnet")
_SOURCES = {"vae_decoder": "vae", "vae_encoder": "vae"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int64": torch.int64}

Shape = Mapping[str, int]


def kind_of(component: str) -> str:
    """What ``component`` is built as: engines of ``controlnet_1`` serve as any pipeline's first ControlNet too."""
    return "controlnet" if re.fullmatch(r"controlnet_[1-9]\d*", component) else component


def source_of(component: str) -> str:
    """The checkpoint component that holds the weights of ``component``: both halves of the VAE live in ``vae``."""
    if kind_of(component) not in COMPONENTS:
        raise ExportError(f"there is no component {component!r}.", hint=f"Components: {', '.join(COMPONENTS)}.")
    return _SOURCES.get(component, component)


@dataclass(frozen=True)
class ComponentSpec:
    """One component of one architecture. Axis names in `inputs` and `outputs` are dynamic; numbers are fixed."""

    name: str
    source: str
    config: Mapping[str, Any] = field(repr=False)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, tuple[str, int]]
    """axis -> (input, dimension) where its size can be read"""
    example: dict[str, int]
    """the axis sizes that are traced; none of them equals another size of the graph by accident"""
    shapes: tuple[dict[str, int], ...]
    """small axis sizes to check a graph at: batch 1 and 4, non-square, odd, one to three prompt chunks"""
    _build: Callable[[Mapping[str, Any]], nn.Module] = field(repr=False)

    def build_module(self) -> nn.Module:
        """The torch module to trace: takes and returns tensors in the order of `inputs` and `outputs`.

        It is built on whatever device or fake mode is active, in the default dtype, without loading weights.
        """
        return self._build(self.config).eval().requires_grad_(False)

    def weight_name(self, parameter: str) -> str:
        """The state_dict name, inside the source component, of a parameter of the module."""
        return parameter.split(".", 1)[1]

    def optional_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """The full shape of each optional input at the axis sizes ``shape`` (their declared dimensions are free)."""
        if self.name != "unet":
            return {}
        shapes = residual_shapes(self.config, shape["batch"], shape["height"], shape["width"])
        if any(spec.name == "timestep_cond" for spec in self.inputs):
            shapes["timestep_cond"] = (shape["batch"], self.config["time_cond_proj_dim"])
        return shapes

    def random_inputs(self, shape: Shape, *, seed: int = 0, optional: bool = False) -> dict[str, torch.Tensor]:
        """Inputs of sensible scale at the axis sizes ``shape``; optional ones only when asked for."""
        generator = torch.Generator().manual_seed(seed)
        free = self.optional_shapes(shape)
        inputs = {}
        for spec in self.inputs:
            if spec.optional:
                if optional:
                    inputs[spec.name] = 0.3 * torch.randn(free[spec.name], generator=generator)
                continue
            size = tuple(shape[dim] if isinstance(dim, str) else dim for dim in spec.shape)
            if spec.name == "timestep":
                inputs[spec.name] = torch.randint(0, 1000, size, generator=generator).float()
            elif spec.name == "input_ids":
                inputs[spec.name] = _token_ids(self.config, size, generator)
            else:
                inputs[spec.name] = torch.randn(size, generator=generator, dtype=_DTYPES[spec.dtype])
        return inputs


def component_spec(component: str, config: Mapping[str, Any]) -> ComponentSpec:
    """The spec of ``component`` for a diffusers or transformers ``config``.

    Raises ExportError naming the config field that asks for something a graph of ours does not carry.
    """
    source = kind_of(source_of(component))
    if source == "unet":
        return _unet_spec(dict(config))
    if source == "controlnet":
        return _controlnet_spec(dict(config))
    if source == "vae":
        return _vae_spec(component, dict(config))
    return _text_spec(component, dict(config))


def architecture_fields(component: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``config`` that shapes the graph, defaults filled in: equal fields make equal graphs.

    Every field counts that the model's class takes, except those that only describe data or training. Raises
    ExportError for a config that `component_spec` refuses.
    """
    source = kind_of(source_of(component))
    component_spec(component, config)
    if source.startswith("text_encoder"):
        ignored = {"attention_dropout", "initializer_range", "initializer_factor", "pad_token_id", "bos_token_id"}
        known = {"projected": _is_projected(component, config)} | _clip_config(config)
        if not known["projected"]:
            ignored.add("projection_dim")
    elif source == "unet":
        # sample_size is the native side, dropout is off in eval; the rest decides layers or arithmetic.
        ignored = {"sample_size", "dropout"}
        known = _with_defaults(_unet_class(), config)
    elif source == "controlnet":
        # The order of channels and the pooling of the results are left to the host.
        ignored = {"controlnet_conditioning_channel_order", "global_pool_conditions", "addition_embed_type_num_heads"}
        known = _with_defaults(_controlnet_class(), config)
    else:
        # The numbers around the VAE (scaling, shift, statistics, upcast) are applied by the host, not in the graph.
        ignored = {"sample_size", "scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast"}
        known = _with_defaults(_vae_class(), config)
    return json.loads(json.dumps({name: value for name, value in known.items() if name not in ignored}))


# --- UNet -------------------------------------------------------------------------------------------------------------

_DENOISER_FREE_OF = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "addition_embed_type": (None, "text_time"),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "attention_type": ("default",),
    "downsample_padding": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None),
}
_DOWN_BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")
_UP_BLOCKS = ("CrossAttnUpBlock2D", "UpBlock2D")


def residual_layout(config: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(input, channels, level) of each ControlNet residual; the level halves height and width, rounded up, that often.

    One for conv_in, one for each layer of the down path, one for each down-sampler; then the middle block's.
    """
    widths = list(config["block_out_channels"])
    layers = config["layers_per_block"]
    layers = [layers] * len(widths) if isinstance(layers, int) else list(layers)
    skips = [(widths[0], 0)]
    for level, (width, count) in enumerate(zip(widths, layers, strict=True)):
        skips += [(width, level)] * count
        if level < len(widths) - 1:
            skips.append((width, level + 1))
    named = [(f"down_residual_{index}", width, level) for index, (width, level) in enumerate(skips)]
    return [*named, ("mid_residual", widths[-1], len(widths) - 1)]


def residual_shapes(config: Mapping[str, Any], batch: int, height: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shape of each ControlNet residual by input, for latents of ``height`` and ``width``."""
    return {
        name: (batch, channels, *(-(-side // 2**level) for side in (height, width)))
        for name, channels, level in residual_layout(config)
    }


def _unet_spec(config: dict[str, Any]) -> ComponentSpec:
    _check_class(config, "UNet2DConditionModel")
    config = _with_defaults(_unet_class(), config)
    inputs = _denoiser_inputs("unet", config)
    if config["time_cond_proj_dim"] is not None:
        shape = ("timestep_cond_batch", config["time_cond_proj_dim"])
        inputs.append(TensorSpec("timestep_cond", "float32", shape, optional=True))
    for name, _, _ in residual_layout(config):
        free = tuple(f"{name}_{axis}" for axis in ("batch", "channels", "height", "width"))
        inputs.append(TensorSpec(name, "float32", free, optional=True))
    coarsest = 2 ** (len(config["block_out_channels"]) - 1)
    return ComponentSpec(
        name="unet",
        source="unet",
        config=config,
        inputs=tuple(inputs),
        outputs=(TensorSpec("sample_out", "float32", ("batch", config["out_channels"], "height", "width")),),
        axes=_DENOISER_AXES,
        example={"batch": 2, "height": 13 * coarsest + 1, "width": 11 * coarsest + 1, "tokens": 77},
        shapes=_DENOISER_SHAPES,
        _build=_build_unet,
    )


def _denoiser_inputs(component: str, config: Mapping[str, Any]) -> list[TensorSpec]:
    """What every call of a UNet takes, and a ControlNet with it. Raises ExportError for a config of another kind."""
    for name, allowed in _DENOISER_FREE_OF.items():
        if name in config and config[name] not in allowed:
            raise _unsupported(component, name, config[name], allowed)
    for name, kinds in (("down_block_types", _DOWN_BLOCKS), ("up_block_types", _UP_BLOCKS)):
        for kind in config.get(name, ()):
            if kind not in kinds:
                raise _unsupported(component, name, kind, kinds)
    text_width = config["cross_attention_dim"]
    if not isinstance(text_width, int) and len(set(text_width)) > 1:
        raise _unsupported(component, "cross_attention_dim", text_width, ("one width for all blocks",))
    text_width = text_width if isinstance(text_width, int) else text_width[0]
    inputs = [
        TensorSpec("sample", "float32", ("batch", config["in_channels"], "height", "width")),
        TensorSpec("timestep", "float32", ("batch",)),
        TensorSpec("encoder_hidden_states", "float32", ("batch", "tokens", text_width)),
    ]
    if config["addition_embed_type"] == "text_time":
        vector = config["projection_class_embeddings_input_dim"]
        if not vector:
            raise _unsupported(component, "projection_class_embeddings_input_dim", vector, ("the width of y",))
        inputs.append(TensorSpec("y", "float32", ("batch", vector)))
    return inputs


_DENOISER_AXES = {
    "batch": ("sample", 0),
    "height": ("sample", 2),
    "width": ("sample", 3),
    "tokens": ("encoder_hidden_states", 1),
}
_DENOISER_SHAPES = (
    {"batch": 1, "height": 16, "width": 8, "tokens": 77},
    {"batch": 4, "height": 8, "width": 16, "tokens": 154},
    {"batch": 2, "height": 13, "width": 9, "tokens": 231},
)


class _NeverDivides:
    """Stands for ``num_upsamplers``: no size counts as a multiple of two to the power of it.

    diffusers hands each up-sampler its skip's size only when a side is no multiple. Tracing must always take that
    path: it is exact for every size, whereas doubling breaks odd ones.
    """

    def __rpow__(self, base: int) -> _NeverDivides:
        return self

    def __rmod__(self, side: int) -> int:
        return 1


def _unet_class() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel


def _build_unet(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import UNet2DConditionModel

    class VectorUNet(UNet2DConditionModel):
        """Takes SDXL's vector itself, so that no time ids are computed in the graph."""

        def get_aug_embed(self, emb, encoder_hidden_states, added_cond_kwargs):
            return self.add_embedding(added_cond_kwargs["y"]) if added_cond_kwargs else None

    unet = VectorUNet(**config)
    unet.num_upsamplers = _NeverDivides()
    return _UNet(unet, [spec.name for spec in _unet_spec(dict(config)).inputs])


class _UNet(nn.Module):
    def __init__(self, unet: nn.Module, inputs: list[str]):
        super().__init__()
        self.unet = unet
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        given = dict(zip(self.inputs, tensors, strict=True))
        return self.unet(
            given["sample"],
            given["timestep"],
            given["encoder_hidden_states"],
            timestep_cond=given.get("timestep_cond"),
            added_cond_kwargs={"y": given["y"]} if "y" in given else None,
            down_block_additional_residuals=[given[name] for name in self.inputs if name.startswith("down_residual")],
            mid_block_additional_residual=given["mid_residual"],
            return_dict=False,
        )


# --- ControlNet -------------------------------------------------------------------------------------------------------


def pixels_a_latent(config: Mapping[str, Any]) -> int:
    """How much larger than the latent, along one side, a ControlNet takes its image."""
    return 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)


def _controlnet_spec(config: dict[str, Any]) -> ComponentSpec:
    _check_class(config, "ControlNetModel")
    config = _with_defaults(_controlnet_class(), config)
    inputs = _denoiser_inputs("controlnet", config)
    image = ("batch", config["conditioning_channels"], "image_height", "image_width")
    inputs.append(TensorSpec("controlnet_cond", "float32", image))
    scale = pixels_a_latent(config)

    def with_image(shape: Shape) -> dict[str, int]:
        return {**shape, "image_height": scale * shape["height"], "image_width": scale * shape["width"]}

    coarsest = 2 ** (len(config["block_out_channels"]) - 1)
    return ComponentSpec(
        name="controlnet",
        source="controlnet",
        config=config,
        inputs=tuple(inputs),
        outputs=tuple(
            TensorSpec(name, "float32", ("batch", channels, *_sides(name, level)))
            for name, channels, level in residual_layout(config)
        ),
        axes=_DENOISER_AXES | {"image_height": ("controlnet_cond", 2), "image_width": ("controlnet_cond", 3)},
        example=with_image({"batch": 2, "height": 13 * coarsest + 1, "width": 11 * coarsest + 1, "tokens": 77}),
        shapes=tuple(map(with_image, _DENOISER_SHAPES)),
        _build=_build_controlnet,
    )


def _sides(name: str, level: int) -> tuple[str, str]:
    return (f"{name}_height", f"{name}_width") if level else ("height", "width")


def _controlnet_class() -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel


def _build_controlnet(config: Mapping[str, Any]) -> nn.Module:
    return _ControlNet(_controlnet_class()(**config), [spec.name for spec in _controlnet_spec(dict(config)).inputs])


class _ControlNet(nn.Module):
    """ControlNetModel's layers (arXiv:2302.05543), with SDXL's vector as an input and the results as they come."""

    def __init__(self, net: nn.Module, inputs: list[str]):
        super().__init__()
        self.net = net
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, net = dict(zip(self.inputs, tensors, strict=True)), self.net
        sample, text = given["sample"], given["encoder_hidden_states"]
        time = net.time_embedding(net.time_proj(given["timestep"]).to(sample.dtype))
        if "y" in given:
            time = time + net.add_embedding(given["y"])
        hidden = net.conv_in(sample) + net.controlnet_cond_embedding(given["controlnet_cond"])
        skips = [hidden]
        for block in net.down_blocks:
            hidden, states = block(hidden, time, **_prompt(block, text))
            skips += states
        hidden = net.mid_block(hidden, time, **_prompt(net.mid_block, text))
        down = (layer(skip) for layer, skip in zip(net.controlnet_down_blocks, skips, strict=True))
        return (*down, net.controlnet_mid_block(hidden))


def _prompt(block: nn.Module, text: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"encoder_hidden_states": text} if getattr(block, "has_cross_attention", False) else {}


# --- VAE --------------------------------------------------------------------------------------------------------------


def _vae_class() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL


def _vae_spec(component: str, config: dict[str, Any]) -> ComponentSpec:
    _check_class(config, "AutoencoderKL")
    config = _with_defaults(_vae_class(), config)
    axes = ("batch", "height", "width")
    latent = config["latent_channels"]
    factor = 2 ** (len(config["block_out_channels"]) - 1)
    decode = component == "vae_decoder"
    pixels = [{"batch": 1, "height": 8, "width": 16}, {"batch": 4, "height": 8, "width": 5}]
    if not decode:
        pixels = [{a: n if a == "batch" else n * factor for a, n in shape.items()} for shape in pixels]
    if decode:
        source = TensorSpec("latents", "float32", ("batch", latent, "height", "width"))
        target = TensorSpec("image", "float32", ("batch", config["out_channels"], "image_height", "image_width"))
        example = {"batch": 2, "height": 13, "width": 11}
    else:
        source = TensorSpec("image", "float32", ("batch", config["in_channels"], "height", "width"))
        target = TensorSpec("moments", "float32", ("batch", 2 * latent, "latent_height", "latent_width"))
        example = {"batch": 2, "height": 13 * factor, "width": 11 * factor}
    return ComponentSpec(
        name=component,
        source="vae",
        config=config,
        inputs=(source,),
        outputs=(target,),
        axes={axis: (source.name, dim) for axis, dim in zip(axes, (0, 2, 3), strict=True)},
        example=example,
        shapes=tuple(pixels),
        _build=_build_decoder if decode else _build_encoder,
    )


def _build_decoder(config: Mapping[str, Any]) -> nn.Module:
    vae = _vae_class()(**config)
    vae.encoder = vae.quant_conv = None
    return _Decoder(vae)


def _build_encoder(config: Mapping[str, Any]) -> nn.Module:
    vae = _vae_class()(**config)
    vae.decoder = vae.post_quant_conv = None
    return _Encoder(vae)


class _Half(nn.Module):
    def __init__(self, vae: nn.Module):
        super().__init__()
        self.vae = vae


class _Decoder(_Half):
    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        (latents,) = tensors
        if self.vae.post_quant_conv is not None:
            latents = self.vae.post_quant_conv(latents)
        return (self.vae.decoder(latents),)


class _Encoder(_Half):
    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        (image,) = tensors
        moments = self.vae.encoder(image)
        return (moments if self.vae.quant_conv is None else self.vae.quant_conv(moments),)


# --- text encoders ----------------------------------------------------------------------------------------------------

# transformers before 4.24 wrote eos_token_id 2 into every CLIP config; the end is then the highest id of a prompt.
_LEGACY_EOS = 2


def _clip_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` reduced to the fields of CLIPTextConfig itself, with its defaults."""
    from transformers import CLIPTextConfig

    defaults = CLIPTextConfig()
    return {name: config.get(name, getattr(defaults, name)) for name in CLIPTextConfig.__annotations__}


def _is_projected(component: str, config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    if names:
        return any("WithProjection" in name for name in names)
    return component == "text_encoder_2"


def _text_spec(component: str, config: dict[str, Any]) -> ComponentSpec:
    kind = config.get("model_type", "clip_text_model")
    if kind not in ("clip_text_model", "clip"):
        raise _unsupported(component, "model_type", kind, ("clip_text_model",))
    projected = _is_projected(component, config)
    config = _clip_config(config)
    if not isinstance(config["eos_token_id"], int):
        raise _unsupported(component, "eos_token_id", config["eos_token_id"], ("one token id",))
    longest, width, layers = config["max_position_embeddings"], config["hidden_size"], config["num_hidden_layers"]
    states = ("batch", "tokens", width)
    return ComponentSpec(
        name=component,
        source=component,
        config=config,
        inputs=(TensorSpec("input_ids", "int64", ("batch", "tokens")),),
        outputs=(
            *(TensorSpec(f"hidden_{index}", "float32", states) for index in range(layers + 1)),
            TensorSpec("last_hidden_state", "float32", states),
            TensorSpec("pooled", "float32", ("batch", config["projection_dim"] if projected else width)),
        ),
        axes={"batch": ("input_ids", 0), "tokens": ("input_ids", 1)},
        example={"batch": 2, "tokens": longest},
        shapes=({"batch": 1, "tokens": longest}, {"batch": 4, "tokens": longest}, {"batch": 3, "tokens": 5}),
        _build=_build_projected_text if projected else _build_text,
    )


def _build_text(config: Mapping[str, Any]) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextModel(CLIPTextConfig(**config, attn_implementation="sdpa"))
    # transformers 4 keeps the layers one level further down, under text_model; names are as in transformers 5.
    return _Text(getattr(text, "text_model", text))


def _build_projected_text(config: Mapping[str, Any]) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return _Text(CLIPTextModelWithProjection(CLIPTextConfig(**config, attn_implementation="sdpa")))


class _Text(nn.Module):
    """CLIP's text transformer, layer by layer: that gives every hidden state and a causal attention without a mask."""

    def __init__(self, text: nn.Module):
        super().__init__()
        self.text = text

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (input_ids,) = tensors
        clip = getattr(self.text, "text_model", self.text)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = clip.embeddings(input_ids=input_ids, position_ids=positions)
        states = [hidden]
        for layer in clip.encoder.layers:
            hidden = layer(hidden, None, is_causal=True)
            states.append(hidden)
        last = clip.final_layer_norm(hidden)

        end = self.text.config.eos_token_id
        ids = input_ids.to(torch.int32)
        position = (ids if end == _LEGACY_EOS else (ids == end).to(torch.int32)).argmax(dim=-1)
        pooled = last[torch.arange(last.shape[0], device=last.device), position]
        projection = getattr(self.text, "text_projection", None)
        return (*states, last, pooled if projection is None else projection(pooled))


def _token_ids(config: Mapping[str, Any], size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Prompts as tokenizers write them: words, one end token somewhere, then padding with it."""
    end = config["vocab_size"] - 1 if config["eos_token_id"] == _LEGACY_EOS else config["eos_token_id"]
    ids = torch.randint(0, max(1, min(end, config["vocab_size"] - 1)), size, generator=generator)
    for row in ids:
        stop = int(torch.randint(0, size[1], (1,), generator=generator))
        row[stop:] = end
    return ids


# --- configs ----------------------------------------------------------------------------------------------------------


def _with_defaults(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``cls``, from ``config`` or by default, as diffusers itself reads a config.

    null for a flag that is off by default means off (published configs write either).
    """
    arguments = {}
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        value = config.get(parameter.name, parameter.default)
        arguments[parameter.name] = False if value is None and parameter.default is False else value
    return arguments


def _check_class(config: Mapping[str, Any], expected: str) -> None:
    found = config.get("_class_name", expected)
    if found != expected:
        raise _unsupported(expected, "_class_name", found, (expected,))


def _unsupported(component: str, name: str, value: Any, allowed: tuple[Any, ...]) -> ExportError:
    values = ", ".join(map(str, allowed))
    return ExportError(
        f"{component} cannot be exported: config field {name} is {value!r}; a graph carries only {values}.",
        hint="Run this component in torch (leave it out of components=).",
    )
