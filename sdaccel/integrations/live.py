"""What adapters (PEFT's layers around the module's own) make of weights, as patches for an engine. Needs no peft."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdaccel.engine.patch import Patch
from sdaccel.errors import UnsupportedCall

Sums = Callable[[Tensor], int]
"""Of a tensor's bits, whatever it has cost to get them"""


def active(layer: nn.Module) -> list[str]:
    """Names of a layer's adapters that change its output now."""
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return []
    scaling = getattr(layer, "scaling", None)
    if not isinstance(scaling, dict):
        return list(layer.active_adapters)  # type: ignore[arg-type]
    # DoRA and its kin change the output even at scale 0.
    variants = getattr(layer, "lora_variant", None) or {}
    return [
        name
        for name in layer.active_adapters  # type: ignore[union-attr]
        if name in scaling and (scaling[name] != 0 or name in variants)
    ]


class _Active(NamedTuple):
    """One of PEFT's layers, its adapters that are active, and what it keeps for them: modules, tensors and numbers."""

    layer: nn.Module
    names: tuple[str, ...]
    kept: tuple[Any, ...]


class Wrapped:
    """A module of the model inside adapters' layers, the outermost first, as they are when it is made."""

    def __init__(self, name: str, layers: Sequence[nn.Module], base: nn.Module):
        self.name = name
        self.base = base
        self.layers = list(layers)
        self._seen = list(map(_glimpse, layers))
        self._active = [
            _Active(layer, names, tuple(_kept(layer, names))) for layer in layers if (names := tuple(active(layer)))
        ]
        self.adapters = tuple(dict.fromkeys(name for each in self._active for name in each.names))
        self.tensors = [tensor for each in self._active for part in each.kept for tensor in _tensors(part)]
        """All that adapters bring."""
        self._description = [
            (
                type(each.layer),
                each.names,
                [repr(part) for part in each.kept if not isinstance(part, (nn.Module, Tensor))],
            )
            for each in self._active
        ]

    def stands(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the layers, and as they were but for what tensors hold. Asked in every generation."""
        try:
            return self.layers == layers and self._seen == list(map(_glimpse, layers))
        except (RuntimeError, ValueError, TypeError):  # tensors do not compare to one truth
            return False

    def refusal(self) -> str | None:
        """Why no weights give what the layers compute; None if some do."""
        for layer, _, kept in self._active:
            if not callable(getattr(layer, "merge", None)):
                return f"an adapter is active around {self.name} that cannot be merged ({type(layer).__name__})"
            if any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in kept):
                return f"the adapter around {self.name} is in training mode and has dropout"
        return None

    def key(self, sums: Sums) -> Any:
        return (
            self._description,
            [(tensor.shape, tensor.dtype) for tensor in self.tensors],
            list(map(sums, self.tensors)),
        )

    def patches(self, edits: Mapping[str, Patch], sums: Sums, scale: float) -> dict[str, Patch]:
        """Of the weight, and of the bias where it can change. ``edits``: of the module's own parameters by name.

        ``scale`` multiplies all adapters, as ``cross_attention_kwargs`` of diffusers does.
        """
        key = (scale, repr(self.key(sums)))
        terms = self._low_rank(scale)
        found = {}
        for parameter, value in self.base._parameters.items():
            if value is None or (terms is not None and parameter != "weight"):
                continue
            name = f"{self.name}.{parameter}" if self.name else parameter
            edit = edits.get(name)
            names = (*self.adapters, *(edit.adapters if edit else ()))
            found[name] = Patch((edit.key if edit else None, *key), self._applied(parameter, edit, terms, scale), names)
        return found

    def _applied(
        self, parameter: str, edit: Patch | None, terms: Sequence[_Term] | None, scale: float
    ) -> Callable[[Tensor], Tensor]:
        def apply(base: Tensor) -> Tensor:
            value = base if edit is None else edit.apply(base)
            return self._merged(parameter, value, scale) if terms is None else _with_low_rank(value, terms)

        return apply

    def _low_rank(self, scale: float) -> list[_Term] | None:
        """The adapters as pairs of factors, if they are all plain LoRA."""
        terms = []
        for layer, names, _ in self._active:
            for name in names:
                first, second = (getattr(layer, field, {}) for field in ("lora_A", "lora_B"))
                plain = (
                    isinstance(self.base, (nn.Linear, nn.Conv2d))
                    and getattr(self.base, "groups", 1) == 1
                    and name in first
                    and name in second
                    and not getattr(layer, "fan_in_fan_out", False)
                    and name not in (getattr(layer, "lora_variant", None) or {})
                    and not (getattr(layer, "lora_bias", None) or {}).get(name)
                    and type(first[name]) is type(second[name]) is type(self.base)
                    and getattr(second[name], "kernel_size", (1, 1)) == (1, 1)
                )
                if not plain:
                    return None
                terms.append((first[name].weight, second[name].weight, scale * layer.scaling[name]))  # type: ignore[index]
        return terms

    def _merged(self, parameter: str, value: Tensor, scale: float) -> Tensor:
        """A parameter after the adapters' own ``merge``, in float32, on shells of the layers: they stay as they are."""
        device = next((tensor.device for tensor in self.tensors), value.device)
        values = {name: p.detach() for name, p in self.base._parameters.items() if p is not None} | {parameter: value}
        held = {name: nn.Parameter(_exact(each.to(device)), requires_grad=False) for name, each in values.items()}
        inner = _shell(self.base, _parameters={**self.base._parameters, **held})
        for layer, names, _ in reversed(self._active):
            # Copies of the groups, since LayerNorm tuning trades its layer for the base.
            parts = [(key, part) for key, part in layer._modules.items() if part is not None]
            groups = {key: _shell(part, _modules=dict(part._modules)) for key, part in parts}
            outer = _shell(
                layer, _modules={**groups, "base_layer": inner}, merged_adapters=[], _caches={}, training=False
            )
            if scale != 1:
                scaling = getattr(layer, "scaling", None)
                if not isinstance(scaling, dict):
                    raise UnsupportedCall(
                        f"{', '.join(names)} around {self.name} has no scale that a call could change."
                    )
                outer.__dict__["scaling"] = {name: value * scale for name, value in scaling.items()}
            try:
                outer.merge(adapter_names=list(names))  # type: ignore[operator]
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
                reason = str(error).split("\n")[0].removesuffix(".")
                raise UnsupportedCall(f"{', '.join(names)} around {self.name} cannot be merged: {reason}.") from error
            inner = outer._modules["base_layer"]  # type: ignore[assignment]
        return inner._parameters[parameter].data  # type: ignore[union-attr]


_Term = tuple[Tensor, Tensor, float]
"""A, B and the scale of B A"""


@functools.cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    return (*getattr(kind, "adapter_layer_names", ()), *getattr(kind, "other_param_names", ()))


def _glimpse(layer: nn.Module) -> list[Any]:
    """Everything about a layer that decides what it computes, but for what tensors hold."""
    state, modules = layer.__dict__, layer._modules
    found: list[Any] = [dict(modules), state.get("_active_adapter"), state.get("_disable_adapters")]
    found.append(list(state.get("merged_adapters") or ()))
    for field in _fields(layer.__class__):
        group = modules.get(field)
        if group is not None:
            found += [dict(group._modules), dict(group._parameters), dict(group._buffers)]
        else:
            value = state.get(field)
            found.append(dict(value) if isinstance(value, dict) else value)
    variants = state.get("lora_variant")
    return [*found, dict(variants) if isinstance(variants, dict) else variants]


def _kept(layer: nn.Module, names: Sequence[str]) -> Iterator[Any]:
    for field in _fields(layer.__class__):
        group = layer._modules.get(field)
        found: Any = (
            layer.__dict__.get(field) if group is None else group._modules or group._parameters or group._buffers
        )
        if isinstance(found, dict):
            yield from (found[name] for name in names if name in found)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        for group in (part._parameters, part._buffers):
            yield from (tensor for tensor in group.values() if tensor is not None)
        for child in part._modules.values():
            yield from _tensors(child)


def _exact(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value.clone()


def _shell(module: nn.Module, **changed: Any) -> nn.Module:
    shell = object.__new__(type(module))
    shell.__dict__.update({**module.__dict__, **changed})
    return shell


def _with_low_rank(base: Tensor, terms: Sequence[_Term]) -> Tensor:
    """W + Σ s·B·A (arXiv:2106.09685), rounded once to W's type where one term is of that type too."""
    image = base.dim() == 4
    flat = _rows(base) if image else base
    same = len(terms) == 1 and all(factor.dtype == base.dtype for factor in terms[0][:2])
    result = flat if same else flat.float()
    for first, second, scale in terms:
        down, up = (_rows(first), second.flatten(1)) if image else (first, second)
        down, up = (factor.detach().to(base.device, result.dtype) for factor in (down, up))
        result = torch.addmm(result, up, down, alpha=scale)
    if not image:
        return result
    out, into, height, width = base.shape
    return result.reshape(out, height, width, into).permute(0, 3, 1, 2)


def _rows(weight: Tensor) -> Tensor:
    """[O, I, kh, kw] → [O, kh·kw·I], a view where channels are innermost."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
