"""Notices when a torch module no longer is what its engine was built from.

Other weights (edited ones, adapters around layers) are patches that an engine takes. Of FreeU, attention processors,
hooks, replaced classes and attributes it knows nothing, so a call on such a module runs in torch and says why. Needs
neither diffusers nor peft.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sdaccel.backends.cuda.fingerprint import fingerprints, places, readable
from sdaccel.engine.patch import NOTHING, Patch, Patches
from sdaccel.errors import BackendError
from sdaccel.integrations.live import Wrapped, active

# The share of the time that may go into looking at everything, as much into glances and into reading weights whole.
SHARE = 1 / 400
# A glance looks at every so many'th weight.
STRIDE = 64

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

# Attributes that may change without changing what a module computes, or that are looked at on their own.
_FREE = frozenset(
    {
        *_FREEU,
        "training",
        "num_embeddings",  # the shape of the weight says it better
        "processor",
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "fused_projections",
        "is_quantized",
        "_is_hf_initialized",
        "_attention_backend",
        "_output_capturing_hooks_installed",
    }
)
# The same, of the whole component: where hooks and swaps sit, and what belongs to its host.
_FREE_OF_ROOT = frozenset(
    {
        "forward",
        "decode",
        "encode",
        "_old_forward",
        "_hf_hook",
        "_internal_dict",
        "_compiled_call_impl",
        "_hf_peft_config_loaded",
        "peft_config",
        "vocab_size",
        "use_slicing",
        "use_tiling",
        "tile_latent_min_size",
        "tile_sample_min_size",
        "tile_overlap_factor",
        "_skip_layerwise_casting_patterns",
    }
)
# Projections fused for speed out of weights that are here already.
_FUSED = frozenset({"to_qkv", "to_kv"})


# Attributes of these types are compared by value.
_PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))

_OF_EMBEDDINGS = ("embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class ModuleWatch:
    """Watches one module from the moment it is made.

    `reason` is asked at every call. A look at every module and weight takes milliseconds (they lie all over the
    memory), so for a while after one it only sees the module's own class and attributes and new hooks, and glances now
    and then at attention, FreeU and a few weights. Host programs change the rest between generations, each of which
    begins with `look_closer`, or before its first call (`unsettle`), or in code around the calls (``careful``).

    plain: the module as its class makes it, which is what the engine computes. Patches that ``module`` has from the
    start on show in what differs.
    """

    def __init__(self, module: nn.Module, plain: nn.Module | None = None):
        self.module = module
        self.lock = threading.RLock()
        """Held while the module runs: calls from several threads run one after the other."""
        self.device, self.dtype = "", torch.float32
        """Of its weights, at the last look."""
        self._foreign = _foreign_forward(module)
        self._parts = [_Part(name, part) for name, part in _own_parts(module)]
        self._by_name = {part.name: part for part in self._parts}
        self._root = self._parts[0]
        if plain is not None:
            self._foreign = self._foreign or _overridden(module, plain)
            for name, part in _own_parts(plain):
                if name and name in self._by_name:
                    self._by_name[name].expect(part)
        self._weights = [weight for part in self._parts for weight in part.weights()]
        self._classes = _methods(self._parts)
        if plain is not None:
            self._foreign = self._foreign or _exchanged(self._classes)
        self._adapter_layers: dict[str, list[nn.Module]] = {}
        """Around a module of our own, by its name, the outermost first."""
        self._changed: list[_Part] = []
        self._around: list[Wrapped] = []
        self._wrapped: list[Wrapped] = []
        """Those of them that change something."""
        self.known: Mapping[str, Sequence[str]] = {}
        """Weights that our own program has written adapters into, and their names."""
        self.edits: list[str] = []
        """Names of weights that differ from the engine's, and not by adapters."""
        self._edits: dict[str, Patch] = {}
        self._patches: dict[float, Patches] = {}
        self._state: Any = ([], [])
        """What the patches are made of."""
        self._sums = _Sums()
        self._attentions = [part for part in self._parts if hasattr(part.module, "processor")]
        self._blocks = [block.__dict__ for block in getattr(module, "up_blocks", ())]
        read_at_once(self._weights)
        for weight in self._weights:
            weight.remember()
        self._looked = self._looked_closer = self._glanced = -math.inf
        self._cost = self._closer_cost = self._glance_cost = 0.0
        self._settled = False
        """The last look found nothing different inside the module: a glance will do for a while."""
        self._root_state: dict[str, Any] = {}
        """The module's own attributes at the last look: swaps and hooks among them, which it is free to have."""
        self.look_closer()

    def adapters(self) -> list[str]:
        """Names of the adapters (PEFT) that change the output now, fused ones included."""
        names: set[str] = set()
        for layer in (layer for layers in self._adapter_layers.values() for layer in layers):
            names.update(getattr(layer, "merged_adapters", ()))
            names.update(active(layer))
        return sorted(names)

    def patches(self, scale: float = 1.0) -> Patches:
        """What makes an engine's weights those of the module, as they were at the last look.

        The same mapping as long as nothing changes. ``scale`` multiplies all adapters.
        """
        if scale not in self._patches:
            self._patches[scale] = self._patches_now(scale)
        return self._patches[scale]

    def reason(self, *, careful: bool = False) -> str | None:
        """Why the engine would not compute what the module computes; None if it would.

        careful: looks at everything, because other code may have run since the last call.
        """
        if self._settled and not careful:
            now = time.perf_counter()
            if (
                now - self._looked < self._cost / SHARE
                and RemovableHandle.next_id == self._hook_count
                and not self._root.differs(self._root_state, self._root.accepted)
                and (now - self._glanced < self._glance_cost / SHARE or not self._glance())
            ):
                return None
        return self._look()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's own, by the names they had when the watch began: without adapters' wrappers."""
        found = {weight.name: weight.now() for weight in self._weights}
        return {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}

    def share(self, names: Collection[str]) -> None:
        """Takes the memory that these weights are in for the engine's own: what is edited there, it computes with."""
        for weight in self._weights:
            if weight.name in names:
                weight.share()

    def unshare(self, names: Collection[str]) -> None:
        """The engine has memory of its own for these weights now."""
        for weight in self._weights:
            if weight.name in names:
                weight.unshare()

    def unsettle(self) -> None:
        """Makes the next `reason` look at everything."""
        self._settled = False

    def look_closer(self) -> str | None:
        """Like `reason`, and reads every weight: edits in place through ``.data`` leave no other trace."""
        start = time.perf_counter()
        for weight in self._weights:
            weight.trust_nothing()
        self._sums.trust_nothing()
        reason = self._look()
        self._looked_closer = time.perf_counter()
        self._closer_cost = self._looked_closer - start
        return reason

    def look(self) -> str | None:
        """For calls outside of a generation: `look_closer` if the last one is long enough ago, else a look at all."""
        due = time.perf_counter() - self._looked_closer > self._closer_cost / SHARE
        return self.look_closer() if due else self.reason(careful=True)

    def _look(self) -> str | None:
        start = time.perf_counter()
        self._hook_count = RemovableHandle.next_id
        before, self._changed = self._changed, [part for part in self._parts if part.changed()]
        reason = self._foreign or self._patched() or self._adapted() or self._edited()
        for part in (*before, *self._changed):
            part.accept()
        self._settled = reason is None and all(part is self._root or part.only_wrapped() for part in self._changed)
        self._renew_patches(reason)
        self._root_state = dict(self.module.__dict__)
        first = self._weights[0].now()
        if first is not None:
            self.device, self.dtype = first.device.type, first.dtype
        self._looked = time.perf_counter()
        self._cost = max(self._looked - start, 0.9 * self._cost)
        return reason

    def _glance(self) -> bool:
        """Whether something caught the eye."""
        start = time.perf_counter()
        caught = (
            any(state.get("s1") for state in self._blocks)
            or any(part.changed_since() for part in self._attentions)
            or any(weight.touched() for weight in self._weights[::STRIDE])
        )
        self._glanced = time.perf_counter()
        self._glance_cost = max(self._glanced - start, 0.9 * self._glance_cost)
        return caught

    # the tree of modules

    def _patched(self) -> str | None:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "a forward hook for all modules is set"
        for owner, name, method in self._classes:
            if getattr(owner, name) is not method:
                return f"{name} of the class {owner.__name__} has been replaced"
        self._adapter_layers = {}
        for part in self._changed:
            if part.around is None or part.changed_since():
                reason = self._look_into(part)
                if reason:
                    return reason
            self._adapter_layers.update(part.around or {})
        if self.module.training:
            for part in self._parts:
                if part.drops_out():
                    return "the module is in training mode and has dropout"
        return None

    def _look_into(self, part: _Part) -> str | None:
        part.around = None
        for key, known, new in part.replaced_embeddings():
            self._take_for(part, key, known, new)
        around: dict[str, list[nn.Module]] = {}
        reason = part.reason(part is self._root, around)
        if reason is None:
            part.around = around
        return reason

    def _take_for(self, parent: _Part, key: str, known: nn.Module, new: nn.Module) -> None:
        """A table of embeddings that stands where another stood: vocabularies grow and shrink so."""
        parent.children[key] = new
        for part in self._parts:
            if part.module is known:
                for weight in self._weights:
                    weight.move(part.parameters, new._parameters)
                part.become(new)

    def _adapted(self) -> str | None:
        known = {wrapped.name: wrapped for wrapped in self._around}
        self._around = []
        for name, layers in self._adapter_layers.items():
            found = known.get(name)
            if found is None or not found.stands(layers):
                found = Wrapped(name, layers, self._by_name[name].module)
            self._around.append(found)
        self._wrapped = [wrapped for wrapped in self._around if wrapped.adapters]
        return next((reason for wrapped in self._wrapped if (reason := wrapped.refusal())), None)

    # the weights

    def _edited(self) -> str | None:
        suspects = [weight for weight in self._weights if weight.suspect()]
        if not suspects:
            return None
        read_at_once(suspects)
        findings = [(weight, weight.compare()) for weight in suspects]
        rounded = any(finding == ROUNDED for _, finding in findings)
        edited = []
        for weight, finding in findings:
            if finding == EDITED or (finding == UNCLEAR and not rounded):
                weight.reject()
                edited.append(weight)
            else:
                weight.accept()
        for weight in edited:
            now = weight.now()
            if now is None:
                return f"{weight.name} is gone"
            if now.is_meta:
                return f"{weight.name} is not in memory (offloaded)"
            if now.shape[1:] != weight.shape[1:] or now.dim() != len(weight.shape):
                return f"{weight.name} is {list(now.shape)} now, the engine holds {list(weight.shape)}"
        return None

    # what differs, as patches

    def _renew_patches(self, reason: str | None) -> None:
        if reason is not None:
            return
        edited = [weight for weight in self._weights if weight.edited()]
        self._sums.read([tensor for wrapped in self._wrapped for tensor in wrapped.tensors])
        state = (
            [(weight.name, weight.content, self._merged_around(weight.name)) for weight in edited],
            [(wrapped.name, wrapped.key(self._sums)) for wrapped in self._wrapped],
        )
        if state != self._state:
            self._state, self._patches = state, {}
            self._edits = {weight.name: weight.patch(self._merged_around(weight.name)) for weight in edited}
            self.edits = [name for name, patch in self._edits.items() if not patch.adapters]

    def _patches_now(self, scale: float) -> Patches:
        if not self._edits and not self._wrapped:
            return NOTHING
        found: dict[str, Patch] = dict(self._edits)
        for wrapped in self._wrapped:
            found.update(wrapped.patches(self._edits, self._sums, scale))
        return found

    def _merged_around(self, weight: str) -> tuple[str, ...]:
        known = self.known.get(weight)
        if known:
            return tuple(known)
        layers = self._adapter_layers.get(weight.rpartition(".")[0], ())
        return tuple(dict.fromkeys(name for layer in layers for name in getattr(layer, "merged_adapters", ())))


# --- modules ----------------------------------------------------------------------------------------------------------


def _foreign_forward(module: nn.Module) -> str | None:
    """Why the engine cannot stand for ``module`` from the start: it had another forward already."""
    found = module.__dict__.get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    own = found is None or getattr(found, "__func__", None) is type(module).forward
    if own and module.__dict__.get("_compiled_call_impl") is None:
        return None
    return "forward of the module had been replaced before accelerate() (a patch or torch.compile)"


def _overridden(module: nn.Module, plain: nn.Module) -> str | None:
    """Why the engine cannot stand for ``module``: its class computes something else."""
    own, known = type(module), type(plain)
    names = (
        name for name in ("forward", "decode", "encode") if getattr(own, name, None) is not getattr(known, name, None)
    )
    return next((f"the class {own.__name__} has a {name} other than {known.__name__}'s" for name in names), None)


def _base(module: nn.Module | None, layers: list[nn.Module] | None = None) -> nn.Module | None:
    """The layer inside an adapter's wrappers, which are added to ``layers``."""
    while isinstance(module, nn.Module) and isinstance(getattr(module, "base_layer", None), nn.Module):
        if not hasattr(module, "active_adapters"):
            break
        if layers is not None:
            layers.append(module)
        module = module.base_layer  # type: ignore[assignment]
    return module


def _own_parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``module`` and all modules in it by name, without adapters."""
    yield name, module
    for key, child in module._modules.items():
        base = _base(child)
        if base is not None:
            yield from _own_parts(base, f"{name}.{key}" if name else key)


def _methods(parts: list[_Part]) -> list[tuple[type, str, Any]]:
    """(class, method name, function) of everything that runs when the module runs."""
    found = {(part.kind, "forward") for part in parts}
    found |= {(type(part.module.processor), "__call__") for part in parts if hasattr(part.module, "processor")}
    return [(owner, name, getattr(owner, name)) for owner, name in found if hasattr(owner, name)]


def _exchanged(methods: Sequence[tuple[type, str, Any]]) -> str | None:
    """The first that another program has put into a class of diffusers, transformers or torch."""
    libraries = ("diffusers", "transformers", "torch")
    for owner, name, function in methods:
        origins = (getattr(each, "__module__", None) or "" for each in (owner, function))
        known, made = (origin.partition(".")[0] in libraries for origin in origins)
        if known and not made:
            return f"{name} of the class {owner.__name__} had been replaced before accelerate()"
    return None


def _changes_results(hook: Any) -> bool:
    """All hooks may, but those by which transformers only collects hidden states."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _is_plain(processor: Any) -> bool:
    kind = type(processor)
    return kind.__name__ in PLAIN_PROCESSORS and kind.__module__.startswith("diffusers.")


class _Part:
    """One module: its class, attributes, children and parameters as they were."""

    __slots__ = (
        "_attributes",
        "_hooks",
        "_parameters",
        "_pre_hooks",
        "_special",
        "accepted",
        "around",
        "children",
        "kind",
        "module",
        "name",
    )

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.kind = type(module)
        self._attributes = dict(module.__dict__)
        self.children = {key: _base(child) for key, child in module._modules.items()}
        self.around: dict[str, list[nn.Module]] | None = None
        """Adapters around children at the last look, if nothing was against an engine."""
        self.accepted: dict[str, nn.Module | None] = self.children  # type: ignore[assignment]
        """The children at the last look, adapters around them or not."""
        self._parameters = module._parameters
        self._hooks = module._forward_hooks
        self._pre_hooks = module._forward_pre_hooks
        # Not what the engine computes from the start on.
        processor = getattr(module, "processor", None)
        self._special = (processor is not None and not _is_plain(processor)) or bool(getattr(module, "s1", None))

    def expect(self, plain: nn.Module) -> None:
        """Takes class and attributes of ``plain`` for those that an engine stands for."""
        self.kind = type(plain)
        if getattr(self._attributes.get("forward"), "__func__", None) is not self.kind.forward:
            self._attributes.pop("forward", None)
        for key, value in plain.__dict__.items():
            if isinstance(value, _PLAIN) and isinstance(self._attributes.get(key), _PLAIN):
                self._attributes[key] = value

    @property
    def parameters(self) -> dict[str, nn.Parameter | None]:
        return self._parameters

    def replaced_embeddings(self) -> list[tuple[str, nn.Module, nn.Module]]:
        """(name, the child that was, the child that is)"""
        found: list[tuple[str, nn.Module, nn.Module]] = []
        for key, known in self.children.items():
            new = self.module._modules.get(key)
            if not isinstance(known, nn.Embedding) or not isinstance(new, nn.Embedding) or new is known:
                continue
            plain = type(known) is type(new) is nn.Embedding and not (new._forward_hooks or new._forward_pre_hooks)
            if plain and all(getattr(known, name) == getattr(new, name) for name in _OF_EMBEDDINGS):
                found.append((key, known, new))
        return found

    def become(self, module: nn.Module) -> None:
        self.module = module
        self._attributes = dict(module.__dict__)
        self._parameters = module._parameters
        self._hooks, self._pre_hooks = module._forward_hooks, module._forward_pre_hooks

    def weights(self) -> list[_Weight]:
        return [
            _Weight(f"{self.name}.{key}" if self.name else key, self._parameters, key)
            for key, parameter in self._parameters.items()
            if parameter is not None
        ]

    def changed(self) -> bool:
        """Whether anything differs."""
        return self.differs(self._attributes) or bool(self._hooks) or bool(self._pre_hooks) or self._special

    def changed_since(self) -> bool:
        """Whether anything differs from the last look."""
        return (
            self.differs(self._attributes, self.accepted) or bool(self._hooks) or bool(self._pre_hooks) or self._special
        )

    def accept(self) -> None:
        self.accepted = dict(self.module._modules)

    def only_wrapped(self) -> bool:
        """Whether adapters around children are all that differed at the last look."""
        return self.around is not None and not self.changed_since()

    def differs(self, attributes: dict[str, Any], children: Mapping[str, nn.Module | None] | None = None) -> bool:
        """Whether class, children or ``attributes`` are others. Values that are the same object compare at once."""
        module = self.module
        children = self.children if children is None else children
        try:
            return module.__class__ is not self.kind or module.__dict__ != attributes or module._modules != children
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays do not compare to one truth
            return True

    def reason(self, root: bool, around: dict[str, list[nn.Module]]) -> str | None:
        """What of the differences matters. Adapters around children are collected in ``around``."""
        module, name = self.module, self.name or type(self.module).__name__
        if module.__class__ is not self.kind:
            return f"{name} has become a {module.__class__.__name__}"
        # A hook on the whole component runs around the engine as around torch.
        if not root and any(
            map(_changes_results, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
        ):
            return f"{name} has a forward hook"
        for key, child in module._modules.items():
            known = self.children.get(key)
            if child is known or key == "processor" or (known is None and key in _FUSED):
                continue
            layers: list[nn.Module] = []
            if _base(child, layers) is not known:
                return f"{name}.{key} has been {'added' if known is None else 'replaced'}"
            around[f"{self.name}.{key}" if self.name else key] = layers
        for key, child in self.children.items():
            if child is not None and key != "processor" and key not in module._modules:
                return f"{name}.{key} has been removed"
        processor = getattr(module, "processor", None)
        if processor is not None and not _is_plain(processor):
            return f"the attention processor {type(processor).__name__} is set"
        if all(getattr(module, scale, None) for scale in _FREEU):
            return "FreeU is on"
        return self._attribute_changed(name, _FREE | _FREE_OF_ROOT if root else _FREE)

    def _attribute_changed(self, name: str, free: frozenset[str]) -> str | None:
        if not self.differs(self._attributes, self.module._modules):
            return None
        now, then = self.module.__dict__, self._attributes
        for key in sorted(now.keys() | then.keys(), key=lambda key: (key.startswith("_"), key)):
            if key in free or (key in now and key in then and now[key] is then[key]):
                continue
            if key not in now:
                if then[key] is None and self.module._modules.get(key) is None:
                    continue
                return f"{name} has lost its attribute {key}"
            if key not in then and not hasattr(self.kind, key):
                continue  # the class knows nothing of it
            if key == "forward" and getattr(now[key], "__func__", None) is self.kind.forward:
                continue
            plain = isinstance(now[key], _PLAIN)
            if plain and key in then and type(now[key]) is type(then[key]) and now[key] == then[key]:
                continue
            return f"{key} of {name} has been replaced"
        return None

    def drops_out(self) -> bool:
        rate = self.module.p if isinstance(self.module, nn.Dropout) else self._attributes.get("dropout", 0.0)
        return self.module.training and isinstance(rate, float) and rate > 0


# --- weights ----------------------------------------------------------------------------------------------------------

SAME, ROUNDED, EDITED = "same", "rounded", "edited"
UNCLEAR = "unclear"
"""Other bits under the same samples: rounded if the rest of the module was, else edited."""


class _Weight:
    """One parameter, found by its name in its module: a sum over its bits and a few of its values to compare with.

    A trip through half precision rounds values; that is no edit, since the engine holds the exact ones.
    """

    __slots__ = (
        "_bits",
        "_count",
        "_finding",
        "_forms",
        "_index",
        "_key",
        "_known",
        "_last",
        "_now",
        "_parameters",
        "_reading",
        "_seen",
        "_shared",
        "_sum",
        "_values",
        "name",
        "shape",
    )

    _finding: str

    def __init__(self, name: str, parameters: dict[str, nn.Parameter | None], key: str):
        self.name = name
        self._parameters = parameters
        self._key = key
        self._shared: int | None = None
        self._seen: tuple[Any, ...] | None = None
        self._reading: tuple[int, bytes] | None = None
        """Sum and samples of the present values, where they have been read already."""
        self._forms: frozenset[bytes] | None = None
        parameter = parameters[key]
        assert parameter is not None
        self.shape = tuple(parameter.shape)
        flat = torch.from_numpy(places(parameter.numel()))
        self._count = len(flat)
        self._index = torch.unravel_index(flat, self.shape) if self.shape else ()

    def remember(self) -> None:
        parameter = self._parameters[self._key]
        assert parameter is not None
        total, self._now = self._read(parameter)
        self._values = self._now
        self._bits = self._sum = (parameter.dtype, total)
        self._seen = self._state(parameter)
        self.accept()

    def now(self) -> torch.Tensor | None:
        return self._parameters.get(self._key)

    def trust_nothing(self) -> None:
        now = self._parameters.get(self._key)
        if now is None or now.data_ptr() != self._shared:
            self._seen = None

    def share(self) -> None:
        now = self._parameters.get(self._key)
        if now is not None:
            self._shared, self._seen = now.data_ptr(), self._state(now)

    def move(self, parameters: dict[str, nn.Parameter | None], to: dict[str, nn.Parameter | None]) -> None:
        """``to`` took the place of ``parameters``."""
        if self._parameters is parameters:
            self._parameters, self._seen, self._shared = to, None, None

    def unshare(self) -> None:
        self._shared = self._seen = None

    def edited(self) -> bool:
        return self._finding == EDITED

    def patch(self, adapters: tuple[str, ...]) -> Patch:
        """The parameter as it is now. ``adapters``: names of those that are merged into it."""
        return Patch(("edit", *self.content), self._value, adapters, edit=True)

    @property
    def content(self) -> tuple[Any, ...]:
        """Differs where values differ."""
        return (*self._bits, self._now)

    def _value(self, base: torch.Tensor) -> torch.Tensor:
        now = self.now()
        return base if now is None else now.detach()

    def touched(self) -> bool:
        """Whether it may have been edited since it was last compared."""
        now = self._parameters.get(self._key)
        return now is None or self.unread(now)

    def suspect(self) -> bool:
        """Whether it may have been edited since it was last compared, or was edited then."""
        now = self._parameters.get(self._key)
        return now is None or self.unread(now) or self._finding == EDITED

    def unread(self, now: torch.Tensor) -> bool:
        """Whether these values may be others than those read last."""
        return self._state(now) != self._seen

    def compare(self) -> str:
        now = self.now()
        if now is None or now.is_meta:
            return EDITED
        if not self.unread(now):
            return self._finding
        self._seen = self._state(now)
        if tuple(now.shape) == self.shape:
            self._finding = self._compare(now)
        else:
            self._bits, self._now = (now.dtype, int(_sum_of_bits(now))), repr(now.shape).encode()
            self._finding = EDITED
        return self._finding

    def accept(self) -> None:
        """Takes the values just compared for the engine's, exact or rounded."""
        self._finding = SAME
        self._known, self._last = self._bits, self._now

    def reject(self) -> None:
        self._finding = EDITED

    def _compare(self, now: torch.Tensor) -> str:
        total, values = self._read(now)
        self._bits, self._now = (now.dtype, total), values
        if values != self._values and values not in self._rounded():
            return EDITED
        if self._bits in (self._sum, self._known):
            return SAME
        if now.dtype != self._known[0]:
            return SAME
        return UNCLEAR if values == self._last else ROUNDED

    def _rounded(self) -> frozenset[bytes]:
        if self._forms is None:
            exact = torch.frombuffer(bytearray(self._values), dtype=torch.float32)
            half, brain = exact.half(), exact.bfloat16()
            self._forms = frozenset(map(_bytes, (half, brain, half.float().bfloat16(), brain.float().half())))
        return self._forms

    @staticmethod
    def _state(now: torch.Tensor) -> tuple[Any, ...]:
        try:
            return now.data_ptr(), now._version, now.dtype
        except RuntimeError:  # what was loaded in inference mode counts no versions
            return now.data_ptr(), 0, now.dtype

    def _read(self, parameter: torch.Tensor) -> tuple[int, bytes]:
        """Sum over the bits and samples."""
        reading, self._reading = self._reading, None
        if reading is not None:
            return reading
        values = parameter.detach()
        return int(_sum_of_bits(parameter)), _bytes(values[self._index] if self.shape else values)

    def has_read(self, total: int, samples: np.ndarray) -> None:
        self._reading = total, samples[: self._count].tobytes()


class _Sums:
    """Sums over the bits of adapters' tensors, read again when a tensor may have been edited."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def trust_nothing(self) -> None:
        self._known = {}

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """With one wait for all that lie on one GPU."""
        unread: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            if _Weight._state(tensor) not in self._known and readable(tensor):
                unread.setdefault(tensor.device, []).append(tensor)
        for group in unread.values():
            try:
                totals, _ = fingerprints(group)
            except BackendError:  # no compiler here
                continue
            self._known.update(zip(map(_Weight._state, group), totals, strict=True))

    def __call__(self, tensor: torch.Tensor) -> int:
        state = _Weight._state(tensor)
        if state not in self._known:
            self._known[state] = int(_sum_of_bits(tensor))
        return self._known[state]


def read_at_once(weights: Sequence[_Weight]) -> None:
    """Reads weights of a GPU with one wait for all of them. What cannot be read so is read when it is compared."""
    by_device: dict[torch.device, list[tuple[_Weight, torch.Tensor]]] = {}
    for weight in weights:
        now = weight.now()
        if now is not None and weight.unread(now) and tuple(now.shape) == weight.shape and readable(now):
            by_device.setdefault(now.device, []).append((weight, now))
    for group in by_device.values():
        try:
            totals, samples = fingerprints([now for _, now in group])
        except BackendError:  # no compiler here
            continue
        for (weight, _), total, row in zip(group, totals, _comparable(samples), strict=True):
            weight.has_read(total, row)


def _comparable(samples: torch.Tensor) -> np.ndarray:
    """In float32; both zeros are one."""
    return (samples.to("cpu", torch.float32) + 0.0).numpy()


def _bytes(samples: torch.Tensor) -> bytes:
    return _comparable(samples).tobytes()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, summed modulo 2 to their width: whatever their order in memory, at memory speed."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    kind = _INTEGERS[tensor.element_size()]
    return tensor.detach().view(kind).sum(dtype=kind)
