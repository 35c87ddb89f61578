"""ControlNet: what a ControlNetModel of diffusers is called with, translated for its engine.

The engine gives the residuals as the network makes them. What ControlNetModel's forward does around it is done here:
the order of the image's channels, the scale, guess mode's scales from 0.1 to 1, the pooling over each residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdaccel.errors import UnsupportedCall
from sdaccel.export.components import residual_shapes
from sdaccel.integrations.components import added_vector, need_tensors, timesteps
from sdaccel.integrations.swap import Swap, Target


class ControlNetSwap(Swap):
    def run(
        self,
        target: Target,
        /,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        encoder_hidden_states: torch.Tensor,
        controlnet_cond: torch.Tensor,
        conditioning_scale: float = 1.0,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        added_cond_kwargs: Mapping[str, Any] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
        **unknown: Any,
    ) -> Any:
        refused = {"class_labels": class_labels, "timestep_cond": timestep_cond, "attention_mask": attention_mask}
        refused |= {key: value for key, value in (cross_attention_kwargs or {}).items() if key != "scale"}
        for name, value in (refused | unknown).items():
            if value is not None:
                raise UnsupportedCall(f"the ControlNet was called with {name}, which engines do not take.")
        if not isinstance(conditioning_scale, (int, float, torch.Tensor)):
            raise UnsupportedCall(
                f"conditioning_scale is a {type(conditioning_scale).__name__}; engines take a number."
            )
        need_tensors(sample=sample, encoder_hidden_states=encoder_hidden_states, controlnet_cond=controlnet_cond)
        config: Any = self.module.config
        shapes = residual_shapes(config, len(sample), *sample.shape[2:])
        if not isinstance(conditioning_scale, torch.Tensor) and conditioning_scale == 0:
            # Outside of its share of the steps a pipeline goes on calling a ControlNet, with this scale.
            target.report.note(f"{self.component}: where its scale is 0 it was not computed.")
            residuals = [torch.zeros(shape, dtype=sample.dtype, device=sample.device) for shape in shapes.values()]
        else:
            image = controlnet_cond
            if config.controlnet_conditioning_channel_order == "bgr":
                image = image.flip(1)
            inputs = {
                "sample": sample,
                "timestep": timesteps(timestep, sample),
                "encoder_hidden_states": encoder_hidden_states,
                "controlnet_cond": image.expand(len(sample), -1, -1, -1) if len(image) == 1 else image,
            }
            if config.addition_embed_type == "text_time":
                added = added_cond_kwargs or {}
                inputs["y"] = added_vector(self.module, added.get("text_embeds"), added.get("time_ids"))
            found = self.at_scale(target, cross_attention_kwargs).run(inputs)
            residuals = [found[name].to(sample.device, sample.dtype) for name in shapes]
            residuals = _scaled(residuals, conditioning_scale, guess_mode and not config.global_pool_conditions)
        if config.global_pool_conditions:
            residuals = [residual.mean(dim=(2, 3), keepdim=True) for residual in residuals]
        *down, mid = residuals
        if not return_dict:
            return down, mid
        from diffusers.models.controlnets.controlnet import ControlNetOutput

        return ControlNetOutput(down_block_res_samples=down, mid_block_res_sample=mid)  # type: ignore[arg-type]

    def tensor(self, result: Any) -> torch.Tensor:
        """With two values that differ: constant residuals are no fault, a scale of 0 or a new network makes them."""
        mid = result[1].flatten()
        return torch.cat((mid, torch.arange(2, dtype=mid.dtype, device=mid.device)))


def _scaled(residuals: list[torch.Tensor], scale: float | torch.Tensor, guess_mode: bool) -> list[torch.Tensor]:
    if guess_mode:
        scales = torch.logspace(-1, 0, len(residuals), device=residuals[0].device) * scale
        return [residual * each for residual, each in zip(residuals, scales, strict=True)]
    if isinstance(scale, torch.Tensor) or scale != 1:
        return [residual * scale for residual in residuals]
    return residuals
