"""Reads an adapter file: every key belongs to a layer or is refused with a reason. Weights stay on disk."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdaccel.adapters.keys import split_key, split_module
from sdaccel.adapters.layer import Layer, fault, kind_of, rank_of
from sdaccel.adapters.names import Modules
from sdaccel.errors import ModelError
from sdaccel.models.family import Family
from sdaccel.models.tensors import FLOATS, HeaderEntry, TensorRef, read_stamped_header

Shapes = Mapping[str, tuple[int, ...]]
_NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B",
            "BOOL": "<?"}  # fmt: skip
_WIDTHS = {768: Family.SD1, 1024: Family.SD2, 2048: Family.SDXL, 1280: Family.SDXL_REFINER}


class Fit(NamedTuple):
    """A layer and the parameter that it changes."""

    component: str
    name: str
    """In the component's state_dict."""
    layer: Layer
    bias: bool


@dataclass(frozen=True)
class Fitted:
    """What of an adapter a model takes."""

    fits: tuple[Fit, ...]
    unused: Mapping[str, str]
    """Layers by name → why they change nothing of this model."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter file, opened but not read."""

    path: Path
    layers: tuple[Layer, ...]
    refused: Mapping[str, str]
    """Keys of the file → why they are not used."""
    metadata: Mapping[str, str]
    family: Family | None
    """By its shapes, else by what its metadata says; None: it does not show."""
    nbytes: int
    keys: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """In words."""
        return ", ".join(name for name, _ in Counter(layer.format for layer in self.layers).most_common()) or "none"

    def parts_on(self, device: torch.device) -> dict[Layer, dict[str, torch.Tensor]]:
        """Every layer's parts on a GPU in their own types, by one copy of the file. Raises ModelError."""
        whole = next(ref for layer in self.layers for ref in layer.parts.values()).file().to(device)

        def part(ref: TensorRef) -> torch.Tensor:
            values = whole[ref.offset : ref.offset + ref.nbytes]
            dtype = FLOATS[ref.dtype]
            aligned = values if ref.offset % dtype.itemsize == 0 else values.clone()
            return aligned.view(dtype).view(ref.shape)

        return {layer: {name: part(ref) for name, ref in layer.parts.items()} for layer in self.layers}

    def fit(self, names: Mapping[str, Shapes]) -> Fitted:
        """Which parameters of a model it changes; ``names``: component → state_dict name → shape.

        Raises ModelError for a layer whose module is there in another shape.
        """
        modules = {component: Modules(shapes) for component, shapes in names.items()}
        fits: list[Fit] = []
        unused: dict[str, str] = {}
        taken: dict[tuple[str, str, bool], str] = {}
        for layer in self.layers:
            found = _find(layer, modules)
            if found is None:
                where = layer.component or "model"
                known = not layer.component or layer.component in names
                unused[layer.name] = f"the {where} has no {layer.module}" if known else f"there is no {where}"
                continue
            component, module = found
            for bias in (False, True):
                if not (layer.changes_bias if bias else layer.changes_weight):
                    continue
                name = f"{module}.{'bias' if bias else 'weight'}"
                shape = names[component].get(name)
                if shape is None:
                    unused[layer.name] = f"{component}.{module} has no {'bias' if bias else 'weight'}"
                    continue
                if bias:
                    part = next(part for part in ("diff_b", "b_norm", "up_bias") if part in layer.parts)
                    ref = layer.parts[part]
                    if ref.count != math.prod(shape):
                        raise ModelError(
                            f"{ref.name}: its shape is {ref.shape}, but {component}.{name} is {tuple(shape)}."
                        )
                else:
                    layer.check(tuple(shape), f"{component}.{name}")
                other = taken.setdefault((component, name, bias), layer.name)
                if other != layer.name:
                    raise ModelError(f"{self.path}: {other} and {layer.name} both change {component}.{name}.")
                fits.append(Fit(component, name, layer, bias))
        return Fitted(tuple(fits), unused)


def _find(layer: Layer, modules: Mapping[str, Modules]) -> tuple[str, str] | None:
    for component in (layer.component,) if layer.component else tuple(modules):
        found = modules[component].find(layer.module) if component in modules else None
        if found is not None:
            return component, found
    return None


def read_adapter(path: Path | str) -> Adapter:
    """Opens a .safetensors file of a LoRA or one of its relatives; weights are mapped when they are used.

    Raises ModelError for anything else, and for a file without a single key of a known format.
    """
    path = Path(path)
    if path.suffix.lower() != ".safetensors":
        raise ModelError(f"{path} is no .safetensors file, the only kind of adapter that is opened.")
    entries, metadata, opened = read_stamped_header(path)
    settings = _settings(path, metadata)
    refused: dict[str, str] = {}
    groups: dict[str, dict[str, str]] = {}
    for name in entries:
        key = split_key(name)
        if key is None:
            refused[name] = "of no known adapter format"
        elif key.part in groups.setdefault(key.module, {}):
            refused[name] = f"the same part as {groups[key.module][key.part]}"
        else:
            groups[key.module][key.part] = name
    layers = []
    for module, keys in groups.items():
        found = _layer(path, opened, module, keys, entries, settings)
        if isinstance(found, Layer):
            layers.append(found)
        else:
            refused.update(dict.fromkeys(keys.values(), found))
    if not layers:
        example = next(iter(refused), "")
        reason = f" ({example[:120]}: {refused[example]})" if example else ""
        raise ModelError(f"{path}: no LoRA or relative of it: none of its {len(entries)} keys can be used{reason}.")
    nbytes = sum(entry.nbytes for entry in entries.values())
    family = _family(layers, metadata)
    return Adapter(path, tuple(layers), refused, metadata, family, nbytes, len(entries), settings)


def _layer(
    path: Path,
    opened: tuple[int, int],
    module: str,
    keys: Mapping[str, str],
    entries: Mapping[str, HeaderEntry],
    settings: Mapping[str, Any],
) -> Layer | str:
    """A layer, or why there is none."""
    shapes = {part: entries[name].shape for part, name in keys.items()}
    unsupported = {"oft_diag": "OFT of LyCORIS before 2", "scalar": "a trained scalar"}
    for part, label in unsupported.items():
        if part in shapes:
            return f"{label} ({part}), which is not supported"
    kind = kind_of(shapes)
    if kind is None:
        return f"of no known adapter format (only {', '.join(sorted(shapes))})"
    wrong = fault(shapes, kind)
    if wrong:
        return wrong
    terms = None
    if kind == "peft-oft":
        if settings.get("peft_type") != "OFT" or settings.get("coft"):
            return "OFT of PEFT whose adapter_config.json is not beside it, or which is constrained (coft)"
        if settings.get("use_cayley_neumann", True):
            terms = settings.get("num_cayley_neumann_terms", 5)
            if type(terms) is not int or not 1 <= terms <= 100:
                return f"num_cayley_neumann_terms is {str(terms)[:20]}, not 1 to 100"
    alpha, parts = None, {}
    for part, name in keys.items():
        entry = entries[name]
        if part in ("alpha", "on_input"):
            number = _number(path, entry)
            if number is None or not math.isfinite(number):
                return f"its {part} is no finite number"
            if part == "alpha":
                alpha = number
                continue
            if entry.dtype not in FLOATS:
                parts[part] = TensorRef(name, "F32", (), torch.tensor(number))
                continue
        if entry.dtype not in FLOATS:
            return f"its {part} is stored as {entry.dtype}; read are {', '.join(FLOATS)}"
        parts[part] = TensorRef(name, entry.dtype, entry.shape, path, entry.offset, stamp=opened)
    component, inside = split_module(module)
    rank = rank_of(shapes, kind)
    rs = False
    whole = kind == "lokr" and {"lokr_w1", "lokr_w2"} <= set(shapes)
    if whole or kind in ("full", "norm", "ia3"):  # LyCORIS writes an alpha that it does not use
        alpha = None
    unscaled = alpha == 0 and kind not in ("oft", "boft")  # as kohya and LyCORIS mean it
    if unscaled:
        alpha = None
    elif alpha is None and (rank or whole):
        alpha, rs = (
            _stated(settings, component, inside, "alpha"),
            settings.get(f"{component}.use_rslora", settings.get("use_rslora")) is True,
        )
        if whole:  # PEFT scales these too
            stated_rank = _stated(settings, component, inside, "r")
            rank, alpha = (int(stated_rank), alpha) if stated_rank and stated_rank >= 1 else (None, None)
    return Layer(
        module, component, inside, kind, parts, tuple(keys.values()), rank, alpha, rs, "magnitude" in shapes, terms
    )


def _number(path: Path, entry: HeaderEntry) -> float | None:
    if math.prod(entry.shape) != 1:
        return None
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            raw = file.read(entry.nbytes)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if entry.dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0]) if len(raw) == 2 else None
    form = _NUMBERS.get(entry.dtype)
    return float(struct.unpack(form, raw)[0]) if form and len(raw) == struct.calcsize(form) else None


def _settings(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What diffusers keeps in the file and PEFT beside it: alphas are not among their tensors."""
    text = metadata.get("lora_adapter_metadata")
    beside = path.with_name("adapter_config.json")
    try:
        if text is None and path.name == "adapter_model.safetensors" and beside.is_file():
            text = beside.read_text(encoding="utf-8")
        found = json.loads(text) if text else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the settings that belong to it cannot be read ({error}).") from None
    return found if isinstance(found, dict) else {}


def _stated(settings: Mapping[str, Any], component: str, module: str, what: str) -> float | None:
    """ "alpha" or "r" of a module, from its pattern or for all."""

    def stated(*names: str) -> Any:
        found = (settings.get(f"{component}.{name}", settings.get(name)) for name in names)
        return next((value for value in found if value is not None), None)

    number = stated("lora_alpha", "alpha") if what == "alpha" else stated("r")
    pattern = stated("alpha_pattern" if what == "alpha" else "rank_pattern")
    if isinstance(pattern, dict):
        fitting = [name for name in pattern if module == name or module.endswith(f".{name}")]
        number = pattern[max(fitting, key=len)] if fitting else number
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) < 1e30:
        return None
    return float(number)


def _family(layers: list[Layer], metadata: Mapping[str, str]) -> Family | None:
    widths = Counter(
        layer.size[1]
        for layer in layers
        if layer.component == "unet" and layer.module.replace(".", "_").endswith(("attn2_to_k", "attn2_to_v"))
    )
    for width, _ in widths.most_common():
        if width in _WIDTHS:
            return _WIDTHS[width]
    if any(layer.component == "text_encoder_2" for layer in layers):
        return Family.SDXL
    said = " ".join(
        metadata.get(key, "") for key in ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")
    ).lower()
    for words, family in (
        (("refiner",), Family.SDXL_REFINER),
        (("sdxl", "stable-diffusion-xl"), Family.SDXL),
        (("sd_v2", "stable-diffusion-v2", "sd2"), Family.SD2),
        (("sd_v1", "stable-diffusion-v1", "sd1"), Family.SD1),
    ):
        if any(word in said for word in words):
            return family
    return None
