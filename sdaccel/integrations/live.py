"""What adapters (PEFT's layers around the module's own) make of weights, as patches for an engine. Needs no peft."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

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


class Wrapped:
    """A module of the model inside adapters' layers, the outermost first."""

    def __init__(self, name: str, layers: Sequence[nn.Module], base: nn.Module):
        self.name = name
        self.base = base
        self._layers = [(layer, names) for layer in layers if (names := active(layer))]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, names in self._layers for name in names))

    def refusal(self) -> str | None:
        """Why no weights give what the layers compute; None if some do."""
        for layer, names in self._layers:
            if not callable(getattr(layer, "merge", None)):
                return f"an adapter is active around {self.name} that cannot be merged ({type(layer).__name__})"
            for part in self._parts(layer, names):
                for module in part.modules() if isinstance(part, nn.Module) else ():
                    if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                        return f"the adapter around {self.name} is in training mode and has dropout"
        return None

    def tensors(self) -> list[Tensor]:
        """All that adapters bring."""
        found: list[Tensor] = []
        for layer, names in self._layers:
            for part in self._parts(layer, names):
                if isinstance(part, nn.Module):
                    found += [*part.parameters(), *part.buffers()]
                elif isinstance(part, Tensor):
                    found.append(part)
        return found

    @staticmethod
    def _parts(layer: nn.Module, names: Iterable[str]) -> list[Any]:
        fields = (*getattr(layer, "adapter_layer_names", ()), *getattr(layer, "other_param_names", ()))
        groups = [group for field in fields if isinstance(group := getattr(layer, field, None), (dict, nn.Module))]
        return [group[name] for group in groups for name in names if name in group]  # type: ignore[operator,index]

    def patches(self, edits: Mapping[str, Patch], sums: Sums, scale: float) -> dict[str, Patch]:
        """Of the weight, and of the bias where it can change. ``edits``: of the module's own parameters by name.

        ``scale`` multiplies all adapters, as ``cross_attention_kwargs`` of diffusers does.
        """
        key = (scale, *(_describe(layer, self._parts(layer, names), names, sums) for layer, names in self._layers))
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
        for layer, names in self._layers:
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
        device = next((tensor.device for tensor in self.tensors()), value.device)
        values = {name: p.detach() for name, p in self.base._parameters.items() if p is not None} | {parameter: value}
        held = {name: nn.Parameter(_exact(each.to(device)), requires_grad=False) for name, each in values.items()}
        inner = _shell(self.base, _parameters={**self.base._parameters, **held})
        for layer, names in reversed(self._layers):
            outer = _shell(
                layer, _modules={**layer._modules, "base_layer": inner}, merged_adapters=[], _caches={}, training=False
            )
            if scale != 1:
                outer.__dict__["scaling"] = {name: value * scale for name, value in layer.scaling.items()}  # type: ignore[union-attr,operator]
            try:
                outer.merge(adapter_names=list(names))  # type: ignore[operator]
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
                reason = str(error).split("\n")[0].removesuffix(".")
                raise UnsupportedCall(f"{', '.join(names)} around {self.name} cannot be merged: {reason}.") from error
        return inner._parameters[parameter].data  # type: ignore[union-attr]


_Term = tuple[Tensor, Tensor, float]
"""A, B and the scale of B A"""


def _describe(layer: nn.Module, parts: Iterable[Any], names: Sequence[str], sums: Sums) -> Hashable:
    tensors: list[Hashable] = []
    plain: list[Hashable] = []
    for part in parts:
        if isinstance(part, nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                tensors.append((tuple(tensor.shape), tensor.dtype, sums(tensor)))
        elif isinstance(part, Tensor):
            tensors.append((tuple(part.shape), part.dtype, sums(part)))
        else:
            plain.append(repr(part))
    return type(layer), tuple(names), tuple(plain), tuple(tensors)


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
