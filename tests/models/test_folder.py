"""Diffusers folders: variants, shards, pickles, and what is wrong with a folder."""

from __future__ import annotations

import json
import random
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdaccel.errors import ModelError, PickleRefused
from sdaccel.models import Family, open_checkpoint
from sdaccel.models.pipeline import load_pipeline
from tests.models import tiny
from tests.tolerances import ENDLESS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "my model.v1"
    tiny.pipeline("sd1", folder.parent / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def unet_file(folder):
    return folder / "unet" / "diffusion_pytorch_model.safetensors"


def rename_all(folder, variant):
    for file in folder.glob("*/*model.safetensors"):
        file.rename(file.with_name(f"{file.stem}.{variant}.safetensors"))


def first_weight(checkpoint):
    return checkpoint.components["unet"].tensors["conv_in.weight"].read()


def test_opens(folder):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "my model.v1" and checkpoint.origin == str(folder)
    assert checkpoint.kind == "folder" and checkpoint.path == folder
    assert checkpoint.family is Family.SD1 and checkpoint.native_side == 16 and checkpoint.prediction_type == "epsilon"
    assert checkpoint.notes == () and checkpoint.ignored == ()
    expected = load_file(str(unet_file(folder)))
    tensors = checkpoint.components["unet"].tensors
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name].read(), expected[name]) for name in expected)
    assert checkpoint.components["text_encoder"].config["architectures"] == ["CLIPTextModel"]


def test_plain_weights_before_a_variant(folder):
    weights = {name: (tensor * 2).half() for name, tensor in load_file(str(unet_file(folder))).items()}
    save_file(weights, str(folder / "unet" / "diffusion_pytorch_model.fp16.safetensors"))
    plain, half = open_checkpoint(folder), open_checkpoint(folder, variant="fp16")
    assert plain.notes == () and first_weight(plain).dtype == torch.float32
    assert torch.equal(first_weight(half), weights["conv_in.weight"])
    assert any("vae has no variant 'fp16'" in note for note in half.notes)


def test_only_a_variant(folder):
    rename_all(folder, "fp16")
    checkpoint = open_checkpoint(folder)
    assert sum("only the variant fp16" in note for note in checkpoint.notes) == 3
    assert open_checkpoint(folder, variant="fp16").notes == ()
    with pytest.raises(ModelError, match="no variant 'bf16', only fp16"):
        open_checkpoint(folder, variant="bf16")
    rename_all_again = folder / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    shutil.copy(rename_all_again, rename_all_again.with_name("diffusion_pytorch_model.non_ema.safetensors"))
    assert any("fp16, non_ema: fp16 is used" in note for note in open_checkpoint(folder).notes)
    rename_all_again.rename(rename_all_again.with_name("diffusion_pytorch_model.ema.safetensors"))
    with pytest.raises(ModelError, match=r"several variants \(ema, non_ema\)"):
        open_checkpoint(folder)


def test_no_component_has_the_variant(folder):
    with pytest.raises(ModelError, match="no component has a variant 'fp16'"):
        open_checkpoint(folder, variant="fp16")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards(variant, tmp_path):
    pipe = tiny.pipeline("sdxl", tmp_path / "tokenizer")
    pipe.save_pretrained(tmp_path / "model", variant=variant, max_shard_size="300KB")
    index = {None: "diffusion_pytorch_model.safetensors.index.json"}.get(
        variant, f"diffusion_pytorch_model.safetensors.index.{variant}.json"
    )
    index_file = tmp_path / "model" / "unet" / index
    assert index_file.is_file()
    checkpoint = open_checkpoint(tmp_path / "model", variant=variant)
    state = pipe.unet.state_dict()
    tensors = checkpoint.components["unet"].tensors
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name].read(), state[name]) for name in state)

    content = json.loads(index_file.read_text(encoding="utf-8"))
    shard = sorted(set(content["weight_map"].values()))[1]
    index_file.with_name(shard).rename(tmp_path / "aside")
    with pytest.raises(ModelError, match=f"the shard {shard} is missing"):
        open_checkpoint(tmp_path / "model", variant=variant)
    for bad in (f"../unet/{shard}", "/etc/passwd", "..\\x.safetensors", "C:x.safetensors", "config.json", 5):
        content["weight_map"]["conv_in.weight"] = bad
        index_file.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ModelError, match="no weight file of its folder"):
            open_checkpoint(tmp_path / "model", variant=variant)


def test_pickles_are_refused_unless_allowed(folder):
    expected = open_checkpoint(folder).components["unet"].content_hash
    file = unet_file(folder)
    torch.save(load_file(str(file)), file.with_suffix(".bin"))
    assert open_checkpoint(folder).notes == ()  # the .safetensors is preferred
    file.unlink()
    with pytest.raises(PickleRefused, match=r"diffusion_pytorch_model\.bin .*--allow-pickle"):
        open_checkpoint(folder)
    allowed = open_checkpoint(folder, allow_pickle=True)
    assert allowed.components["unet"].content_hash == expected


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"x": Evil()}, id="code"),
        pytest.param([1, 2], id="list"),
        pytest.param(b"<html>no</html>" * 9, id="html"),
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
        pytest.param(b"\x80\x02" + bytes(100), id="pickle"),
        pytest.param(None, id="truncated"),
    ],
)
def test_pickles_that_are_no_checkpoints(content, tmp_path, capsys):
    path = tmp_path / "model.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is None:
        torch.save({"x": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    else:
        torch.save(content, path)
    with pytest.raises(PickleRefused):
        open_checkpoint(path)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path, allow_pickle=True)
    assert "model.ckpt" in str(caught.value) and not isinstance(caught.value, PickleRefused)
    assert "unpickled" not in capsys.readouterr().out


# ---- folders of published models, older than today's libraries


def test_old_names(folder):
    """text_model. in front and position_ids (transformers 4), query/key/value/proj_attn (diffusers 0.11)."""
    expected = {
        name: (part.tensors.keys(), part.content_hash) for name, part in open_checkpoint(folder).components.items()
    }
    text = folder / "text_encoder" / "model.safetensors"
    weights = {f"text_model.{name}": tensor for name, tensor in load_file(str(text)).items()}
    weights["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(weights, str(text), metadata={"format": "pt"})
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(str(vae))
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        weights = {
            name.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): tensor for name, tensor in weights.items()
        }
    assert "decoder.mid_block.attentions.0.proj_attn.weight" in weights
    save_file(weights, str(vae), metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    found = {name: (part.tensors.keys(), part.content_hash) for name, part in checkpoint.components.items()}
    assert found == expected
    assert checkpoint.ignored == ("text_encoder/text_model.embeddings.position_ids",)


def edit(file, **changes):
    content = json.loads(file.read_text(encoding="utf-8"))
    content.update(changes)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_config_and_weights_disagree(folder):
    edit(folder / "unet" / "config.json", in_channels=9)
    with pytest.raises(
        ModelError, match=r"unet: 1 tensors do not fit the config: conv_in.weight is 32×4×3×3 instead of 32×9"
    ):
        open_checkpoint(folder)
    edit(folder / "unet" / "config.json", in_channels=4, layers_per_block=2)
    with pytest.raises(ModelError, match=r"unet: \d+ tensors are missing: .* more"):
        open_checkpoint(folder)
    edit(folder / "unet" / "config.json", block_out_channels="many")
    with pytest.raises(ModelError, match="the config of unet is broken"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (
            {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]},
            "Diffusion3",
        ),
        (
            {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]},
            "FluxPipeline has no UNet",
        ),
        ({"_class_name": "StableCascadePriorPipeline", "prior": ["diffusers", "StableCascadeUNet"]}, "StableCascade"),
        ({}, "an unnamed pipeline has no UNet"),
    ],
)
def test_other_pipelines(index, says, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{says}.*Expected Stable Diffusion 1.x"):
        open_checkpoint(tmp_path)


def test_other_networks_in_the_right_places(folder):
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for name, kind, says in (
        ("unet", "UNet3DConditionModel", "the UNet is a UNet3DConditionModel"),
        ("text_encoder", "T5EncoderModel", "text_encoder is a T5EncoderModel, not CLIP"),
    ):
        edit(folder / "model_index.json", **{name: ["library", kind]})
        with pytest.raises(ModelError, match=says):
            open_checkpoint(folder)
        edit(folder / "model_index.json", **{name: index[name]})
    for change, says in (
        ({"encoder_hid_dim_type": "text_proj"}, "Kolors"),
        ({"num_class_embeds": 1000}, "upscaler"),
        ({"addition_embed_type": "image"}, "addition_embed_type='image'"),
    ):
        before = (folder / "unet" / "config.json").read_text(encoding="utf-8")
        edit(folder / "unet" / "config.json", **change)
        with pytest.raises(ModelError, match=says):
            open_checkpoint(folder)
        (folder / "unet" / "config.json").write_text(before, encoding="utf-8")


def test_another_vae_stays_in_torch(folder):
    edit(folder / "model_index.json", vae=["diffusers", "AutoencoderTiny"])
    edit(folder / "vae" / "config.json", _class_name="AutoencoderTiny")
    checkpoint = open_checkpoint(folder)
    assert "vae" not in checkpoint.components and "vae is a AutoencoderTiny: it stays in torch." in checkpoint.notes


def test_a_vae_of_choice(folder, tmp_path):
    vae = {
        name: tensor * 2
        for name, tensor in load_file(str(folder / "vae" / "diffusion_pytorch_model.safetensors")).items()
    }
    save_file(vae, str(tmp_path / "vae.safetensors"))
    checkpoint = open_checkpoint(folder, vae=tmp_path / "vae.safetensors")
    assert torch.equal(checkpoint.components["vae"].tensors["encoder.conv_in.bias"].read(), vae["encoder.conv_in.bias"])
    with pytest.raises(ModelError, match="no VAE there"):
        open_checkpoint(folder, vae=tmp_path)


def test_a_relative_path_is_fixed_when_it_is_opened(folder, tmp_path, monkeypatch):
    """What is built keeps its origin, which has to mean the same in another folder."""
    monkeypatch.chdir(folder.parent)
    checkpoint = open_checkpoint(folder.name, vae=f"{folder.name}/vae")
    assert checkpoint.path == folder and checkpoint.origin == str(folder)
    monkeypatch.chdir(tmp_path.parent)
    assert all(checkpoint.components[name].content_hash for name in ("unet", "vae"))


def test_incomplete_folders(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no model_index.json; it holds config.json, diffusion"):
        open_checkpoint(folder / "unet")
    with pytest.raises(ModelError, match="it holds nothing"):
        (tmp_path / "nothing").mkdir()
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(folder / "none")
    for odd in ("x" * 5000, "~nobody-of-this-name/model", "a\0b", ""):
        with pytest.raises(ModelError):
            open_checkpoint(odd)
    shutil.rmtree(folder / "scheduler")
    assert any("prediction_type epsilon is assumed" in note for note in open_checkpoint(folder).notes)
    assert open_checkpoint(folder, prediction_type="v_prediction").prediction_type == "v_prediction"
    unet_file(folder).unlink()
    with pytest.raises(ModelError, match="unet: no weights"):
        open_checkpoint(folder)
    (folder / "unet" / "config.json").write_text("{" * 5000, encoding="utf-8")
    with pytest.raises(ModelError, match="not JSON"):
        open_checkpoint(folder)
    shutil.rmtree(folder / "unet")
    with pytest.raises(ModelError, match="unet is missing"):
        open_checkpoint(folder)


JUNK = (
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1.5,
    "x",
    "",
    [],
    {},
    [10**9],
    [None],
    [[1], "x"],
    {"a": 1},
    [-1, -1],
    [64] * 99,
)


@pytest.mark.parametrize(
    "file", ["model_index.json", *(f"{name}/config.json" for name in ("unet", "vae", "text_encoder"))]
)
def test_junk_in_configs_raises_only_our_errors(file, folder):
    chance = random.Random(1)
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8"))
    refused = 0
    for key in content:
        for junk in chance.sample(JUNK, 6):
            path.write_text(json.dumps(content | {key: junk}), encoding="utf-8")
            start = time.thread_time()
            try:
                checkpoint = open_checkpoint(folder)
                assert checkpoint.native_side and checkpoint.variant
            except ModelError:
                refused += 1
            assert time.thread_time() - start < ENDLESS
    assert refused


def test_html_instead_of_weights(folder):
    unet_file(folder).write_text("<!doctype html><html>log in</html>", encoding="utf-8")
    with pytest.raises(ModelError, match="not a safetensors file, but an HTML page"):
        open_checkpoint(folder)


def test_loads_as_a_pipeline(folder):
    rename_all(folder, "fp16")  # a variant alone, which diffusers does not find unasked
    checkpoint = open_checkpoint(folder, prediction_type="v_prediction")
    pipe = load_pipeline(checkpoint)
    assert type(pipe).__name__ == "StableDiffusionPipeline" and pipe.safety_checker is None
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    weight = pipe.unet.conv_in.weight
    assert torch.equal(weight, first_weight(checkpoint))
    assert weight.data_ptr() == first_weight(checkpoint).data_ptr()  # mapped, not copied
    assert load_pipeline(checkpoint, dtype=torch.float16).text_encoder.dtype == torch.float16
