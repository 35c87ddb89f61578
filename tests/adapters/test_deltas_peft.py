"""ΔW of every format that PEFT writes, against the weights that PEFT merges."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sdaccel.adapters import read_adapter
from tests import tolerances

peft = pytest.importorskip("peft")


class Net(torch.nn.Module):
    """Named as part of a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = torch.nn.Conv2d(4, 12, 3, padding=1)
        self.conv_out = torch.nn.Conv2d(12, 8, 1)
        self.time_proj = torch.nn.Linear(8, 12)


TARGETS = ["conv_in", "conv_out", "time_proj"]
LYCORIS = {"r": 2, "alpha": 3, "target_modules": TARGETS, "init_weights": False}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=2, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False),
    "rslora": lambda: peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False, use_rslora=True
    ),
    "ranks": lambda: peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False,
        rank_pattern={"conv_in": 4}, alpha_pattern={"conv_out": 7},
    ),
    "dora": lambda: peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False, use_dora=True
    ),
    "loha": lambda: peft.LoHaConfig(**LYCORIS),
    "loha-core": lambda: peft.LoHaConfig(**LYCORIS, use_effective_conv2d=True),
    "lokr": lambda: peft.LoKrConfig(**LYCORIS),
    "lokr-core": lambda: peft.LoKrConfig(**LYCORIS, use_effective_conv2d=True, decompose_both=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["time_proj"], init_ia3_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=TARGETS, oft_block_size=4, r=0, init_weights=False),
    "oft-exact": lambda: peft.OFTConfig(
        target_modules=TARGETS, oft_block_size=4, r=0, init_weights=False, use_cayley_neumann=False
    ),
    "oft-shared": lambda: peft.OFTConfig(
        target_modules=TARGETS, oft_block_size=4, r=0, init_weights=False, block_share=True
    ),
    "boft": lambda: peft.BOFTConfig(target_modules=TARGETS, boft_block_size=4, init_weights=False),
}  # fmt: skip


@pytest.fixture
def made(request, tmp_path, monkeypatch):
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)  # it compiles for a minute
    torch.manual_seed(3)
    base = Net()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = peft.get_peft_model(base, CONFIGS[request.param]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name or "ia3" in name or "boft_s" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "oft_R" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "hada" in name:  # products of small numbers
                parameter.mul_(3)
    model.save_pretrained(tmp_path)
    return tmp_path / "adapter_model.safetensors", before, model


@pytest.mark.parametrize("made", CONFIGS, indirect=True)
def test_deltas_are_those_that_peft_merges(made):
    path, before, model = made
    adapter = read_adapter(path)
    assert not adapter.refused
    fitted = adapter.fit({"unet": {name: tuple(tensor.shape) for name, tensor in before.items()}})
    assert not fitted.unused and {fit.name for fit in fitted.fits} == {f"{name}.weight" for name in TARGETS}
    assert sum(len(layer.keys) for layer in adapter.layers) == adapter.keys
    merged = model.merge_and_unload().state_dict()
    for fit in fitted.fits:
        weight = before[fit.name]
        delta = fit.layer.delta(weight, 1.0)
        assert delta.dtype == torch.float32 and delta.shape == weight.shape
        expected = merged[fit.name] - weight
        assert expected.abs().max() > 0.01
        assert (delta - expected).abs().max() <= tolerances.ADAPTER_MAX_ABS


@pytest.mark.parametrize("made", ["lora", "dora"], indirect=True)
def test_strengths_are_those_of_peft(made):
    path, before, model = made
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.4)
    merged = model.merge_and_unload().state_dict()
    for fit in read_adapter(path).fit({"unet": {name: tuple(t.shape) for name, t in before.items()}}).fits:
        expected = merged[fit.name] - before[fit.name]
        assert (fit.layer.delta(before[fit.name], 0.4) - expected).abs().max() <= tolerances.ADAPTER_MAX_ABS


def test_a_bias_of_lora(tmp_path):
    torch.manual_seed(4)
    up, down, bias = torch.rand(12, 2), torch.rand(2, 8), torch.rand(12)
    parts = {"lora_B.weight": up, "lora_A.weight": down, "lora_B.bias": bias, "alpha": torch.tensor(1.0)}
    save_file({f"unet.time_proj.{name}": tensor for name, tensor in parts.items()}, tmp_path / "a.safetensors")
    adapter = read_adapter(tmp_path / "a.safetensors")
    fits = adapter.fit({"unet": {"time_proj.weight": (12, 8), "time_proj.bias": (12,)}}).fits
    assert [(fit.name, fit.bias) for fit in fits] == [("time_proj.weight", False), ("time_proj.bias", True)]
    torch.testing.assert_close(fits[1].layer.delta_bias(torch.zeros(12), 2.0), bias)
