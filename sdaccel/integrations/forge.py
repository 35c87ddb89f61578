"""Forge: engines through the wrappers that its model patchers offer.

Forge lists "SD Unet" options but never calls them. Before every sampling the extension sets a wrapper around the
model's function on a clone of ``forge_objects.unet``: ``f(apply_model, {"input", "timestep", "c", "cond_or_uncond"})``.
For that one call the network inside answers through an engine, so that the scaling around it (sigmas to timesteps,
epsilon or v) stays the host's own code. The VAE's wrappers work the same way.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sdaccel.engine.patch import NOTHING, Patches
from sdaccel.errors import SdaccelError, UnsupportedCall
from sdaccel.export.components import residual_layout
from sdaccel.integrations.host import SWITCHED_OFF, Loaded, WebHost
from sdaccel.integrations.host_engines import ModelEngines
from sdaccel.integrations.host_networks import merged
from sdaccel.integrations.host_watch import ABSENT, Kept, replaced_forward, swapped

MODULES = ("shared", "devices", "sd_models")

# What Forge tells every call about itself; anything else in transformer_options changes the result.
_HARMLESS = frozenset(
    {
        "block",
        "block_index",
        "cond_indices",
        "cond_mark",
        "cond_or_uncond",
        "controlnet_conditioning_modifiers",
        "controlnet_model_function_wrapper",
        "original_shape",
        "sigmas",
        "transformer_index",
        "uncond_indices",
    }
)
_KNOWN = frozenset({"c_concat", "c_crossattn", "control", "control_model", "transformer_options", "y"})


def host_modules() -> SimpleNamespace:
    """The parts of the host that `Forge` uses, imported."""
    return SimpleNamespace(**{name: importlib.import_module(f"modules.{name}") for name in MODULES})


class _Wrapper:
    """A wrapper of ours around the one that was there. Patchers copy theirs deeply; this one stays the object it is."""

    def __init__(self, call: Callable[..., Any], outer: Callable[..., Any] | None):
        self.call, self.outer = call, outer

    def __call__(self, *args: Any) -> Any:
        return self.call(*args, outer=self.outer)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Wrapper:
        return self


def _foreign(wrapper: Any) -> Any:
    """The wrapper that another extension has set, inside one of ours or not."""
    return wrapper.outer if isinstance(wrapper, _Wrapper) else wrapper


class Forge(WebHost):
    """The extension in Forge: callbacks and script hooks call its methods."""

    name = "Forge"

    def __init__(self, host: Any = None):
        super().__init__(host_modules() if host is None else host)
        self._merged: tuple[Any, Patches] = None, NOTHING
        """What the host keeps while networks are merged, and the patches of those."""
        self._sampled: weakref.ref[Any] | None = None
        """The model whose patchers carry our wrappers in the sampling under way."""

    # what the host has

    def _model(self) -> Any:
        return getattr(self.host.sd_models.model_data, "sd_model", None)

    def loaded(self) -> Loaded | None:
        model = self._model()
        objects = getattr(model, "forge_objects", None)
        info = getattr(model, "sd_checkpoint_info", None)
        unet = getattr(getattr(getattr(objects, "unet", None), "model", None), "diffusion_model", None)
        vae = getattr(getattr(objects, "vae", None), "first_stage_model", None)
        if info is None or not isinstance(unet, nn.Module) or not isinstance(vae, nn.Module):
            return None
        device = torch.device(self.host.devices.device).type
        return Loaded(Path(info.filename), self._vae_file(), unet, vae, device)

    def _vae_file(self) -> Path | None:
        """A VAE among the additional modules chosen in the interface."""
        parameters = getattr(self.host.sd_models.model_data, "forge_loading_parameters", None) or {}
        for name in parameters.get("additional_modules") or ():
            path = Path(str(name))
            if "vae" in path.name.lower() or path.parent.name.lower() == "vae":
                return path
        return None

    def hindrance(self, part: str) -> str | None:
        patcher = self._patcher(part)
        networks = getattr(patcher, "lora_patches", None) or {}
        names = sorted({_network_name(key) for key in networks if part != "unet" or key[-1]})
        if names:
            return f"networks are active that the engine does not hold: {', '.join(names)}."
        inside = ("diffusion_model", "first_stage_model", "decoder", "encoder", "quant_conv", "post_quant_conv")
        for name in getattr(patcher, "object_patches", None) or {}:
            if str(name).startswith(inside):
                return f"{name} has been replaced by an object patch."
        loaded = self.loaded()
        if part == "unet" and loaded is not None:
            return replaced_forward(loaded.unet, "forward of the UNet")
        return None

    def _patcher(self, part: str) -> Any:
        patcher = getattr(getattr(self._model(), "forge_objects", None), part, None)
        return patcher if part == "unet" else getattr(patcher, "patcher", patcher)

    def networks(self, part: str) -> list[str]:
        return sorted({_network_name(key) for key in getattr(self._patcher(part), "lora_patches", None) or {}})

    def patches(self, part: str, engines: ModelEngines) -> Patches:
        loaded, kept = self.loaded(), self._kept(part)
        if loaded is None or kept is None:
            return NOTHING
        if kept is self._merged[0]:
            return self._merged[1]
        adapters: dict[str, tuple[str, ...]] = {}
        for key, changed in (getattr(self._patcher(part), "lora_patches", None) or {}).items():
            for name in changed:
                name = _inside(name)
                adapters[name] = (*adapters.get(name, ()), _network_name(key))
        found = merged(engines.component(part), loaded.unet, map(_inside, kept), adapters)
        self._merged = kept, found
        return found

    def _kept(self, part: str) -> Mapping[str, torch.Tensor] | None:
        """The loader's: parameters by name, a new mapping whenever networks change. It merges before a sampling."""
        if part != "unet":
            return None
        return getattr(getattr(getattr(self._patcher(part), "model", None), "lora_loader", None), "backup", None)

    def kept(self, part: str) -> Kept:
        return {_inside(name): weight for name, weight in (self._kept(part) or {}).items()}

    def model_loaded(self) -> None:
        super().model_loaded()
        self._merged = None, NOTHING

    # callbacks

    def loaded_callback(self, sd_model: Any = None) -> None:
        """on_model_loaded."""
        self.model_loaded()

    # script hooks

    def begin(self, p: Any) -> None:
        """Script.process: before the image of img2img is encoded."""
        super().begin(p)
        self._wrap_vae(p.sd_model)

    def before_sampling(self, p: Any) -> None:
        """Script.process_before_every_sampling: each pass of hires fix has patchers of its own."""
        self._wrap(p.sd_model)

    def before_step(self, params: Any = None) -> None:
        """on_cfg_denoiser: a refiner that came in during the sampling has patchers of its own too."""
        model = self._model()
        if self._sampled is not None and self._sampled() is not model:
            self._wrap(model)

    def _wrap(self, sd_model: Any) -> None:
        self._wrap_vae(sd_model)
        objects, loaded = getattr(sd_model, "forge_objects", None), self.loaded()
        self._sampled = None if sd_model is None else weakref.ref(sd_model)
        if objects is None or loaded is None:
            return
        unet = objects.unet.clone()
        outer = _foreign(unet.model_options.get("model_function_wrapper"))
        unet.set_model_unet_function_wrapper(_Wrapper(self.wrapper, outer))
        if loaded.device != "cpu":  # the host fills the GPU's memory up to what it is asked to leave
            unet.add_extra_preserved_memory_during_sampling(self._needed(loaded))
        objects.unet = unet

    def _needed(self, loaded: Loaded) -> int:
        try:
            return self.engines(loaded).nbytes("unet")
        except SdaccelError:
            return 0

    def describe(self, p: Any) -> None:
        """Script.postprocess_batch: images are decoded, their infotext is not written yet."""
        if "unet" not in self.report.components:
            self.never_asked(self._why_none())
        super().describe(p)

    def _why_none(self) -> str:
        """Why no call of the UNet came to us."""
        if not self.enabled:
            return SWITCHED_OFF
        loaded = self.loaded()
        if loaded is None:
            return "the model that is loaded is no Stable Diffusion UNet"
        return self.lacking(loaded) or "another extension took over the call of the model"

    def unload(self) -> None:
        """on_script_unloaded: the patchers that carry our wrappers are the last generation's; the next has new ones."""

    # the UNet

    def wrapper(
        self, apply_model: Callable[..., torch.Tensor], args: Mapping[str, Any], outer: Callable[..., Any] | None = None
    ) -> torch.Tensor:
        """``f(apply_model, {"input", "timestep", "c", "cond_or_uncond"})``, inside another extension's ``outer``."""
        apply = functools.partial(self._apply, apply_model)
        if outer is not None:
            return outer(apply, args)
        return apply(args["input"], args["timestep"], **args["c"])

    def _apply(self, apply_model: Callable[..., torch.Tensor], x: torch.Tensor, t: torch.Tensor, **c: Any) -> Any:
        loaded = self.loaded()
        model = getattr(apply_model, "__self__", None)
        if loaded is None or getattr(model, "diffusion_model", None) is not loaded.unet:
            self.report.fell_back("unet", "the model that runs is not the one that the host has loaded.")
            return apply_model(x, t, **c)
        outside = {name: value for name, value in c.items() if name not in _KNOWN}
        unet: Any = loaded.unet
        forward = unet.forward

        def answer(
            x: torch.Tensor,
            timesteps: Any = None,
            context: Any = None,
            y: Any = None,
            control: Any = None,
            transformer_options: Mapping[str, Any] | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            options = transformer_options or {}
            refused = {f"transformer_options {name}": v for name, v in options.items() if name not in _HARMLESS}
            refused |= {**outside, **kwargs}
            refused.pop("control_model", None)  # the maker of `control`, which the network does not look at
            plain = functools.partial(
                forward, x, timesteps, context, y, control, {} if transformer_options is None else options, **kwargs
            )
            # While ours is away: one that other code has put there is a reason against engines.
            with swapped((unet, "forward", before)):
                residuals = functools.partial(_residuals, control, x) if control else None
                return self.call_unet(
                    unet, plain, x, timesteps, context, y, refused=refused, whole=False, residuals=residuals
                )

        before = unet.__dict__.get("forward", ABSENT)
        with swapped((unet, "forward", answer)):
            return apply_model(x, t, **c)

    # the VAE

    def _wrap_vae(self, sd_model: Any) -> None:
        objects = getattr(sd_model, "forge_objects", None)
        if objects is None or self.loaded() is None:
            return
        vae = objects.vae.clone()
        for name, setter, method, call in (
            ("model_vae_decode_wrapper", "set_model_vae_decode_wrapper", "decode", self.call_decode),
            ("model_vae_encode_wrapper", "set_model_vae_encode_wrapper", "encode", self.call_encode),
        ):
            wrapper = functools.partial(self.vae_wrapper, method, call)
            getattr(vae.patcher, setter)(_Wrapper(wrapper, _foreign(vae.patcher.model_options.get(name))))
        objects.vae = vae

    def vae_wrapper(
        self,
        method: str,
        call: Callable[..., Any],
        inner: Callable[[torch.Tensor], torch.Tensor],
        tensor: torch.Tensor,
        outer: Callable[..., Any] | None,
    ) -> torch.Tensor:
        """``f(decode_inner, samples)``: the host's own code around the network, which an engine answers for."""
        loaded = self.loaded()
        if loaded is None:
            return inner(tensor) if outer is None else outer(inner, tensor)
        vae = loaded.vae
        plain = getattr(vae, method)

        def answer(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return call(vae, functools.partial(plain, value, *args, **kwargs), value)

        with swapped((vae, method, answer)):
            return inner(tensor) if outer is None else outer(inner, tensor)


def _inside(name: str) -> str:
    """A parameter's name in the UNet, by its name in the host's model around it."""
    return str(name).removeprefix("diffusion_model.")


def _network_name(key: Any) -> str:
    """Of the key that the host gives a network: (file, strengths, whether layers compute it as they run)."""
    return Path(str(key[0])).stem


def _residuals(control: Any, x: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A ControlNet's residuals as inputs of an engine. Raises UnsupportedCall for those that it has no input for.

    The host takes them from the end of its lists: the last of "output" is for the last skip connection.
    """
    if not isinstance(control, Mapping):
        raise UnsupportedCall("the UNet was called with ControlNet residuals of an unknown kind.")
    for name, values in control.items():
        if name not in ("output", "middle") and any(value is not None for value in values):
            raise UnsupportedCall(f"the UNet was called with residuals for {name} (T2I-Adapter), which engines lack.")
    *down, middle = residual_layout(config)
    found = {}
    for places, name in ((down, "output"), ([middle], "middle")):
        for (place, channels, level), value in zip(reversed(places), reversed(control.get(name) or ())):  # noqa: B905
            if value is None:
                continue
            height, width = (-(-side // 2**level) for side in x.shape[2:])
            if value.device != x.device or value.shape not in {(n, channels, height, width) for n in (1, len(x))}:
                shape, wanted = list(value.shape), [len(x), channels, height, width]
                raise UnsupportedCall(f"a ControlNet residual is {shape} on {value.device}; the engine takes {wanted}.")
            found[place] = value.expand(len(x), -1, -1, -1)
    return found


__all__ = ["Forge", "host_modules"]
