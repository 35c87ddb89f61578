"""Tiny models in the original layout: checkpoint files, and torch modules whose parameters have the original names.

The arithmetic is diffusers'; a tree of empty modules carries the very same parameters under their original names, as
`modules.sd_models` and Forge's loader leave them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn

from sdaccel.builder import build
from sdaccel.engine.store import Store
from sdaccel.export.components import source_of
from sdaccel.export.to_onnx import publish_graph
from sdaccel.models import ldm
from sdaccel.models.checkpoint import open_checkpoint
from sdaccel.profile import parse_profiles
from tests import pipelines
from tests.models import tiny

FACTOR = 8
"""Pixels a latent."""


@contextmanager
def tiny_architectures() -> Iterator[None]:
    """Files are opened as the architectures of `tests.pipelines`, of which a run of the tests exports each graph once.

    They have fewer heads and groups than any published model, which a file's shapes do not tell.
    """
    infer_unet, infer_vae = ldm.infer_unet, ldm.infer_vae

    def unet(shapes: Any, template: Any) -> dict[str, Any]:
        found = infer_unet(shapes, template)
        if not template:
            return found
        xl = "label_emb.0.0.weight" in shapes
        heads = [2, 4, 4][: len(found["block_out_channels"])] if xl else 2
        return found | {"norm_num_groups": 4, "attention_head_dim": heads}

    def vae(shapes: Any, template: Any) -> dict[str, Any]:
        return infer_vae(shapes, template) | {"norm_num_groups": 2}

    with mock.patch.object(ldm, "infer_unet", unet), mock.patch.object(ldm, "infer_vae", vae):
        yield


class VectorUNet(UNet2DConditionModel):
    """Takes SDXL's vector itself, as the original does."""

    def get_aug_embed(self, emb, encoder_hidden_states, added_cond_kwargs):
        return self.add_embedding(added_cond_kwargs["y"]) if added_cond_kwargs else None


def write_checkpoint(kind: str, path: Path, seed: int = 0) -> Path:
    """A random checkpoint in one file: "sd1", "inpaint", "sdxl" or "refiner"."""
    pipe = pipelines.make(kind, seed=seed)
    torch.manual_seed(seed)
    if kind != "refiner":
        pipe.text_encoder = tiny.text_encoder(False)
    if kind in ("sdxl", "refiner"):
        pipe.text_encoder_2 = tiny.text_encoder(True, act="gelu")
    layout = {"inpaint": "sd1", "refiner": "sdxl-refiner"}.get(kind, kind)
    return tiny.save_single_file(tiny.original_weights(pipe, layout), path, torch.float32)


class Layer(nn.Module):
    """Carries parameters under their original names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def grow(self, name: str, parameter: nn.Parameter) -> None:
        at: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in at._modules:
                at.add_module(part, Layer())
            at = at._modules[part]  # type: ignore[assignment]
        at.register_parameter(last, parameter)


def _network(path: Path, component: str, kind: type) -> tuple[Any, dict[str, nn.Parameter]]:
    """diffusers' module with the file's weights, and its parameters by their original names."""
    found = open_checkpoint(path).components[component]
    options = {key: value for key, value in found.config.items() if not key.startswith("_")}
    module = kind(**options)
    module.load_state_dict({name: ref.read().float() for name, ref in found.tensors.items()})
    module.eval().requires_grad_(False)
    own = dict(module.named_parameters())
    return module, {place.ldm: own[place.name] for place in ldm.places(component, found.config)}


class UNetModel(Layer):
    """The UNet: ``forward(x, timesteps, context, y=…)``."""

    def __init__(self, path: Path):
        super().__init__()
        inner, parameters = _network(path, "unet", VectorUNet)
        self.inner = (inner,)  # not registered: its parameters are those of the tree
        self.tally = [0]
        self.places = [(place.name, place.ldm) for place in ldm.places("unet", inner.config)]
        for name, parameter in parameters.items():
            self.grow(name, parameter)

    @property
    def calls(self) -> int:
        return self.tally[0]

    def take_parameters(self) -> None:
        """The arithmetic is done with what is in the tree now."""
        parameters = dict(self.named_parameters())
        for name, original in self.places:
            path, _, kind = name.rpartition(".")
            self.inner[0].get_submodule(path)._parameters[kind] = parameters[original]

    def compute(self, x: Any, timesteps: Any, context: Any, y: Any = None, **residuals: Any) -> torch.Tensor:
        self.tally[0] += 1
        added = None if y is None else {"y": y}
        return self.inner[0](x, timesteps, context, added_cond_kwargs=added, return_dict=False, **residuals)[0]


class Posterior:
    def __init__(self, moments: torch.Tensor):
        self.mean, logvar = moments.chunk(2, dim=1)
        self.std = torch.exp(0.5 * logvar.clamp(-30.0, 20.0))

    def sample(self) -> torch.Tensor:
        return self.mean + self.std * torch.randn(self.mean.shape)


class _Part(Layer):
    def __init__(self, module: Any):
        super().__init__()
        self.inner = (module,)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self.last_z_shape = tensor.shape
        return self.inner[0](tensor)


class FirstStage(Layer):
    """The VAE: encoder, quant_conv, post_quant_conv and decoder, with encode and decode around them."""

    def __init__(self, path: Path):
        super().__init__()
        inner, parameters = _network(path, "vae", AutoencoderKL)
        for name in ("encoder", "decoder", "quant_conv", "post_quant_conv"):
            self.add_module(name, _Part(getattr(inner, name)))
        for name, parameter in parameters.items():
            self.grow(name, parameter)
        self.calls = {"encode": 0, "decode": 0}

    def encode(self, x: torch.Tensor, regulation: Any = None) -> Any:
        self.calls["encode"] += 1
        posterior = Posterior(self.quant_conv(self.encoder(x)))
        return posterior if regulation is None else regulation(posterior)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        self.calls["decode"] += 1
        return self.decoder(self.post_quant_conv(z))


@dataclass(frozen=True)
class Material:
    """Checkpoints and a store with their engines: 64 to 96 pixels a side, 1 to 2 images, 77 to 154 tokens.

    "other" is an sd1 without engines; of all but sd1 there is the UNet alone.
    """

    folder: tempfile.TemporaryDirectory[str]
    store: Path
    files: dict[str, Path]


@cache
def material() -> Material:
    """Made once in a run; tests copy what they change."""
    folder = tempfile.TemporaryDirectory(prefix="sdaccel hosts ")
    root = Path(folder.name)
    kinds = ("sd1", "inpaint", "sdxl", "refiner")
    files = {kind: write_checkpoint(kind, root / f"{kind}.safetensors") for kind in kinds}
    files["other"] = write_checkpoint("sd1", root / "other.safetensors", seed=7)
    profiles = parse_profiles(["64-96"], ["1-2"], ["77-154"], native=64)
    store = Store(root / "store")
    with tiny_architectures():
        for kind in kinds:
            components = ("unet", "vae_decoder", "vae_encoder") if kind == "sd1" else ("unet",)
            share_graphs(files[kind], components, store)
            build(files[kind], components=components, profiles=profiles, store=store, check=False)
    return Material(folder, store.root, files)


def share_graphs(file: Path, components: Sequence[str], store: Store) -> None:
    """Takes the graphs from the store that all tests share, exported there if need be."""
    found = open_checkpoint(file)
    for component in components:
        config = found.components[source_of(component)].config
        entry = publish_graph(pipelines.shared_store(), component, config)
        shutil.copytree(entry.path, store.root / "graphs" / entry.key, dirs_exist_ok=True)
