"""A stand-in of AUTOMATIC1111's WebUI 1.10: callbacks, scripts, sd_unet, sampling with guidance, VAE, infotext.

Follows the order that the host documents: scripts.process, the image of img2img, sd_unet.apply_unet, for each step the
cfg_denoiser callbacks and the UNet, decoding, scripts.postprocess_batch, the infotext, scripts.postprocess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.integrations.hosts.ldm import FACTOR, FirstStage, UNetModel
from tests.integrations.hosts.networks import Networks


class SdUnetOption:
    model_name: str | None = None
    label: str | None = None

    def create_unet(self) -> Any:
        raise NotImplementedError


class SdUnet(nn.Module):
    option: Any = None

    def forward(self, x, timesteps, context, *args, **kwargs):
        raise NotImplementedError

    def activate(self) -> None:
        pass

    def deactivate(self) -> None:
        pass


class OptionInfo:
    def __init__(self, default: Any = None, label: str = "", section: Any = None):
        self.default, self.label, self.section = default, label, section
        self.restrict_api = False


class Options:
    def __init__(self) -> None:
        self.sd_unet = "Automatic"
        self.infos: dict[str, OptionInfo] = {}

    def add_option(self, name: str, info: OptionInfo) -> None:
        self.infos[name] = info
        if not hasattr(self, name):
            setattr(self, name, info.default)


@dataclass
class Checkpoint:
    filename: str

    @property
    def name(self) -> str:
        return Path(self.filename).name

    @property
    def model_name(self) -> str:
        return Path(self.filename).stem


@dataclass
class Processing:
    width: int = 64
    height: int = 64
    batch_size: int = 1
    steps: int = 3
    cfg_scale: float = 7.0
    seed: int = 1
    tokens: int = 77
    negative_tokens: int = 77
    init_image: torch.Tensor | None = None
    """(batch, 3, height, width) in 0…1: img2img."""
    hr_scale: float = 0.0
    refiner: Path | None = None
    """Switched to after the first step."""
    networks: list[tuple[Any, ...]] = field(default_factory=list)
    """What the prompt names: see `Networks.load`."""
    sd_model: Any = None
    extra_generation_params: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, int] = field(default_factory=dict)

    def comment(self, text: str) -> None:
        self.comments[text] = 1


@dataclass
class Processed:
    images: torch.Tensor
    info: str
    comments: str = ""


class Scripted:
    """What both hosts do around their own sampling."""

    script: Any = None

    def _script(self, method: str, p: Processing, *args: Any) -> None:
        if self.script is not None:
            getattr(self.script, method)(p, *args)

    def _passes(self, p: Processing, latents: torch.Tensor | None) -> torch.Tensor:
        latents = self._sample(p, p.width, p.height, latents)
        if p.hr_scale:
            width, height = int(p.width * p.hr_scale), int(p.height * p.hr_scale)
            size = (height // FACTOR, width // FACTOR)
            latents = self._sample(p, width, height, nn.functional.interpolate(latents, size=size))
        return latents

    def _end(self, p: Processing, images: torch.Tensor) -> Processed:
        self._script("postprocess_batch", p)
        info = ", ".join(f"{key}: {value}" for key, value in p.extra_generation_params.items())
        processed = Processed(images, info, "".join(f"{text}\n" for text in p.comments))
        self._script("postprocess", p, processed)
        return processed

    def _sample(self, p: Processing, width: int, height: int, latents: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class A1111(Scripted):
    """The host: `shared`, `devices`, `sd_unet`, `sd_models`, `sd_vae` and `script_callbacks` as its modules are."""

    def __init__(self, files: list[Path], networks: Networks | None = None):
        self.networks = networks or Networks({})
        self.other_scripts: list[Any] = []
        """Called with p when the networks of a pass are there (block weights)."""
        self.shared = SimpleNamespace(
            opts=Options(),
            cmd_opts=SimpleNamespace(lowvram=False, listen=False, share=False, server_name=None, api_auth=None),
            loaded_hypernetworks=[],
            OptionInfo=OptionInfo,
        )
        self.devices = SimpleNamespace(device=torch.device("cpu"))
        self.sd_models = SimpleNamespace(
            checkpoints_list={path.name: Checkpoint(str(path)) for path in files},
            model_data=SimpleNamespace(sd_model=None),
        )
        self.sd_vae = SimpleNamespace(loaded_vae_file=None)
        self.sd_unet = SimpleNamespace(
            SdUnet=SdUnet,
            SdUnetOption=SdUnetOption,
            unet_options=[],
            current_unet=None,
            current_unet_option=None,
            list_unets=self.list_unets,
            apply_unet=self.apply_unet,
        )
        self.callbacks: dict[str, list[Any]] = {}
        names = ("list_unets", "model_loaded", "cfg_denoiser", "ui_settings", "script_unloaded", "ui_tabs")
        names += ("app_started",)
        self.script_callbacks = SimpleNamespace(
            **{f"on_{name}": self.callbacks.setdefault(name, []).append for name in names}
        )
        self.moves: list[str] = []

    @property
    def model(self) -> Any:
        return self.sd_models.model_data.sd_model

    # sd_models

    def load(self, path: Path) -> Any:
        """A checkpoint read anew, as the host does where configs differ: it does not call apply_unet then."""
        if self.model is not None:
            self.apply_unet("None")
        host = self

        class PatchedUNet(UNetModel):
            def forward(self, x, timesteps=None, context=None, *args, **kwargs):
                if host.sd_unet.current_unet is not None:
                    return host.sd_unet.current_unet.forward(x, timesteps, context, *args, **kwargs)
                return self.compute(x, timesteps, context, *args, **kwargs)

            def compute(self, *args, **kwargs):
                for layer in self.modules():
                    host.networks.apply(layer)
                return super().compute(*args, **kwargs)

            def to(self, *args, **kwargs):
                host.moves.append(str(args[0]))
                return super().to(*args, **kwargs)

        unet = PatchedUNet(path)
        self.sd_models.model_data.sd_model = SimpleNamespace(
            sd_checkpoint_info=next(c for c in self.sd_models.checkpoints_list.values() if c.filename == str(path)),
            model=SimpleNamespace(diffusion_model=unet),
            first_stage_model=FirstStage(path),
            lowvram=False,
            scale_factor=0.18215,
        )
        self.networks.name_layers(unet)
        for callback in self.callbacks["model_loaded"]:
            callback(self.model)
        return self.model

    # sd_unet

    def list_unets(self) -> None:
        found: list[Any] = []
        for callback in self.callbacks["list_unets"]:
            callback(found)
        self.sd_unet.unet_options[:] = found

    def _option(self, option: str | None) -> Any:
        option = option or self.shared.opts.sd_unet
        if option == "Automatic":
            name = self.model.sd_checkpoint_info.model_name
            option = next((x.label for x in self.sd_unet.unet_options if x.model_name == name), "None")
        return next((x for x in self.sd_unet.unet_options if x.label == option), None)

    def apply_unet(self, option: str | None = None) -> None:
        new = self._option(option)
        if new == self.sd_unet.current_unet_option:
            return
        if self.sd_unet.current_unet is not None:
            self.sd_unet.current_unet.deactivate()
        self.sd_unet.current_unet_option = new
        if new is None:
            self.sd_unet.current_unet = None
            self.model.model.diffusion_model.to(self.devices.device)
            return
        self.model.model.diffusion_model.to("cpu")
        self.sd_unet.current_unet = new.create_unet()
        self.sd_unet.current_unet.option = new
        self.sd_unet.current_unet.activate()

    # processing

    def generate(self, **options: Any) -> Processed:
        p = Processing(**options, sd_model=self.model)
        torch.manual_seed(p.seed)
        self._script("process", p)
        latents = None if p.init_image is None else self._encode(p.init_image)
        self.apply_unet()
        with torch.no_grad():
            latents = self._passes(p, latents)
            decode = self.model.first_stage_model.decode
            images = torch.cat([decode(z[None] / self.model.scale_factor) for z in latents])
        return self._end(p, images)

    def _encode(self, image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parts = [self.model.first_stage_model.encode(item[None] * 2 - 1).sample() for item in image]
        return torch.cat(parts) * self.model.scale_factor

    def _conditions(self, p: Processing) -> tuple[Any, Any]:
        config = self.model.model.diffusion_model.inner[0].config
        generator = torch.Generator().manual_seed(p.seed)
        vector = config.projection_class_embeddings_input_dim

        def condition(tokens: int) -> dict[str, torch.Tensor]:
            one = torch.randn(1, tokens, config.cross_attention_dim, generator=generator)
            found = {"context": one.repeat(p.batch_size, 1, 1)}
            if vector:
                found["y"] = torch.randn(1, vector, generator=generator).repeat(p.batch_size, 1)
            return found

        return condition(p.tokens), condition(p.negative_tokens)

    def _sample(self, p: Processing, width: int, height: int, latents: torch.Tensor | None) -> torch.Tensor:
        shape = (p.batch_size, 4, height // FACTOR, width // FACTOR)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(p.seed))
        x = x if latents is None else latents + 0.3 * x
        self.networks.load(self.model.model.diffusion_model, p.networks)
        for script in self.other_scripts:
            script(p)
        for step in range(p.steps):
            if p.refiner is not None and step == 1:
                self.load(p.refiner)
            for callback in self.callbacks["cfg_denoiser"]:
                callback(SimpleNamespace(x=x, sampling_step=step))
            cond, uncond = self._conditions(p)
            t = torch.full((p.batch_size,), 901.5 - 300 * step)
            if p.tokens == p.negative_tokens:
                both = {name: torch.cat([cond[name], uncond[name]]) for name in cond}
                first, second = self._unet(torch.cat([x, x]), torch.cat([t, t]), **both).chunk(2)
            else:
                first, second = self._unet(x, t, **cond), self._unet(x, t, **uncond)
            x = x - 0.2 * (second + p.cfg_scale * (first - second))
        return x

    def _unet(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, **extra: Any) -> torch.Tensor:
        unet = self.model.model.diffusion_model
        channels = unet.inner[0].config.in_channels
        if channels > 4:  # mask and masked image
            x = torch.cat([x, torch.zeros(len(x), channels - 4, *x.shape[2:])], dim=1)
        return unet(x, t, context=context, **extra)
