"""A diffusers pipeline in plain torch from an opened checkpoint: what engines are compared with and fall back to."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from sdaccel.errors import ModelError
from sdaccel.models.checkpoint import Checkpoint
from sdaccel.models.family import Family
from sdaccel.models.files import read_json
from sdaccel.models.tensors import Component

CLIP_TOKENIZER = "openai/clip-vit-large-patch14"

_PIPELINES = {
    (False, "text-to-image"): "StableDiffusionPipeline",
    (False, "inpaint"): "StableDiffusionInpaintPipeline",
    (False, "8-channel"): "StableDiffusionInstructPix2PixPipeline",
    (True, "text-to-image"): "StableDiffusionXLPipeline",
    (True, "inpaint"): "StableDiffusionXLInpaintPipeline",
    (True, "8-channel"): "StableDiffusionXLInstructPix2PixPipeline",
}


def load_pipeline(checkpoint: Checkpoint, *, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None) -> Any:
    """The checkpoint as a diffusers pipeline on the CPU, without a safety checker.

    Weights already stored as ``dtype`` stay memory-mapped. tokenizer: a tokenizer's folder, or one with tokenizer/ (and
    tokenizer_2/) in it, for a model without its own; a single file has none inside, so it is else looked for beside the
    file, in the local Hugging Face cache and on the network (openai/clip-vit-large-patch14). Raises ModelError when it
    is found nowhere.
    """
    if checkpoint.path is None:
        raise ModelError("this checkpoint was opened from a live pipeline.", hint="Use that pipeline itself.")
    modules = {
        name: _module(component, dtype)
        for name, component in checkpoint.components.items()
        if component.name != "controlnet"  # diffusers loads them, as it knows how they belong together
    }
    if checkpoint.kind == "folder":
        return _from_folder(checkpoint.path, checkpoint, modules, dtype, tokenizer)
    return _from_file(checkpoint.path, checkpoint, modules, tokenizer)


def _module(component: Component, dtype: torch.dtype) -> torch.nn.Module:
    with torch.device("meta"):
        module = _empty(component)
    weights = {name: ref.read().to(dtype) for name, ref in component.tensors.items()}
    wanted = {_in_module(module, component.name, name): tensor for name, tensor in weights.items()}
    module.load_state_dict(wanted, strict=True, assign=True)
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name.endswith("position_ids"):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.register_buffer("position_ids", torch.arange(buffer.shape[-1]).expand(buffer.shape), persistent=False)
    return module.eval().requires_grad_(False)


def _empty(component: Component) -> Any:
    import diffusers
    import transformers

    if component.name in ("unet", "vae"):
        kind = diffusers.UNet2DConditionModel if component.name == "unet" else diffusers.AutoencoderKL
        config = {key: value for key, value in component.config.items() if not key.startswith("_")}
        return kind.from_config(config)
    architecture = getattr(transformers, component.config["architectures"][0])
    return architecture(transformers.CLIPTextConfig.from_dict(component.config))


def _in_module(module: torch.nn.Module, component: str, name: str) -> str:
    """transformers before 5.6 has text_model. in front of every name of a text encoder."""
    wraps = component.startswith("text_encoder") and hasattr(module, "text_model")
    return name if not wraps or name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"


# ---- a folder


def _from_folder(
    path: Path, checkpoint: Checkpoint, modules: dict[str, Any], dtype: torch.dtype, tokenizer: Path | None
) -> Any:
    from diffusers import DiffusionPipeline

    index = read_json(path / "model_index.json")
    for name in ("tokenizer", "tokenizer_2"):
        if any(index.get(name) or ()) and not _has_tokenizer(path / name):
            if tokenizer is None:
                raise ModelError(
                    f"{path}: {name} is missing or incomplete ({_VOCABULARY}).",
                    hint="Download the model completely, or name one with --tokenizer FOLDER.",
                )
            modules[name] = _TokenizerSource(path, checkpoint.family, tokenizer).load(name)
    safety = {"safety_checker": None, "requires_safety_checker": False} if "safety_checker" in index else {}
    try:
        pipe = DiffusionPipeline.from_pretrained(
            str(path), **modules, **safety, torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # what tokenizers raises is no narrower
        raise ModelError(f"{path}: diffusers cannot load it ({str(error)[:200]}).") from error
    if pipe.scheduler.config.get("prediction_type") != checkpoint.prediction_type:
        pipe.scheduler = type(pipe.scheduler).from_config(
            pipe.scheduler.config, prediction_type=checkpoint.prediction_type
        )
    return pipe


# ---- a single file


def _from_file(path: Path, checkpoint: Checkpoint, modules: dict[str, Any], tokenizer: Path | None) -> Any:
    import diffusers

    xl = checkpoint.family.is_xl
    kind = _PIPELINES.get((xl, checkpoint.variant))
    if kind is None:
        raise ModelError(f"{path}: diffusers has no pipeline for a {checkpoint.variant} model.")
    if checkpoint.family is Family.SDXL_REFINER:
        kind = "StableDiffusionXLImg2ImgPipeline"
    scheduler = getattr(diffusers, checkpoint.scheduler["_class_name"]).from_config(checkpoint.scheduler)
    parts: dict[str, Any] = {"text_encoder": None} | modules | {"scheduler": scheduler}
    source = _TokenizerSource(path, checkpoint.family, tokenizer)
    parts["tokenizer"] = source.load("tokenizer") if parts["text_encoder"] is not None else None
    if xl:
        parts["tokenizer_2"] = source.load("tokenizer_2")
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if checkpoint.family is Family.SDXL_REFINER:
        parts |= {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    return getattr(diffusers, kind)(**parts)


class _TokenizerSource:
    def __init__(self, path: Path, family: Family, given: Path | None):
        self.path = path
        self.family = family
        self.given = Path(given) if given is not None else None

    def load(self, name: str) -> Any:
        """OpenCLIP's tokenizer (SD 2, SDXL's second) is OpenAI's, padded with "!" instead of the end token."""
        pads = {"pad_token": "!"} if name == "tokenizer_2" or self.family is Family.SD2 else {}
        if self.given is not None and not self.given.is_dir():
            raise ModelError(f"tokenizer={self.given}: no such folder.")
        for folder, own in self._folders(name):
            if _has_tokenizer(folder):
                settled = own and (folder / "tokenizer_config.json").is_file()
                return _read_tokenizer(folder, **({} if settled else pads))
        if self.given is not None:
            raise ModelError(f"tokenizer={self.given}: no tokenizer in it ({_VOCABULARY}).")
        for local in (True, False):
            with contextlib.suppress(Exception):  # no copy, no network, a proxy: each has its own
                return _read_tokenizer(_clip_tokenizer(local), **pads)
        raise ModelError(
            f"{self.path}: a single file has no tokenizer, and {CLIP_TOKENIZER} could not be downloaded.",
            hint="Pass tokenizer=<folder with vocab.json and merges.txt>, or put one named tokenizer beside the file.",
        )

    def _folders(self, name: str) -> list[tuple[Path, bool]]:
        """Where to look, and whether that place is this very tokenizer's own."""
        roots = [self.given] if self.given is not None else [self.path.parent]
        found = [(root / name, True) for root in roots] + [(root / "tokenizer", name == "tokenizer") for root in roots]
        return found + ([(self.given, False)] if self.given is not None else [])


# ---- tokenizers


_VOCABULARY = "tokenizer.json, or vocab.json and merges.txt"


def _has_tokenizer(folder: Path) -> bool:
    """Whether a vocabulary is there: transformers 5 makes a tokenizer that knows no word of a folder without one."""
    return (folder / "tokenizer.json").is_file() or all((folder / n).is_file() for n in ("vocab.json", "merges.txt"))


def _read_tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(str(folder), **options)
    except Exception as error:  # what tokenizers raises is no narrower
        raise ModelError(
            f"{folder}: its tokenizer cannot be read ({str(error)[:120]}).", hint="Download it again."
        ) from error
    tokenizer.model_max_length = min(tokenizer.model_max_length, 77)
    return tokenizer


def _clip_tokenizer(local: bool) -> Path:
    """The folder with OpenAI's vocabulary, in the local Hugging Face cache or fetched into it."""
    from huggingface_hub import hf_hub_download

    files = [hf_hub_download(CLIP_TOKENIZER, n, local_files_only=local) for n in ("vocab.json", "merges.txt")]
    return Path(files[0]).parent
