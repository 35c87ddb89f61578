"""The main job on a fresh machine, offline: build the demo model's engines, draw, check, compare with torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdaccel.draw import (
    Drawn,
    Request,
    components_needed,
    draw,
    open_pipeline,
    output_paths,
    report_lines,
    save,
)
from sdaccel.engine.store import Store
from sdaccel.model_choice import ModelChoice, demo_model, open_model
from sdaccel.profile import ImageProfile, Range
from sdaccel.verify import LIMITS

PROMPT = "a red circle on a blue background"
SIDE = 256
STEPS = 20

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Quickstart:
    """``shown``: whether the image shows its prompt; ``psnr`` in dB and seconds: through engines against torch."""

    path: Path
    prompt: str
    shown: bool
    reasons: tuple[str, ...]
    engines: dict[str, str]
    built: int
    psnr: float
    seconds: float
    torch_seconds: float
    build_seconds: float
    all_by_engines: bool
    report: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.shown and self.all_by_engines and self.psnr >= LIMITS["fp32"].image_psnr

    def to_json(self) -> dict[str, Any]:
        decibels = self.psnr if math.isfinite(self.psnr) else None  # None: equal to the last bit
        return {**vars(self), "path": str(self.path), "psnr": decibels, "ok": self.ok}


def quickstart(
    store: Store,
    *,
    path: Path | None = None,
    model: Path | None = None,
    side: int = SIDE,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Quickstart:
    """Draws `PROMPT` with the demo model (or ``model``) and saves it as ``path`` (default: a new file here)."""
    from sdaccel.backends.base import pick_backend
    from sdaccel.builder import BuilderConfig, build_engines
    from sdaccel.integrations.diffusers import accelerate
    from sdaccel.models.demo import GUIDANCE_SCALE
    from sdaccel.quality import prompt_matches, psnr

    report = progress or (lambda stage, fraction: None)
    where = output_paths(path, [seed])[0] if path else _new_file(Path("sdaccel-quickstart.png"))
    checkpoint = open_model(ModelChoice(model, "named") if model else demo_model())
    request = Request(PROMPT, width=side, height=side, steps=steps, guidance=GUIDANCE_SCALE, seed=seed)
    components = components_needed(checkpoint, request)
    profile = ImageProfile(Range(side, side, side), Range(side, side, side))
    before = {entry.key for entry in store.list()}
    start = time.perf_counter()
    entries = build_engines(
        checkpoint,
        BuilderConfig(tuple(components), (profile,)),
        store,
        lambda stage, fraction: report(f"building {stage}", 0.7 * fraction),
    )
    build_seconds = time.perf_counter() - start
    pipe = open_pipeline(checkpoint, request, backend=pick_backend())
    expected, torch_seconds = _drawn(pipe, request, checkpoint.name, "in torch", 0.7, report)
    accelerate(pipe, store=store, components=components, build="never")
    found, seconds = _drawn(pipe, request, checkpoint.name, "through engines", 0.85, report)
    result, image = found
    if result.ok:
        save(image, where)
    match = prompt_matches(image.image, PROMPT)
    return Quickstart(
        path=where.resolve(),
        prompt=PROMPT,
        shown=match.ok,
        reasons=(*match.reasons, *result.failed),
        engines={entry.engine.component: entry.key for entry in entries},
        built=len({entry.key for entry in entries} - before),
        psnr=psnr(image.image, expected[1].image),
        seconds=seconds,
        torch_seconds=torch_seconds,
        build_seconds=build_seconds,
        all_by_engines=result.ok and not result.fallbacks,
        report=tuple(report_lines(result)),
    )


def _drawn(
    pipe: Any, request: Request, model: str, how: str, begin: float, report: Progress
) -> tuple[tuple[Any, Drawn], float]:
    """((result, image), seconds), after one step to warm up."""
    draw(pipe, replace(request, steps=1))
    result = draw(pipe, request, model=model, progress=lambda s, f: report(f"{how}: {s}", begin + 0.15 * f))
    return (result, result.images[0]), result.seconds


def _new_file(path: Path) -> Path:
    number = 1
    found = path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found
