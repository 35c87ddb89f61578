"""A stand-in of A1111's ControlNet extension: a forward in the UNet that runs the blocks itself and adds on the way.

With the stand-in of the UNet, whose blocks carry parameters alone, it hands the sums to diffusers instead.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from sdaccel.export.components import residual_layout


class UnetHook:
    def __init__(self, seed: int = 0, *, until: int = 99, adapter: bool = False, pooled: bool = False):
        self.seed, self.until, self.adapter, self.pooled = seed, until, adapter, pooled
        self.calls = 0
        self.model: Any = None

    def residuals(self, x: torch.Tensor, config: Any) -> list[Any]:
        """Of each skip connection and of the middle; 0.0 where there is none."""
        self.calls += 1
        random = torch.Generator().manual_seed(self.seed)
        found: list[Any] = []
        for _, channels, level in residual_layout(config):
            size = (1, 1) if self.pooled else tuple(-(-side // 2**level) for side in x.shape[2:])
            found.append(torch.randn(len(x), channels, *size, generator=random) * 0.2 * x.mean().abs())
        found[1] = 0.0
        return found

    def hook(self, model: Any) -> None:
        outer = self

        def forward_webui(self: Any, x: Any, timesteps: Any = None, context: Any = None, y: Any = None) -> Any:
            self.cond_mark = context[:, :1, :1]
            context = context[:, 1:]
            added = outer.residuals(x, self.inner[0].config) if outer.steps() else [0.0] * len(outer.zeros)
            if self is model:
                *down, middle = [torch.as_tensor(value) for value in added]
                residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
                h = model.compute(x, timesteps, context, y, **residuals)
            else:
                h = outer.through_blocks(self, x, timesteps, context, y, added)
            return h * 0.9 + 0.01 * x[:, :4]

        model._original_forward = model.forward
        model.forward = MethodType(forward_webui, model)
        self.model, self.zeros, self.left = model, residual_layout(model.inner[0].config), self.until

    def steps(self) -> bool:
        """Whether the guidance goes on, of which each call is a step."""
        self.left -= 1
        return self.left >= 0

    def through_blocks(self, unet: Any, x: Any, timesteps: Any, context: Any, y: Any, added: list[Any]) -> Any:
        emb = unet.time_embed(timesteps[:, None].float())
        if y is not None:
            emb = emb + unet.label_emb(y)
        h, hs = x, []
        for index, block in enumerate(unet.input_blocks):
            unet.current_h_shape = tuple(h.shape)
            h = block(h, emb, context)
            if self.adapter and index == 2:
                h = h + 0.5
            hs.append(h)
        h = _add(unet.middle_block(h, emb, context), added.pop())
        for block in unet.output_blocks:
            h = torch.cat([h, _add(hs.pop(), added.pop())], dim=1)
            h = block(h, emb, context)
        return unet.out(h.type(x.dtype))

    def restore(self) -> None:
        self.model.forward = self.model._original_forward
        del self.model._original_forward


def _add(base: torch.Tensor, value: Any) -> torch.Tensor:
    return base if isinstance(value, float) and value == 0.0 else base + value
