"""A stand-in of A1111's networks (LoRA and its kin): what a prompt names is loaded, and merged into layers as they run.

Follows what the host does: a layer keeps its weights aside when a network first comes, is restored and merged anew
when names or strengths are others, and skips a network that does not fit. Files are functions that make modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Files = Mapping[str, Callable[[nn.Module], dict[str, "Module"]]]


class Network:
    def __init__(self, name: str):
        self.name = name
        self.unet_multiplier = self.te_multiplier = 1.0
        self.dyn_dim: int | None = None
        self.modules: dict[str, Module] = {}


class Module:
    """What a network does to one layer."""

    network: Network
    sd_module: nn.Module

    def multiplier(self) -> float:
        return self.network.unet_multiplier

    def calc_updown(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError


class LowRank(Module):
    """LoRA: up and down are layers of their own."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, alpha: float):
        self.up_model, self.down_model = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.up_model.weight = nn.Parameter(up, requires_grad=False)
        self.down_model.weight = nn.Parameter(down, requires_grad=False)
        self.alpha = alpha

    def calc_updown(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        up, down = self.up_model.weight, self.down_model.weight
        scale = self.alpha / len(down)
        if self.network.dyn_dim is not None:
            up, down = up[:, : self.network.dyn_dim], down[: self.network.dyn_dim]
        delta = (up @ down.flatten(1)).reshape(len(up), *down.shape[1:])
        delta = delta.reshape(weight.shape) if delta.numel() == weight.numel() else delta
        return delta * scale * self.multiplier(), None


class Scaled(Module):
    """(IA)³: depends on the weight that other networks have changed before."""

    def __init__(self, w: torch.Tensor):
        self.w = w

    def calc_updown(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return weight * self.w.reshape(-1, *[1] * (weight.dim() - 1)) * self.multiplier(), None


class Full(Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.ex_bias = weight, bias

    def calc_updown(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.ex_bias is None else self.ex_bias * self.multiplier()
        return self.weight * self.multiplier(), bias


class Networks:
    """The host's module of that name."""

    def __init__(self, files: Files):
        self.files = files
        self.loaded_networks: list[Network] = []
        self.errors: dict[str, int] = {}
        self.merges = 0

    def name_layers(self, unet: nn.Module) -> None:
        for name, layer in unet.named_modules():
            layer.network_layer_name = "_".join(("diffusion_model", *name.split(".")))  # type: ignore[assignment]

    def load(self, unet: nn.Module, wanted: Sequence[tuple[Any, ...]]) -> None:
        """wanted: (name, strength, how many ranks) of each; one that is loaded already is kept as it is."""
        known = {network.name: network for network in self.loaded_networks}
        self.loaded_networks.clear()
        for name, strength, *rest in wanted:
            network = known.get(name)
            if network is None:
                network = known[name] = Network(name)
                network.modules = self.files[name](unet)
                for key, module in network.modules.items():
                    module.network = network
                    layers = (x for x in unet.modules() if x.network_layer_name == key)
                    module.sd_module = next(layers, nn.Identity())
            network.unet_multiplier = network.te_multiplier = strength
            network.dyn_dim = rest[0] if rest else None
            self.loaded_networks.append(network)

    @torch.no_grad()
    def apply(self, layer: Any) -> None:
        """Before a layer runs in torch."""
        wanted = tuple((x.name, x.unet_multiplier, x.te_multiplier, x.dyn_dim) for x in self.loaded_networks)
        state = layer.__dict__
        if "weight" not in layer._parameters or state.get("network_current_names", ()) == wanted:
            return
        for kind, where in (("weight", "network_weights_backup"), ("bias", "network_bias_backup")):
            parameter = layer._parameters.get(kind)
            if parameter is None:
                continue
            if state.get(where) is None:
                setattr(layer, where, parameter.detach().clone())
            else:
                parameter.copy_(state[where])
        for network in self.loaded_networks:
            module = network.modules.get(layer.network_layer_name)
            if module is not None:
                self._merge(network, module, layer)
        layer.network_current_names = wanted

    def _merge(self, network: Network, module: Module, layer: Any) -> None:
        self.merges += 1
        try:
            delta, bias = module.calc_updown(layer.weight)
            if len(layer.weight.shape) == 4 and layer.weight.shape[1] == 9:
                delta = nn.functional.pad(delta, (0, 0, 0, 0, 0, 5))
            if bias is not None and "bias" not in layer._parameters:
                raise RuntimeError("the stand-in's layers take no new parameters")
            layer.weight.copy_(layer.weight + delta)
            if bias is not None:
                layer.bias.copy_(layer.bias + bias)
        except (RuntimeError, AttributeError):
            self.errors[network.name] = self.errors.get(network.name, 0) + 1


def named(unet: nn.Module, *ends: str) -> dict[str, nn.Module]:
    """Layers with a weight whose path ends so, by the host's name for them."""
    return {
        layer.network_layer_name: layer  # type: ignore[misc]
        for name, layer in unet.named_modules()
        if name.endswith(ends) and "weight" in layer._parameters
    }


def lora(seed: int = 0, size: float = 0.3) -> Callable[[nn.Module], dict[str, Module]]:
    """A LoRA of rank 3 for attention, projections and convolutions."""

    def make(unet: nn.Module) -> dict[str, Module]:
        random = torch.Generator().manual_seed(seed)
        found: dict[str, Module] = {"transformer_text_model_encoder_layers_0_mlp_fc1": Full(torch.ones(1))}
        for name, layer in named(unet, "to_q", "to_v", "to_out.0", "proj_in", "in_layers.2").items():
            shape = layer.weight.shape
            down = torch.randn(3, *shape[1:], generator=random) * size
            found[name] = LowRank(torch.randn(shape[0], 3, generator=random) * size, down, 3.0)
        return found

    return make


def others(unet: nn.Module) -> dict[str, Module]:
    """Full differences with biases, of norms too, and (IA)³."""
    random = torch.Generator().manual_seed(5)
    found: dict[str, Module] = {
        name: Full(
            torch.randn(layer.weight.shape, generator=random) * 0.1,
            torch.randn(layer.bias.shape, generator=random) * 0.1,
        )
        for name, layer in named(unet, "in_layers.0", "in_layers.2", "norm").items()
    }
    found |= {
        name: Scaled(torch.randn(len(layer.weight), generator=random) * 0.3)
        for name, layer in named(unet, "to_k", "to_q").items()
    }
    return found
