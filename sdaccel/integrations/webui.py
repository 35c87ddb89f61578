"""AUTOMATIC1111's WebUI: engines as its "SD Unet", VAE through engines, what ran in the infotext.

The host asks for ``SdUnet`` options by the callback on_list_unets, picks with "Automatic" the one whose model_name is
the loaded checkpoint's, moves its torch UNet to the CPU and calls ``SdUnet.forward(x, timesteps, context, y=…)`` from
then on. A call that no engine can take goes to the torch UNet, brought back to the host's device for the rest of the
generation.

The host's modules are passed in; `host_modules` imports them. Nothing of the host is changed but the VAE's ``encode``
and ``decode``, on the instance, until `WebUI.unload`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sdaccel.engine.patch import NOTHING, Patches
from sdaccel.errors import ProfileError, SdaccelError, SettingError
from sdaccel.export.components import residual_layout
from sdaccel.integrations.host import SWITCHED_OFF, Loaded, WebHost
from sdaccel.integrations.host_engines import ContentHashes, ModelEngines
from sdaccel.integrations.host_networks import Networks
from sdaccel.integrations.host_watch import ABSENT, Kept, replaced_forward, swapped
from sdaccel.integrations.webui_controlnet import Controlled, is_controlnet

PREFIX = "[sdaccel] "
MODULES = ("shared", "devices", "sd_unet", "sd_models", "sd_vae", "script_callbacks")


def host_modules() -> SimpleNamespace:
    """The parts of the host that `WebUI` uses, imported."""
    return SimpleNamespace(**{name: importlib.import_module(f"modules.{name}") for name in MODULES})


class WebUI(WebHost):
    """The extension in A1111: callbacks and script hooks call its methods."""

    name = "A1111"

    def __init__(self, host: Any = None):
        super().__init__(host_modules() if host is None else host)
        self._options: dict[str, Any] = {}
        self._vae: nn.Module | None = None
        self._vae_before: dict[str, Any] = {}
        self._unet_class: type | None = None
        self._networks: Networks | None = None
        self._controlled: tuple[nn.Module, Controlled] | None = None

    # what the host has

    def _model(self) -> Any:
        """The model in memory. Asking the host for it in another way would load one."""
        return getattr(self.host.sd_models.model_data, "sd_model", None)

    def loaded(self) -> Loaded | None:
        model = self._model()
        info = getattr(model, "sd_checkpoint_info", None)
        unet = getattr(getattr(model, "model", None), "diffusion_model", None)
        vae = getattr(model, "first_stage_model", None)
        if info is None or not isinstance(unet, nn.Module) or not isinstance(vae, nn.Module):
            return None
        vae_file = getattr(self.host.sd_vae, "loaded_vae_file", None)
        device = torch.device(self.host.devices.device).type
        return Loaded(Path(info.filename), Path(vae_file) if vae_file else None, unet, vae, device)

    def hindrance(self, part: str) -> str | None:
        if part != "unet":
            return None
        shared = self.host.shared
        if getattr(shared.cmd_opts, "lowvram", False):
            return "the host runs with --lowvram, which moves the UNet piece by piece; engines need it whole."
        taken, others = _networks()
        if others:
            return f"networks are active that the engine does not hold: {', '.join(others)}."
        if taken and self.option("lora_functional", False):
            return "networks are computed beside the layers (lora_functional in Settings), which engines do not do."
        hypernetworks = [str(getattr(net, "name", net)) for net in getattr(shared, "loaded_hypernetworks", None) or ()]
        if hypernetworks:
            return f"hypernetworks are active that the engine does not hold: {', '.join(hypernetworks)}."
        patched = _patched_cat()
        if patched:
            return patched
        loaded = self.loaded()
        return replaced_forward(loaded.unet, "forward of the UNet") if loaded else None

    def networks(self, part: str) -> list[str]:
        if part != "unet":
            return []
        taken, others = _networks()
        return [*dict.fromkeys(str(net.name) for net in taken), *others]

    def patches(self, part: str, engines: ModelEngines) -> Patches:
        taken, _ = _networks()
        loaded, component, networks = self.loaded(), engines.component(part), self._networks
        if loaded is None or part != "unet" or (networks is None and not taken):
            return NOTHING
        if networks is None or networks.module is not loaded.unet or networks.component is not component:
            networks = self._networks = Networks(component, loaded.unet)
        return networks.patches(taken)

    def kept(self, part: str) -> Kept:
        """The host merges networks into a layer when it next runs, and keeps its weights as they were."""
        loaded, found = self.loaded(), {}
        for name, layer in loaded.unet.named_modules() if loaded and part == "unet" else ():
            state = layer.__dict__
            if state.get("network_current_names", ()) != ():
                for kind, where in (("weight", "network_weights_backup"), ("bias", "network_bias_backup")):
                    if isinstance(state.get(where), torch.Tensor):
                        found[f"{name}.{kind}"] = state[where]
        return found

    def model_loaded(self) -> None:
        super().model_loaded()
        self._networks = None

    # callbacks

    def list_unets(self, unets: list[Any]) -> None:
        """on_list_unets: an option for each of the host's checkpoints that engines are known of."""
        hashes = ContentHashes(self.store)
        engines = [entry.engine for entry in self.store.find_engines(component="unet")]
        weights = {engine.weights for engine in engines}
        names = {engine.model for engine in engines} | {Path(engine.origin).stem for engine in engines}
        for info in list(self.host.sd_models.checkpoints_list.values()) if engines and self.enabled else ():
            path = Path(info.filename)
            known = hashes.known(path, "unet")
            if known in weights or (known is None and path.stem in names):
                unets.append(self._option(info))

    def _option(self, info: Any) -> Any:
        """The host tells options apart by identity: one a checkpoint."""
        key = str(info.model_name)
        found = self._options.get(key)
        if found is None or found.filename != info.filename:
            found = self.host.sd_unet.SdUnetOption()
            found.model_name, found.label, found.filename = key, f"{PREFIX}{key}", info.filename
            found.create_unet = self._create
            self._options[key] = found
        return found

    def _create(self) -> Any:
        if self._unet_class is None:
            web = self

            class EngineUnet(self.host.sd_unet.SdUnet):  # type: ignore[misc, name-defined]
                def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
                    return web.unet(getattr(self, "option", None), x, timesteps, context, *args, **kwargs)

            self._unet_class = EngineUnet
        return self._unet_class()

    def loaded_callback(self, sd_model: Any = None) -> None:
        """on_model_loaded."""
        self.model_loaded()
        self._take_vae()

    def before_step(self, params: Any = None) -> None:
        """on_cfg_denoiser: a refiner or hires checkpoint that came in during the generation gets its engines too."""
        unet = self.host.sd_unet
        self.run.steps += 1
        if self._networks is not None and not getattr(params, "sampling_step", 0):
            self._networks.renew()
        self._take_vae()
        self._offer_option()
        unet.apply_unet()
        loaded = self.loaded()
        if unet.current_unet is None and "unet" in self.report.components:  # of a model that came in meanwhile
            self.report.fell_back("unet", self._why_none())
        if loaded is None or unet.current_unet is None or not self._is_ours(unet.current_unet):
            return
        self._take_controlnet(loaded.unet)
        if self._controlled is None and replaced_forward(loaded.unet, "forward of the UNet"):  # it may never ask us
            self.bring_back(loaded)

    def _is_ours(self, unet: Any) -> bool:
        return self._unet_class is not None and isinstance(unet, self._unet_class)

    # script hooks

    def begin(self, p: Any) -> None:
        """Script.process: before the host chooses its UNet and encodes the image of img2img."""
        super().begin(p)
        self._leave_controlnet()
        self._take_vae()
        self._offer_option()
        loaded = self.loaded()
        if loaded is not None and self._is_ours(self.host.sd_unet.current_unet):
            self._park(loaded)

    def describe(self, p: Any) -> None:
        """Script.postprocess_batch: images are decoded, their infotext is not written yet."""
        self._leave_controlnet()
        current = self.host.sd_unet.current_unet
        if "unet" not in self.report.components and current is not None and self._is_ours(current):
            loaded = self.loaded()
            reason = replaced_forward(loaded.unet, "forward of the UNet") if loaded else None
            self.never_asked(reason or "other code ran the UNet and never asked for an engine")
        elif current is None and "unet" not in self.report.components:
            self.never_asked(self._why_none())
        super().describe(p)

    def _why_none(self) -> str:
        """Why the host runs its own UNet."""
        if not self.enabled:
            return SWITCHED_OFF
        chosen = getattr(self.host.shared.opts, "sd_unet", "Automatic")
        if chosen != "Automatic":
            return f"SD Unet is set to {chosen!r} in Settings"
        loaded = self.loaded()
        if loaded is None:
            return "no Stable Diffusion model is loaded"
        return self.lacking(loaded) or "the host chose its own UNet"

    def _offer_option(self) -> None:
        """Lets "Automatic" find the engines of the loaded checkpoint, also those built since the host started."""
        loaded, model = self.loaded(), self._model()
        if loaded is None:
            return
        options, name = self.host.sd_unet.unet_options, str(model.sd_checkpoint_info.model_name)
        listed = any(option.label == f"{PREFIX}{name}" for option in options)
        try:
            there = self.enabled and self.engines(loaded).has("unet")
        except SdaccelError:
            there = False
        if there and not listed:
            options.append(self._option(model.sd_checkpoint_info))
        elif listed and not there:  # under this name, but of other content
            options[:] = [option for option in options if option.label != f"{PREFIX}{name}"]

    # the UNet

    def unet(self, option: Any, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``SdUnet.forward``: see `WebHost.call_unet`."""
        loaded = self.loaded()
        if loaded is None:
            raise SettingError("the host calls a UNet, but has no Stable Diffusion model loaded.")
        given = dict(kwargs)
        y = args[0] if args else given.pop("y", None)
        refused = {**given, **{f"argument {index + 4}": value for index, value in enumerate(args[1:])}}
        if option is not None and option.filename != self._model().sd_checkpoint_info.filename:
            refused["the engines of another checkpoint chosen in Settings (SD Unet)"] = option.label

        def plain() -> torch.Tensor:
            self.bring_back(loaded)
            with swapped((self.host.sd_unet, "current_unet", None)):
                return type(loaded.unet).forward(loaded.unet, x, timesteps, context, *args, **kwargs)

        return self.call_unet(loaded.unet, plain, x, timesteps, context, y, refused=refused, whole=True)

    # ControlNet, whose extension never asks the host's SD Unet

    def _take_controlnet(self, unet: nn.Module) -> None:
        if is_controlnet(unet.__dict__.get("forward")):
            self._controlled = unet, Controlled(unet.__dict__["forward"], self.controlled)
            unet.__dict__["forward"] = self._controlled[1]

    def _leave_controlnet(self) -> None:
        """The extension puts its forward in and takes it out between generations: it finds its own."""
        if self._controlled is not None:
            unet, ours = self._controlled
            if unet.__dict__.get("forward") is ours:
                unet.__dict__["forward"] = ours.theirs
            self._controlled = None

    def controlled(
        self, forward: Controlled, x: Any, timesteps: Any = None, context: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A call of the extension's forward, with an engine where it runs the UNet's blocks."""
        loaded = self.loaded()
        if loaded is None:
            raise SettingError("ControlNet calls a UNet, but the host has no Stable Diffusion model loaded.")

        def run(x: Any, context: Any, y: Any, residuals: Any) -> torch.Tensor:
            return self.run_unet(
                loaded.unet, x, timesteps, context, y, refused={}, whole=True, residuals=lambda _: residuals
            )

        def engine() -> torch.Tensor:
            if x.shape in forward.misfits:
                raise forward.misfits[x.shape]
            with swapped((loaded.unet, "forward", ABSENT)):
                engines, _ = self._ready("unet", loaded.unet, {"sample": x})
                places = residual_layout(engines.component("unet").config)
                try:
                    return forward.follow(loaded.unet, places, run, x, timesteps, context, *args, **kwargs)
                except ProfileError as error:
                    forward.misfits[x.shape] = error
                    raise

        def plain() -> torch.Tensor:
            self.bring_back(loaded)
            with swapped((self.host.sd_unet, "current_unet", None)):
                return forward.theirs(x, timesteps, context, *args, **kwargs)

        return self._dispatch("unet", engine, plain, lambda result: result)

    # the torch UNet, which the host keeps on the CPU while another one is chosen

    def bring_back(self, loaded: Loaded) -> None:
        """The torch UNet onto the host's device; it stays there until the next generation begins."""
        if not getattr(self._model(), "lowvram", False):
            loaded.unet.to(self.host.devices.device)

    def _park(self, loaded: Loaded) -> None:
        """The torch UNet back to the CPU, where the host keeps it while another one is chosen."""
        if loaded.device != "cpu" and not getattr(self._model(), "lowvram", False):
            loaded.unet.to("cpu")

    # the VAE

    def _take_vae(self) -> None:
        loaded = self.loaded()
        vae = loaded.vae if loaded else None
        if vae is self._vae and (vae is None or _is_ours(vae.__dict__.get("decode"))):
            return
        self.restore()
        if vae is None:
            return
        self._vae = vae
        self._vae_before = {name: vae.__dict__[name] for name in ("encode", "decode") if name in vae.__dict__}
        for name, call in (("decode", self.call_decode), ("encode", self.call_encode)):
            vae.__dict__[name] = _VaeMethod(vae, getattr(vae, name), call)

    def restore(self) -> None:
        """on_script_unloaded: the VAE's methods are the host's again, and the host's UNet runs."""
        vae, self._vae = self._vae, None
        for name in ("encode", "decode") if vae is not None else ():
            if _is_ours(vae.__dict__.get(name)):
                vae.__dict__.pop(name)
                if name in self._vae_before:
                    vae.__dict__[name] = self._vae_before[name]

    def unload(self) -> None:
        """on_script_unloaded."""
        self.restore()
        self._leave_controlnet()
        if self._is_ours(self.host.sd_unet.current_unet):
            self.host.sd_unet.apply_unet("None")


class _VaeMethod:
    """What stands in a VAE where its method stood."""

    def __init__(self, vae: nn.Module, before: Callable[..., Any], call: Callable[..., Any]):
        self._vae, self._before, self._call = vae, before, call
        functools.update_wrapper(self, before)

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._vae, functools.partial(self._before, tensor, *args, **kwargs), tensor)


def _is_ours(method: Any) -> bool:
    return isinstance(method, _VaeMethod)


_NETWORKS = (("networks", "loaded_networks"), ("lora", "loaded_loras"), ("lycoris", "loaded_lycos"))


def _networks() -> tuple[list[Any], list[str]]:
    """Networks that the host applies to the UNet: its own, which engines take, and names of other extensions'."""
    lists = [getattr(sys.modules.get(module), attribute, None) or () for module, attribute in _NETWORKS]
    active = [[net for net in found if getattr(net, "unet_multiplier", 1.0) != 0] for found in lists]
    taken = [net for net in active[0] if isinstance(getattr(net, "modules", None), dict)]  # twice, if named twice
    others = [net for found in active for net in found if all(net is not known for known in taken)]
    return taken, list(dict.fromkeys(str(getattr(net, "name", net)) for net in others))


def _patched_cat() -> str | None:
    """The original UNet joins skip connections through ``th.cat``, which FreeU and others replace."""
    own = getattr(sys.modules.get("modules.sd_hijack_unet"), "th", None)
    for package in ("ldm", "sgm"):
        found = getattr(sys.modules.get(f"{package}.modules.diffusionmodules.openaimodel"), "th", None)
        if own is not None and found is not None and found is not own and found is not torch:
            return f"how {package}'s UNet joins its skip connections has been replaced (FreeU or the like)."
    return None


__all__ = ["PREFIX", "WebUI", "host_modules"]
