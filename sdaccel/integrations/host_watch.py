"""Whether a torch module of a WebUI still computes what its checkpoint file says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sdaccel.engine.patch import NOTHING, Patch, Patches
from sdaccel.errors import ModelError
from sdaccel.integrations.watch import ModuleWatch
from sdaccel.models import ldm
from sdaccel.models.tensors import Component

SAMPLES = 16


Kept = Mapping[str, torch.Tensor]
"""Weights that a host has set aside, by name, while networks (LoRA) are merged into those in the module."""


def differs_from_file(component: Component, module: nn.Module, kept: Kept | None = None) -> str | None:
    """How the module's weights differ from those of its file, rounded to its 16 bits or more; None if they do not.

    Compares names, shapes and 16 values of each weight: a merge in memory, another file under the same name, quantized
    weights or added layers show in that. Weights ``kept`` aside count in the place of those in the module.
    """
    live: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **(kept or {})}
    for place in ldm.places(component.name, component.config):
        now, ref = live.pop(place.ldm, None), component.tensors.get(place.name)
        if now is None or ref is None:
            return f"the loaded {component.name} has no {place.ldm}"
        if now.is_meta:
            return f"{place.ldm} is not in memory"
        if now.numel() != ref.count or not now.is_floating_point():
            return f"{place.ldm} is stored as {list(now.shape)} {_dtype(now)}, the file has {list(ref.shape)}"
        if now.element_size() < 2:
            return f"the host holds the {component.name} in {_dtype(now)}, which makes other images than the file"
        count = max(now.numel(), 1)
        places = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64).round().long()
        expected = ref.read().reshape(-1)[places].to(now.dtype).float()
        index = torch.unravel_index(places.to(now.device), now.shape) if now.dim() else ()
        found = now.detach()[index].float().cpu().reshape(-1)
        if not torch.equal(found, expected.reshape(-1)):
            return f"the loaded weights are not those of the file ({place.ldm} first): merged or edited in memory"
    if live:
        return f"the loaded {component.name} has parts that the file has not ({min(live)}): an extension added them"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def patched_part(module: nn.Module) -> str | None:
    """What inside ``module`` is not as its classes define it: a replaced forward, a hook, a foreign class.

    The module's own forward is looked at by `replaced_forward`.
    """
    known = {"torch", "modules", type(module).__module__.split(".")[0]}
    for name, part in module.named_modules():
        kind = type(part)
        if kind.__module__.split(".")[0] not in known:
            return f"{name or 'the module'} has become a {kind.__name__} ({kind.__module__})"
        if part is module:
            continue
        reason = None if _dormant(part) else replaced_forward(part, f"{name}.forward")
        reason = reason or replaced_forward(part, f"{name}._forward", INNER)
        if reason:
            return reason
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{name} has a forward hook"
    return None


INNER = "_forward"
"""What a block's forward of the original layout calls."""


def replaced_forward(module: nn.Module, name: str, method: str = "forward") -> str | None:
    """Whether ``method`` stands on the instance, put there by other code."""
    found = module.__dict__.get(method)
    if found is None or getattr(found, "__func__", None) is getattr(type(module), method, None):
        return None
    return f"{name} has been replaced by {getattr(found, '__module__', None) or type(found).__module__}"


# Where hosts keep their own books about a layer: LoRA backups and names (what a LoRA does shows in the weights), where
# Lightning last put it, what shape it last saw, what ControlNet's extension notes.
BOOKS = (
    "_device",
    "_original_forward",
    "cond_mark",
    "current_h_shape",
    "is_in_high_res_fix",
    "last_z_shape",
    "network_bias_backup",
    "network_current_names",
    "network_layer_name",
    "network_weights_backup",
)


class _Behind:
    """The parameters of a layer as they are without networks. A weight of the watch asks it by key."""

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter | None], watch: HostWatch):
        self.name, self.parameters, self.watch = name, parameters, watch

    def __getitem__(self, key: str) -> torch.Tensor | None:
        kept = self.watch.kept.get(self.name)
        return self.parameters.get(key) if kept is None else kept

    get = __getitem__


class HostWatch(ModuleWatch):
    """A watch that does not take a host's book-keeping for a change of the module, nor networks for an edit."""

    def __init__(self, module: nn.Module, find_kept: Callable[[], Kept]):
        self._find_kept, self.kept = find_kept, find_kept()
        super().__init__(module)
        for weight in self._weights:
            weight._parameters = _Behind(weight.name, weight._parameters, self)  # type: ignore[assignment]
            if weight.name in self.kept:
                weight.remember()

    def _look(self) -> str | None:
        self.kept = self._find_kept()
        for part in self._parts:
            now, then = part.module.__dict__, part._attributes
            for name in BOOKS:
                if name in now:
                    then[name] = now[name]
                else:
                    then.pop(name, None)
            if INNER in now and replaced_forward(part.module, "", INNER) is None:  # put back by who had replaced it
                then[INNER] = now[INNER]
            if _dormant(part.module):
                then["forward"] = now["forward"]
            elif "forward" in then and HYPERTILE in now:
                del then["forward"]
        return super()._look()


HYPERTILE = "__webui_hypertile_params"


def _dormant(module: nn.Module) -> bool:
    """Whether the forward on the instance is HyperTile's, which stays when it is switched off and then does nothing."""
    parameters = module.__dict__.get(HYPERTILE)
    return parameters is not None and not getattr(parameters, "enabled", True) and "forward" in module.__dict__


class Watched:
    """A torch module of the host: compared with its file first, then watched."""

    def __init__(self, component: Component, module: nn.Module, find_kept: Callable[[], Kept] = dict):
        self.module = module
        self.lock = threading.RLock()
        self.component = component
        self._find_kept = find_kept
        self._watch: HostWatch | None = None
        self._due = True
        self._names = {place.ldm: place.name for place in ldm.places(component.name, component.config)}
        self._joined: tuple[Patches, Patches, Patches] = (NOTHING, NOTHING, NOTHING)

    def begin(self) -> None:
        """A generation begins: the next `reason` looks at everything."""
        self._due = True

    def reason(self) -> str | None:
        """Why an engine would not compute what the module computes now."""
        with self.lock:
            if self._watch is None:
                try:
                    reason = patched_part(self.module) or differs_from_file(
                        self.component, self.module, self._find_kept()
                    )
                except ModelError as error:  # the file is gone or another one
                    return str(error)
                if reason is None:
                    self._watch = HostWatch(self.module, self._find_kept)
                    reason = self._watch.reason(careful=True)
                return reason
            due, self._due = self._due, False
            return self._watch.look() if due else self._watch.reason()

    def patches(self, networks: Patches) -> Patches:
        """What makes an engine's weights those of the module at the last `reason`, with ``networks`` upon them.

        The same mapping for the same ``networks`` as long as nothing is edited.
        """
        edits = NOTHING if self._watch is None else self._watch.patches()
        if not edits:
            return networks
        if self._joined[0] is not edits or self._joined[1] is not networks:
            joined = dict(networks)
            for original, edit in edits.items():
                name = self._names[original]
                joined[name] = _upon(edit, networks.get(name))
            self._joined = edits, networks, joined
        return self._joined[2]


def _upon(edit: Patch, network: Patch | None) -> Patch:
    """An edit of a weight of the original layout, which may be a 1×1 convolution elsewhere, and then the network."""

    def apply(base: torch.Tensor) -> torch.Tensor:
        edited = edit.apply(base).reshape(base.shape)
        return edited if network is None else network.apply(edited)

    if network is None:
        return replace(edit, apply=apply)
    return Patch((edit.key, network.key), apply, network.adapters)


ABSENT = object()


@contextmanager
def swapped(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(object, attribute, value or ABSENT): changes attributes of instances, and puts back exactly what was there."""
    before = [(thing, name, thing.__dict__.get(name, ABSENT)) for thing, name, _ in changes]
    try:
        for change in changes:
            _set(*change)
        yield
    finally:
        for change in before:
            _set(*change)


def _set(thing: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        thing.__dict__.pop(name, None)
    else:
        thing.__dict__[name] = value
