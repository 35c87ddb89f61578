"""Adapter files as people have them: accounted for key by key, and refused with reasons."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from sdaccel import cli
from sdaccel.adapters import read_adapter
from sdaccel.errors import ModelError, SdaccelError
from sdaccel.models.family import Family
from tests import tolerances

ATTN2 = "down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"


def pair(name: str, out: int = 6, into: int = 4, rank: int = 2, alpha: float | None = 1.0) -> dict[str, torch.Tensor]:
    found = {f"{name}.lora_up.weight": torch.rand(out, rank), f"{name}.lora_down.weight": torch.rand(rank, into)}
    return found if alpha is None else {**found, f"{name}.alpha": torch.tensor(alpha)}


@pytest.fixture
def write(tmp_path):
    def write(tensors, metadata=None):
        path = tmp_path / "añ b.c.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        return path

    return write


@pytest.mark.parametrize(
    ("width", "family"),
    [(768, Family.SD1), (1024, Family.SD2), (2048, Family.SDXL), (1280, Family.SDXL_REFINER), (4096, None)],
)
def test_the_family_shows_in_the_cross_attention(write, width, family):
    assert read_adapter(write(pair(f"lora_unet_{ATTN2}", into=width))).family is family


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({"ss_base_model_version": "sdxl_base_v1-0"}, Family.SDXL),
        ({"modelspec.architecture": "stable-diffusion-v1/lora"}, Family.SD1),
        ({"ss_base_model_version": "sd_v2"}, Family.SD2),
        ({}, None),
    ],
)
def test_else_in_the_metadata(write, metadata, family):
    assert read_adapter(write(pair("lora_unet_conv_in"), metadata)).family is family


def test_every_key_is_in_a_layer_or_refused(write):
    tensors = {
        **pair("lora_unet_conv_in"),
        **pair("lora_te_text_model_encoder_layers_0_mlp_fc1", rank=3, alpha=None),
        "lora_unet_conv_out.lora_up.weight": torch.rand(3, 2),
        "lora_unet_time_embed_0.oft_diag": torch.rand(2, 2, 2),
        "lora_unet_mid.lora_down.weight": torch.rand(2, 4),
        "lora_unet_mid.lora_up.weight": torch.rand(4, 3),
        "emb_params": torch.rand(2),
        "lora_unet_x.alpha": torch.tensor(1.0),
        **pair("lora_unet_y", alpha=float("nan")),
    }
    adapter = read_adapter(write(tensors))
    in_layers = [key for layer in adapter.layers for key in layer.keys]
    assert sorted([*in_layers, *adapter.refused]) == sorted(tensors)
    assert [layer.rank for layer in sorted(adapter.layers, key=lambda layer: layer.name)] == [3, 2]
    reasons = adapter.refused
    assert "without down" in reasons["lora_unet_conv_out.lora_up.weight"]
    assert "LyCORIS before 2" in reasons["lora_unet_time_embed_0.oft_diag"]
    assert "(4, 3)" in reasons["lora_unet_mid.lora_up.weight"]
    assert "finite" in reasons["lora_unet_y.alpha"]
    assert "no known" in reasons["emb_params"] and "no known" in reasons["lora_unet_x.alpha"]


def test_a_wrong_shape_names_the_key_and_both_shapes(write):
    adapter = read_adapter(write(pair("lora_unet_conv_in")))
    with pytest.raises(
        ModelError, match=r"lora_unet_conv_in\.lora_\w+\.weight.*6 × 4.*unet\.conv_in\.weight.*\(6, 5\)"
    ):
        adapter.fit({"unet": {"conv_in.weight": (6, 5)}})
    with pytest.raises(ModelError, match=r"6 × 4.*\(5, 4\)"):
        adapter.layers[0].delta(torch.zeros(5, 4), 1.0)


def test_what_does_not_apply_is_named(write):
    adapter = read_adapter(write({**pair("lora_unet_conv_in"), **pair("lora_te2_x"), **pair("lora_unet_gone")}))
    fitted = adapter.fit({"unet": {"conv_in.weight": (6, 4, 1, 1)}})
    assert [fit.name for fit in fitted.fits] == ["conv_in.weight"]
    assert set(fitted.unused) == {"lora_te2_x", "lora_unet_gone"}
    assert "there is no text_encoder_2" in fitted.unused["lora_te2_x"]


def test_two_layers_of_one_weight_are_an_error(write):
    adapter = read_adapter(write({**pair("lora_unet_conv_in"), **pair("unet.conv_in")}))
    with pytest.raises(ModelError, match=r"both change unet\.conv_in\.weight"):
        adapter.fit({"unet": {"conv_in.weight": (6, 4)}})


@pytest.mark.parametrize("parts", [(6, 4), (6, 4, 1, 1)])
@pytest.mark.parametrize("weight", [(6, 4), (6, 4, 1, 1)])
def test_linear_layers_and_small_convolutions_are_one(write, parts, weight):
    up, down = torch.rand(6, 2), torch.rand(2, 4)
    tensors = {
        "lora_unet_conv_in.lora_up.weight": up.reshape(6, 2, *parts[2:]),
        "lora_unet_conv_in.lora_down.weight": down.reshape(2, 4, *parts[2:]),
    }
    (layer,) = read_adapter(write(tensors)).layers
    torch.testing.assert_close(layer.delta(torch.zeros(weight), 0.5), (0.5 * up @ down).reshape(weight))


def test_differences_of_weights_biases_and_norms(write):
    diff, bias, norm = torch.rand(6, 4, 3, 3), torch.rand(6), torch.rand(8)
    tensors = {
        "lora_unet_conv_in.diff": diff,
        "lora_unet_conv_in.diff_b": bias,
        "lora_unet_conv_norm_out.w_norm": norm,
        "lora_unet_conv_norm_out.b_norm": -norm,
        "lora_unet_conv_out.diff_b": bias[:3].clone(),
    }
    shapes = {"conv_in.weight": (6, 4, 3, 3), "conv_in.bias": (6,), "conv_norm_out.weight": (8,),
              "conv_norm_out.bias": (8,), "conv_out.weight": (3, 6, 3, 3), "conv_out.bias": (3,)}  # fmt: skip
    fitted = read_adapter(write(tensors)).fit({"unet": shapes})
    found = {
        fit.name: (fit.layer.delta_bias if fit.bias else fit.layer.delta)(torch.zeros(shapes[fit.name]), 2.0)
        for fit in fitted.fits
    }
    expected = {"conv_in.weight": diff, "conv_in.bias": bias, "conv_norm_out.weight": norm,
                "conv_norm_out.bias": -norm, "conv_out.bias": bias[:3]}  # fmt: skip
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], 2 * tensor)


def test_alphas_of_diffusers_are_in_the_metadata(write):
    tensors = {"unet.conv_in.lora_B.weight": torch.ones(6, 2), "unet.conv_in.lora_A.weight": torch.ones(2, 4)}
    settings = {"unet.r": 2, "unet.lora_alpha": 5, "unet.alpha_pattern": {}, "unet.use_rslora": False}
    (layer,) = read_adapter(write(tensors, {"lora_adapter_metadata": json.dumps(settings)})).layers
    assert layer.alpha == 5 and float(layer.delta(torch.zeros(6, 4), 1.0)[0, 0]) == pytest.approx(5.0)


# ---- files that are none


def test_only_safetensors_are_opened(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        read_adapter(path)


def test_another_file_is_no_adapter(write):
    with pytest.raises(ModelError, match="none of its 1 keys can be used"):
        read_adapter(write({"emb_params": torch.rand(2)}))


def one_of_each() -> dict[str, torch.Tensor]:
    r = torch.rand
    return {
        **pair("lora_unet_a"), "lora_unet_a.dora_scale": r(6, 1),
        "lora_unet_b.hada_w1_a": r(6, 2), "lora_unet_b.hada_w1_b": r(2, 4),
        "lora_unet_b.hada_w2_a": r(6, 2), "lora_unet_b.hada_w2_b": r(2, 4),
        "lora_unet_c.lokr_w1": r(2, 2), "lora_unet_c.lokr_w2_a": r(3, 2), "lora_unet_c.lokr_w2_b": r(2, 2),
        "lora_unet_d.weight": r(6), "lora_unet_d.on_input": torch.tensor(0),
        "lora_unet_e.oft_blocks": r(3, 2, 2), "lora_unet_f.oft_blocks": r(2, 3, 2, 2), "lora_unet_f.rescale": r(6, 1),
        "lora_unet_g.a1.weight": r(4, 2), "lora_unet_g.a2.weight": r(2, 4), "lora_unet_g.b1.weight": r(6, 2),
        "lora_unet_g.b2.weight": r(2, 4), "lora_unet_h.diff": r(6, 4), "lora_unet_h.diff_b": r(6),
        "lora_unet_i.boft_R": r(1, 2, 2, 2), "lora_unet_i.boft_s": r(6, 1), "lora_unet_j.oft_R.weight": r(2, 1),
    }  # fmt: skip


def test_damaged_files_give_our_errors_only(write):
    path = write(one_of_each())
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    dice = random.Random(7)
    shapes = {f"{name}.{part}": shape for name in "abcdefghij" for part, shape in (("weight", (6, 4)), ("bias", (6,)))}
    opened = 0
    start = time.thread_time()
    for round_ in range(600):
        broken = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            where = dice.randrange(length if round_ % 4 else len(broken))
            digit = chr(broken[where]).isdigit()
            broken[where] = dice.choice(b"0123456789") if digit else dice.randrange(256)
        path.write_bytes(broken[: dice.randrange(len(broken))] if round_ % 10 == 0 else broken)
        try:
            adapter = read_adapter(path)
            opened += 1
            assert len(adapter.refused) + sum(len(layer.keys) for layer in adapter.layers) == adapter.keys
            for fit in adapter.fit({"unet": shapes}).fits:
                base = torch.ones(shapes[fit.name])
                delta = fit.layer.delta_bias(base, 1.0) if fit.bias else fit.layer.delta(base, 1.0)
                assert delta.shape == base.shape
        except SdaccelError:
            continue
    assert opened > 20
    assert time.thread_time() - start < tolerances.ENDLESS


@pytest.mark.parametrize("seed", range(40))
def test_parts_of_other_shapes_give_our_errors_only(write, seed):
    dice = random.Random(seed)
    tensors = {
        name: tensor
        if dice.random() < 0.6
        else torch.rand([dice.choice((0, 1, 2, 3)) for _ in range(dice.randint(0, 5))])
        for name, tensor in one_of_each().items()
        if dice.random() < 0.95
    }
    shapes = {f"{name}.{part}": shape for name in "abcdefghij" for part, shape in (("weight", (6, 4)), ("bias", (6,)))}
    try:
        adapter = read_adapter(write(tensors))
    except ModelError:
        return
    assert len(adapter.refused) + sum(len(layer.keys) for layer in adapter.layers) == len(tensors)
    for layer in adapter.layers:
        for shape in ((6, 4), (6, 4, 3, 3), (4,)):
            for act in (layer.delta, layer.delta_bias) if layer.changes_bias else (layer.delta,):
                try:
                    act(torch.ones(shape), 1.0)
                except ModelError:
                    continue
    with suppress(ModelError):
        adapter.fit({"unet": shapes})


# ---- the command


def test_the_command_says_what_is_in_a_file(write, capsys):
    path = write(pair(f"lora_unet_{ATTN2}", into=768, rank=4, alpha=2.0), {"ss_network_module": "networks.lora"})
    assert cli.run(["lora", "inspect", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("format: LoRA", "target: sd1; 1 layers of unet", "rank: 4; alpha: 2", "3 keys", "networks.lora"):
        assert words in said
    assert cli.run(["lora", "inspect", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == [4] and facts["family"] == "sd1" and facts["applies"] is None


def test_the_command_fails_where_a_key_is_refused(write, capsys):
    assert cli.run(["lora", "inspect", str(write({**pair("lora_unet_conv_in"), "odd\x1b": torch.rand(1)}))]) == 1
    said = capsys.readouterr().out
    assert "refused: odd\\x1b: of no known adapter format" in said and "\x1b" not in said


def test_the_command_fits_a_model(capsys):
    from sdaccel.models.demo import demo_lora_path, demo_model_path

    assert cli.run(["lora", "inspect", str(demo_lora_path()), str(demo_model_path()), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["applies"]) == len(facts["layers"]) == 56 and facts["unused"] == {}


def test_all_parts_by_one_copy_of_the_file(tmp_path):
    """As on a GPU; an odd offset is no matter."""
    tensors = {
        "lora_unet_conv_in.lora_down.weight": torch.randn(2, 4, 3, 3).half(),
        "lora_unet_conv_in.lora_up.weight": torch.randn(8, 2, 1, 1),
        "lora_unet_conv_out.lora_down.weight": torch.randn(2, 8, 3, 3).bfloat16(),
        "lora_unet_conv_out.lora_up.weight": torch.randn(4, 2, 1, 1).half(),
    }
    path = tmp_path / "style.safetensors"
    save_file(tensors, path, {"odd": "x"})
    adapter = read_adapter(path)
    for layer, parts in adapter.parts_on(torch.device("cpu")).items():
        for name, part in layer.read(torch.device("cpu")).items():
            assert torch.equal(parts[name].float(), part)
