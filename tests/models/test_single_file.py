"""Single files of the original layout: every weight under its right name, bit for bit."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch

from sdaccel.errors import ModelError
from sdaccel.models import Family, open_checkpoint
from sdaccel.models.pipeline import load_pipeline
from tests.models import tiny
from tests.tolerances import SAME_NETWORK_MAX_ABS

FAMILIES = {
    "sd1": Family.SD1,
    "sd2": Family.SD2,
    "sdxl": Family.SDXL,
    "sdxl-inpaint": Family.SDXL,
    "sdxl-refiner": Family.SDXL_REFINER,
}


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    made = {}

    def pipe(kind: str):
        if kind not in made:
            made[kind] = tiny.pipeline(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return pipe


def equal(checkpoint, pipe, dtype=torch.float16):
    """Every weight of the pipeline, and no other, bit-identical."""
    modules = {name: getattr(pipe, name, None) for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    present = {name: module for name, module in modules.items() if module is not None}
    assert checkpoint.components.keys() == present.keys()
    for name, module in present.items():
        state = module.state_dict()
        tensors = checkpoint.components[name].tensors
        assert tensors.keys() == state.keys()
        for key, expected in state.items():
            found = tensors[key].read()
            assert found.dtype == dtype and tensors[key].shape == found.shape == expected.shape, key
            assert torch.equal(found, expected.to(dtype)), key


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_weight_of_every_family(kind, pipes, tmp_path):
    pipe = pipes(kind)
    weights = tiny.original_weights(pipe, kind)
    path = tiny.save_single_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    equal(checkpoint, pipe)
    assert checkpoint.family is FAMILIES.get(kind, Family.SD1)
    assert checkpoint.variant == {"inpaint": "inpaint", "edit": "8-channel"}.get(
        kind.rpartition("-")[2], "text-to-image"
    )
    assert checkpoint.vae_factor == 2 and checkpoint.name == "model" and checkpoint.kind == "file"
    expected_ignored = {name for name in weights if name.endswith(("position_ids", "logit_scale", "alphas_cumprod"))}
    if kind == "sd2":
        last = pipe.text_encoder.config.num_hidden_layers
        expected_ignored |= {
            name for name in weights if f".resblocks.{last}." in name or name.endswith("text_projection")
        }
    assert set(checkpoint.ignored) == expected_ignored


@pytest.mark.parametrize("kind", ["sd1", "sd1-lcm", "sd2", "sdxl", "sdxl-refiner"])
def test_the_config_read_off_the_shapes_builds_the_same_networks(kind, pipes, tmp_path):
    pipe = pipes(kind)
    path = tiny.save_single_file(tiny.original_weights(pipe, kind), tmp_path / "model.safetensors", torch.float32)
    tiny.write_tokenizer(tmp_path / "tokenizer")
    again = load_pipeline(open_checkpoint(path))
    assert type(again) is type(pipe)
    generator = torch.Generator().manual_seed(1)
    call = {"prompt": "a red circle", "num_inference_steps": 2, "output_type": "pt", "generator": generator}
    if kind == "sdxl-refiner":
        call |= {
            "image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2)),
            "num_inference_steps": 8,
        }
    else:
        call |= {"height": 32, "width": 32}
    if kind == "sd1-lcm":
        again.scheduler = pipe.scheduler
    expected = pipe(**call).images
    generator.manual_seed(1)
    assert (again(**call).images - expected).abs().max() <= SAME_NETWORK_MAX_ABS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype, pipes, tmp_path):
    path = tiny.save_single_file(tiny.original_weights(pipes("sd1"), "sd1"), tmp_path / "model.safetensors", dtype)
    equal(open_checkpoint(path), pipes("sd1"), dtype)


def test_open_clip_with_its_last_block_already_gone(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sd2"), "sd2", whole_open_clip=False)
    equal(open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors")), pipes("sd2"))


def test_open_clip_with_its_projection_already_transposed(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sdxl"), "sdxl")
    name = "conditioner.embedders.1.model.text_projection"
    weights[f"{name}.weight"] = weights.pop(name).t().contiguous()
    equal(open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors")), pipes("sdxl"))


def test_clip_names_without_text_model(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sd1"), "sd1")
    weights = {name.replace("transformer.text_model.", "transformer."): tensor for name, tensor in weights.items()}
    equal(open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors")), pipes("sd1"))


def test_averaged_weights(pipes, tmp_path):
    pipe = pipes("sdxl")
    weights = tiny.original_weights(pipe, "sdxl")
    averaged = tiny.averaged_names(weights)
    counts = {"model_ema.decay": torch.tensor(0.99), "model_ema.num_updates": torch.tensor(7)}
    shifted = {name: tensor + 1 for name, tensor in weights.items() if name.startswith("model.diffusion_model.")}

    both = tiny.save_single_file({**weights, **shifted, **averaged, **counts}, tmp_path / "both.safetensors")
    equal(open_checkpoint(both, use_ema=True), pipe)
    plain = open_checkpoint(both)
    assert any("EMA" in note for note in plain.notes)
    assert averaged.keys() | counts.keys() <= set(plain.ignored)
    assert torch.equal(plain.components["unet"].tensors["conv_in.bias"].read(), (pipe.unet.conv_in.bias + 1).half())

    rest = {name: tensor for name, tensor in weights.items() if name not in shifted}
    equal(open_checkpoint(tiny.save_single_file({**rest, **averaged}, tmp_path / "only.safetensors")), pipe)
    with pytest.raises(ModelError, match="no EMA weights"):
        open_checkpoint(tiny.save_single_file(weights, tmp_path / "none.safetensors"), use_ema=True)


def test_without_a_vae(pipes, tmp_path):
    pipe = pipes("sd1")
    weights = tiny.original_weights(pipe, "sd1")
    inner = {name: tensor for name, tensor in weights.items() if not name.startswith("first_stage_model.")}
    path = tiny.save_single_file(inner, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no VAE.*vae="):
        open_checkpoint(path)

    prefix = "first_stage_model."
    alone = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    equal(open_checkpoint(path, vae=tiny.save_single_file(alone, tmp_path / "vae.safetensors")), pipe)
    own_names = tiny.save_single_file(pipe.vae.state_dict(), tmp_path / "vae2.safetensors")
    equal(open_checkpoint(path, vae=own_names), pipe)
    pipe.vae.save_pretrained(tmp_path / "vae")
    folder = open_checkpoint(path, vae=tmp_path / "vae")
    assert folder.components["vae"].config["scaling_factor"] == 0.18215
    assert torch.equal(folder.components["vae"].tensors["quant_conv.weight"].read(), pipe.vae.quant_conv.weight)
    with pytest.raises(ModelError, match="no VAE in it"):
        open_checkpoint(path, vae=path)


def test_what_lies_beside_a_whole_model_is_named_and_not_used(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sd1"), "sd1")
    strays = ("lora_unet_x.lora_up.weight", "ip_adapter.1.to_k_ip.weight", "emb_params", "<cat-toy>")
    path = tiny.save_single_file(weights | dict.fromkeys(strays, torch.ones(2)), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    equal(checkpoint, pipes("sd1"))
    assert set(strays) <= set(checkpoint.ignored)
    inside = {"model.diffusion_model.input_blocks.0.0.lora_up.weight": torch.ones(2)}
    with pytest.raises(ModelError, match="a LoRA"):
        open_checkpoint(tiny.save_single_file(weights | inside, path))


def test_a_given_vae_replaces_the_one_inside(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sd1"), "sd1")
    path = tiny.save_single_file(weights, tmp_path / "model.safetensors")
    vae = {name: tensor * 2 for name, tensor in pipes("sd1").vae.state_dict().items()}
    checkpoint = open_checkpoint(path, vae=tiny.save_single_file(vae, tmp_path / "vae.safetensors"))
    found = checkpoint.components["vae"].tensors["decoder.conv_in.weight"].read()
    assert torch.equal(found, vae["decoder.conv_in.weight"].half())
    assert "first_stage_model.decoder.conv_in.weight" in checkpoint.ignored


def test_missing_and_misshapen_tensors_make_one_error_each(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sd1"), "sd1")
    gone = [name for name in weights if "output_blocks.1.0.out_layers" in name]
    fewer = {name: tensor for name, tensor in weights.items() if name not in gone}
    with pytest.raises(ModelError, match=f"{len(gone)} tensors are missing: output_blocks.1.0.out_layers"):
        open_checkpoint(tiny.save_single_file(fewer, tmp_path / "fewer.safetensors"))
    name = "model.diffusion_model.time_embed.2.weight"
    odd = {**weights, name: torch.zeros(3, 3)}
    with pytest.raises(
        ModelError, match=r"1 tensors do not fit the config: time_embed.2.weight is 3×3 instead of 128×128"
    ):
        open_checkpoint(tiny.save_single_file(odd, tmp_path / "odd.safetensors"))
    eight = {**weights, name: weights[name].to(torch.float8_e4m3fn)}
    with pytest.raises(ModelError, match=r"time_embed.2.weight as F8_E4M3"):
        open_checkpoint(tiny.save_single_file(eight, tmp_path / "eight.safetensors"))


def test_an_sdxl_file_without_its_first_encoder_is_no_refiner(pipes, tmp_path):
    weights = {n: t for n, t in tiny.original_weights(pipes("sdxl"), "sdxl").items() if ".embedders.0." not in n}
    path = tiny.save_single_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"Stable Diffusion XL UNet, but no text_encoder \(conditioner\.embedders\.0"):
        open_checkpoint(path)


def test_no_text_encoder(pipes, tmp_path):
    weights = tiny.original_weights(pipes("sdxl"), "sdxl")
    fewer = {name: tensor for name, tensor in weights.items() if not name.startswith("conditioner.embedders.1")}
    with pytest.raises(ModelError, match="no text_encoder_2"):
        open_checkpoint(tiny.save_single_file(fewer, tmp_path / "model.safetensors"))


# ---- how the model predicts


@pytest.fixture
def sd2_weights(pipes):
    return tiny.original_weights(pipes("sd2"), "sd2")


def test_prediction_type_is_assumed_only_with_a_note(sd2_weights, tmp_path):
    path = tiny.save_single_file(sd2_weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.prediction_type == "epsilon"
    assert any("assumed" in note and "prediction_type=" in note for note in checkpoint.notes)
    told = open_checkpoint(path, prediction_type="v_prediction")
    assert told.prediction_type == "v_prediction" and not any("assumed" in note for note in told.notes)
    assert told.components["unet"].config["sample_size"] == 96 and told.native_side == 192
    with pytest.raises(ModelError, match="none of epsilon, v_prediction, sample"):
        open_checkpoint(path, prediction_type="v")


@pytest.mark.parametrize(("spread", "expected"), [(0.2, "v_prediction"), (0.02, "epsilon")], ids=["wide", "narrow"])
def test_prediction_type_from_the_last_attention(spread, expected, sd2_weights, tmp_path):
    base = "model.diffusion_model.output_blocks."
    last = max(int(name[len(base) :].split(".")[0]) for name in sd2_weights if name.startswith(base))
    sd2_weights[f"{base}{last}.1.transformer_blocks.0.norm1.bias"] = torch.linspace(-1, 1, 64) * spread * 1.7
    path = tiny.save_single_file(sd2_weights, tmp_path / "model.safetensors")
    assert open_checkpoint(path).prediction_type == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {"modelspec.prediction_type": "v"},
        {"modelspec.predict_key": "v"},
        {"modelspec.architecture": "stable-diffusion-v2-768-v"},
    ],
)
def test_prediction_type_from_metadata(metadata, sd2_weights, tmp_path):
    path = tiny.save_single_file(sd2_weights, tmp_path / "model.safetensors", **metadata)
    assert open_checkpoint(path).prediction_type == "v_prediction"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('model:\n  params:\n    parameterization: "v"\n', "v_prediction"),
        ("model:\r\n  params:\r\n    parameterization: v # velocity\r\n", "v_prediction"),
        ("\ufeffmodel:\n  params:\n    parameterization: 'eps'\n", "epsilon"),
        ("    # parameterization: v\n", "epsilon"),
        ("        target: sgm.modules.diffusionmodules.denoiser_scaling.VScaling\n", "v_prediction"),
        ("{{{ not yaml at all \x00 \ud7ff", "epsilon"),
    ],
)
def test_prediction_type_from_the_sidecar(text, expected, pipes, tmp_path):
    path = tiny.save_single_file(tiny.original_weights(pipes("sd1"), "sd1"), tmp_path / "model.safetensors")
    path.with_suffix(".yaml").write_text(text, encoding="utf-8")
    assert open_checkpoint(path).prediction_type == expected


def test_a_sidecar_of_another_kind_is_an_error(pipes, tmp_path):
    path = tiny.save_single_file(tiny.original_weights(pipes("sd1"), "sd1"), tmp_path / "model.safetensors")
    path.with_suffix(".yaml").write_text("parameterization: x0\n", encoding="utf-8")
    with pytest.raises(ModelError, match="neither v nor eps"):
        open_checkpoint(path)


def test_v_pred_key(pipes, tmp_path):
    marks = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    weights = {**tiny.original_weights(pipes("sdxl"), "sdxl"), **marks}
    checkpoint = open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors"))
    assert checkpoint.prediction_type == "v_prediction"
    assert checkpoint.scheduler["rescale_betas_zero_snr"] is True
    assert not marks.keys() & set(checkpoint.ignored)


@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_zero_terminal_snr_reaches_the_scheduler(pipes, tmp_path, kind):
    weights = {**tiny.original_weights(pipes(kind), kind), "ztsnr": torch.tensor([])}
    checkpoint = open_checkpoint(tiny.save_single_file(weights, tmp_path / "model.safetensors"))
    scheduler = getattr(diffusers, checkpoint.scheduler["_class_name"]).from_config(checkpoint.scheduler)
    scheduler.set_timesteps(4)
    assert scheduler.alphas_cumprod[-1] < 1e-6 and scheduler.timesteps[0] == 999


# ---- pickles


def test_ckpt(pipes, tmp_path):
    path: Path = tmp_path / "model.ckpt"
    weights = {name: tensor.half() for name, tensor in tiny.original_weights(pipes("sd2"), "sd2").items()}
    torch.save({"state_dict": {"state_dict": weights}, "global_step": 220000, "epoch": 3}, path)
    checkpoint = open_checkpoint(path, allow_pickle=True)
    equal(checkpoint, pipes("sd2"))
    content_hash = checkpoint.components["unet"].content_hash
    path = tmp_path / "older.ckpt"
    torch.save({"state_dict": weights, "global_step": 220000}, path, _use_new_zipfile_serialization=False)
    again = open_checkpoint(path, allow_pickle=True)
    equal(again, pipes("sd2"))
    assert again.prediction_type == "v_prediction" and any("global_step is 220000" in note for note in again.notes)
    assert again.components["unet"].content_hash == content_hash
