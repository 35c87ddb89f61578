"""Opens a Stable Diffusion model: a diffusers folder, a single file or a live pipeline. Weights stay where they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sdaccel.errors import ModelError
from sdaccel.models import ldm
from sdaccel.models.family import EXPECTED, Family, detect_family, native_side, vae_factor, variant
from sdaccel.models.files import read_json, read_tensors, refused, tensor_ref
from sdaccel.models.single_file import PREDICTIONS, canonical_names, open_single_file, open_vae_file
from sdaccel.models.tensors import FLOATS, Component, HeaderEntry, TensorRef, read_header
from sdaccel.resources import expanded

__all__ = ["Checkpoint", "Component", "HeaderEntry", "TensorRef", "open_checkpoint", "read_header"]

COMPONENTS = ("unet", "vae", "text_encoder", "text_encoder_2")

Source = Any  # a path or a diffusers pipeline


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A whole model, opened but not read."""

    name: str
    """Short, for people."""
    origin: str
    """The absolute path as text, or "pipeline <class>"."""
    kind: str
    """"folder", "file" or "pipeline"."""
    family: Family
    components: dict[str, Component]
    """By name, and the ControlNets that it has: controlnet, controlnet_1, …"""
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


def open_checkpoint(
    source: Source,
    *,
    allow_pickle: bool = False,
    variant: str | None = None,
    vae: str | Path | None = None,
    use_ema: bool = False,
    prediction_type: str | None = None,
) -> Checkpoint:
    """Opens a diffusers folder, a single .safetensors file in the original layout, or a live diffusers pipeline.

    allow_pickle: also accept .ckpt, .bin, .pt and .pth (read with torch's weights_only unpickler).
    variant: which weights of a folder to take, "fp16" for ``*.fp16.safetensors``.
    vae: folder or file of a VAE to use instead of the model's own, or when it has none.
    use_ema: of a single file, take the averaged UNet weights.
    prediction_type: "epsilon", "v_prediction" or "sample", when the model does not say it or says it wrongly.
    Raises ModelError, or PickleRefused for a pickle that is not allowed.
    """
    if prediction_type is not None and prediction_type not in PREDICTIONS:
        raise ModelError(f"prediction_type={prediction_type!r} is none of {', '.join(PREDICTIONS)}.")
    if not isinstance(source, (str, os.PathLike)):
        return _open_pipeline(source, prediction_type)
    path = Path(source)
    try:
        path = expanded(path).absolute()
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error}).") from None
    if is_folder:
        return _open_folder(path, allow_pickle, variant, vae, prediction_type)
    if is_file:
        return _open_file(path, allow_pickle, vae, use_ema, prediction_type)
    raise ModelError(f"{path}: no such file or folder.", hint="Name a diffusers folder or a .safetensors file.")


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
    side, factor = native_side(unet, vae, family), vae_factor(vae)
    name, origin = (text.encode(errors="replace").decode() for text in (name, origin))  # manifests are UTF-8
    return Checkpoint(
        name, origin, kind, family, components, scheduler, side, factor, path, tuple(notes), tuple(ignored)
    )


# ---- a single file


def _open_file(
    path: Path, allow_pickle: bool, vae: str | Path | None, use_ema: bool, prediction_type: str | None
) -> Checkpoint:
    parts = open_single_file(
        path,
        allow_pickle=allow_pickle,
        vae=None if vae is None else lambda family: _open_vae(Path(vae), family, allow_pickle),
        use_ema=use_ema,
        prediction_type=prediction_type,
    )
    return _checkpoint(
        path.stem,
        str(path),
        "file",
        parts.family,
        parts.components,
        parts.configs,
        parts.scheduler,
        path,
        parts.notes,
        parts.ignored,
    )


def _open_vae(path: Path, family: Family | None, allow_pickle: bool) -> Component:
    """A VAE from its folder, from a whole model's folder, or from a file."""
    path = expanded(path).absolute()
    if path.is_file():
        return open_vae_file(path, family, allow_pickle)
    folder = path / "vae" if (path / "model_index.json").is_file() else path
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: no VAE there.", hint="Name a .safetensors file or a folder with a config.json.")
    config = read_json(folder / "config.json")
    refusal = _unsupported("vae", "AutoencoderKL", config)
    if refusal:
        raise ModelError(f"{path}: {refusal}", hint="Expected an AutoencoderKL.")
    return _component("vae", config, _folder_tensors(folder, allow_pickle, None, []), [], [], str(folder))


# ---- a diffusers folder


def _open_folder(
    folder: Path, allow_pickle: bool, wanted: str | None, vae: str | Path | None, prediction_type: str | None
) -> Checkpoint:
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        inside = ", ".join(file.name for file in _files(folder)[:5]) or "nothing"
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
        kind = _kind(index, name)
        if kind is None or (name == "vae" and vae is not None):
            continue
        part = folder / name
        if not part.is_dir():
            raise ModelError(f"{folder}: {name} is missing.", hint="Download the model completely.")
        config = configs[name] = read_json(part / "config.json")
        refusal = _unsupported(name, kind, config)
        if refusal:
            notes.append(refusal)
            continue
        found = _folder_tensors(part, allow_pickle, wanted, notes)
        components[name] = _component(name, config, found, notes, ignored, str(part))
    for name in _controlnet_folders(folder, index):
        part = folder / name
        config = read_json(part / "config.json")
        kind = str(config.get("_class_name", "ControlNetModel"))
        if kind != "ControlNetModel":
            notes.append(f"{name} is a {kind}: it stays in torch.")
            continue
        found = _folder_tensors(part, allow_pickle, wanted, notes)
        components[name] = Component("controlnet", config, _unchecked(found, str(part))[0])
    _require_variant(folder, wanted, components, notes)
    family = detect_family(configs["unet"], {name for name in configs if name.startswith("text")})
    if vae is not None:
        components["vae"] = _open_vae(Path(vae), family, allow_pickle)
        configs["vae"] = components["vae"].config
    scheduler = _folder_scheduler(folder, notes)
    if prediction_type is not None:
        scheduler = scheduler | {"prediction_type": prediction_type}
    name = folder.resolve().name
    return _checkpoint(name, str(folder), "folder", family, components, configs, scheduler, folder, notes, ignored)


def _kind(index: Mapping[str, Any], name: str) -> str | None:
    """The class that a model_index.json names for a component."""
    entry = index.get(name)
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        return None
    return entry[1]


def _controlnet_folders(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """controlnet, controlnet_1, …: those of a model that was saved with ControlNets."""
    if _kind(index, "controlnet") is None:
        return []
    names = ["controlnet"]
    while (folder / f"controlnet_{len(names)}").is_dir():
        names.append(f"controlnet_{len(names)}")
    return names


def _folder_scheduler(folder: Path, notes: list[str]) -> dict[str, Any]:
    file = folder / "scheduler" / "scheduler_config.json"
    if file.is_file():
        return {"prediction_type": "epsilon"} | read_json(file)
    notes.append(
        'no scheduler/scheduler_config.json: prediction_type epsilon is assumed; override it with prediction_type="…".'
    )
    return {"prediction_type": "epsilon"}


def _check_pipeline(where: object, index: Mapping[str, Any]) -> None:
    if _kind(index, "unet"):
        return
    kind = str(index.get("_class_name", "an unnamed pipeline"))
    parts = ", ".join(sorted(key for key in index if not key.startswith("_"))[:8])
    raise ModelError(f"{where}: {kind} has no UNet (it has {parts or 'no components'}).", hint=EXPECTED)


def _unsupported(name: str, kind: str, config: dict[str, Any]) -> str | None:
    """Why a component stays with its own implementation; a UNet or text encoder of another kind is an error instead."""
    if name == "unet" and kind != "UNet2DConditionModel":
        raise ModelError(f"the UNet is a {kind}.", hint=EXPECTED)
    if name == "vae" and (kind != "AutoencoderKL" or config.get("_class_name", kind) != kind):
        return f"vae is a {config.get('_class_name', kind)}: it stays in torch."
    if name.startswith("text"):
        if kind not in ("CLIPTextModel", "CLIPTextModelWithProjection"):
            raise ModelError(f"{name} is a {kind}, not CLIP.", hint=EXPECTED)
        config["architectures"] = [kind]
    return None


_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")


def _folder_tensors(folder: Path, allow_pickle: bool, wanted: str | None, notes: list[str]) -> dict[str, TensorRef]:
    safe = _weight_files(folder, ".safetensors")
    found = safe or _weight_files(folder, ".bin")
    if not found:
        raise ModelError(f"{folder}: no weights (*.safetensors) in it.", hint="Download the model completely.")
    if not safe and not allow_pickle:
        raise refused(", ".join(sorted(file.name for file in found.values())), folder)
    file = found[_choose(folder, found, wanted, notes)]
    tensors: dict[str, TensorRef] = {}
    for part in [file] if file.suffix != ".json" else _shards(file):
        read = read_tensors(part, allow_pickle).tensors
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
        for file in _files(folder):
            match = name.fullmatch(file.name)
            if match and not re.search(r"-\d{5}-of-\d{5}", file.name):
                found.setdefault(match[1] or match[2], file)
    return found


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read ({error.strerror or error}).") from None


def _choose(folder: Path, found: Mapping[str | None, Path], wanted: str | None, notes: list[str]) -> str | None:
    if wanted in found:
        return wanted
    if wanted and None in found:
        notes.append(f"{folder.name}{_NO_VARIANT}{wanted!r}: its plain weights are used.")
        return None
    named = sorted(name for name in found if name)
    if wanted:
        raise ModelError(f"{folder}: no variant {wanted!r}, only {', '.join(named)}.")
    if len(named) > 1 and "fp16" not in named:
        raise ModelError(f"{folder}: several variants ({', '.join(named)}).", hint="Name one with variant=….")
    choice = "fp16" if "fp16" in named else named[0]
    notes.append(f"{folder.name} has only the variant {', '.join(named)}: {choice} is used.")
    return choice


_NO_VARIANT = " has no variant "


def _require_variant(folder: Path, wanted: str | None, components: Mapping[str, Component], notes: list[str]) -> None:
    if wanted and components and sum(_NO_VARIANT in note for note in notes) == len(components):
        raise ModelError(f"{folder}: no component has a variant {wanted!r}.", hint="Open it without variant.")


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


# ---- a live pipeline


def _open_pipeline(pipe: Any, prediction_type: str | None) -> Checkpoint:
    host = type(pipe).__name__
    if not hasattr(pipe, "unet") or not hasattr(pipe, "scheduler"):
        raise ModelError(f"a {host} is neither a path nor a pipeline with a UNet.", hint=EXPECTED)
    notes: list[str] = []
    ignored: list[str] = []
    components: dict[str, Component] = {}
    configs: dict[str, dict] = {}
    for name in COMPONENTS:
        module = getattr(pipe, name, None)
        if module is None:
            continue
        inner = _unwrapped(module)
        kind = _class_of(inner)
        config = configs[name] = _module_config(inner, kind)
        refusal = _unsupported(name, kind, config)
        if refusal:
            notes.append(refusal)
            continue
        found = {key: tensor_ref(key, value) for key, value in unwrapped_state_dict(module, ignored, name).items()}
        components[name] = _component(name, config, found, notes, ignored, f"{host}.{name}")
    if "unet" not in configs:
        raise ModelError(f"the {host} has no UNet.", hint=EXPECTED)
    for name, module in controlnets(pipe).items():
        inner = _unwrapped(module)
        kind = _class_of(inner)
        if kind != "ControlNetModel":
            notes.append(f"{name} is a {kind}: it stays in torch.")
            continue
        found = {key: tensor_ref(key, value) for key, value in unwrapped_state_dict(module, ignored, name).items()}
        tensors, _ = _unchecked(found, f"{host}.{name}")
        _refuse_offloaded(tensors, f"{host}.{name}")
        components[name] = Component("controlnet", _module_config(inner, kind), tensors)
    family = detect_family(configs["unet"], {name for name in configs if name.startswith("text")})
    scheduler = _plain(dict(pipe.scheduler.config))
    if prediction_type is not None:
        scheduler["prediction_type"] = prediction_type
    came_from = str(getattr(pipe, "name_or_path", None) or configs["unet"].get("_name_or_path") or "")
    name = Path(came_from).name or host
    return _checkpoint(
        name, f"pipeline {host}", "pipeline", family, components, configs, scheduler, None, notes, ignored
    )


def controlnets(pipe: Any) -> dict[str, Any]:
    """The ControlNets of a pipeline, each once, by the names that diffusers saves them under."""
    whole = getattr(pipe, "controlnet", None)
    if whole is None:
        return {}
    inside = getattr(_unwrapped(whole), "nets", None)
    nets = list(inside) if isinstance(inside, torch.nn.ModuleList) else [whole]
    named = {id(net): (f"controlnet_{index}" if index else "controlnet") for index, net in reversed([*enumerate(nets)])}
    return {named[id(net)]: net for net in nets}


def _unwrapped(module: Any) -> Any:
    """The model inside torch.compile's and PEFT's wrappers."""
    module = getattr(module, "_orig_mod", module)
    return module.get_base_model() if hasattr(module, "get_base_model") and hasattr(module, "peft_config") else module


_SUPPORTED = (
    "UNet2DConditionModel",
    "AutoencoderKL",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "ControlNetModel",
)


def _class_of(module: Any) -> str:
    """The supported class that a module is of, directly or by inheritance; else its own."""
    own = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in own if name in _SUPPORTED), own[0])


def _module_config(module: Any, kind: str) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return _plain(config.to_dict())
    if not isinstance(config, Mapping):
        raise ModelError(f"a {type(module).__name__} has no config.")
    return _plain(dict(config) | {"_class_name": kind})


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As config.json would have it."""
    return json.loads(
        json.dumps({key: value for key, value in config.items() if key != "_use_default_values"}, default=str)
    )


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


def _component(
    name: str, config: dict[str, Any], found: Mapping[str, TensorRef], notes: list[str], ignored: list[str], where: str
) -> Component:
    renamed: dict[str, str] = {}
    for old, new in canonical_names(name, found, ldm.has_projection(config)).items():
        if new in renamed:
            raise ModelError(f"{where}: {old} and {renamed[new]} are the same weight.")
        renamed[new] = old
    refs = {new: found[old] for new, old in renamed.items()}
    try:
        tensors, rest = ldm.assemble(name, config, refs, where)
    except ldm.Unmodelled as reason:
        tensors, rest = _unchecked(refs, where)
        notes.append(f"{name}: names and shapes of its weights are not checked: {reason}")
    _refuse_offloaded(tensors, where)
    ignored += [f"{name}/{renamed[new]}" for new in rest]
    return Component(name, config, tensors)


def _refuse_offloaded(tensors: Mapping[str, TensorRef], where: str) -> None:
    offloaded = [ref.name for ref in tensors.values() if isinstance(ref.source, torch.Tensor) and ref.source.is_meta]
    if offloaded:
        raise ModelError(
            f"{where}: {len(offloaded)} weights are on the meta device (offloaded), {offloaded[0]} is one.",
            hint="Call pipe.remove_all_hooks() and pipe.to('cpu') first.",
        )


def _unchecked(refs: Mapping[str, TensorRef], where: str) -> tuple[dict[str, TensorRef], list[str]]:
    rest = [name for name in refs if name.endswith("position_ids") or ".processor." in name]
    kept = {name: ref for name, ref in refs.items() if name not in rest}
    strange = [f"{name} as {ref.dtype}" for name, ref in kept.items() if ref.dtype not in FLOATS]
    if strange:
        raise ModelError(f"{where}: stores {strange[0]}.", hint="Use an fp16, bf16 or fp32 form of this model.")
    return {name: replace(ref, name=name) for name, ref in kept.items()}, rest
