"""A stand-in of Forge: model patchers with wrappers, KModel with its scaling, VAE patcher, sampling, infotext.

Follows what the host documents: patchers are cloned before they are changed, ``forge_objects`` are reset for every
pass, scripts.process_before_every_sampling comes between, and the wrapper gets ``(apply_model, {"input", "timestep",
"c", "cond_or_uncond"})``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.integrations.hosts.a1111 import Checkpoint, OptionInfo, Options, Processed, Processing, Scripted
from tests.integrations.hosts.ldm import FACTOR, FirstStage, UNetModel


class UNet(UNetModel):
    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **kwargs):  # noqa: B006
        transformer_options["original_shape"] = list(x.shape)
        self.take_parameters()
        out = self.compute(x, timesteps, context, y, **self._residuals(control))
        for patch in transformer_options.get("patches", {}).get("output_block_patch", ()):
            out = patch(out)
        return out

    def _residuals(self, control: Any) -> dict[str, Any]:
        """Each block takes the last one of its list; what does not fit or is None is left out."""
        if not control:
            return {}
        nothing = torch.zeros(())
        taken = {"output": [], "middle": []}
        count = len(self.input_blocks._modules)
        for name, times in (("middle", 1), ("output", count)):
            for _ in range(times):
                value = control[name].pop() if control.get(name) else None
                taken[name].append(nothing if value is None else value)
        return {
            "down_block_additional_residuals": taken["output"][::-1],
            "mid_block_additional_residual": taken["middle"][0],
        }


class Vae(FirstStage):
    """Its encode gives a sample, or what the regulation makes of the distribution."""

    def encode(self, x: torch.Tensor, regulation: Any = None) -> Any:
        return super().encode(x, regulation or (lambda posterior: posterior.sample()))


class KModel(nn.Module):
    """The network and the scaling around it: epsilon, at sigmas."""

    def __init__(self, unet: UNet):
        super().__init__()
        self.diffusion_model = unet
        self.computation_dtype = torch.float32

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):  # noqa: B006
        sigma = t.view(-1, 1, 1, 1)
        xc = x / (sigma**2 + 1) ** 0.5
        if c_concat is not None:
            xc = torch.cat([xc, c_concat], dim=1)
        timestep = (t.log() * 100 + 500).round().float()
        out = self.diffusion_model(
            xc.to(self.computation_dtype),
            timestep,
            context=c_crossattn,
            control=control,
            transformer_options=transformer_options,
            **kwargs,
        )
        return x - out.float() * sigma


class Control:
    """A ControlNet: residuals for the first ``until`` steps, None after."""

    def __init__(self, residuals: dict[str, list[torch.Tensor | None]], until: int):
        self.residuals, self.left = residuals, until

    def get_control(self) -> Any:
        self.left -= 1
        return {name: list(values) for name, values in self.residuals.items()} if self.left >= 0 else None


class Loader:
    """Merges networks into a model: new parameters stand where those that it keeps were."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.backup: dict[str, nn.Parameter] = {}
        self.loaded = "[]"

    @torch.inference_mode()
    def refresh(self, networks: dict[Any, Any]) -> None:
        wanted = str(list(networks))
        if wanted == self.loaded:
            return
        for name, parameter in self.backup.items():
            self._put(name, parameter)
        self.backup = {}
        for patches in networks.values():
            for name, (strength, delta) in patches.items():
                parameter = self.model.get_parameter(name)
                self.backup.setdefault(name, parameter)
                merged = parameter + strength * delta
                self._put(name, nn.Parameter(merged, requires_grad=False))
        self.loaded = wanted

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        path, _, kind = name.rpartition(".")
        setattr(self.model.get_submodule(path), kind, parameter)


class Patcher:
    def __init__(self, model: Any):
        self.model = model
        if not hasattr(model, "lora_loader"):
            model.lora_loader = Loader(model)
        self.lora_patches: dict[Any, Any] = {}
        self.object_patches: dict[str, Any] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.control: Any = None
        self.preserved = 0

    def clone(self) -> Any:
        new = type(self)(self.model)
        new.lora_patches, new.object_patches = self.lora_patches.copy(), self.object_patches.copy()
        new.model_options = copy.deepcopy(self.model_options)
        new.control = self.control
        return new

    def add_extra_preserved_memory_during_sampling(self, nbytes: int) -> None:
        self.preserved = nbytes

    def set_model_unet_function_wrapper(self, wrapper: Any) -> None:
        self.model_options["model_function_wrapper"] = wrapper

    def set_model_vae_decode_wrapper(self, wrapper: Any) -> None:
        self.model_options["model_vae_decode_wrapper"] = wrapper

    def set_model_vae_encode_wrapper(self, wrapper: Any) -> None:
        self.model_options["model_vae_encode_wrapper"] = wrapper


class VaePatcher:
    """Channels last, 0…1 around a network with channels first, -1…1."""

    def __init__(self, vae: Vae):
        self.first_stage_model = vae
        self.patcher = Patcher(vae)

    def clone(self) -> VaePatcher:
        new = VaePatcher(self.first_stage_model)
        new.patcher = self.patcher.clone()
        return new

    def decode_inner(self, samples: torch.Tensor) -> torch.Tensor:
        decoded = [self.first_stage_model.decode(one[None]) for one in samples]
        return torch.clamp((torch.cat(decoded) + 1) / 2, 0, 1).movedim(1, -1)

    def encode_inner(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.first_stage_model.encode(2 * pixels.movedim(-1, 1) - 1, None)

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        wrapper = self.patcher.model_options.get("model_vae_decode_wrapper")
        return self.decode_inner(samples) if wrapper is None else wrapper(self.decode_inner, samples)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        wrapper = self.patcher.model_options.get("model_vae_encode_wrapper")
        return self.encode_inner(pixels) if wrapper is None else wrapper(self.encode_inner, pixels)


class Model(SimpleNamespace):
    """A diffusion engine of the host: the patchers of a checkpoint."""


class ForgeHost(Scripted):
    """The host: `shared`, `devices` and `sd_models` as its modules are.

    networks: name → function of the UNet that gives what is added to its weights, by their original names.
    """

    def __init__(self, files: list[Path], networks: dict[str, Any] | None = None):
        self.networks = networks or {}
        self.shared = SimpleNamespace(opts=Options(), cmd_opts=SimpleNamespace(), OptionInfo=OptionInfo)
        self.devices = SimpleNamespace(device=torch.device("cpu"))
        self.sd_models = SimpleNamespace(
            checkpoints_list={path.name: Checkpoint(str(path)) for path in files},
            model_data=SimpleNamespace(sd_model=None, forge_loading_parameters={}),
        )
        self.other_scripts: list[Any] = []
        """Called with p before every sampling, before ours."""
        self.loaded_callbacks: list[Any] = []
        self.step_callbacks: list[Any] = []
        """on_cfg_denoiser."""
        self.refiner: tuple[int, Path] | None = None
        """(step, checkpoint): loaded in the middle of the sampling."""

    @property
    def model(self) -> Any:
        return self.sd_models.model_data.sd_model

    def load(self, path: Path) -> Any:
        original = SimpleNamespace(unet=Patcher(KModel(UNet(path))), vae=VaePatcher(Vae(path)))
        self.sd_models.model_data.sd_model = Model(
            sd_checkpoint_info=next(c for c in self.sd_models.checkpoints_list.values() if c.filename == str(path)),
            forge_objects_original=original,
            forge_objects=copy.copy(original),
            forge_objects_after_applying_lora=original,
        )
        for callback in self.loaded_callbacks:
            callback(self.model)
        return self.model

    def generate(self, **options: Any) -> Processed:
        p = Processing(**options, sd_model=self.model)
        torch.manual_seed(p.seed)
        self._script("process", p)
        self._load_networks(p)
        latents = None
        if p.init_image is not None:
            latents = self.model.forge_objects.vae.encode(p.init_image.movedim(1, -1))
        with torch.no_grad():
            latents = self._passes(p, latents)
            images = self.model.forge_objects.vae.decode(latents / 4)
        return self._end(p, images)

    def _load_networks(self, p: Processing) -> None:
        unet = self.model.forge_objects_original.unet.clone()
        for name, strength in p.networks:
            deltas = self.networks[name](unet.model.diffusion_model)
            unet.lora_patches[f"/loras/{name}.safetensors", strength, 1.0, False] = {
                f"diffusion_model.{weight}": (strength, delta) for weight, delta in deltas.items()
            }
        self.model.forge_objects_after_applying_lora = copy.copy(self.model.forge_objects_original)
        self.model.forge_objects_after_applying_lora.unet = unet

    def _sample(self, p: Processing, width: int, height: int, latents: torch.Tensor | None) -> torch.Tensor:
        self.model.forge_objects = copy.copy(self.model.forge_objects_after_applying_lora)
        for script in self.other_scripts:
            script(p)
        self._script("process_before_every_sampling", p)
        self.model.forge_objects.unet.model.lora_loader.refresh(self.model.forge_objects.unet.lora_patches)
        config = self.model.forge_objects.unet.model.diffusion_model.inner[0].config
        x = torch.randn(p.batch_size, 4, height // FACTOR, width // FACTOR)
        x = x * 2 if latents is None else latents + 0.3 * x
        generator = torch.Generator().manual_seed(p.seed)
        cond = torch.randn(1, p.tokens, config.cross_attention_dim, generator=generator).repeat(p.batch_size, 1, 1)
        uncond = torch.randn(1, p.negative_tokens, config.cross_attention_dim, generator=generator).repeat(
            p.batch_size, 1, 1
        )
        for step in range(p.steps):
            if self.refiner is not None and step == self.refiner[0]:
                self.load(self.refiner[1])
            for callback in self.step_callbacks:
                callback(None)
            unet = self.model.forge_objects.unet
            sigma = torch.full((p.batch_size,), 2.0 / (step + 1))
            if p.tokens == p.negative_tokens:
                both = self._apply(
                    unet, torch.cat([x, x]), torch.cat([sigma, sigma]), torch.cat([cond, uncond]), [0, 1]
                )
                first, second = both.chunk(2)
            else:
                first = self._apply(unet, x, sigma, cond, [0])
                second = self._apply(unet, x, sigma, uncond, [1])
            x = x + 0.2 * (second + p.cfg_scale * (first - second) - x)
        return x

    def _apply(
        self, unet: Patcher, x: torch.Tensor, sigma: torch.Tensor, context: torch.Tensor, which: list[int]
    ) -> torch.Tensor:
        options = unet.model_options["transformer_options"].copy()
        options |= {"cond_or_uncond": which, "sigmas": sigma, "cond_mark": sigma, "cond_indices": which}
        c: dict[str, Any] = {"c_crossattn": context, "transformer_options": options}
        config = unet.model.diffusion_model.inner[0].config
        if config.projection_class_embeddings_input_dim:
            c["y"] = torch.ones(len(x), config.projection_class_embeddings_input_dim)
        if config.in_channels > 4:
            c["c_concat"] = torch.zeros(len(x), config.in_channels - 4, *x.shape[2:])
        if unet.control is not None:
            c |= {"control": unet.control.get_control(), "control_model": unet.control}
        wrapper = unet.model_options.get("model_function_wrapper")
        if wrapper is None:
            return unet.model.apply_model(x, sigma, **c)
        return wrapper(unet.model.apply_model, {"input": x, "timestep": sigma, "c": c, "cond_or_uncond": which})
