"""Notices when a torch module no longer is what its engine was built from.

Adapters, FreeU, attention processors, hooks, replaced classes, edited weights: an engine knows nothing of them, so a
call on such a module runs in torch and says why. Looks only at attributes; needs neither diffusers nor peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SAMPLES = 16

# They compute what plain scaled-dot-product attention computes; any other processor may not.
PLAIN_PROCESSORS = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "FusedAttnProcessor2_0",
        "SlicedAttnProcessor",
        "XFormersAttnProcessor",
        "XLAFlashAttnProcessor2_0",
    }
)
_FREEU = ("s1", "s2", "b1", "b2")


class ModuleWatch:
    """Watches one module from the moment it is made; `reason` is cheap enough to ask at every call."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._foreign_forward = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")
        self._weights = [
            _Weight(name.replace(".base_layer.", "."), parameter)
            for name, parameter in module.named_parameters()
            if not _belongs_to_adapter(name)
        ]
        self._look_at_tree()

    def adapters(self) -> list[str]:
        """Names of the adapters (PEFT) that change the output now."""
        names: set[str] = set()
        for layer in self._adapter_layers:
            names.update(getattr(layer, "merged_adapters", ()))
            if not getattr(layer, "disable_adapters", False):
                scaling = getattr(layer, "scaling", {})
                names.update(name for name in layer.active_adapters if scaling.get(name, 1.0) != 0)
        return sorted(names)

    def reason(self) -> str | None:
        """Why the engine would not compute what the module computes; None if it would."""
        if self._foreign_forward:
            return "forward of the module had been replaced before accelerate() (a patch or torch.compile)"
        changed = self._tree_changed()
        if changed:
            self._look_at_tree()
        adapters = self.adapters() if self._adapter_layers else []
        if adapters:
            return f"adapters are active that the engine does not hold: {', '.join(adapters)}"
        return self._patched() or self._edited()

    def look_closer(self) -> str | None:
        """Like `reason`, and compares samples of every weight: some edits leave no other trace."""
        for weight in self._weights:
            weight.trust_nothing()
        return self.reason()

    # the tree of modules

    def _look_at_tree(self) -> None:
        parts = list(self.module.modules())
        self._tree = [(part, type(part), tuple(part._modules.values())) for part in parts]
        self._adapter_layers = [p for p in parts if hasattr(p, "active_adapters") and hasattr(p, "base_layer")]
        self._attentions = [part for part in parts if hasattr(part, "processor")]
        self._dropouts = [part for part in parts if isinstance(part, nn.Dropout) and part.p > 0]
        self._freeu_blocks = list(getattr(self.module, "up_blocks", ()))
        self._names = {id(part): name for name, part in self.module.named_modules()}

    def _tree_changed(self) -> bool:
        return any(tuple(part._modules.values()) != children for part, _, children in self._tree)

    def _patched(self) -> str | None:
        root = self.module
        for part, kind, _ in self._tree:
            if part.__class__ is not kind:
                return f"{self._name(part)} has become a {part.__class__.__name__}"
            if part._forward_hooks or part._forward_pre_hooks:
                return f"{self._name(part)} has a forward hook"
            if "forward" in part.__dict__ and part is not root:
                return f"forward of {self._name(part)} has been replaced"
        for part in self._attentions:
            kind_name = type(part.processor).__name__
            if kind_name not in PLAIN_PROCESSORS:
                return f"the attention processor {kind_name} is set"
        for block in self._freeu_blocks:
            if all(getattr(block, name, None) for name in _FREEU):
                return "FreeU is on"
        if self._dropouts and root.training:
            return "the module is in training mode and has dropout"
        return None

    def _name(self, part: nn.Module) -> str:
        return self._names.get(id(part)) or type(part).__name__

    # the weights

    def _edited(self) -> str | None:
        edited = [weight for weight in self._weights if weight.edited()]
        if not edited:
            return None
        first = edited[0]
        if tuple(first.parameter.shape) != first.shape:
            return f"{first.name} is {list(first.parameter.shape)} now, the engine holds {list(first.shape)}"
        return f"{len(edited)} weights differ from those of the engine, {first.name} first (fused adapters or an edit)"


class _Weight:
    """One parameter, with a few of its values to compare with."""

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name = name
        self.parameter = parameter
        self.shape = tuple(parameter.shape)
        count = max(parameter.numel(), 1)
        flat = torch.linspace(0, count - 1, min(count, SAMPLES), dtype=torch.float64).round().long()
        self._index = torch.unravel_index(flat, self.shape) if self.shape else ()
        self._values = self._sample()
        self._seen: tuple[Any, ...] | None = self._state()

    def trust_nothing(self) -> None:
        self._seen = None

    def edited(self) -> bool:
        if self._state() == self._seen:
            return False
        if tuple(self.parameter.shape) != self.shape:
            return True
        if not self._same():
            return True
        self._seen = self._state()
        return False

    def _state(self) -> tuple[Any, ...]:
        return self.parameter.data_ptr(), self.parameter._version, self.parameter.dtype

    def _sample(self) -> torch.Tensor:
        values = self.parameter.detach()
        return (values[self._index] if self.shape else values).to("cpu", torch.float32)

    def _same(self) -> bool:
        """Whether the values are the recorded ones, or those rounded by a trip through half precision."""
        now = self._sample()
        return any(torch.equal(self._values.to(dtype), now.to(dtype)) for dtype in _roundings(self.parameter.dtype))


def _roundings(dtype: torch.dtype) -> Iterator[torch.dtype]:
    if dtype not in (torch.float16, torch.bfloat16):
        yield dtype
    yield torch.float16
    yield torch.bfloat16


def _belongs_to_adapter(name: str) -> bool:
    return any(part.startswith(("lora_", "hada_", "lokr_", "oft_", "boft_")) for part in name.split("."))
