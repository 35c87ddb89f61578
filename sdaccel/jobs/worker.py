"""Draws batches and writes their images in stages: prompts, latents, pixels, files.

Each stage has a thread of its own (files a few), so that while a batch is drawn the prompts of the next are encoded and
the latents of the one before are decoded and written. On a GPU decoding has a stream of its own.
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdaccel import metadata, settings
from sdaccel.draw import (
    Request,
    at_once_by,
    build_missing,
    call,
    call_arguments,
    components_needed,
    device_for,
    edits_as_told,
    fit_pipeline,
    misread,
    new_scheduler,
    open_on_host,
    parameters,
    refusals,
    usual_guidance,
    verifying,
    with_size,
)
from sdaccel.engine.hashes import content_hash
from sdaccel.errors import SdaccelError, SettingError
from sdaccel.jobs.embeddings import PROMPTS, Embeddings
from sdaccel.jobs.job import Job
from sdaccel.jobs.remote import local_model
from sdaccel.jobs.sidecar import to_sidecar
from sdaccel.jobs.storage import Storage, has_key, is_address
from sdaccel.jobs.task import BatchTask, ImageResult, ModelFacts, Options
from sdaccel.lora import LiveWeights
from sdaccel.model_cache import HostWeights, ModelCache
from sdaccel.runtime import RunReport

Progress = Callable[[str, float], None]
WRITERS = 4
AHEAD = 3
"""Batches that may be on their way: the one that is drawn, the next, and the one before."""


class Worker:
    """Owns one model at a time and its engines, and keeps those before it. `prepare` and `draw` are for one thread."""

    def __init__(self, options: Options, storage: Storage, progress: Progress | None = None):
        self.options = options
        self.storage = storage
        self.progress = progress
        self._model: _Model | None = None
        self._kept: ModelCache[_Model] = ModelCache()
        self._encoding = ThreadPoolExecutor(1, "sdaccel-encode")
        self._drawing = ThreadPoolExecutor(1, "sdaccel-latents")
        self._decoding = ThreadPoolExecutor(1, "sdaccel-decode")
        self._writing = ThreadPoolExecutor(WRITERS, "sdaccel-write")
        self._room = threading.Semaphore(AHEAD)
        self._last_decoded: Future[_Drawn] | None = None
        self._before: Future[_Drawn] | None = None
        """What has to be decoded before the model may change."""

    def prepare(self, model: str | None, jobs: Sequence[Job]) -> ModelFacts:
        """Opens the model and builds what its engines lack for ``jobs``. Raises SdaccelError."""
        self._before = self._last_decoded
        opened = self._open(model)
        native = opened.checkpoint.native_side
        at_once: dict[tuple[int, int], int] = {}
        refused: dict[tuple[int, int], str] = {}
        for job in jobs:
            try:
                request = job.request(native, opened.guidance)
                size = opened.size(request)
            except SettingError:  # its image cannot be read: the plan tells that of this job
                continue
            try:
                opened.ready(request)
            except SdaccelError as error:
                refused[size] = str(error)
            if size not in at_once:
                at_once[size] = self.options.batch_size or opened.largest_batch(*size)
        name, content, guidance = opened.checkpoint.name, opened.content(), opened.guidance
        return ModelFacts(model, name, content, native, guidance, opened.settings(), at_once, refused)

    def draw(self, batch: BatchTask) -> Future[list[ImageResult]]:
        """Takes a batch on, and waits while `AHEAD` others are under way.

        The future gives a result for each image that was to be written, or raises SdaccelError and whatever else the
        pipeline raises.
        """
        self._room.acquire()
        encoded = self._encoding.submit(self._encode, batch, self._last_decoded)
        drawn = self._drawing.submit(lambda: encoded.result().model.latents(encoded.result()))
        decoded = self._last_decoded = self._decoding.submit(lambda: drawn.result().decoded())
        result: Future[list[ImageResult]] = Future()
        decoded.add_done_callback(lambda future: self._write(future, result))
        return result

    def close(self, *, now: bool = False) -> None:
        """Waits until everything is written (``now``: but not for what has not begun), and lets go of the model."""
        for stage in (self._encoding, self._drawing, self._decoding, self._writing):
            stage.shutdown(cancel_futures=now)
        self._put_aside()
        self._kept.clear()

    def _open(self, model: str | None) -> _Model:
        model = model or self.options.model
        if self._model is None or self._model.named != model:
            self._put_aside()
            kept = self._kept.take(model)
            if kept is not None and kept.changed:
                kept.close()
                kept = None
            self._model = kept or _Model(model, self.options, self._settle, self.progress, self._kept.budget)
        return self._model

    def _settle(self) -> None:
        """Until nothing of an earlier batch needs the model: it may change then."""
        if self._before is not None:
            wait([self._before])
            self._before = None

    def _put_aside(self) -> None:
        if self._model is not None:
            self._settle()
            model, self._model = self._model, None
            self._kept.keep(model.named, model)

    # ---- stages

    def _encode(self, batch: BatchTask, before: Future[_Drawn] | None) -> _Encoded:
        self._before = before
        return self._open(batch.model).encoded(batch)

    def _write(self, decoded: Future[_Drawn], result: Future[list[ImageResult]]) -> None:
        """Hands each image to a thread that writes it, and the last of them the whole result."""
        error = CancelledError() if decoded.cancelled() else decoded.exception()
        if error is not None:
            self._room.release()
            result.set_exception(error)
            return
        drawn = decoded.result()
        try:
            files = [self._writing.submit(self._save, drawn, position) for position in drawn.batch.wanted]
        except RuntimeError as error:  # closed at once
            self._room.release()
            result.set_exception(error)
            return
        left = [len(files)]
        guard = threading.Lock()

        def finish(_: Future[ImageResult]) -> None:
            with guard:
                left[0] -= 1
                if left[0]:
                    return
            self._room.release()
            faults = [CancelledError() if file.cancelled() else file.exception() for file in files]
            fault = next((fault for fault in faults if fault is not None), None)
            if fault is not None:
                result.set_exception(fault)
            else:
                result.set_result([file.result() for file in files])

        for file in files:
            file.add_done_callback(finish)

    def _save(self, drawn: _Drawn, position: int) -> ImageResult:
        task = drawn.batch.images[position]
        share = drawn.seconds / len(drawn.batch.images)
        failed = drawn.failed
        seed = task.job.seed or 0
        if failed:
            return ImageResult(task.key, task.index, seed=seed, error="; ".join(failed))
        image = drawn.image(position)
        details = drawn.details(position)
        text = drawn.parameters(position, image.size)
        suffix = self.options.suffix
        data = metadata.encode(
            image, suffix, parameters=text, details=details, key=task.key, quality=self.options.quality
        )
        wanted = str(Path(task.name).with_suffix(suffix))  # an earlier run may have planned another format
        name = self.storage.write(wanted, data, lambda there: has_key(there, task.key))
        if self.options.sidecar or self.options.format != "png":
            text = json.dumps({**details, "key": task.key}, indent=1)
            side = str(Path(name).with_suffix(".json"))
            self.storage.write(side, text.encode(), lambda there: has_key(there, task.key))
        ran = drawn.engines()
        return ImageResult(task.key, task.index, name, seed, len(data), share, drawn.memory, ran, drawn.notes(position))


@dataclass
class _Encoded:
    """A batch whose prompts are read: what its pipeline is called with."""

    batch: BatchTask
    model: _Model
    pipe: Any
    request: Request
    """As much of it as all images share."""
    arguments: dict[str, Any]
    misread: list[list[str]]
    """What to tell of each image's prompts."""
    reports: list[RunReport]
    seconds: float


@dataclass
class _Drawn:
    """A batch on its way from latents to files."""

    batch: BatchTask
    model: _Model
    pipe: Any
    scheduler: str
    latents: Any
    event: Any
    """On a GPU: when the latents are there."""
    misread: list[list[str]]
    reports: list[RunReport]
    seconds: float
    pixels: Any = None

    def decoded(self) -> _Drawn:
        start = time.perf_counter()
        self.pixels = self.model.decode(self)
        self.seconds += time.perf_counter() - start
        return self

    def image(self, position: int) -> Any:
        (image,) = self.pipe.image_processor.postprocess(self.pixels[position : position + 1], output_type="pil")
        return image

    @property
    def memory(self) -> int:
        """Bytes of the GPU's memory that this process has taken at most."""
        import torch

        return torch.cuda.max_memory_reserved(self.latents.device) if self.event is not None else 0

    @property
    def failed(self) -> list[str]:
        return list(dict.fromkeys(text for report in self.reports for text in report.failed))

    def notes(self, position: int) -> tuple[str, ...]:
        told = [f"{fault.component} in torch: {fault.reason}" for report in self.reports for fault in report.fallbacks]
        told += [note for report in self.reports for note in report.notes]
        return tuple(dict.fromkeys([*told, *self.misread[position]]))

    def engines(self) -> dict[str, str]:
        """component → "engine", "torch" or "engine, torch"."""
        found = {}
        for report in self.reports:
            for name, run in report.components.items():
                kinds = [kind for kind, calls in (("engine", run.calls), ("torch", run.torch_calls)) if calls]
                found[name] = ", ".join(kinds)
        return found

    def parameters(self, position: int, size: tuple[int, int]) -> str:
        job = self.batch.images[position].job
        request = job.request(self.model.checkpoint.native_side, self.model.guidance)
        return parameters(request, job.seed or 0, size, self.scheduler, self.model.checkpoint.name)

    def details(self, position: int) -> dict[str, Any]:
        """Everything about one image, as `sdaccel.jobs.reading` reads it again."""
        job = self.batch.images[position].job
        together = tuple(image.job for image in self.batch.images)
        told = replace(job, model=job.model or self.model.origin, batch=together, position=position)
        return to_sidecar(told) | {
            "settings": dict(self.model.settings()),
            "model": {"name": self.model.checkpoint.name, "content": self.model.content()},
            "scheduler": self.scheduler,
            "notes": self.misread[position],
            "reports": [report.to_json() for report in self.reports],
        }


class _Model:
    """A checkpoint, its pipeline, and its engines swapped in."""

    def __init__(
        self,
        named: str | None,
        options: Options,
        settle: Callable[[], None],
        progress: Progress | None = None,
        room: int = 0,
    ):
        """room: bytes of RAM that it may take while it is not in use."""
        from sdaccel.backends.base import gpu_left_out, pick_backend
        from sdaccel.engine.store import Store
        from sdaccel.model_choice import choose_model, open_model

        self.named = named
        self.options = options
        self.settle = settle
        self.progress = progress
        self.store = Store(options.store)
        wanted = named or options.model or settings.MODEL.value()
        address = wanted if is_address(wanted) else None
        choice = choose_model(local_model(address, self.store.root, progress) if address else named or options.model)
        self.origin = address or str(choice.path)
        self.checkpoint = open_model(choice, **options.opening)
        self.guidance = usual_guidance(self.checkpoint)
        self.backend = pick_backend(options.backend) if options.engines else None
        self._left_out = gpu_left_out(options.backend, self.backend) if self.backend is not None else None
        self._base: Any = None
        self._room = room
        self._host: HostWeights | None = None
        """Where its weights are while it is not in use, unless they have no room."""
        self._nbytes = 0
        self._parked = False
        self._own_scheduler: Any = None
        self._pipe: Any = None
        self._mode = ""
        self._encoder: Any = None
        self._embeddings = Embeddings()
        self._decoder: Any = None
        self._weights: Any = None
        self._ready: set[tuple[int, int, str]] = set()
        self._upcasting = threading.Lock()
        self._content = ""
        self._stream: Any = None

    def content(self) -> str:
        """Hash of all weights, and of the scheduler's settings."""
        if not self._content:
            parts = {name: content_hash(part, self.store) for name, part in sorted(self.checkpoint.components.items())}
            text = repr((parts, sorted((key, repr(value)) for key, value in self.checkpoint.scheduler.items())))
            self._content = hashlib.sha256(text.encode()).hexdigest()
        return self._content

    def settings(self) -> Mapping[str, Any]:
        if self.backend is None:
            return {"backend": "torch"}
        return {"backend": self.backend.name, "precision": self.backend.precisions[0]}

    def size(self, request: Request) -> tuple[int, int]:
        sized = with_size(request, self.checkpoint.native_side)
        return sized.width or 0, sized.height or 0

    def ready(self, request: Request) -> None:
        """Engines for this size are there, as far as they are to be built. Those that were swapped in are kept."""
        width, height = self.size(request)
        known = (width, height, _mode(request))
        if known in self._ready or self.backend is None:
            return
        if self.options.build == "if-missing":
            components = components_needed(self.checkpoint, request)
            batch = self.options.batch_size or 1
            built = build_missing(
                self.checkpoint,
                components,
                self.store,
                self.backend.name,
                width,
                height,
                batch=batch,
                progress=self.progress,
            )
            if built:
                self._take_out()
        self._ready.add(known)

    def largest_batch(self, width: int, height: int) -> int:
        from sdaccel.builder import engines_here

        if self.backend is None:
            return at_once_by((), width, height)
        return at_once_by(engines_here(self.checkpoint, "unet", self.backend, self.store), width, height)

    # ---- drawing

    def encoded(self, batch: BatchTask) -> _Encoded:
        import torch

        requests = [image.job.request(self.checkpoint.native_side, self.guidance) for image in batch.images]
        self.ready(requests[0])
        pipe = self._fitted(requests[0])
        start = time.perf_counter()
        arguments = _together(pipe, requests)
        arguments["generator"] = [torch.Generator().manual_seed(image.job.seed or 0) for image in batch.images]
        reports = [report := RunReport()]
        if _encodes(pipe):
            with refusals(pipe, requests[0]):
                embeddings, told = self._embeddings.of(pipe, arguments, requests[0].loras, self._encode)
            arguments = {name: value for name, value in arguments.items() if name not in PROMPTS} | embeddings
            reports = [*told, report]
        for each in reports:
            self._weights.tell(each)
        if self.backend is None:
            report.note("in plain torch, as asked")
        if self._left_out is not None:
            report.note(self._left_out)
        notes = [misread(pipe, request) for request in requests]
        return _Encoded(batch, self, pipe, requests[0], arguments, notes, reports, time.perf_counter() - start)

    def _encode(self, call: Callable[[], Any]) -> tuple[Any, RunReport]:
        if self._encoder is None:
            return call(), RunReport()
        result = self._encoder.generate(call, careful=False)
        return result, self._encoder.last_report

    def latents(self, encoded: _Encoded) -> _Drawn:
        import torch

        pipe, request = encoded.pipe, encoded.request
        start = time.perf_counter()
        pipe.scheduler = new_scheduler(self._own_scheduler, request.scheduler)
        with self._upcasting if self._upcasts() else nullcontext():
            latents = call(pipe, request, encoded.arguments | {"output_type": "latent"}).images
        reports = encoded.reports
        if self.backend is not None:
            reports = [*reports, pipe.sdaccel.last_report]
            self._weights.tell(reports[-1])
        event = None
        if latents.is_cuda:
            event = torch.cuda.Event()
            event.record()
        seconds = encoded.seconds + time.perf_counter() - start
        scheduler, notes = type(pipe.scheduler).__name__, encoded.misread
        return _Drawn(encoded.batch, self, pipe, scheduler, latents, event, notes, reports, seconds)

    def _fitted(self, request: Request) -> Any:
        """The pipeline of the kind that ``request`` needs, with its engines and LoRAs."""
        from sdaccel.integrations.diffusers import accelerate

        plain = replace(request, scheduler=None, loras=())
        if self._base is None:
            if self.progress is not None:
                self.progress(f"loading {self.checkpoint.name}", 0.0)
            tokenizer = Path(self.options.tokenizer) if self.options.tokenizer else None
            with verifying(self.checkpoint, plain, self.store, self.backend):
                self._host = HostWeights(open_on_host(self.checkpoint, plain, tokenizer, self.backend))
                self._base = self._host.move(device_for(self.backend))
            self._nbytes = self._host.nbytes
            if self._nbytes > self._room:
                self._host = None
            self._own_scheduler = self._base.scheduler
            self._weights = LiveWeights(self._base)
        elif self._parked and self._host is not None:
            self._host.move(device_for(self.backend))
        self._parked = False
        if self._pipe is None or self._mode != _mode(request):
            self._take_out()
            self._pipe, self._mode = fit_pipeline(self._base, plain), _mode(request)
            if self.backend is not None:
                accelerate(
                    self._pipe,
                    store=self.store,
                    backend=self.backend.name,
                    components=components_needed(self.checkpoint, request),
                    build="never",
                    fallback=self.options.fallback,
                    checkpoint=self.checkpoint,
                )
                self._encoder = self._pipe.sdaccel.beside("text_encoder", "text_encoder_2")
                self._decoder = self._pipe.sdaccel.beside("vae_decoder")
        if self._weights.loras != request.loras:
            self.settle()
            self._weights.set(request.loras)
        return self._pipe

    def _take_out(self) -> None:
        from sdaccel.integrations.diffusers import restore

        self.settle()
        if self._weights is not None:
            self._weights.set(())
        for beside in filter(None, (self._encoder, self._decoder)):
            beside.detach()
        self._encoder = self._decoder = None
        if self._pipe is not None:
            restore(self._pipe)
            self._pipe = None

    # ---- decoding

    def decode(self, drawn: _Drawn) -> Any:
        """Pixels on the CPU, (images, 3, height, width), -1..1 (StableDiffusionXLPipeline.__call__, its last part)."""
        import torch

        with torch.inference_mode(), self._own_stream(drawn):
            if self._decoder is None:
                return self._decode(drawn.latents).cpu()
            pixels = self._decoder.generate(lambda: self._decode(drawn.latents), careful=False)
            drawn.reports.append(self._decoder.last_report)
            self._weights.tell(drawn.reports[-1])
            return pixels.cpu()

    @contextmanager
    def _own_stream(self, drawn: _Drawn):
        if drawn.event is None:
            yield
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(drawn.latents.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(drawn.event)
            drawn.latents.record_stream(self._stream)
            yield

    def _upcasts(self) -> bool:
        """Whether torch decodes half-precision weights in float32: they change their type while it does."""
        import torch

        vae = self._base.vae
        return bool(vae.dtype == torch.float16 and getattr(vae.config, "force_upcast", False))

    def _decode(self, latents: Any) -> Any:
        import torch

        vae = self._pipe.vae
        halves = self._upcasts() and not (self._decoder is not None and self._decoder.decodes_in_half())
        with self._upcasting if halves else nullcontext():
            if halves:
                vae.to(torch.float32)
            try:
                return vae.decode(_scaled(latents.to(vae.dtype), vae.config), return_dict=False)[0]
            finally:
                if halves:
                    vae.to(torch.float16)

    # ---- not in use

    @property
    def changed(self) -> bool:
        return any(component.changed for component in self.checkpoint.components.values())

    @property
    def nbytes(self) -> int:
        """What its weights take in RAM, and on a CPU those of its engines."""
        if self._pipe is None or self.backend is None or not self._on_cpu():
            return self._nbytes
        engines = [entry.engine for context in self._pipe.sdaccel.contexts.values() for entry in context.engines]
        keys = {key for engine in engines for key in engine.weights_entries}
        found = [self.store.get("weights", key) for key in keys]
        return self._nbytes + sum(entry.nbytes for entry in found if entry is not None)

    def park(self) -> None:
        """Off the GPU. On a CPU it stays as it is, engines and all."""
        if self._host is not None and not self._on_cpu():
            self._take_out()
            self._weights.release()
            self._embeddings = Embeddings()
            self._host.leave()
            self._parked = True
            gc.collect()

    def _on_cpu(self) -> bool:
        return device_for(self.backend) == "cpu"

    def close(self) -> None:
        self._take_out()
        if self._host is not None:  # what was drawn may still name the pipeline
            self._host.leave()
        self._base = self._host = self._weights = None
        gc.collect()


def _mode(request: Request) -> str:
    return "inpaint" if request.mask is not None else "image" if request.image is not None else "text"


def _together(pipe: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """The arguments of one call for all of ``requests``, which differ in prompts and images alone."""
    each = [call_arguments(pipe, request) for request in requests]
    several = ("prompt", "negative_prompt", "image", "mask_image")
    lists = {name: [one[name] for one in each] for name in several if each[0].get(name) is not None}
    return each[0] | lists


def _encodes(pipe: Any) -> bool:
    """Whether prompts can be encoded before the call."""
    return hasattr(pipe, "encode_prompt") and not edits_as_told(pipe)


def _scaled(latents: Any, config: Any) -> Any:
    """Latents as the VAE takes them."""
    import torch

    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is None or std is None:
        return latents / config.scaling_factor
    shape = {"device": latents.device, "dtype": latents.dtype}
    mean, std = (torch.tensor(value, **shape).view(1, -1, 1, 1) for value in (mean, std))
    return latents * std / config.scaling_factor + mean
