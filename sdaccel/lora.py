"""LoRA files written into the weights of a diffusers pipeline, where engines follow them, and taken out again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sdaccel.errors import ModelError, SettingError
from sdaccel.resources import expanded

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from sdaccel.adapters import Adapter, Fit, Fitted, Layer
    from sdaccel.runtime import RunReport

MOST = 10.0
MODULES = ("unet", "text_encoder", "text_encoder_2", "vae")
HELD = 1 << 30
"""Bytes of a GPU that adapters' numbers may take between their uses; one of rank 32 over all of SDXL has 0.2 GB."""
NAMED = 3
"""Of the keys without a use, so many are named in a note."""


@dataclass(frozen=True)
class Lora:
    """A .safetensors file of a LoRA or one of its relatives, and how strongly it acts (-10..10)."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Lora:
        """``FILE`` or ``FILE:SCALE``. Raises SettingError."""
        name, colon, tail = text.strip().rpartition(":")
        try:
            scale = float(tail) if colon and name else None
        except ValueError:  # a drive's colon
            scale = None
        if scale is None:
            name, scale = text.strip(), 1.0
        name = name.strip('"')
        if not (math.isfinite(scale) and abs(scale) <= MOST):
            raise SettingError(f"the strength {scale:g} of {name} is not between -{MOST:g} and {MOST:g}.")
        return cls(expanded(name), scale)

    @property
    def name(self) -> str:
        return self.path.stem

    def check(self) -> None:
        """Raises SettingError where there is no such file, or it is none that may be opened."""
        if self.path.suffix.lower() != ".safetensors":
            raise SettingError(f"{self.path} is no .safetensors file, the only kind of LoRA that is opened.")
        if not self.path.is_file():
            raise SettingError(f"the LoRA {self.path} is not there.")


def chosen(texts: Iterable[str]) -> tuple[Lora, ...]:
    """What people wrote, each a file that is there. Raises SettingError."""
    found = tuple(map(Lora.parse, texts))
    for lora in found:
        lora.check()
    return found


Key = tuple[str, str]
"""Module of the pipeline, and the weight's name in its state_dict."""


class _Change(NamedTuple):
    lora: Lora
    adapter: Adapter
    fit: Fit


class _Changed(NamedTuple):
    """A weight that is not its base now."""

    parameter: Parameter
    base: Tensor
    changes: tuple[_Change, ...]


class LiveWeights:
    """The weights of a pipeline's modules with LoRAs in them, and the base weights to go back to.

    A changed weight is W + Σ scale·ΔW, computed in float32 from its base on its own device. On a GPU it is written over
    the base, in memory that engines share; the base is copied first: within the GPU where such copies take at most a
    quarter of its free memory (the next set then moves nothing), else to the CPU. On a CPU the two tensors change
    places, so that nothing is copied and mapped files stay unwritten. Other programs' adapters must be out of the
    pipeline. For one thread at a time, while none draws.
    """

    def __init__(self, pipe: Any):
        self._pipe = pipe
        self._changed: dict[Key, _Changed] = {}
        self._parts = _Parts()
        self._fitted: WeakKeyDictionary[Adapter, Fitted] = WeakKeyDictionary()
        self.loras: tuple[Lora, ...] = ()
        """What is in the weights now."""
        self.adapters: dict[str, tuple[str, ...]] = {}
        """Module of the pipeline → what changes it, as ``name:scale``."""
        self.notes: tuple[str, ...] = ()
        """What of their files is not used, and why."""

    def set(self, loras: Sequence[Lora]) -> None:
        """Makes every weight its base and all of ``loras``; without any, its base, bit for bit.

        Only weights whose LoRAs differ from those of the last call are computed. Raises SettingError for a file that is
        not there, ModelError for one that cannot be used: weights are then what they were, or their base where a file
        turns out to be broken while it is read.
        """
        parameters = self._parameters() if loras else {}
        wanted, notes = self._plan(loras, parameters)
        self.loras, self.adapters, self.notes = (), {}, ()
        try:
            self._write(wanted, parameters)
        except BaseException:
            self._write({}, {})
            raise
        names: dict[str, dict[str, list[str]]] = {}
        for (component, name), changes in wanted.items():
            names.setdefault(component, {})[name] = [f"{change.lora.name}:{change.lora.scale:g}" for change in changes]
        self.loras, self.notes = tuple(loras), tuple(notes)
        self.adapters = {
            component: tuple(dict.fromkeys(each for found in weights.values() for each in found))
            for component, weights in names.items()
        }
        self._tell_watches(names)

    def release(self) -> None:
        """Lets go of adapters' numbers that are kept on a GPU for the next set."""
        self._parts = _Parts()

    def tell(self, report: RunReport) -> None:
        """Names in ``report`` what ran with which LoRAs, and what of their files is not used."""
        for component, run in report.components.items():
            source = "vae" if component.startswith("vae_") else component
            run.adapters = sorted({*run.adapters, *self.adapters.get(source, ())})
        for note in self.notes:
            report.note(note)

    def _tell_watches(self, names: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """What it is that changed, for the engines' reports."""
        from sdaccel.integrations.swap import swaps_of

        for component in MODULES:
            module = getattr(self._pipe, component, None)
            for swap in swaps_of(module) if module is not None else ():
                swap.watch.known = names.get(component, {})

    def _parameters(self) -> dict[Key, Parameter]:
        found: dict[Key, Parameter] = {}
        for component in MODULES:
            module = getattr(self._pipe, component, None)
            for name, parameter in module.named_parameters(remove_duplicate=False) if module is not None else ():
                own = ".".join(part for part in name.split(".") if part not in ("base_layer", "_orig_mod"))
                found[component, own] = parameter
        return found

    def _plan(
        self, loras: Sequence[Lora], parameters: Mapping[Key, Parameter]
    ) -> tuple[dict[Key, tuple[_Change, ...]], list[str]]:
        """What each weight is to hold, and notes on what is not used."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for (component, name), parameter in parameters.items():
            shapes.setdefault(component, {})[name] = tuple(parameter.shape)
        wanted: dict[Key, tuple[_Change, ...]] = {}
        notes = []
        for lora in loras:
            lora.check()
            adapter = _open(lora.path)
            made_for = f"It looks like one for {adapter.family.label}." if adapter.family else None
            if adapter not in self._fitted:
                with _naming(lora, made_for):
                    self._fitted[adapter] = adapter.fit(shapes)
            fitted = self._fitted[adapter]
            unused = _unused(adapter, fitted)
            if not fitted.fits:
                raise ModelError(f"{lora.path} changes nothing of this model: {unused}.", hint=made_for)
            if unused:
                notes.append(f"{lora.path.name}: not used: {unused}")
            for fit in fitted.fits:
                key = fit.component, fit.name
                if parameters[key].is_meta:
                    raise ModelError(f"{fit.component}.{fit.name} is not in memory (offloaded): no LoRA can change it.")
                wanted[key] = (*wanted.get(key, ()), _Change(lora, adapter, fit))
        return wanted, notes

    def _write(self, wanted: Mapping[Key, tuple[_Change, ...]], parameters: Mapping[Key, Parameter]) -> None:
        import torch

        with torch.inference_mode(False), torch.no_grad():
            spare = _fits_beside([parameters[key] for key in wanted if key not in self._changed])
            for key in {**self._changed, **wanted}:
                before, changes = self._changed.get(key), wanted.get(key, ())
                if before is None:
                    parameter = parameters[key]
                    base = _base(parameter, spare)
                elif before.changes == changes:
                    continue
                else:
                    parameter, base = before.parameter, before.base
                value = _effective(base.to(parameter.device), changes, self._parts)
                self._changed[key] = _Changed(parameter, base, changes)
                _put(parameter, value)
                if not changes:
                    del self._changed[key]


@contextmanager
def applied(pipe: Any, loras: Sequence[Lora]) -> Iterator[LiveWeights]:
    """``pipe`` has ``loras`` in its weights, and its base weights again afterwards; see `LiveWeights`.

    Raises SettingError, ModelError.
    """
    weights = LiveWeights(pipe)
    weights.set(loras)
    try:
        yield weights
    finally:
        weights.set(())


# ---- files


def _open(path: Path) -> Adapter:
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    return _opened(path.absolute(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=16)
def _opened(path: Path, size: int, changed: int) -> Adapter:
    """Its layers' weights are mapped when they are needed."""
    from sdaccel.adapters import read_adapter

    return read_adapter(path)


@contextmanager
def _naming(lora: Lora, hint: str | None = None) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except ModelError as error:
        named = lora.path.name in str(error)
        raise ModelError(str(error) if named else f"{lora.path}: {error}", hint=hint) from error


def _unused(adapter: Adapter, fitted: Fitted) -> str:
    """Keys of the file that change nothing, with reasons; empty where all do."""
    rest = [f"{name} ({reason})" for name, reason in {**adapter.refused, **fitted.unused}.items()]
    named = [(text if text.isprintable() else ascii(text)[1:-1])[:300] for text in rest[:NAMED]]
    more = [f"{len(rest) - NAMED} more, which sdaccel lora inspect names"] if len(rest) > NAMED else []
    return "; ".join(named + more)


# ---- weights


class _Parts:
    """Numbers of adapters on a GPU, for the next set of LoRAs: of the files used last."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Adapter, Any], dict[Layer, dict[str, Tensor]]] = OrderedDict()

    def of(self, adapter: Adapter, layer: Layer, device: Any) -> dict[str, Tensor] | None:
        """None on a CPU, where the mapped file is as near."""
        if device.type == "cpu":
            return None
        key = adapter, device
        if key not in self._held:
            self._held[key] = adapter.parts_on(device)
            while len(self._held) > 1 and sum(each.nbytes for each, _ in self._held) > HELD:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key][layer]


def _effective(base: Tensor, changes: Sequence[_Change], parts: _Parts) -> Tensor:
    """W + Σ scale·ΔW; in float32 if that are several; ``base`` itself without changes."""
    value = base if len(changes) < 2 else base.float()
    for lora, adapter, (_, _, layer, bias) in changes:
        with _naming(lora):
            held = parts.of(adapter, layer, base.device)
            if bias:
                value = value.float() + layer.delta_bias(base, lora.scale, held)
            else:
                value = layer.added(value, base, lora.scale, held)
    return value


def _fits_beside(parameters: Sequence[Parameter]) -> bool:
    """Whether copies of these take at most a quarter of their GPU's free memory."""
    import torch

    on_gpu = [parameter for parameter in parameters if parameter.is_cuda]
    nbytes = sum(parameter.nbytes for parameter in on_gpu)
    return not on_gpu or 4 * nbytes <= torch.cuda.mem_get_info(on_gpu[0].device)[0]


def _base(parameter: Parameter, spare: bool) -> Tensor:
    """What it holds, to be kept."""
    if parameter.device.type == "cpu":
        return parameter.data
    return parameter.detach().clone() if spare else parameter.detach().to("cpu")


def _put(parameter: Parameter, value: Tensor) -> None:
    import torch

    if parameter.device.type == value.device.type == "cpu":
        parameter.data = value.to(parameter.dtype)
        return
    with torch.inference_mode(parameter.is_inference()):
        parameter.copy_(value)
