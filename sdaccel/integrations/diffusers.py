"""diffusers: `accelerate` swaps engines into a pipeline, `restore` puts back exactly what was there.

The pipeline's modules stay the objects they are: config, dtype, device, save_pretrained, LoRA loaders and schedulers
see no difference. Only ``forward`` of the UNet and text encoders and ``decode`` and ``encode`` of the VAE are replaced,
on these instances. Every call is dispatched on its own: an engine runs it, or torch does and the report says why.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sdaccel.backends.base import Backend, pick_backend
from sdaccel.builder import BuilderConfig, build_engines, buildable_components
from sdaccel.engine.store import Entry, Store
from sdaccel.errors import SdaccelError, SettingError, UnsupportedCall
from sdaccel.export.components import source_of
from sdaccel.integrations.watch import ModuleWatch
from sdaccel.models.checkpoint import Checkpoint, open_checkpoint
from sdaccel.profile import ImageProfile
from sdaccel.progress import terminal_progress
from sdaccel.runtime import FALLBACK_ERRORS, ExecutionContext, RunReport, unusable

BUILD = ("if-missing", "never")
HALF = (torch.float16, torch.bfloat16)

Torch = Callable[..., Any]


def accelerate(
    pipe: Any,
    *,
    store: Store | str | None = None,
    backend: str = "auto",
    components: Collection[str] | None = None,
    profiles: Sequence[ImageProfile] = (),
    build: str = "if-missing",
    fallback: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> Any:
    """Swaps engines into a Stable Diffusion pipeline of diffusers, in place, and returns it.

    store: where engines are kept (default: SDACCEL_STORE, else the user's data folder).
    components: of unet, vae_decoder, vae_encoder, text_encoder, text_encoder_2; default: all that the pipeline has.
    profiles: shapes to be covered; default: whatever engines there are, or the model's native range if none.
    build: "if-missing" builds what the store lacks, "never" runs in torch what has no engine.
    fallback: False raises instead of running a call in torch.

    One call of the pipeline runs at a time: a lock serialises threads, since a diffusers scheduler holds state.
    ``pipe.sdaccel.last_report`` is the `RunReport` of the last call. Raises SettingError, ModelError, ExportError,
    BackendError, StoreError.
    """
    if build not in BUILD:
        raise SettingError(f"build={build!r} is not one of {', '.join(BUILD)}.")
    if hasattr(pipe, "sdaccel"):
        restore(pipe)
    place = store if isinstance(store, Store) else Store(store)
    chosen_backend = pick_backend(backend)
    checkpoint = open_checkpoint(pipe)
    wanted = buildable_components(checkpoint, components)
    engines, notes = _engines(checkpoint, wanted, tuple(profiles), chosen_backend, place, build, progress)
    accelerated = Accelerated(pipe, fallback, notes)
    for component in wanted:
        context = ExecutionContext(component, place, chosen_backend, engines[component])
        accelerated.swap(component, context)
    accelerated.install()
    return pipe


def restore(pipe: Any) -> Any:
    """Takes the engines out again and puts back exactly what `accelerate` found. Returns the pipeline."""
    accelerated = getattr(pipe, "sdaccel", None)
    if isinstance(accelerated, Accelerated):
        accelerated.remove()
    return pipe


def _engines(
    checkpoint: Checkpoint,
    components: Sequence[str],
    profiles: tuple[ImageProfile, ...],
    backend: Backend,
    store: Store,
    build: str,
    progress: Callable[[str, float], None] | None,
) -> tuple[dict[str, list[Entry]], list[str]]:
    """The engines of each component that run here, built where that is asked for; and notes for the report."""

    def fitting(component: str) -> list[Entry]:
        return store.find_engines(
            component=component,
            weights=checkpoint.components[source_of(component)].content_hash,
            backend=backend.name,
            device=backend.device(),
            versions=backend.versions(),
        )

    def covered(entries: Sequence[Entry]) -> bool:
        have = {profile for entry in entries for profile in entry.engine.image_profiles}
        return bool(entries) and have.issuperset(profiles)

    found = {component: fitting(component) for component in components}
    missing = [component for component, entries in found.items() if not covered(entries)]
    if missing and build == "if-missing":
        config = BuilderConfig(tuple(missing), profiles, None, backend.name)
        with terminal_progress() as bar:
            build_engines(checkpoint, config, store, progress or bar)
        found = {component: fitting(component) for component in components}
        missing = []
    return found, [f"{component} has no engine for all that was asked for." for component in missing]


class Accelerated:
    """What `accelerate` leaves on a pipeline as ``pipe.sdaccel``."""

    def __init__(self, pipe: Any, fallback: bool, notes: Sequence[str] = ()):
        self.pipe = pipe
        self.fallback = fallback
        self.notes = list(notes)
        self.last_report = RunReport()
        self.swaps: dict[str, Swap] = {}
        self.lock = threading.RLock()
        self._class = type(pipe)

    def swap(self, component: str, context: ExecutionContext) -> None:
        source = source_of(component)
        module = getattr(self.pipe, source)
        watch = next((swap.watch for swap in self.swaps.values() if swap.module is module), None)
        kind = {"unet": UNetSwap, "vae_decoder": DecoderSwap, "vae_encoder": EncoderSwap}.get(component, TextSwap)
        self.swaps[component] = kind(self, component, module, context, watch or ModuleWatch(module))

    def install(self) -> None:
        for swap in self.swaps.values():
            swap.install()
        self.pipe.__class__ = _accelerated_class(self._class)
        self.pipe.sdaccel = self

    def remove(self) -> None:
        for swap in self.swaps.values():
            swap.remove()
        self.pipe.__class__ = self._class
        del self.pipe.sdaccel

    def engines(self) -> dict[str, list[str]]:
        """Component → ids of the engines that calls can be dispatched to."""
        return {name: [entry.key for entry in swap.context.engines] for name, swap in self.swaps.items()}

    def generate(self, call: Callable[[], Any]) -> Any:
        """One call of the pipeline under the lock, with a report of its own."""
        with self.lock:
            self.last_report = RunReport()
            for note in self.notes:
                self.last_report.note(note)
            for swap in self.swaps.values():
                swap.look_closer()
            try:
                return call()
            finally:
                for swap in self.swaps.values():
                    swap.check_in_place()


@functools.cache
def _accelerated_class(cls: type) -> type:
    """``cls`` under its own name, whose calls are reported; diffusers looks pipelines up by the name of their class."""

    @functools.wraps(cls.__call__)  # type: ignore[operator]
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.sdaccel.generate(lambda: cls.__call__(self, *args, **kwargs))  # type: ignore[operator]

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


class Swap:
    """One method of one module, replaced on the instance. Subclasses translate its arguments and results."""

    method = "forward"

    def __init__(
        self, owner: Accelerated, component: str, module: nn.Module, context: ExecutionContext, watch: ModuleWatch
    ):
        self.owner = owner
        self.component = component
        self.module = module
        self.context = context
        self.watch = watch
        self._before = module.__dict__.get(self.method)
        self._torch: Torch = getattr(module, self.method)
        self._edited: str | None = None
        self._bypass = threading.local()

        @functools.wraps(self._torch)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self._replacement = replacement

    def install(self) -> None:
        setattr(self.module, self.method, self._replacement)

    def remove(self) -> None:
        if self._before is None:
            self.module.__dict__.pop(self.method, None)
        else:
            setattr(self.module, self.method, self._before)

    def look_closer(self) -> None:
        self._edited = self.watch.look_closer()

    def check_in_place(self) -> None:
        """Reports a swap that other code took out, so that its engine was never asked."""
        source = source_of(self.component)
        if getattr(self.owner.pipe, source, None) is not self.module:
            self.report.fell_back(self.component, f"pipe.{source} was replaced after accelerate()")
        hooked = hasattr(self.module, "_hf_hook")
        if self.module.__dict__.get(self.method) is not self._replacement and not hooked:
            self.report.fell_back(self.component, f"{source}.{self.method} was replaced after accelerate()")

    @property
    def report(self) -> RunReport:
        return self.owner.last_report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._bypass, "on", False):
            return self._torch(*args, **kwargs)
        with self.owner.lock:
            try:
                reason = self.watch.reason()
                if reason:
                    raise UnsupportedCall(f"{reason}.")
                self._check_device()
                result = self.run(*args, **kwargs)
            except FALLBACK_ERRORS as error:
                if not self.owner.fallback:
                    raise
                self.report.fell_back(self.component, str(error))
                result = self._run_torch(*args, **kwargs)
            return self._usable(result, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, computed by an engine. Raises one of `FALLBACK_ERRORS`."""
        raise NotImplementedError

    def tensor(self, result: Any) -> torch.Tensor:
        """The tensor of a result that must be finite and not constant."""
        return result[0]

    def _check_device(self) -> None:
        wanted = self.context.backend.device_type()
        found = next(self.module.parameters()).device.type
        if found != wanted:
            raise UnsupportedCall(f"the pipeline is on {found}, the backend {self.context.backend.name} on {wanted}.")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.module.parameters()):
            raise UnsupportedCall("gradients are wanted, engines give none (use torch.no_grad()).")

    def _run_torch(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._torch(*args, **kwargs)
        self.report.ran_torch(self.component, (time.perf_counter() - start) * 1e3, self.watch.adapters())
        return result

    def _usable(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``result``, or what torch gives in float32 where it holds NaN, infinite values or one constant."""
        fault = unusable(self.tensor(result))
        if fault is None:
            return result
        self.report.fell_back(self.component, f"the output was {fault}: computed again by torch in float32.")
        with self._float32():
            retried = self._run_torch(*_float32(args), **_float32(kwargs))
        fault = unusable(self.tensor(retried))
        if fault:
            self.report.fail(f"{self.component} gives {fault}, in torch and float32 too.")
        return retried

    @contextmanager
    def _float32(self):
        """Holds the module in float32 and lets its calls through to torch."""
        halves = [(p, p.data) for p in self.module.parameters() if p.dtype in HALF]
        self._bypass.on = True
        try:
            for parameter, data in halves:
                parameter.data = data.float()
            yield
        finally:
            for parameter, data in halves:
                parameter.data = data
            self._bypass.on = False


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (tuple, list)):
        return type(value)(_float32(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _float32(item) for key, item in value.items()}
    return value


class UNetSwap(Swap):
    def run(
        self,
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
        # Without adapters the LoRA scale changes nothing.
        refused.update({k: v for k, v in (cross_attention_kwargs or {}).items() if k != "scale"})
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedCall(f"the UNet was called with {name}, which engines do not take.")
        batch = sample.shape[0]
        inputs = {
            "sample": sample,
            "timestep": torch.as_tensor(timestep, device=sample.device).float().expand(batch),
            "encoder_hidden_states": encoder_hidden_states,
        }
        vector = self._vector(added_cond_kwargs or {})
        if vector is not None:
            inputs["y"] = vector
        if timestep_cond is not None:
            inputs["timestep_cond"] = timestep_cond
        for index, residual in enumerate(down_block_additional_residuals or ()):
            inputs[f"down_residual_{index}"] = residual
        if mid_block_additional_residual is not None:
            inputs["mid_residual"] = mid_block_additional_residual
        out = self.context.run(inputs, self.report)["sample_out"].to(sample.device, sample.dtype)
        if not return_dict:
            return (out,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=out)

    def _vector(self, added: Mapping[str, Any]) -> torch.Tensor | None:
        """SDXL's vector: pooled text, then Fourier features of the time ids, as the UNet's own forward joins them."""
        text_time = getattr(self.module.config, "addition_embed_type", None) == "text_time"
        known = {"text_embeds", "time_ids"} if text_time else set()
        for name in added:
            if name not in known:
                raise UnsupportedCall(f"the UNet was called with {name} (IP-Adapter), which engines do not take.")
        if not text_time:
            return None
        if set(added) != known:
            raise UnsupportedCall("the UNet needs text_embeds and time_ids.")
        text, ids = added["text_embeds"], added["time_ids"]
        features = self.module.add_time_proj(ids.flatten()).reshape(text.shape[0], -1)  # type: ignore[operator]
        return torch.cat([text.float(), features.float()], dim=-1)


class TextSwap(Swap):
    def run(
        self,
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
        if input_ids is None or output_attentions:
            raise UnsupportedCall("engines of text encoders take token ids and give no attention maps.")
        config = self.module.config
        hidden_wanted = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        names = ["last_hidden_state", "pooled"]
        if hidden_wanted:
            names += [f"hidden_{layer}" for layer in range(config.num_hidden_layers + 1)]  # type: ignore[operator]
        ids = input_ids.view(-1, input_ids.shape[-1])
        results = self.context.run({"input_ids": ids}, self.report, names)
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

    def _through_engine(self, tensor: torch.Tensor, output: str) -> torch.Tensor:
        vae: Any = self.module
        limit = vae.tile_latent_min_size if self.component == "vae_decoder" else vae.tile_sample_min_size
        if vae.use_tiling and max(tensor.shape[-2:]) > limit:
            raise UnsupportedCall("VAE tiling is on, which engines do not do (pipe.vae.disable_tiling()).")
        pieces = tensor.split(1) if vae.use_slicing else (tensor,)
        results = [self.context.run({self.input: piece}, self.report)[output] for piece in pieces]
        if next(vae.parameters()).dtype in HALF:
            self.report.note(f"{self.component} ran in float32, where half precision can overflow.")
        return torch.cat(results).to(tensor.device, tensor.dtype) if len(results) > 1 else results[0].to(tensor)


class DecoderSwap(_VaeSwap):
    method = "decode"
    input = "latents"

    def run(self, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        image = self._through_engine(z, "image")
        if not return_dict:
            return (image,)
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=image)


class EncoderSwap(_VaeSwap):
    method = "encode"
    input = "image"

    def run(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        posterior = DiagonalGaussianDistribution(self._through_engine(x, "moments"))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def tensor(self, result: Any) -> torch.Tensor:
        return result[0].parameters


__all__ = ["Accelerated", "SdaccelError", "accelerate", "restore"]
