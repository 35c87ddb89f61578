"""The ControlNet extension of A1111 (sd-webui-controlnet): what it adds inside of the UNet, as inputs of an engine.

It puts a forward of its own into the UNet, which computes residuals, goes through the UNet's blocks itself and adds
them on the way. To learn them, that very code goes through blocks that compute nothing and see what is added where. The
engine's output stands for that of the last one, so that whatever the extension does before and after is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sdaccel.errors import ProfileError, SdaccelError, UnsupportedCall

Engine = Callable[[torch.Tensor, torch.Tensor, Any, Mapping[str, torch.Tensor]], torch.Tensor]
"""x, context, y and residuals → the UNet's output"""


class Controlled:
    """Stands in the UNet where the extension's forward stood."""

    def __init__(self, theirs: Any, call: Callable[..., torch.Tensor]):
        self.theirs = theirs
        self._call = call
        self.misfits: dict[torch.Size, ProfileError] = {}
        """Sizes without profile: not worth to compute residuals of at every step."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call(self, *args, **kwargs)

    def follow(
        self,
        unet: Any,
        places: Sequence[tuple[str, int, int]],
        engine: Engine,
        x: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What the extension's forward gives with ``engine`` inside. places: see `residual_layout`.

        Raises UnsupportedCall where it does something else than adding to skip connections and the middle.
        """
        outline = _Outline(unet, places, x, engine)
        try:
            return self.theirs.__func__(outline, x, *args, **kwargs)
        except SdaccelError:
            raise
        except Exception as error:  # of foreign code that meets something else than a UNet
            raise UnsupportedCall(f"the ControlNet extension could not be followed: {error}.") from error


def is_controlnet(forward: Any) -> bool:
    """Whether it is a forward that the extension put into a UNet."""
    return "UnetHook." in getattr(forward, "__qualname__", "") and hasattr(forward, "__func__")


class _Outline:
    """Stands for the UNet while the extension's forward runs."""

    def __init__(self, unet: Any, places: Sequence[tuple[str, int, int]], x: torch.Tensor, engine: Engine):
        self._unet, self._engine = unet, engine
        *self._skips, self._middle = [
            (name, (len(x), channels, *(-(-side // 2**level) for side in x.shape[2:])))
            for name, channels, level in places
        ]
        self._nothing = torch.zeros((), dtype=x.dtype, device=x.device)
        self._last: torch.Tensor | None = None
        self._x, self._context, self._y = x, x, None
        self._residuals: dict[str, torch.Tensor] = {}
        self.input_blocks = [partial(self._enter, shape) for _, shape in self._skips]
        self.output_blocks = [partial(self._leave, place) for place in reversed(range(len(self._skips)))]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unet, name)

    def time_embed(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def label_emb(self, y: Any) -> float:
        self._y = y
        return 0.0

    def _enter(self, shape: tuple[int, ...], h: torch.Tensor, emb: Any, context: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            self._x, self._context = h, context
        elif h is not self._last:
            raise UnsupportedCall("a T2I-Adapter adds to the UNet's blocks where engines have no input.")
        self._last = self._nothing.expand(shape)
        return self._last

    def middle_block(self, h: torch.Tensor, emb: Any, context: torch.Tensor) -> torch.Tensor:
        return self._enter(self._middle[1], h, emb, context)

    def _leave(self, place: int, h: torch.Tensor, emb: Any, context: torch.Tensor) -> torch.Tensor:
        """``h``: what the block before gave and was added to it, then the skip connection."""
        name, shape = self._skips[place]
        if self._middle[0] not in self._residuals:
            self._residuals[self._middle[0]], h = h.split([self._middle[1][1], shape[1]], dim=1)
        if h.shape != shape:
            raise UnsupportedCall(f"the ControlNet extension adds {list(h.shape)} to a connection of {list(shape)}.")
        self._residuals[name] = h
        following = self._skips[max(place - 1, 0)][1]
        return self._nothing.expand(len(h), 0, *following[2:])

    def out(self, h: torch.Tensor) -> torch.Tensor:
        residuals = {name: value.contiguous() for name, value in self._residuals.items()}
        return self._engine(self._x, self._context, self._y, residuals)


__all__ = ["Controlled", "is_controlnet"]
