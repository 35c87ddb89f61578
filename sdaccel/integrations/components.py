"""The swaps of each component: what a diffusers or transformers module is called with, translated for its engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sdaccel.errors import UnsupportedCall
from sdaccel.export.components import kind_of, residual_layout
from sdaccel.integrations.swap import HALF, Swap, Target, in_dtype
from sdaccel.integrations.watch import ModuleWatch


def swap_class(component: str) -> type[Swap]:
    """The kind of swap that stands for an engine component."""
    if kind_of(component) == "controlnet":
        from sdaccel.integrations.controlnet import ControlNetSwap

        return ControlNetSwap
    found: dict[str, type[Swap]] = {"unet": UNetSwap, "vae_decoder": DecoderSwap, "vae_encoder": EncoderSwap}
    return found.get(component, TextSwap)


class UNetSwap(Swap):
    def __init__(self, component: str, module: nn.Module, watch: ModuleWatch):
        super().__init__(component, module, watch)
        self._text_time = getattr(module.config, "addition_embed_type", None) == "text_time"

    def run(
        self,
        target: Target,
        /,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Any] | None = None,
        down_block_additional_residuals: Sequence[torch.Tensor] | None = None,
        mid_block_additional_residual: torch.Tensor | None = None,
        down_intrablock_additional_residuals: Sequence[torch.Tensor] | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
        **unknown: Any,
    ) -> Any:
        refused = {
            "class_labels": class_labels,
            "attention_mask": attention_mask,
            "down_intrablock_additional_residuals (T2I-Adapter)": down_intrablock_additional_residuals,
            "encoder_attention_mask": encoder_attention_mask,
            **unknown,
        }
        refused.update({k: v for k, v in (cross_attention_kwargs or {}).items() if k != "scale"})
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedCall(f"the UNet was called with {name}, which engines do not take.")
        need_tensors(sample=sample, encoder_hidden_states=encoder_hidden_states)
        inputs = {
            "sample": sample,
            "timestep": timesteps(timestep, sample),
            "encoder_hidden_states": encoder_hidden_states,
        }
        if self._text_time or added_cond_kwargs:
            inputs["y"] = self._vector(added_cond_kwargs or {})
        if timestep_cond is not None:
            inputs["timestep_cond"] = timestep_cond
        if down_block_additional_residuals is not None or mid_block_additional_residual is not None:
            inputs |= self._residuals(down_block_additional_residuals, mid_block_additional_residual)
        out = self.at_scale(target, cross_attention_kwargs).run(inputs)["sample_out"]
        if out.dtype is not sample.dtype or out.device != sample.device:
            out = out.to(sample.device, sample.dtype)
        if not return_dict:
            return (out,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=out)

    def _residuals(self, down: Sequence[torch.Tensor] | None, mid: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """ControlNet's residuals: all or none. Down residuals alone mean a T2I-Adapter to the UNet."""
        if down is None or mid is None:
            raise UnsupportedCall("the UNet was called with residuals of the down path or of the middle alone.")
        wanted = len(residual_layout(self.module.config)) - 1  # type: ignore[arg-type]
        if len(down) != wanted:
            raise UnsupportedCall(f"the UNet was called with {len(down)} down residuals; engines take {wanted}.")
        return {"mid_residual": mid} | {f"down_residual_{index}": residual for index, residual in enumerate(down)}

    def _vector(self, added: Mapping[str, Any]) -> torch.Tensor:
        for name in added:
            if not self._text_time or name not in ("text_embeds", "time_ids"):
                raise UnsupportedCall(f"the UNet was called with {name} (IP-Adapter), which engines do not take.")
        return added_vector(self.module, **added)


def added_vector(
    module: nn.Module, text_embeds: torch.Tensor | None = None, time_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """SDXL's vector: pooled text, then Fourier features of the time ids, as the UNet's own forward joins them."""
    if text_embeds is None or time_ids is None:
        raise UnsupportedCall("SDXL's networks need text_embeds and time_ids.")
    features = module.add_time_proj(time_ids.flatten()).reshape(len(text_embeds), -1)  # type: ignore[operator]
    return torch.cat([text_embeds.float(), features.float()], dim=-1)


def timesteps(timestep: torch.Tensor | float | int, sample: torch.Tensor) -> torch.Tensor:
    """float32, one for each of ``sample``."""
    number = isinstance(timestep, (int, float)) or (
        isinstance(timestep, torch.Tensor) and timestep.is_cpu and not timestep.dim()
    )
    if number and sample.is_cpu:
        return _constant(float(timestep), len(sample))
    if number:  # a copy from the host would wait for the GPU
        return torch.full((len(sample),), float(timestep), dtype=torch.float32, device=sample.device)
    return torch.as_tensor(timestep, device=sample.device).float().expand(len(sample))


@functools.lru_cache(maxsize=4096)
def _constant(value: float, batch: int) -> torch.Tensor:
    """Schedulers come back to the same timesteps in every generation. Not to be written to."""
    return torch.full((batch,), value)


class TextSwap(Swap):
    def run(
        self,
        target: Target,
        /,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unknown: Any,
    ) -> Any:
        refused = {"attention_mask": attention_mask, "position_ids": position_ids, **unknown}
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedCall(f"the text encoder was called with {name}, which engines do not take.")
        config = self.module.config
        maps = getattr(config, "output_attentions", False) if output_attentions is None else output_attentions
        if input_ids is None or maps:
            raise UnsupportedCall("engines of text encoders take token ids and give no attention maps.")
        need_tensors(input_ids=input_ids)
        hidden_wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        names = ["last_hidden_state", "pooled"]
        if hidden_wanted:
            names += [f"hidden_{layer}" for layer in range(config.num_hidden_layers + 1)]  # type: ignore[operator]
        ids = input_ids.view(-1, input_ids.shape[-1])
        results = target.run({"input_ids": ids}, names)
        dtype = next(self.module.parameters()).dtype
        results = {name: value.to(input_ids.device, dtype) for name, value in results.items()}
        hidden = tuple(results[name] for name in names[2:]) if hidden_wanted else None
        return self._output(results, hidden, return_dict)

    def _output(
        self, results: dict[str, torch.Tensor], hidden: tuple[torch.Tensor, ...] | None, return_dict: bool | None
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        from transformers.models.clip.modeling_clip import CLIPTextModelOutput

        last, pooled = results["last_hidden_state"], results["pooled"]
        if hasattr(self.module, "text_projection"):
            output = CLIPTextModelOutput(text_embeds=pooled, last_hidden_state=last, hidden_states=hidden)
        else:
            output = BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, hidden_states=hidden)
        plain = return_dict is False or (return_dict is None and not getattr(self.module.config, "return_dict", True))
        return output.to_tuple() if plain else output


class _VaeSwap(Swap):
    """A half of the VAE. Slicing is honoured; tiling blends tiles in torch, so such calls run there."""

    input = ""

    def _changed(self, target: Target) -> str | None:
        if self.before is None or getattr(self.before, "__func__", None) is getattr(type(self.module), self.method):
            return super()._changed(target)
        return f"{self.method} of the module had been replaced before accelerate()"

    def _through_engine(self, target: Target, tensor: torch.Tensor, output: str) -> torch.Tensor:
        vae: Any = self.module
        need_tensors(**{self.input: tensor})
        limit = vae.tile_latent_min_size if self.component == "vae_decoder" else vae.tile_sample_min_size
        if vae.use_tiling and max(tensor.shape[-2:]) > limit:
            raise UnsupportedCall("VAE tiling is on, which engines do not do (pipe.vae.disable_tiling()).")
        pieces = tensor.split(1) if vae.use_slicing else (tensor,)
        results = [target.run({self.input: piece})[output] for piece in pieces]
        if target.context.precision == "fp32" and tensor.dtype in HALF:
            target.report.note(f"{self.component} ran in float32, where half precision can overflow.")
        return torch.cat(results).to(tensor.device, tensor.dtype) if len(results) > 1 else results[0].to(tensor)


class DecoderSwap(_VaeSwap):
    method = "decode"
    input = "latents"

    def run(self, target: Target, /, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        image = self._through_engine(target, z.float() if target.upcast else z, "image")
        if not return_dict:
            return (image,)
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=image)

    def _run_torch(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not target.upcast:
            return super()._run_torch(target, args, kwargs)
        with self._float32():
            return super()._run_torch(target, in_dtype(args, torch.float32), in_dtype(kwargs, torch.float32))


class EncoderSwap(_VaeSwap):
    method = "encode"
    input = "image"

    def run(self, target: Target, /, x: torch.Tensor, return_dict: bool = True) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        posterior = DiagonalGaussianDistribution(self._through_engine(target, x, "moments"))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def tensor(self, result: Any) -> torch.Tensor:
        return result[0].parameters

    def cast(self, result: Any, dtype: torch.dtype) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        posterior = DiagonalGaussianDistribution(self.tensor(result).to(dtype))
        return (posterior,) if isinstance(result, tuple) else AutoencoderKLOutput(latent_dist=posterior)


def need_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedCall(f"{name} is a {type(value).__name__}; engines take tensors.")
