"""Opens a Stable Diffusion model: a diffusers folder, a single file or a live pipeline. Weights stay where they are."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdaccel.errors import ModelError, PickleRefused
from sdaccel.models.family import EXPECTED, Family, detect_family, native_side, vae_factor, variant
from sdaccel.models.tensors import FLOATS, NAMES, Component, HeaderEntry, TensorRef, read_header

__all__ = ["Checkpoint", "Component", "HeaderEntry", "TensorRef", "canonical_names", "open_checkpoint", "read_header"]

COMPONENTS = ("unet", "vae", "text_encoder", "text_encoder_2")
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
MAX_JSON = 64 << 20

Source = Any  # str | Path | a diffusers pipeline


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A whole model, opened but not read."""

    name: str
    """Short, for people."""
    origin: str
    """The path as text, or "pipeline <class>"."""
    kind: str
    """"folder", "file" or "pipeline"."""
    family: Family
    components: dict[str, Component]
    scheduler: dict[str, Any]
    """The scheduler's config, with prediction_type."""
    native_side: int
    """Pixels."""
    vae_factor: int
    """Pixels per latent."""
    path: Path | None = None
    notes: tuple[str, ...] = ()
    """What was assumed or chosen, for the user to read."""
    ignored: tuple[str, ...] = ()
    """Tensors found and not used, as "component/name" or as the single file names them."""

    @property
    def prediction_type(self) -> str:
        """ "epsilon", "v_prediction" or "sample"."""
        return str(self.scheduler.get("prediction_type", "epsilon"))

    @property
    def variant(self) -> str:
        """ "text-to-image", "inpaint", "8-channel", …"""
        return variant(self.components["unet"].config)


def open_checkpoint(source: Source, *, allow_pickle: bool = False, variant: str | None = None) -> Checkpoint:
    """Opens a diffusers folder, a single .safetensors file in the original layout, or a live diffusers pipeline.

    variant: which weights of a folder to take, "fp16" for ``*.fp16.safetensors``.
    allow_pickle: also accept .ckpt, .bin, .pt and .pth (read with torch's weights_only unpickler).
    Raises ModelError, or PickleRefused for a pickle that is not allowed.
    """
    if not isinstance(source, (str, Path)):
        return _open_pipeline(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, allow_pickle, variant)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder.")
    raise ModelError(f"{path}: not a folder.")


# ---- a diffusers folder


def _open_folder(folder: Path, allow_pickle: bool, wanted: str | None) -> Checkpoint:
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ModelError(
            f"{folder}: not a diffusers model (no model_index.json; it holds {inside}).",
            hint="Name the folder that contains model_index.json, or a .safetensors file.",
        )
    index = read_json(index_file)
    _check_pipeline(folder, index)
    notes: list[str] = []
    ignored: list[str] = []
    components: dict[str, Component] = {}
    configs: dict[str, dict] = {}
    for name in COMPONENTS:
        entry = index.get(name)
        if not isinstance(entry, list) or entry[-1] is None:
            continue
        config = configs[name] = read_json(folder / name / "config.json")
        refused = _unsupported(name, str(entry[-1]), config)
        if refused:
            notes.append(refused)
            continue
        found = _folder_tensors(folder / name, allow_pickle, wanted, notes)
        components[name] = _component(name, config, found, ignored, str(folder / name))
    family = detect_family(configs["unet"], {name for name in configs if name.startswith("text")})
    scheduler_file = folder / "scheduler" / "scheduler_config.json"
    if scheduler_file.is_file():
        scheduler = read_json(scheduler_file)
    else:
        scheduler = {"prediction_type": "epsilon"}
        notes.append("the folder has no scheduler/scheduler_config.json: prediction_type epsilon is assumed.")
    return _checkpoint(
        folder.resolve().name, str(folder), "folder", family, components, configs, scheduler, folder, notes, ignored
    )


def _checkpoint(
    name: str,
    origin: str,
    kind: str,
    family: Family,
    components: dict[str, Component],
    configs: Mapping[str, Mapping[str, Any]],
    scheduler: dict[str, Any],
    path: Path | None,
    notes: Iterable[str],
    ignored: Iterable[str],
) -> Checkpoint:
    unet, vae = configs["unet"], configs.get("vae", {})
    side = native_side(unet, vae, family)
    notes, ignored = tuple(notes), tuple(ignored)
    return Checkpoint(name, origin, kind, family, components, scheduler, side, vae_factor(vae), path, notes, ignored)


def _check_pipeline(where: object, index: Mapping[str, Any]) -> None:
    if "unet" in index:
        return
    kind = str(index.get("_class_name", "an unnamed pipeline"))
    parts = ", ".join(sorted(key for key in index if not key.startswith("_"))[:8])
    raise ModelError(f"{where}: {kind} has no UNet (it has {parts or 'no components'}).", hint=EXPECTED)


def _unsupported(name: str, kind: str, config: Mapping[str, Any]) -> str | None:
    """Why a component stays with its own implementation; a UNet of another kind is an error instead."""
    kind = str(config.get("_class_name") or (config.get("architectures") or [kind])[0])
    if name == "unet" and kind != "UNet2DConditionModel":
        raise ModelError(f"the UNet is a {kind}.", hint=EXPECTED)
    if name == "vae" and kind != "AutoencoderKL":
        return f"vae is a {kind}: it stays in torch."
    if name.startswith("text") and not kind.startswith("CLIPText"):
        raise ModelError(f"{name} is a {kind}, not CLIP.", hint=EXPECTED)
    return None


_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")


def _folder_tensors(folder: Path, allow_pickle: bool, wanted: str | None, notes: list[str]) -> dict[str, TensorRef]:
    safe = _weight_files(folder, ".safetensors")
    unsafe = _weight_files(folder, ".bin")
    if not safe and unsafe and not allow_pickle:
        raise PickleRefused(
            f"{folder}: its weights are pickles ({', '.join(sorted(file.name for file in unsafe.values()))}).",
            hint="Use the .safetensors files of this model, or --allow-pickle (allow_pickle=True) if you trust it.",
        )
    found = safe or unsafe
    if not found:
        raise ModelError(f"{folder}: no weights (*.safetensors) in it.", hint="Download the model completely.")
    choice = _choose(folder, found, wanted, notes)
    file = found[choice]
    parts = [file] if file.suffix != ".json" else _shards(file)
    tensors: dict[str, TensorRef] = {}
    for part in parts:
        read = _safetensors_refs(part) if part.suffix == ".safetensors" else _pickle_refs(part)
        twice = tensors.keys() & read.keys()
        if twice:
            raise ModelError(f"{folder}: {len(twice)} tensors are in two shards, {min(twice)} is one.")
        tensors.update(read)
    return tensors


def _weight_files(folder: Path, suffix: str) -> dict[str | None, Path]:
    """Variant (None for the plain weights) → its file, or the index of its shards."""
    found: dict[str | None, Path] = {}
    for stem in _STEMS:
        name = re.compile(
            rf"{stem}(?:\.([\w-]+?))?{re.escape(suffix)}|{stem}{re.escape(suffix)}\.index(?:\.([\w-]+))?\.json"
        )
        for file in sorted(folder.iterdir()):
            match = name.fullmatch(file.name)
            if match and not re.search(r"-\d{5}-of-\d{5}", file.name):
                found.setdefault(match[1] or match[2], file)
    return found


def _choose(folder: Path, found: Mapping[str | None, Path], wanted: str | None, notes: list[str]) -> str | None:
    if wanted in found:
        return wanted
    named = sorted(name for name in found if name)
    if wanted and None in found:
        notes.append(f"{folder.name} has no variant {wanted!r}: its plain weights are used.")
        return None
    if wanted:
        raise ModelError(f"{folder}: no variant {wanted!r}, only {', '.join(named)}.")
    choice = "fp16" if "fp16" in named else named[0]
    if len(named) > 1 and choice != "fp16":
        raise ModelError(f"{folder}: several variants ({', '.join(named)}).", hint="Name one with variant=….")
    notes.append(f"{folder.name} has only the variant {choice!r}: it is used.")
    return choice


def _shards(index_file: Path) -> list[Path]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_file}: no weight_map in it.")
    files = []
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name or "\\" in name or ":" in name or Path(name).suffix not in (".safetensors", ".bin"):
            raise ModelError(f"{index_file}: names the shard {name!r}, which is no weight file of its folder.")
        if not (index_file.parent / name).is_file():
            raise ModelError(
                f"{index_file.parent}: the shard {name} is missing.", hint="Download the model completely."
            )
        files.append(index_file.parent / name)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a config file. Raises ModelError for anything else."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelError(f"{path}: too large for a config.")
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({str(error)[:80]}).") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object.")
    return found


# ---- files of tensors


def _safetensors_refs(path: Path) -> dict[str, TensorRef]:
    entries, _ = read_header(path)
    return {name: TensorRef(name, entry.dtype, entry.shape, path, entry.offset) for name, entry in entries.items()}


def _pickle_refs(path: Path) -> dict[str, TensorRef]:
    state = _load_pickle(path)
    while isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    return {
        str(name): _tensor_ref(str(name), value) for name, value in state.items() if isinstance(value, torch.Tensor)
    }


def _load_pickle(path: Path) -> dict[str, Any]:
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ModelError(
            f"{path}: not a checkpoint of plain tensors ({reason}).",
            hint="Convert it to .safetensors.",
        ) from None
    if not isinstance(state, dict):
        raise ModelError(f"{path}: holds a {type(state).__name__}, not a table of tensors.")
    return state


def _tensor_ref(name: str, tensor: torch.Tensor) -> TensorRef:
    dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return TensorRef(name, dtype, tuple(tensor.shape), tensor)


# ---- a live pipeline


def _open_pipeline(pipe: Any) -> Checkpoint:
    kind = type(pipe).__name__
    if not hasattr(pipe, "unet") or not hasattr(pipe, "scheduler"):
        raise ModelError(f"a {kind} is neither a path nor a pipeline with a UNet.", hint=EXPECTED)
    notes: list[str] = []
    ignored: list[str] = []
    components: dict[str, Component] = {}
    configs: dict[str, dict] = {}
    for name in COMPONENTS:
        module = getattr(pipe, name, None)
        if module is None:
            continue
        config = configs[name] = _module_config(module)
        refused = _unsupported(name, type(module).__name__, config)
        if refused:
            notes.append(refused)
            continue
        found = {key: _tensor_ref(key, value) for key, value in unwrapped_state_dict(module, ignored, name).items()}
        components[name] = _component(name, config, found, ignored, f"{kind}.{name}")
    if "unet" not in configs:
        raise ModelError(f"the {kind} has no UNet.", hint=EXPECTED)
    family = detect_family(configs["unet"], {name for name in configs if name.startswith("text")})
    origin = f"pipeline {kind}"
    path = str(getattr(pipe, "name_or_path", None) or configs["unet"].get("_name_or_path") or "")
    name = Path(path).name or kind
    scheduler = dict(pipe.scheduler.config)
    return _checkpoint(name, origin, "pipeline", family, components, configs, scheduler, None, notes, ignored)


def _module_config(module: Any) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return config.to_dict()
    if not isinstance(config, Mapping):
        raise ModelError(f"a {type(module).__name__} has no config.")
    return dict(config)


def unwrapped_state_dict(module: Any, ignored: list[str], component: str) -> dict[str, torch.Tensor]:
    """A module's own weights, referenced, under the names they have without PEFT and torch.compile around them."""
    plain: dict[str, torch.Tensor] = {}
    state = {_strip(name): tensor for name, tensor in module.state_dict().items()}
    wrapped = {name.split(".base_layer.")[0] for name in state if ".base_layer." in name}
    for name, tensor in state.items():
        parents = {name[: match.start()] for match in re.finditer(r"\.", name)}
        adapter = any(part.startswith("lora_") for part in name.split(".")) or (
            parents & wrapped and ".base_layer." not in name
        )
        if adapter:
            ignored.append(f"{component}/{name}")
        else:
            plain[name.replace(".base_layer.", ".")] = tensor
    return plain


def _strip(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# ---- from found tensors to a component


def canonical_names(component: str, names: Iterable[str]) -> dict[str, str]:
    """Names as files and library versions have them → the one name a tensor has in ``Component.tensors``.

    Text encoders: as transformers 5 names them, that is without "text_model." unless there is a text_projection.
    VAE: attention as to_q, to_k, to_v, to_out.0 (older files: query, key, value, proj_attn).
    """
    names = list(names)
    if component.startswith("text_encoder"):
        bare = {name: name.removeprefix("text_model.") for name in names}
        if "text_projection.weight" not in names:
            return bare
        return {
            name: short if short == "text_projection.weight" else f"text_model.{short}" for name, short in bare.items()
        }
    if component == "vae":
        return {name: _OLD_ATTENTION.sub(lambda match: _NEW_ATTENTION[match[1]], name) for name in names}
    return {name: name for name in names}


_OLD_ATTENTION = re.compile(r"(?<=attentions\.0\.)(query|key|value|proj_attn)(?=\.)")
_NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _component(
    name: str, config: dict[str, Any], found: Mapping[str, TensorRef], ignored: list[str], where: str
) -> Component:
    tensors: dict[str, TensorRef] = {}
    for old, new in canonical_names(name, found).items():
        ref = found[old]
        if new.endswith("position_ids"):
            ignored.append(f"{name}/{old}")
            continue
        if new in tensors:
            raise ModelError(f"{where}: {old} and another tensor both mean {new}.")
        if ref.dtype not in FLOATS:
            raise ModelError(f"{where}: {old} is stored as {ref.dtype}.", hint="Use an fp16, bf16 or fp32 model.")
        if isinstance(ref.source, torch.Tensor) and ref.source.is_meta:
            raise ModelError(
                f"{where}: {old} is on the meta device (offloaded).",
                hint="Call pipe.remove_all_hooks() and pipe.to('cpu').",
            )
        tensors[new] = TensorRef(new, ref.dtype, ref.shape, ref.source, ref.offset, ref.transposed)
    return Component(name, config, tensors)
