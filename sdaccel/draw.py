"""Images from a prompt: the pipeline in diffusers, engines swapped in, files that say how they were made."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdaccel import metadata
from sdaccel.errors import ModelError, SdaccelError, SettingError, StoreError
from sdaccel.lora import LiveWeights, Lora, applied
from sdaccel.profile import ImageProfile, Range

if TYPE_CHECKING:
    from sdaccel.backends.base import Backend

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "deis": "DEISMultistepScheduler",
    "dpm++2m": "DPMSolverMultistepScheduler",
    "dpm++sde": "DPMSolverSDEScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lcm": "LCMScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}
MAX_SEED = 2**32 - 1
_SAMPLERS = {  # AUTOMATIC1111's names, for the parameters text
    "DDIMScheduler": "DDIM",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "DPMSolverSDEScheduler": "DPM++ SDE",
    "EulerDiscreteScheduler": "Euler",
    "EulerAncestralDiscreteScheduler": "Euler a",
    "HeunDiscreteScheduler": "Heun",
    "LCMScheduler": "LCM",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "UniPCMultistepScheduler": "UniPC",
}

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Request:
    """What to draw. Sides in pixels; the i-th image has the seed ``seed + i``."""

    prompt: str
    negative: str = ""
    width: int | None = None
    height: int | None = None
    steps: int = 20
    guidance: float = 7.5
    seed: int | None = None
    count: int = 1
    scheduler: str | None = None
    image: Path | None = None
    mask: Path | None = None
    strength: float = 0.8
    loras: tuple[Lora, ...] = ()

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("steps", self.steps, 1, 1000),
            ("n", self.count, 1, 1000),
            ("seed", self.seed or 0, 0, MAX_SEED),
            ("guidance", self.guidance, 0, 100),
            ("strength", self.strength, 0, 1),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise SettingError(f"{name} {value} is not between {low} and {high}.")
        if self.scheduler is not None and self.scheduler not in SCHEDULERS:
            raise SettingError(f"there is no scheduler {self.scheduler!r}: {', '.join(SCHEDULERS)}.")
        if self.mask is not None and self.image is None:
            raise SettingError("a mask needs the image that it is for.", hint="Add --image FILE.")


@dataclass
class Drawn:
    """One image (a PIL image) and how it was made."""

    image: Any
    seed: int
    index: int
    report: dict[str, Any]
    parameters: str
    path: Path | None = None


@dataclass
class Result:
    images: list[Drawn] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    """A `RunReport` for each call of the pipeline."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every image can be kept: nothing in it was NaN, infinite or constant."""
        return all(report.ok for report in self.reports)

    @property
    def failed(self) -> list[str]:
        return list(dict.fromkeys(text for report in self.reports for text in report.failed))

    @property
    def fallbacks(self) -> list[Any]:
        return [fallback for report in self.reports for fallback in report.fallbacks]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for report in self.reports for note in report.notes))


def open_pipeline(
    checkpoint: Any, request: Request, tokenizer: Path | None = None, backend: Backend | None = None
) -> Any:
    """`open_on_host`, taken to where ``backend`` runs; without one, to the GPU where there is one."""
    from sdaccel.model_cache import HostWeights

    return HostWeights(open_on_host(checkpoint, request, tokenizer, backend)).move(device_for(backend))


def open_on_host(
    checkpoint: Any, request: Request, tokenizer: Path | None = None, backend: Backend | None = None
) -> Any:
    """The checkpoint's pipeline in torch on the CPU, of the kind that ``request`` needs (from text, from an image,
    inpainting), in what the engines of ``backend`` compute in; without one in float32.

    tokenizer: see `sdaccel.models.pipeline.load_pipeline`.
    """
    import torch
    from diffusers.utils import logging as diffusers_logging

    from sdaccel.models.pipeline import load_pipeline

    diffusers_logging.disable_progress_bar()
    dtype = torch.float16 if backend is not None and backend.precisions[0] == "fp16" else torch.float32
    return fit_pipeline(load_pipeline(checkpoint, dtype=dtype, tokenizer=tokenizer), request)


@contextmanager
def verifying(checkpoint: Any, request: Request, store: Any, backend: Backend | None) -> Iterator[None]:
    """Verifies meanwhile the engines that ``request`` will call: disk and processor have little else to do while a
    model's weights go to a GPU. What is wrong with an engine is told when it is loaded."""
    from sdaccel.builder import engines_here

    def verify() -> None:
        if backend is None:
            return
        for component in components_needed(checkpoint, request):
            with suppress(SdaccelError):
                for entry in engines_here(checkpoint, component, backend, store)[:1]:
                    store.open_engine(entry.key)

    thread = threading.Thread(target=verify, name="sdaccel-verify", daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    yield
    thread.join()


def device_for(backend: Backend | None) -> str:
    """ "cpu" or "cuda"."""
    import torch

    if backend is not None:
        return backend.device_type()
    return "cuda" if torch.cuda.is_available() else "cpu"


def fit_pipeline(pipe: Any, request: Request) -> Any:
    """``pipe`` as the kind that ``request`` needs, with its scheduler. Raises ModelError where it has no such kind."""
    import diffusers

    name = type(pipe).__name__
    if "ControlNet" in name:
        raise SettingError(
            f"this model is a {name}: it needs an image to follow, which is given in Python alone (sdaccel.accelerate)."
        )
    needs_mask, needs_image = "Inpaint" in name, "Img2Img" in name or "Pix2Pix" in name
    lacks_mask = needs_mask and request.mask is None
    if lacks_mask or (needs_image and request.image is None):
        needs = "an image and a mask (--image FILE --mask FILE)" if needs_mask else "an image (--image FILE)"
        raise SettingError(f"this model is a {name}: it needs {needs} to start from.")
    if request.image is not None and not (needs_mask or (needs_image and request.mask is None)):
        auto = diffusers.AutoPipelineForInpainting if request.mask else diffusers.AutoPipelineForImage2Image
        try:
            pipe = auto.from_pipe(pipe)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{name} cannot start from an image: {error}") from error
    if request.scheduler is not None:
        pipe.scheduler = new_scheduler(pipe.scheduler, request.scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def new_scheduler(own: Any, name: str | None) -> Any:
    """A scheduler of that name (None: the same kind) for the model that ``own`` is of. Raises SettingError."""
    import diffusers

    kind = getattr(diffusers, SCHEDULERS[name]) if name else type(own)
    try:
        return kind.from_config(own.config)
    except (ImportError, ValueError, TypeError) as error:
        raise SettingError(f"the scheduler {name} cannot be used: {error}") from error


def open_accelerated(
    checkpoint: Any,
    request: Request,
    store: Any,
    backend: str = "auto",
    build: str = "if-missing",
    fallback: bool = True,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Any, int]:
    """(pipeline with engines, images at once that they take). Builds engines that hold this size where asked to."""
    check_build(build)
    from sdaccel.backends.base import pick_backend
    from sdaccel.integrations.diffusers import accelerate

    components = components_needed(checkpoint, request)
    width, height = request.width or checkpoint.native_side, request.height or checkpoint.native_side
    if build == "if-missing":
        build_missing(checkpoint, components, store, backend, width, height, progress=progress)
    chosen = pick_backend(backend)
    with verifying(checkpoint, request, store, chosen):
        pipe = open_pipeline(checkpoint, request, tokenizer, chosen)
    how = {"store": store, "backend": backend, "build": "never", "fallback": fallback}
    accelerate(pipe, components=components, checkpoint=checkpoint, **how)
    return pipe, largest_batch(pipe.sdaccel, width, height)


def check_build(build: str) -> None:
    """Raises SettingError for what says neither way."""
    if build not in ("if-missing", "never"):
        raise SettingError(f"build {build!r} is neither if-missing nor never.")


def build_missing(
    checkpoint: Any,
    components: Sequence[str],
    store: Any,
    backend: str,
    width: int,
    height: int,
    *,
    batch: int = 1,
    progress: Progress | None = None,
) -> bool:
    """Builds the engines that ``batch`` images of this size at once lack; whether there were any such."""
    from sdaccel.builder import BuilderConfig, build_engines

    missing = _missing(checkpoint, components, store, backend, width, height, batch)
    if missing:
        profile = covering_profile(checkpoint.native_side, width, height)
        if batch > profile.batch.max:
            profile = replace(profile, batch=Range(1, batch, batch))
        build_engines(checkpoint, BuilderConfig(tuple(missing), (profile,), None, backend), store, progress)
    return bool(missing)


def _missing(
    checkpoint: Any, components: Sequence[str], store: Any, backend: str, width: int, height: int, batch: int = 1
) -> list[str]:
    """The components without an engine for images of this size, on this machine as it is now."""
    from sdaccel.backends.base import pick_backend
    from sdaccel.builder import engines_here

    chosen = pick_backend(backend)

    def held(component: str) -> bool:
        engines = engines_here(checkpoint, component, chosen, store)
        if component.startswith("text_encoder"):
            return any(batch in profile["batch"] for entry in engines for profile in entry.engine.profiles)
        images = [image for entry in engines for image in entry.engine.image_profiles]
        return any(width in p.width and height in p.height and batch in p.batch for p in images)

    return [component for component in components if not held(component)]


def components_needed(checkpoint: Any, request: Request) -> list[str]:
    """The engine components that ``request`` calls."""
    from sdaccel.builder import buildable_components

    found = buildable_components(checkpoint)
    return [name for name in found if name != "vae_encoder" or request.image is not None]


def covering_profile(native: int, width: int, height: int) -> ImageProfile:
    """The profile to build for images of this size: the model's native range where that holds it.

    Raises ProfileError for a size that no engine can have.
    """
    usual = ImageProfile.native(native)
    if width in usual.width and height in usual.height:
        return usual
    return ImageProfile(Range(width, width, width), Range(height, height, height))


def random_seed(count: int = 1) -> int:
    return random.SystemRandom().randrange(MAX_SEED - count)


def usual_guidance(checkpoint: Any) -> float:
    """The guidance scale to draw with when none is named."""
    from sdaccel.models.demo import GUIDANCE_SCALE, demo_model_path

    if checkpoint.path is not None and checkpoint.path.resolve() == demo_model_path().resolve():
        return GUIDANCE_SCALE
    return 5.0 if checkpoint.family.is_xl else 7.5


def with_size(request: Request, native: int) -> Request:
    """``request`` with both sides: those given, else those of its image, else the native side."""
    width, height = request.width, request.height
    if request.image is not None and (width is None or height is None):
        found = _open_image(request.image)
        width, height = width or found.width - found.width % 8, height or found.height - found.height % 8
    return replace(request, width=width or native, height=height or native)


def largest_batch(accelerated: Any, width: int, height: int) -> int:
    """Images at once that engines for this size take; 4 where there is none for it."""
    swap = accelerated.swaps.get("unet")
    return at_once_by(swap.context.engines if swap else (), width, height)


def at_once_by(engines: Sequence[Any], width: int, height: int) -> int:
    """As `largest_batch`, of these engines of the UNet."""
    profiles = [image for entry in engines for image in entry.engine.image_profiles]
    return max((p.batch.max for p in profiles if width in p.width and height in p.height), default=4)


def draw(
    pipe: Any,
    request: Request,
    *,
    at_once: int = 4,
    model: str = "",
    progress: Progress | None = None,
    on_step: Callable[[Any], None] | None = None,
) -> Result:
    """The images of ``request`` from a pipeline, ``at_once`` in one call, accelerated or not.

    on_step: gets the latents, (images, channels, height, width), after each step.
    Raises SettingError with the host's own words for what it refuses, such as a side that is no multiple of 8.
    """
    with applied(pipe, request.loras) as weights:
        return _draw(pipe, weights, request, at_once, model, progress, on_step)


def _draw(
    pipe: Any,
    weights: LiveWeights,
    request: Request,
    at_once: int,
    model: str,
    progress: Progress | None,
    on_step: Callable[[Any], None] | None,
) -> Result:
    import torch

    from sdaccel.runtime import RunReport

    base = random_seed(request.count) if request.seed is None else request.seed
    result = Result()
    start = time.perf_counter()
    for first in range(0, request.count, at_once):
        seeds = [base + i for i in range(first, min(first + at_once, request.count))]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        done = first / request.count
        callback = _step_callback(request, progress, on_step, done, len(seeds) / request.count)
        arguments = call_arguments(pipe, request) | {"generator": generators, "num_images_per_prompt": len(seeds)}
        images = call(pipe, request, arguments | {"callback_on_step_end": callback}).images
        report = pipe.sdaccel.last_report if hasattr(pipe, "sdaccel") else RunReport()
        weights.tell(report)
        for note in misread(pipe, request):
            report.note(note)
        result.reports.append(report)
        for offset, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            text = parameters(request, seed, image.size, type(pipe.scheduler).__name__, model)
            result.images.append(Drawn(image, seed, first + offset, report.to_json(), text))
    result.seconds = time.perf_counter() - start
    return result


def call(pipe: Any, request: Request, arguments: dict[str, Any]) -> Any:
    """What the pipeline returns. Raises SettingError with diffusers' own words for what it refuses."""
    with refusals(pipe, request):
        return pipe(**arguments)


@contextmanager
def refusals(pipe: Any, request: Request) -> Iterator[None]:
    """Without gradients; what the pipeline refuses becomes a SettingError with diffusers' own words."""
    import torch

    try:
        with torch.inference_mode():
            yield
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"diffusers refused this: {error}") from error
    except IndexError as error:  # some schedulers count their timesteps from one, and so one too many
        kind, known = type(pipe.scheduler).__name__, pipe.scheduler.config.num_train_timesteps
        if request.steps < known:
            raise
        raise SettingError(f"{kind} cannot draw in {request.steps} steps.", hint=f"Below {known} it can.") from error


def edits_as_told(pipe: Any) -> bool:
    """InstructPix2Pix: its pipelines take no strength, and read prompts in their own way."""
    return "Pix2Pix" in type(pipe).__name__


def call_arguments(pipe: Any, request: Request) -> dict[str, Any]:
    """What ``request`` means to a pipeline of its kind, but for seeds and their number."""
    arguments: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative or None,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
    }
    size = {name: side for name, side in (("width", request.width), ("height", request.height)) if side is not None}
    if request.image is None:
        return arguments | size
    image = _open_image(request.image)
    wanted = (request.width or image.width, request.height or image.height)
    arguments["image"] = image.resize(wanted) if wanted != image.size else image
    if not edits_as_told(pipe):
        arguments["strength"] = request.strength
    if request.mask is not None:
        mask = _open_image(request.mask).convert("L")
        arguments |= {"mask_image": mask.resize(wanted), "width": wanted[0], "height": wanted[1]}
    return arguments


_FILE_TAG = re.compile(r"<(?:lora|lyco|hypernet):[^<>]*>")
_WEIGHTED = re.compile(r"\([^()]*:\s*[\d.]+\s*\)|\[[^][]*:\s*[\d.]+\s*\]|\bBREAK\b")


def misread(pipe: Any, request: Request) -> list[str]:
    """What to tell of prompts that are not read as they may be meant."""
    texts = (request.prompt, request.negative)
    tags = dict.fromkeys(tag for text in texts for tag in _FILE_TAG.findall(text))
    notes = [f"{tag} is read as words of the prompt: give its file with --lora, or as a job's loras" for tag in tags]
    if any(map(_WEIGHTED.search, texts)):
        notes.append("(word:1.2), [a:b:0.5] and BREAK are read as words of the prompt: only web UIs know them")
    return notes + _cut_off(pipe, request)


def _cut_off(pipe: Any, request: Request) -> list[str]:
    """Of prompts that are longer than CLIP reads."""
    tokenizer = getattr(pipe, "tokenizer", None) or getattr(pipe, "tokenizer_2", None)
    if tokenizer is None:
        return []
    most, notes = tokenizer.model_max_length, []
    for what, text in (("prompt", request.prompt), ("negative prompt", request.negative)):
        ids = tokenizer(text, truncation=False, verbose=False).input_ids
        if len(ids) > most:
            lost = tokenizer.decode(ids[most - 1 : -1])[:60]
            notes.append(f"the {what} has {len(ids) - 2} tokens, of which {most - 2} are read: not drawn is {lost!r}")
    return notes


def _open_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path).convert("RGB")
    except UnidentifiedImageError:
        raise SettingError(f"{path} is no image that can be read.") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise SettingError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _step_callback(
    request: Request,
    progress: Progress | None,
    on_step: Callable[[Any], None] | None,
    begin: float,
    share: float,
) -> Callable[..., Any]:
    def step(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(tensors["latents"])
        if progress is not None:
            total = max(1, getattr(pipe, "num_timesteps", request.steps))
            progress(f"step {index + 1} of {total}", begin + share * min(1.0, (index + 1) / total))
        return tensors

    return step


def parameters(request: Request, seed: int, size: tuple[int, int], scheduler: str, model: str) -> str:
    """The text that AUTOMATIC1111 writes into its images and reads from them."""
    from sdaccel import __version__

    facts: list[tuple[str, object]] = [
        ("Steps", request.steps),
        ("Sampler", _SAMPLERS.get(scheduler, scheduler.removesuffix("Scheduler"))),
        ("CFG scale", f"{request.guidance:g}"),
        ("Seed", seed),
        ("Size", f"{size[0]}x{size[1]}"),
    ]
    if model:
        facts.append(("Model", model))
    if request.image is not None:
        facts.append(("Denoising strength", f"{request.strength:g}"))
    facts.append(("Version", f"sdaccel {__version__}"))
    loras = (f"<lora:{lora.name}:{lora.scale:g}>" for lora in request.loras)
    return metadata.write_parameters(" ".join(filter(None, [request.prompt, *loras])), request.negative, facts)


# ---- files


def output_paths(pattern: Path, seeds: Sequence[int], *, force: bool = False) -> list[Path]:
    """A path for each image: ``{seed}`` and ``{index}`` (from 1) in the name are filled in.

    Several images without a pattern get ``-{index}`` before the suffix. Raises StoreError if a file is there already
    (unless ``force``), SettingError for a suffix that is not of `sdaccel.metadata.SUFFIXES`.
    """
    name = pattern.name
    if len(seeds) > 1 and "{seed}" not in name and "{index}" not in name:
        name = f"{pattern.stem}-{{index}}{pattern.suffix}"
    paths = [
        pattern.with_name(name.replace("{seed}", str(seed)).replace("{index}", str(index)))
        for index, seed in enumerate(seeds, 1)
    ]
    for path in paths:
        check_output(path, force=force)
    return paths


def check_output(path: Path, *, force: bool = False) -> None:
    """Raises what `write_new` would for an image, before there is one."""
    metadata.image_format(path.suffix)
    if path.exists() and not force:
        raise StoreError(f"{path} is there already.", hint="Choose another name with -o, or add --force.")
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} is not there.", hint="Make it first, or choose another with -o.")


def save(drawn: Drawn, path: Path, *, force: bool = False) -> None:
    """Writes the image, its parameters and, into a PNG, the report; see `sdaccel.metadata`."""
    data = metadata.encode(drawn.image, path.suffix, parameters=drawn.parameters, details=drawn.report)
    write_new(path, data, force=force)
    drawn.path = path


def write_new(path: Path, data: bytes, *, force: bool = False) -> None:
    """Raises StoreError for a file that is there already, unless ``force``, and for one that cannot be written."""
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(data)
    except FileExistsError:
        raise StoreError(f"{path} is there already.", hint="Choose another name with -o, or add --force.") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from None


def report_lines(result: Result) -> list[str]:
    """What ran, in plain words: engines, what ran in torch and why, notes."""
    calls: dict[str, list[float]] = {}
    adapters: dict[str, dict[str, None]] = {}
    for report in result.reports:
        for name, run in report.components.items():
            adapters.setdefault(name, {}).update(dict.fromkeys(run.adapters))
            row = calls.setdefault(name, [0, 0.0, 0, 0.0])
            for at, value in enumerate((run.calls, run.milliseconds, run.torch_calls, run.torch_milliseconds)):
                row[at] += value
    lines = []
    for name, (engine, engine_ms, torch_calls, torch_ms) in calls.items():
        parts = [f"engine, {_calls(engine)}, {engine_ms / 1e3:.2f} s"] if engine else []
        parts += [f"torch, {_calls(torch_calls)}, {torch_ms / 1e3:.2f} s"] if torch_calls else []
        parts += [f"with {', '.join(adapters[name])}"] if adapters[name] else []
        lines.append(f"{name}: {'; '.join(parts)}")
    reasons: dict[tuple[str, str], int] = {}
    for fallback in result.fallbacks:
        key = (fallback.component, fallback.reason)
        reasons[key] = reasons.get(key, 0) + fallback.calls
    lines += [f"not by an engine: {name}, {_calls(count)}: {reason}" for (name, reason), count in reasons.items()]
    lines += list(dict.fromkeys(note for report in result.reports for note in report.notes))
    return lines + [f"failed: {text}" for text in result.failed]


def _calls(count: float) -> str:
    return f"{count:.0f} call{'' if count == 1 else 's'}"
