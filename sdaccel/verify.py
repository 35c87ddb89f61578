"""Engines against torch: every component at several shapes of its profiles, then a whole image of one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdaccel.backends.base import Backend, pick_backend
from sdaccel.builder import COMPONENT_LIMITS, check_device
from sdaccel.draw import Request, draw, open_pipeline
from sdaccel.engine.store import Entry, Store
from sdaccel.engine.weights import FILE, layout
from sdaccel.errors import EngineNotFound, ExportError
from sdaccel.profile import SIDE_STEP, OptimizationProfile
from sdaccel.quality import max_abs_error, psnr

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Limits:
    """What counts as equal to torch."""

    component: float
    """Largest |engine - torch| of an output, over max(1, largest |torch|)."""
    image_psnr: float
    """Decibels, least."""
    image_max_abs: float
    """Largest difference of a channel of a pixel, in 0..1."""


# float32 on both sides: the order of sums alone differs. Over the steps of a whole image that may move a pixel by a
# grey level or two (1/255 is 0.004), not more.
# In half precision both round differently at every layer, and steps carry that on.
LIMITS = {
    "fp32": Limits(component=COMPONENT_LIMITS["fp32"], image_psnr=50.0, image_max_abs=0.02),
    "fp16": Limits(component=COMPONENT_LIMITS["fp16"], image_psnr=35.0, image_max_abs=0.5),
    "bf16": Limits(component=COMPONENT_LIMITS["bf16"], image_psnr=25.0, image_max_abs=0.8),
}


@dataclass(frozen=True)
class ShapeCheck:
    component: str
    engine: str
    shape: dict[str, int]
    error: float
    limit: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.error <= self.limit

    def to_json(self) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else None
        return {**vars(self), "error": error, "ok": self.ok}


@dataclass(frozen=True)
class ImageCheck:
    width: int
    height: int
    steps: int
    seed: int
    psnr: float
    max_abs: float
    limits: Limits
    fallbacks: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        near = self.psnr >= self.limits.image_psnr and self.max_abs <= self.limits.image_max_abs
        return near and not self.fallbacks and not self.failed

    def to_json(self) -> dict[str, Any]:
        decibels = self.psnr if math.isfinite(self.psnr) else None  # None: equal to the last bit
        return {**vars(self), "psnr": decibels, "limits": vars(self.limits), "ok": self.ok}


@dataclass
class Verification:
    checks: list[ShapeCheck] = field(default_factory=list)
    image: ImageCheck | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and (self.image is None or self.image.ok)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "components": [check.to_json() for check in self.checks],
            "image": None if self.image is None else self.image.to_json(),
        }


def verify(
    checkpoint: Any,
    store: Store,
    *,
    backend: str = "auto",
    components: Sequence[str] = (),
    image: bool = True,
    size: tuple[int, int] | None = None,
    steps: int = 6,
    seed: int = 0,
    prompt: str = "a red circle on a blue background",
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compares all engines that ``store`` has of ``checkpoint`` for this machine with torch, every byte checked first.

    size: (width, height) in pixels of the image; default: the smallest that the UNet's engines take.
    Raises EngineNotFound if there is no engine, EngineBroken if one was damaged.
    """
    from sdaccel.builder import buildable_components, engines_here

    chosen = pick_backend(backend)
    wanted = buildable_components(checkpoint, components or None)
    report = progress or (lambda stage, fraction: None)
    engines = {name: engines_here(checkpoint, name, chosen, store) for name in wanted}
    if not any(engines.values()):
        raise EngineNotFound(
            f"the store {store.root} has no engine of {checkpoint.name} for this machine.",
            hint=f'Run: sdaccel build "{checkpoint.origin}"',
        )
    result = Verification()
    work = [(name, entry) for name, entries in engines.items() for entry in entries]
    share = 0.7 if image else 1.0
    for index, (name, entry) in enumerate(work):
        report(f"{name}: comparing with torch", share * index / len(work))
        result.checks += _check_engine(store, chosen, entry)
    if image and engines.get("unet"):
        report("a whole image", share)
        have = [name for name, entries in engines.items() if entries and name != "vae_encoder"]
        place = size or _smallest(engines["unet"])
        request = Request(prompt, width=place[0], height=place[1], steps=steps, seed=seed)
        result.image = _check_image(checkpoint, store, chosen, have, request, tokenizer, report)
    report("done", 1.0)
    return result


def shapes_of(component: str, profiles: Sequence[OptimizationProfile]) -> list[dict[str, int]]:
    """Shapes to compare at: of each profile its smallest, its opt, and a wide one between with an uneven side."""
    shapes: list[dict[str, int]] = []
    for profile in profiles:
        low = {axis: r.min for axis, r in profile.axes}
        between = {axis: (r.min + r.opt) // 2 for axis, r in profile.axes}
        if "width" in between:
            middle, between["height"] = between["width"], low["height"]
            if component == "vae_encoder":  # counts pixels
                between["width"] = max(low["width"], middle - middle % SIDE_STEP)
            else:
                between["width"] = min(middle | 1, profile["width"].max)
        for side in ("height", "width"):
            if f"image_{side}" in between:
                pixels = profile[f"image_{side}"].opt // profile[side].opt
                between[f"image_{side}"] = pixels * between[side]
        shapes += [low, between, profile.opt()]
    return [dict(shape) for shape in dict.fromkeys(tuple(sorted(shape.items())) for shape in shapes)]


def _check_engine(store: Store, backend: Backend, entry: Entry) -> list[ShapeCheck]:
    from sdaccel.export.to_onnx import check_graph

    opened = store.open_engine(entry.key)
    engine = entry.engine
    limit = LIMITS[engine.precision].component
    weights = opened.weights[0]
    loaded = backend.load(entry.path, store.root / "weights", engine.inputs)

    def compare(shapes: list[dict[str, int]]) -> list[ShapeCheck]:
        found = check_graph(
            loaded.run,
            engine.component,
            engine.config,
            weights.file(FILE),
            layout(weights),
            shapes=shapes,
            limit=math.inf,
            device=check_device(backend, engine.component, weights),
        )
        return [
            ShapeCheck(engine.component, entry.key, dict(shape), result.error, limit)
            for shape, result in zip(shapes, found, strict=True)
        ]

    shapes = shapes_of(engine.component, engine.profiles)
    try:
        return compare(shapes)
    except ExportError:  # NaN or a missing output: at which shape?
        return [check for shape in shapes for check in _alone(compare, shape, entry, limit)]


def _alone(
    compare: Callable[[list[dict[str, int]]], list[ShapeCheck]], shape: dict[str, int], entry: Entry, limit: float
) -> list[ShapeCheck]:
    try:
        return compare([shape])
    except ExportError as error:
        return [ShapeCheck(entry.engine.component, entry.key, shape, math.nan, limit, str(error))]


def _smallest(engines: Sequence[Entry]) -> tuple[int, int]:
    images = [image for entry in engines for image in entry.engine.image_profiles]
    best = min(images, key=lambda image: image.width.min * image.height.min)
    return best.width.min, best.height.min


def _check_image(
    checkpoint: Any,
    store: Store,
    backend: Backend,
    components: Sequence[str],
    request: Request,
    tokenizer: Path | None,
    report: Progress,
) -> ImageCheck | None:
    from sdaccel.integrations.diffusers import accelerate

    starts_from_text = checkpoint.variant == "text-to-image" and checkpoint.family.value != "sdxl-refiner"
    if not starts_from_text or "controlnet" in checkpoint.components:
        return None  # it starts from an image: its components have been compared
    pipe = open_pipeline(checkpoint, request, tokenizer, backend)
    report("a whole image in torch", 0.75)
    expected = draw(pipe, request).images[0].image
    report("a whole image through engines", 0.88)
    accelerate(pipe, store=store, backend=backend.name, components=components, build="never")
    result = draw(pipe, request)
    found = result.images[0].image
    limits = LIMITS[backend.precisions[0]]
    return ImageCheck(
        width=found.width,
        height=found.height,
        steps=request.steps,
        seed=request.seed or 0,
        psnr=psnr(found, expected),
        max_abs=max_abs_error(found, expected) / 255,
        limits=limits,
        fallbacks=tuple(f"{f.component}: {f.reason}" for f in result.fallbacks),
        failed=tuple(result.failed),
    )


__all__ = ["LIMITS", "Limits", "Verification", "shapes_of", "verify"]
