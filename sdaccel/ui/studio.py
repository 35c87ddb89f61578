"""Draws in this process for the pages: the models used last stay open, engines swapped in and out."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sdaccel.engine.store import Store
from sdaccel.ui.comparison import Comparison
from sdaccel.ui.requests import BuildRequest, backend_of, open_checkpoint

if TYPE_CHECKING:
    from sdaccel.draw import Request, Result
    from sdaccel.model_cache import HostWeights, ModelCache
    from sdaccel.models.checkpoint import Checkpoint

Progress = Callable[[str, float], None]
Show = Callable[[str], None]

PREVIEW_SIDE = 256


@dataclass
class _Open:
    """A pipeline in torch, with what is known about it."""

    model: str
    checkpoint: Checkpoint
    pipe: Any
    scheduler: Any
    """The one that it came with."""
    colours: Any
    """Latents → RGB, see `colour_map`; None where they could not be told."""
    host: HostWeights
    device: str
    engines: tuple[str, ...] = ()
    """Keys of the engines swapped in; empty: plain torch."""

    @property
    def changed(self) -> bool:
        return any(component.changed for component in self.checkpoint.components.values())

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def park(self) -> None:
        """Without engines, and off the GPU."""
        from sdaccel.integrations.diffusers import restore

        restore(self.pipe)
        self.engines = ()
        self.host.leave()

    close = park


class Studio:
    """One call draws at a time; others wait."""

    def __init__(self, store: Store):
        from sdaccel.model_cache import ModelCache

        self.store = store
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._kept: ModelCache[_Open] = ModelCache()

    def draw(
        self, model: str, request: Request, *, engines: bool = True, progress: Progress, show: Show | None = None
    ) -> Result:
        """The images of ``request``, by the engines that the store has, or in plain torch.

        show: gets a data URI of the image so far after each step. Raises ModelError, SettingError, Cancelled, ….
        """
        with self._lock:
            opened = self._opened(model, request, progress)
            return self._drawn(opened, request, engines, progress, show)

    def compare(self, model: str, request: Request, *, progress: Progress, show: Show | None = None) -> Comparison:
        """The first image of ``request`` by torch, then by engines."""
        import numpy as np
        from PIL import Image

        from sdaccel.draw import random_seed
        from sdaccel.quality import max_abs_error, psnr
        from sdaccel.verify import LIMITS

        request = replace(request, count=1, seed=random_seed() if request.seed is None else request.seed)
        with self._lock:
            opened = self._opened(model, request, progress)
            plain = self._drawn(opened, request, False, _half(progress, 0.0, "torch"), show)
            ours = self._drawn(opened, request, True, _half(progress, 0.5, "engines"), show)
        left, right = plain.images[0].image, ours.images[0].image
        gap = np.abs(np.asarray(left, dtype=np.int16) - np.asarray(right, dtype=np.int16))
        largest = int(max_abs_error(right, left))
        gain = 255 / largest if largest else 1.0
        difference = Image.fromarray(np.clip(gap * gain, 0, 255).astype(np.uint8))
        return Comparison(
            torch=left,
            engines=right,
            difference=difference,
            gain=gain,
            psnr=psnr(right, left),
            limit=LIMITS[backend_of(BuildRequest()).precisions[0]].image_psnr,
            max_abs=largest,
            torch_seconds=plain.seconds,
            engine_seconds=ours.seconds,
            seed=request.seed or 0,
            fallbacks=tuple(ours.fallbacks),
            failed=tuple(ours.failed),
            notes=tuple(ours.notes),
        )

    def forget(self) -> None:
        """Lets go of all models and their memory."""
        with self._lock:
            self._open = None
            self._kept.clear()

    def _opened(self, model: str, request: Request, progress: Progress) -> _Open:
        from sdaccel.draw import device_for, open_on_host, verifying
        from sdaccel.model_cache import HostWeights

        if self._open is not None and self._open.model == model:
            return self._open
        if self._open is not None:  # first, so that two do not lie in a GPU's memory at once
            last, self._open = self._open, None
            self._kept.keep(last.model, last)
        progress("opening the model", 0.0)
        opened = self._kept.take(model)
        if opened is None or opened.changed:
            checkpoint, backend = open_checkpoint(BuildRequest(model=model)), backend_of(BuildRequest())
            with verifying(checkpoint, request, self.store, backend):
                pipe = open_on_host(checkpoint, replace(request, scheduler=None), None, backend)
                opened = _Open(model, checkpoint, pipe, pipe.scheduler, None, HostWeights(pipe), device_for(backend))
                opened.host.move(opened.device)
        else:
            opened.host.move(opened.device)
        if opened.colours is None:
            opened.colours = colour_map(opened.pipe)
        progress("opening the model", 0.0)
        self._open = opened
        return opened

    def _drawn(self, opened: _Open, request: Request, engines: bool, progress: Progress, show: Show | None) -> Result:
        from sdaccel.draw import draw, fit_pipeline, largest_batch, with_size

        opened.pipe.scheduler = opened.scheduler
        pipe = fit_pipeline(opened.pipe, request)
        request = with_size(request, opened.checkpoint.native_side)
        self._swap(opened, request, engines, progress)
        at_once = largest_batch(pipe.sdaccel, request.width or 0, request.height or 0) if engines else 4

        def look(latents: Any) -> None:
            if show is not None and opened.colours is not None:
                show(data_uri(preview(latents, opened.colours), "JPEG"))

        return draw(pipe, request, at_once=at_once, model=opened.checkpoint.name, progress=progress, on_step=look)

    def _swap(self, opened: _Open, request: Request, engines: bool, progress: Progress) -> None:
        """Engines in, or out. Those that are in stay while the store has no others."""
        from sdaccel.draw import components_needed
        from sdaccel.integrations.diffusers import accelerate, restore

        if not engines:
            restore(opened.pipe)
            opened.engines = ()
            return
        there = tuple(entry.key for entry in self.store.list())
        if opened.engines == there and hasattr(opened.pipe, "sdaccel"):
            return
        progress("swapping engines in", 0.0)
        accelerate(
            opened.pipe,
            store=self.store,
            backend=backend_of(BuildRequest()).name,
            components=components_needed(opened.checkpoint, request),
            build="never",
            checkpoint=opened.checkpoint,
        )
        opened.engines = there


def _half(progress: Progress, begin: float, who: str) -> Progress:
    return lambda stage, fraction: progress(f"{who}: {stage}", begin + fraction / 2)


# ---- pictures


def data_uri(image: Any, kind: str = "PNG") -> str:
    """A PIL image as the ``src`` of an <img>."""
    file = io.BytesIO()
    image.save(file, format=kind, **({"quality": 85} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def colour_map(pipe: Any) -> Any:
    """The (channels + 1, 3) matrix that turns a latent, with a 1 added, into red, green and blue (0..1).

    It is the least-squares fit over flat patches of random colour that the model's own VAE has encoded. None where
    that gives no finite numbers (a VAE that overflows in fp16).
    """
    import torch

    vae = pipe.vae
    parameter = next(vae.parameters())
    patches = torch.rand((1, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    pixels = patches.repeat_interleave(32, 2).repeat_interleave(32, 3)
    with torch.inference_mode():
        latents = vae.encode((2 * pixels - 1).to(parameter.device, parameter.dtype)).latent_dist.mean
    latents = (latents - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor
    means = torch.nn.functional.adaptive_avg_pool2d(latents.float().cpu(), 8)[0].flatten(1).T
    known = torch.cat([means, torch.ones(len(means), 1)], 1)
    matrix = torch.linalg.lstsq(known, patches[0].flatten(1).T).solution
    return matrix if bool(torch.isfinite(matrix).all()) else None


def preview(latents: Any, colours: Any) -> Any:
    """A small PIL image of latents (images, channels, height, width): the first four side by side."""
    import torch
    from PIL import Image

    values = latents[:4, : len(colours) - 1].detach().float().cpu().permute(0, 2, 3, 1)
    rgb = (values @ colours[:-1] + colours[-1]).clamp(0, 1).nan_to_num(0)
    row = torch.cat(list(rgb), 1)
    image = Image.fromarray((255 * row).round().to(torch.uint8).numpy())
    height = max(1, round(PREVIEW_SIDE * image.height / max(latents.shape[3], image.height)))
    return image.resize((max(1, round(image.width * height / image.height)), height), Image.Resampling.BICUBIC)


__all__ = ["Studio", "colour_map", "data_uri", "preview"]
