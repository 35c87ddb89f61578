"""Networks that a WebUI has active (LoRA, LyCORIS and the like), as patches of an engine's weights.

What a network does to a weight is computed by the host's own code, so that engines follow whatever it and its
extensions (block weights, steps) make of a network.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from sdaccel.engine.patch import NOTHING, Patch, Patches
from sdaccel.errors import UnsupportedCall
from sdaccel.models import ldm
from sdaccel.models.tensors import Component

_numbers: Any = WeakTensorKeyDictionary()
_next_number = itertools.count()


def state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A number of this tensor object, never given to another, and how often it has been written to."""
    number = _numbers.get(tensor)
    if number is None:
        number = _numbers[tensor] = next(_next_number)
    return number, 0 if tensor.is_inference() else tensor._version


class Networks:
    """A1111's networks for one UNet: their ``calc_updown`` gives what is added to a weight."""

    def __init__(self, component: Component, module: nn.Module):
        self.component = component
        self.module = module
        names: dict[str, dict[str, str]] = {}
        for place in ldm.places(component.name, component.config):
            path, _, kind = place.ldm.rpartition(".")
            names.setdefault(path, {})[kind] = place.name
        self._layers: list[tuple[Any, dict[str, str]]] = [
            (module.get_submodule(path), kinds) for path, kinds in names.items()
        ]
        self._seen: tuple[Any, ...] = ()
        self._due = True
        self._keys: dict[int, Hashable] = {}
        self._patches = NOTHING
        self._refusal: str | None = None

    def renew(self) -> None:
        """Other code may have edited networks: the next `patches` looks at every tensor of theirs."""
        self._due = True

    def patches(self, loaded: Iterable[Any]) -> Patches:
        """Of the networks that the host has ``loaded``, in its order; the same object as long as nothing changes.

        Raises UnsupportedCall for a network that cannot be read, or did not fit the model when it was applied.
        """
        active = [net for net in loaded if net.unet_multiplier != 0]
        seen = tuple((net, net.name, net.unet_multiplier, getattr(net, "dyn_dim", None)) for net in active)
        if self._due or seen != self._seen:
            self._seen, self._due = seen, False
            try:
                self._look(active)
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # not the host's own
                self._keys = {-1: seen}
                self._refuse(f"what a network holds could not be read: {error}")
        if self._refusal:
            raise UnsupportedCall(self._refusal)
        return self._patches

    def _look(self, active: list[Any]) -> None:
        changed = {}
        for index, (layer, _) in enumerate(self._layers):
            name = layer.__dict__.get("network_layer_name")
            modules = [(net.name, net.modules[name]) for net in active if name in net.modules]
            if modules:
                changed[index] = modules
        keys: dict[int, Hashable] = {
            index: tuple((name, _state(module)) for name, module in modules) for index, modules in changed.items()
        }
        if keys == self._keys:
            return
        self._keys, self._refusal = keys, None
        self._patches = dict(self._make(keys, changed)) if keys else NOTHING

    def _make(
        self, keys: Mapping[int, Hashable], changed: Mapping[int, list[tuple[str, Any]]]
    ) -> Iterator[tuple[str, Patch]]:
        for index, modules in changed.items():
            layer, names = self._layers[index]
            adapters = tuple(name for name, _ in modules)
            yield names["weight"], Patch(keys[index], functools.partial(self._weight, layer, modules), adapters)
            biased = [name for name, module in modules if _gives_bias(module)]
            if biased and "bias" in names:
                yield names["bias"], Patch(keys[index], functools.partial(self._bias, layer, modules), tuple(biased))
            elif biased:
                self._refuse(f"the network {biased[0]} gives {layer.network_layer_name} a bias, which it has not")

    @torch.no_grad()
    def _weight(self, layer: Any, modules: list[tuple[str, Any]], base: torch.Tensor) -> torch.Tensor:
        weight = base.reshape(layer.weight.shape).float()
        for name, module in modules:
            updown, bias = self._updown(layer, name, module, weight.to(layer.weight.dtype))
            if bias is not None and not _gives_bias(module):
                raise self._refuse(f"the network {name} gives {layer.network_layer_name} a bias in a way of its own")
            weight = weight + updown
        return weight.reshape(base.shape)

    @torch.no_grad()
    def _bias(self, layer: Any, modules: list[tuple[str, Any]], base: torch.Tensor) -> torch.Tensor:
        bias = base.float()
        for name, module in modules:
            if _gives_bias(module):
                more = self._updown(layer, name, module, layer.weight.detach().to(base.device))[1]
                if more is not None and more.shape != bias.shape:
                    raise self._misfit(layer, name, "bias", more.shape, bias.shape)
                bias = bias if more is None else bias + more
        return bias

    def _updown(
        self, layer: Any, name: str, module: Any, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is added to weight and bias, by the host's own code."""
        try:
            updown, bias = module.calc_updown(weight)
        except Exception as error:  # of the host or of an extension; in torch it meets it itself
            raise self._refuse(
                f"the network {name} does not fit {layer.network_layer_name}, whose weight is {list(weight.shape)}: "
                f"{error}"
            ) from error
        if weight.dim() == 4 and weight.shape[1] == 9:  # the host lets networks of plain models run on inpainting ones
            updown = nn.functional.pad(updown, (0, 0, 0, 0, 0, 5))
        if updown.shape != weight.shape:
            raise self._misfit(layer, name, "weight", updown.shape, weight.shape)
        return updown, bias

    def _misfit(self, layer: Any, name: str, kind: str, found: Iterable[int], wanted: Iterable[int]) -> UnsupportedCall:
        where = f"{layer.network_layer_name}, whose {kind} is {list(wanted)}"
        return self._refuse(f"the network {name} gives a change of shape {list(found)} to {where}")

    def _refuse(self, reason: str) -> UnsupportedCall:
        """Noted, so that the next step does not compute everything again to find it."""
        self._refusal = f"{reason}."
        return UnsupportedCall(self._refusal)


def _gives_bias(module: Any) -> bool:
    return getattr(module, "ex_bias", None) is not None or getattr(module, "b_norm", None) is not None


def _state(module: Any) -> Hashable:
    """What the change that a network's module makes depends on: its strength, its numbers and its tensors."""
    found: list[Hashable] = [type(module).__name__, module.multiplier(), getattr(module.network, "dyn_dim", None)]
    for name, value in vars(module).items():
        if isinstance(value, (int, float, str)):
            found.append(value)
        elif isinstance(value, torch.Tensor):
            found += name, state_of(value)
        elif isinstance(value, nn.Module) and name != "sd_module":
            found += name, *map(state_of, value.parameters())
    return tuple(found)


def merged(
    component: Component, module: nn.Module, kept: Iterable[str], adapters: Mapping[str, tuple[str, ...]]
) -> Patches:
    """Forge's networks: its loader has put merged parameters in the place of those that it keeps for later.

    kept: their names in ``module``. adapters: by name, what was merged. Raises UnsupportedCall where one has another
    shape now.
    """
    parameters = dict(module.named_parameters())
    names = {place.ldm: place.name for place in ldm.places(component.name, component.config)}
    found = {}
    for name in kept:
        parameter, reference = parameters.get(name), component.tensors.get(names.get(name, ""))
        if parameter is None or reference is None or parameter.numel() != reference.count:
            shape = None if parameter is None else list(parameter.shape)
            raise UnsupportedCall(f"a network has made {name} {shape}; the engine's has another shape.")
        apply = functools.partial(_instead, parameter)
        found[names[name]] = Patch(state_of(parameter), apply, adapters.get(name, ()))
    return found or NOTHING


def _instead(parameter: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return parameter.detach().reshape(base.shape)
