"""A whole model in one file of the original layout, opened offline with the published configs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sdaccel.errors import ModelError
from sdaccel.models import ldm
from sdaccel.models.family import EXPECTED, Family, detect_family
from sdaccel.models.files import TensorFile, read_json, read_tensors
from sdaccel.models.tensors import FLOATS, Component, TensorRef

CONFIGS = Path(__file__).parent / "configs"
PREDICTIONS = ("epsilon", "v_prediction", "sample")

_UNET = "model.diffusion_model."
_EMA = "model_ema."
_VAE = ("first_stage_model.", "vae.")
_PARTS = (_UNET, _EMA, *_VAE, "cond_stage_model.", "conditioner.")


class Parts(NamedTuple):
    family: Family
    components: dict[str, Component]
    configs: dict[str, dict[str, Any]]
    scheduler: dict[str, Any]
    notes: list[str]
    ignored: list[str]


def published(name: str, component: str) -> dict[str, Any]:
    """A component's published config: "sd15", "sd21", "sd21-base", "sdxl" or "sdxl-refiner"."""
    return dict(_read(name, component))


@cache
def _read(name: str, component: str) -> dict[str, Any]:
    return read_json(CONFIGS / name / f"{component}.json")


def open_single_file(
    path: Path,
    *,
    allow_pickle: bool,
    vae: Callable[[Family], Component] | None,
    use_ema: bool,
    prediction_type: str | None,
) -> Parts:
    """Opens the file; ``vae`` opens one to be used instead of its own. Raises ModelError, PickleRefused."""
    file = read_tensors(path, allow_pickle)
    _refuse_other_kinds(path, file.tensors)
    return _SingleFile(path, file, vae, use_ema, prediction_type).parts()


class _SingleFile:
    def __init__(
        self,
        path: Path,
        file: TensorFile,
        vae: Callable[[Family], Component] | None,
        use_ema: bool,
        prediction_type: str | None,
    ):
        self.path = path
        self.file = file
        self.tensors = file.tensors
        self.vae = vae
        self.notes: list[str] = []
        self.ignored: list[str] = []
        self.grouped: set[str] = {name for name in _MARKERS if name in self.tensors}
        self.unet_tensors = self._unet_tensors(use_ema)
        self.family = self._family()
        self.prediction = self._prediction_type(prediction_type)
        self.published = {
            Family.SD1: "sd15",
            Family.SD2: "sd21" if self.prediction == "v_prediction" else "sd21-base",
            Family.SDXL: "sdxl",
            Family.SDXL_REFINER: "sdxl-refiner",
        }[self.family]

    def parts(self) -> Parts:
        components = {"unet": self._unet(), "vae": self._vae()}
        if self.family is Family.SD1:
            components["text_encoder"] = self._clip("cond_stage_model.transformer.")
        elif self.family is Family.SD2:
            components["text_encoder"] = self._open_clip("text_encoder", "cond_stage_model.model.")
        elif self.family is Family.SDXL:
            components["text_encoder"] = self._clip("conditioner.embedders.0.transformer.")
            components["text_encoder_2"] = self._open_clip("text_encoder_2", "conditioner.embedders.1.model.")
        else:
            components["text_encoder_2"] = self._open_clip("text_encoder_2", "conditioner.embedders.0.model.")
        self.ignored += self.tensors.keys() - self.grouped
        configs = {name: component.config for name, component in components.items()}
        return Parts(self.family, components, configs, self._scheduler(), self.notes, sorted(self.ignored))

    def _group(self, prefix: str) -> dict[str, TensorRef]:
        found = {name[len(prefix) :]: ref for name, ref in self.tensors.items() if name.startswith(prefix)}
        self.grouped |= {prefix + name for name in found}
        return found

    def _component(
        self, name: str, config: dict[str, Any], found: Mapping[str, TensorRef], shown: str
    ) -> tuple[Component, list[str]]:
        tensors, rest = ldm.assemble(name, config, found, f"{self.path}: {name} ({shown}*)", original=True)
        return Component(name, config, tensors), rest

    # -- UNet

    def _unet_tensors(self, use_ema: bool) -> dict[str, TensorRef]:
        plain = self._group(_UNET)
        averaged: dict[str, TensorRef] = {}
        for name, ref in self.tensors.items():
            dotted = ldm.with_dots(name[len(_EMA) + 15 :]) if name.startswith(f"{_EMA}diffusion_model") else None
            if dotted:
                averaged[dotted] = ref
                self.grouped.add(name)
        if use_ema and not averaged:
            raise ModelError(f"{self.path}: no EMA weights (model_ema.*) in it.", hint="Open it without use_ema.")
        take_averaged = use_ema or not plain
        if take_averaged and plain:
            self.ignored += [_UNET + name for name in plain]
        if averaged and not take_averaged:
            self.notes.append(
                "the file holds EMA weights as well: the plain ones are used, use_ema=True takes the others."
            )
            self.ignored += [name for name in self.tensors if name.startswith(f"{_EMA}diffusion_model")]
        return averaged if take_averaged else plain

    def _family(self) -> Family:
        config = ldm.infer_unet(_shapes(self.unet_tensors), {})
        if "label_emb.0.0.weight" in self.unet_tensors:
            if any(name.startswith("cond_stage_model.") for name in self.tensors):
                raise ModelError(f"{self.path}: a Stable Diffusion 2 unCLIP checkpoint.", hint=EXPECTED)
            config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
        encoders = {
            "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.transformer."),
            "text_encoder_2": ("conditioner.embedders.1.model.", "conditioner.embedders.0.model."),
        }
        found = {name for name, prefixes in encoders.items() if any(key.startswith(prefixes) for key in self.tensors)}
        family = detect_family(config, found)
        of_refiner = any(name.startswith("conditioner.embedders.0.model.") for name in self.tensors)  # its only encoder
        return Family.SDXL_REFINER if of_refiner and family.is_xl else family

    def _unet(self) -> Component:
        config = ldm.infer_unet(_shapes(self.unet_tensors), published(self.published, "unet"))
        component, rest = self._component("unet", config, self.unet_tensors, _UNET)
        self.ignored += [_UNET + name for name in rest]
        return component

    # -- VAE

    def _vae(self) -> Component:
        prefix = next((prefix for prefix in _VAE if any(name.startswith(prefix) for name in self.tensors)), None)
        if self.vae is not None:
            if prefix:
                self.notes.append("the VAE given is used instead of the one in the file.")
                self.ignored += [prefix + name for name in self._group(prefix)]
            return self.vae(self.family)
        if prefix is None:
            raise ModelError(
                f"{self.path}: no VAE (first_stage_model.*) in it.", hint="Name one with vae=<folder or file>."
            )
        found = self._group(prefix)
        config = ldm.infer_vae(_shapes(found), published(self.published, "vae"))
        component, rest = self._component("vae", config, found, prefix)
        self.ignored += [prefix + name for name in rest]
        return component

    # -- text encoders

    def _clip(self, prefix: str) -> Component:
        found = self._group(prefix)
        if not found:
            raise self._no_encoder("text_encoder", prefix)
        bare = {name: name.removeprefix("text_model.") for name in found}  # some tools leave "text_model." out
        renamed = {f"text_model.{bare[name]}": ref for name, ref in found.items()}
        config = ldm.infer_clip(_shapes(renamed), published(self.published, "text_encoder"))
        component, rest = self._component("text_encoder", config, renamed, prefix)
        self.ignored += [prefix + name for name in found if f"text_model.{bare[name]}" in rest]
        return component

    def _open_clip(self, name: str, prefix: str) -> Component:
        found = self._group(prefix)
        if not found:
            raise self._no_encoder(name, prefix)
        template = published(self.published, name)
        projects = ldm.has_projection(template)
        renamed, rest = ldm.from_open_clip(found, ldm.open_clip_layers(found, projects))
        if not projects and "text_projection.weight" in renamed:
            del renamed["text_projection.weight"]
            rest += [key for key in ("text_projection", "text_projection.weight") if key in found]
        config = ldm.infer_clip(_shapes(renamed), template)
        component, _ = self._component(name, config, renamed, prefix)
        self.ignored += [prefix + name for name in rest]
        return component

    def _no_encoder(self, name: str, prefix: str) -> ModelError:
        return ModelError(
            f"{self.path}: a {self.family.label} UNet, but no {name} ({prefix}*) in it.",
            hint="Use the full checkpoint, with the text encoders.",
        )

    # -- scheduler

    def _scheduler(self) -> dict[str, Any]:
        scheduler = published(self.published, "scheduler") | {"prediction_type": self.prediction}
        if "time_embed.cond_proj.weight" in self.unet_tensors:
            scheduler["_class_name"] = "LCMScheduler"
            self.notes.append(
                "the UNet embeds its guidance scale (a latent consistency model): LCMScheduler is assumed."
            )
        if "ztsnr" in self.tensors:  # trained with zero terminal SNR (arXiv 2305.08891)
            scheduler |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
            if scheduler["_class_name"] == "PNDMScheduler":
                scheduler["_class_name"] = "DDIMScheduler"
                self.notes.append("trained with zero terminal SNR, unknown to PNDMScheduler: DDIMScheduler is assumed.")
        return scheduler

    def _prediction_type(self, asked: str | None) -> str:
        if asked is not None:
            if asked not in PREDICTIONS:
                raise ModelError(f"prediction_type={asked!r} is none of {', '.join(PREDICTIONS)}.")
            return asked
        for found, source in (
            (_from_sidecar(self.path), "its .yaml"),
            ("v_prediction" if "v_pred" in self.tensors else None, "the key v_pred"),
            (_from_metadata(self.file.metadata), "its metadata"),
        ):
            if found:
                if found != "epsilon":
                    self.notes.append(f"prediction_type {found}, from {source}.")
                return found
        if self.family is not Family.SD2:
            return "epsilon"
        return self._guess_sd2()

    def _guess_sd2(self) -> str:
        """SD 2.x comes both ways and mostly does not say which; these are the signs that other programs go by."""
        override = 'override it with prediction_type="epsilon" or "v_prediction".'
        channels = self.unet_tensors["input_blocks.0.0.weight"].shape[1]
        steps = self.file.values.get("global_step")
        last = ldm.children(_shapes(self.unet_tensors), "output_blocks") - 1
        bias = self.unet_tensors.get(f"output_blocks.{last}.1.transformer_blocks.0.norm1.bias")
        if channels != 4:
            found, why = "epsilon", f"the published {channels}-channel SD 2 models predict epsilon"
        elif steps is not None:
            found, why = "epsilon" if steps == 875000 else "v_prediction", f"global_step is {steps}"
        elif bias is not None and bias.dtype in FLOATS:
            spread = float(bias.read().float().std(unbiased=False))
            found = "v_prediction" if spread > 0.09 else "epsilon"
            why = f"the last attention's norm has a spread of {spread:.3f}, v-models have more than 0.09"
        else:
            found, why = "epsilon", "nothing in the file tells"
        self.notes.append(f"prediction_type {found} is assumed ({why}); {override}")
        return found


def _shapes(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[int, ...]]:
    return {name: ref.shape for name, ref in tensors.items()}


_MARKERS = ("v_pred", "ztsnr")
_SPELLINGS = {
    "v": "v_prediction",
    "v_prediction": "v_prediction",
    "vpred": "v_prediction",
    "eps": "epsilon",
    "epsilon": "epsilon",
}


def _from_metadata(metadata: Mapping[str, str]) -> str | None:
    for key in ("modelspec.prediction_type", "modelspec.predict_key"):
        found = _SPELLINGS.get(metadata.get(key, "").strip().lower().replace("-", "_"))
        if found:
            return found
    architecture = metadata.get("modelspec.architecture", "").lower()
    return "v_prediction" if architecture.startswith("stable-diffusion-v2-768-v") else None


_PARAMETERIZATION = re.compile(r"^\s*[\"']?parameterization[\"']?\s*:\s*[\"']?(\w+)", re.MULTILINE)
_V_SCALING = re.compile(r"^[^#\n]*denoiser_(?:scaling|weighting)\.V(?:Scaling|Weighting)\b", re.MULTILINE)


def _from_sidecar(path: Path) -> str | None:
    """``model.params.parameterization`` of the .yaml beside a checkpoint, or SGM's V scaling."""
    for suffix in (".yaml", ".yml"):
        sidecar = path.with_suffix(suffix)
        try:
            if sidecar.is_file() and sidecar.stat().st_size < 1 << 20:
                text = sidecar.read_text(encoding="utf-8-sig", errors="replace")
            else:
                continue
        except OSError as error:
            raise ModelError(f"{sidecar}: cannot be read ({error.strerror or error}).") from None
        match = _PARAMETERIZATION.search(text)
        if match:
            found = _SPELLINGS.get(match[1].lower())
            if found is None:
                raise ModelError(f"{sidecar}: parameterization {match[1]!r} is neither v nor eps.")
            return found
        if _V_SCALING.search(text):
            return "v_prediction"
    return None


# ---- a VAE of its own


def open_vae_file(path: Path, family: Family | None, allow_pickle: bool) -> Component:
    """A VAE from a file: original or diffusers names, alone or inside a checkpoint."""
    tensors = read_tensors(path, allow_pickle).tensors
    prefix = next(
        (prefix for prefix in (*_VAE, "") if any(name.startswith(f"{prefix}encoder.") for name in tensors)), None
    )
    if prefix is None:
        raise ModelError(f"{path}: no VAE in it.", hint="Expected an AutoencoderKL with its encoder and decoder.")
    found = {name[len(prefix) :]: ref for name, ref in tensors.items() if name.startswith(prefix)}
    original = any(name.startswith("encoder.down.") for name in found)
    if not original:
        found = {new: found[old] for old, new in canonical_names("vae", found).items()}
    published_name = "sdxl" if family and family.is_xl else "sd15"
    config = ldm.infer_vae(_shapes(found), published(published_name, "vae"))
    weights, _ = ldm.assemble("vae", config, found, f"{path}: vae", original=original)
    return Component("vae", config, weights)


def canonical_names(component: str, names: Iterable[str], projects: bool = False) -> dict[str, str]:
    """Names as files and library versions have them → the one name a tensor has in ``Component.tensors``.

    Text encoders: as transformers 5.6 and later name them, that is without "text_model." unless the encoder projects.
    VAE: attention as to_q, to_k, to_v, to_out.0 (older files: query, key, value, proj_attn).
    """
    if component.startswith("text_encoder"):
        bare = {name: name.removeprefix("text_model.") for name in names}
        outer = ("text_projection.", "logit_scale", "vision_model.", "visual_projection.")
        return {
            name: short if not projects or short.startswith(outer) else f"text_model.{short}"
            for name, short in bare.items()
        }
    if component == "vae":
        return {name: _OLD_ATTENTION.sub(lambda match: _NEW_ATTENTION[match[1]], name) for name in names}
    return {name: name for name in names}


_OLD_ATTENTION = re.compile(r"(?<=attentions\.0\.)(query|key|value|proj_attn)(?=\.)")
_NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


# ---- files that are something else


class _Kind(NamedTuple):
    signs: str
    """A regular expression; one tensor's name that it finds is enough."""
    what: str
    hint: str = EXPECTED
    beside: bool = False
    """Whether tensors of its may lie beside those of a whole model, which has no use for them."""


_OTHER_KINDS = (
    _Kind(
        r"lora_(?:up|down|A|B|mid)\b|\.hada_w|\.lokr_w|\.oft_|\.dora_scale|^lora_|\.lora\.",
        "a LoRA (or a relative of it)",
        "Open the checkpoint that it was trained on and add the LoRA to that.",
        beside=True,
    ),
    _Kind(r"^control_model\.|controlnet_|^input_hint_block\.|^zero_convs\.|^controlnet", "a ControlNet"),
    _Kind(r"(?:^|\.)joint_blocks\.", "a Stable Diffusion 3 model"),
    _Kind(r"(?:^|\.)(?:double_blocks|single_transformer_blocks)\.", "a Flux (or related transformer) model"),
    _Kind(r"^clip_txt_mapper|^clip_txt_pooled_mapper|\.channelwise\.0\.|^effnet_mapper", "a Stable Cascade model"),
    _Kind(
        r"\.time_stack\.|\.time_mixer\.|motion_modules\.|temporal_transformer",
        "a video model (Stable Video Diffusion, AnimateDiff)",
    ),
    _Kind(r"^edm_mean$|^edm_vpred\.", "an EDM model (Playground v2.5, CosXL)"),
    _Kind(r"^(?:model\.diffusion_model\.)?label_emb\.weight$", "an upscaler"),
    _Kind(r"^(?:image_proj|ip_adapter)\.", "an IP-Adapter", beside=True),
    _Kind(r"^adapter\.|^body\.\d+\.", "a T2I-Adapter", beside=True),
    _Kind(
        r"^(?:string_to_param|emb_params|clip_[lg]$|<)",
        "a textual inversion",
        "Load it into a pipeline with load_textual_inversion.",
        beside=True,
    ),
)
_PARTS_ALONE = (
    _Kind(
        r"^unet\.(?:conv_in|down_blocks)\.",
        "a diffusers pipeline in one file",
        "Use its folder, with model_index.json, or a file in the original layout.",
    ),
    _Kind(
        r"^(?:down_blocks\.\d+\.resnets|conv_in\.weight)",
        "a diffusers UNet alone",
        "Name the folder that contains model_index.json.",
    ),
    _Kind(
        r"^(?:input_blocks|output_blocks)\.",
        "a UNet alone",
        "Use the full checkpoint, with the text encoders and the VAE.",
    ),
    _Kind(
        r"^(?:first_stage_model\.|vae\.)?(?:encoder|decoder)\.(?:conv_in|down|up)",
        "a VAE alone",
        "Open a checkpoint and give this file as vae=….",
    ),
    _Kind(
        r"^(?:text_model|transformer|cond_stage_model|conditioner|embeddings\.token_embedding)\.",
        "a text encoder alone",
    ),
)


def _refuse_other_kinds(path: Path, tensors: Mapping[str, TensorRef]) -> None:
    names = tensors.keys()
    unet = any(name.startswith((f"{_UNET}input_blocks.", f"{_EMA}diffusion_modelinput_blocks")) for name in names)
    inside = [name for name in names if name.startswith(_PARTS)]
    for kind in _OTHER_KINDS if unet else (*_OTHER_KINDS, *_PARTS_ALONE):
        sign = re.compile(kind.signs)
        if any(sign.search(name) for name in (inside if unet and kind.beside else names)):
            raise ModelError(f"{path}: {kind.what}, not a Stable Diffusion checkpoint.", hint=kind.hint)
    if not unet:
        shown = ", ".join(sorted(names)[:3]) or "none at all"
        raise ModelError(f"{path}: not a Stable Diffusion checkpoint (its tensors: {shown:.200}).", hint=EXPECTED)
