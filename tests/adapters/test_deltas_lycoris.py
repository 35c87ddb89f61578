"""ΔW of every format that LyCORIS writes, against the weights that LyCORIS merges."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sdaccel.adapters import read_adapter
from tests import tolerances

pytest.importorskip("lycoris")

LAYERS = {
    "conv_in": lambda: torch.nn.Conv2d(4, 16, 3),
    "conv_out": lambda: torch.nn.Conv2d(16, 8, 1),
    "time_proj": lambda: torch.nn.Linear(8, 16),
}
RANK = {"lora_dim": 2, "alpha": 3}
FORMATS = {
    "lora": ("locon", "LoConModule", RANK),
    "locon-core": ("locon", "LoConModule", {**RANK, "use_tucker": True}),
    "dora": ("locon", "LoConModule", {**RANK, "weight_decompose": True}),
    "dora-columns": ("locon", "LoConModule", {**RANK, "weight_decompose": True, "wd_on_out": False}),
    "rs": ("locon", "LoConModule", {**RANK, "rs_lora": True}),
    "loha": ("loha", "LohaModule", RANK),
    "loha-core": ("loha", "LohaModule", {**RANK, "use_tucker": True}),
    "doha": ("loha", "LohaModule", {"lora_dim": 2, "alpha": 2, "weight_decompose": True}),
    "lokr": ("lokr", "LokrModule", {"lora_dim": 1, "alpha": 3}),
    "lokr-both": ("lokr", "LokrModule", {"lora_dim": 1, "alpha": 3, "decompose_both": True, "factor": 4}),
    "lokr-core": ("lokr", "LokrModule", {"lora_dim": 1, "alpha": 3, "use_tucker": True}),
    "lokr-whole": ("lokr", "LokrModule", {"lora_dim": 64, "alpha": 3}),
    "ia3-in": ("ia3", "IA3Module", {"train_on_input": True}),
    "ia3-out": ("ia3", "IA3Module", {}),
    "full": ("full", "FullModule", {}),
    "glora": ("glora", "GLoRAModule", RANK),
    "oft": ("diag_oft", "DiagOFTModule", {"lora_dim": 4}),
    "oft-bounded": ("diag_oft", "DiagOFTModule", {"lora_dim": 4, "constraint": 0.01, "rescaled": True}),
    "boft": ("boft", "ButterflyOFTModule", {"lora_dim": 4, "rescaled": True}),
}


def trained(name: str, layer: torch.nn.Module, file: str, kind: str, options: dict):
    import importlib

    made = getattr(importlib.import_module(f"lycoris.modules.{file}"), kind)(f"lora_unet_{name}", layer, 1.0, **options)
    if kind == "FullModule":
        made.apply_to()
    with torch.no_grad():
        for each, parameter in made.named_parameters():
            if "dora" in each or "rescale" in each:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "org" not in each:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return made


def merge(module, weight: torch.Tensor):
    """Weight and bias. LyCORIS 4.1 merges LoHa and LoKr with γ², but trains them, as others draw, with γ."""
    if module.name in ("loha", "kron") and not module.wd:
        return weight + module.get_weight(weight.shape), None
    return module.get_merged_weight(1.0, weight.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_deltas_are_those_that_lycoris_merges(name, tmp_path):
    torch.manual_seed(5)
    layers = {each: make() for each, make in LAYERS.items()}
    before = {f"{each}.weight": layer.weight.detach().clone() for each, layer in layers.items()}
    before |= {f"{each}.bias": layer.bias.detach().clone() for each, layer in layers.items()}
    expected, state = {}, {}
    for each, layer in layers.items():
        module = trained(each, layer, *FORMATS[name])
        with torch.no_grad():
            merged, bias = merge(module, before[f"{each}.weight"])
        expected[f"{each}.weight"] = merged.detach().reshape(before[f"{each}.weight"].shape)
        if bias is not None:
            expected[f"{each}.bias"] = bias.detach()
        for part, tensor in module.custom_state_dict().items() if _custom(module) else module.state_dict().items():
            state[f"lora_unet_{each}.{part}"] = tensor.detach().clone().contiguous()
    save_file(state, tmp_path / "file.safetensors")
    adapter = read_adapter(tmp_path / "file.safetensors")
    assert not adapter.refused
    fitted = adapter.fit({"unet": {each: tuple(tensor.shape) for each, tensor in before.items()}})
    assert not fitted.unused and {fit.name for fit in fitted.fits} == set(expected)
    for fit in fitted.fits:
        base = before[fit.name]
        delta = fit.layer.delta_bias(base, 1.0) if fit.bias else fit.layer.delta(base, 1.0)
        assert (expected[fit.name] - base).abs().max() > 0.01, fit.name
        assert (delta - (expected[fit.name] - base)).abs().max() <= tolerances.ADAPTER_MAX_ABS, fit.name


def _custom(module) -> bool:
    return module.custom_state_dict() is not None


@pytest.mark.parametrize("name", ["oft", "boft", "ia3-out", "lora"])
def test_strengths_are_those_of_lycoris(name, tmp_path):
    torch.manual_seed(6)
    layer = LAYERS["time_proj"]()
    before = layer.weight.detach().clone()
    module = trained("time_proj", layer, *FORMATS[name])
    with torch.no_grad():
        expected = module.get_merged_weight(0.4, before.shape)[0].detach() - before
    state = module.custom_state_dict() or module.state_dict()
    save_file(
        {f"lora_unet_time_proj.{part}": each.detach().clone().contiguous() for part, each in state.items()},
        tmp_path / "a.safetensors",
    )
    (found,) = read_adapter(tmp_path / "a.safetensors").layers
    assert (found.delta(before, 0.4) - expected).abs().max() <= tolerances.ADAPTER_MAX_ABS
