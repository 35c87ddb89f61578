"""The extension in A1111, against a stand-in of the host: every image equals the host's own torch image."""

from __future__ import annotations

import shutil
import sys
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from sdaccel.engine.store import Store
from sdaccel.errors import UnsupportedCall
from sdaccel.integrations import host
from sdaccel.integrations.host_shapes import WantedShapes
from sdaccel.integrations.webui import WebUI
from tests.integrations.hosts.a1111 import A1111
from tests.integrations.hosts.controlnet import UnetHook
from tests.integrations.hosts.extension import Hooks, Installed, architectures  # noqa: F401 - a fixture
from tests.integrations.hosts.ldm import material
from tests.integrations.hosts.networks import Full, Networks, lora, named, others
from tests.tolerances import PIPELINE_MAX_ABS


class Setup(Installed):
    @property
    def unet(self) -> Any:
        return self.host.model.model.diffusion_model

    def plain(self, **options: Any) -> torch.Tensor:
        """The image without the extension."""
        host = A1111(list(material().files.values()), Networks(self.host.networks.files))
        host.load(material().files[options.pop("model", "sd1")])
        host.other_scripts += options.pop("scripts", ())
        return host.generate(**options).images


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A host with the extension and a checkpoint loaded."""

    def new(model: str = "sd1", store: Any = None, networks: Any = None, **options: Any) -> Setup:
        host = A1111(list(material().files.values()), networks)
        host.shared.opts.sdaccel_store = str(store or material().store)
        vars(host.shared.opts).update(options)
        web = WebUI(host)
        host.script = Hooks(web)
        host.script_callbacks.on_list_unets(web.list_unets)
        host.script_callbacks.on_model_loaded(web.loaded_callback)
        host.script_callbacks.on_cfg_denoiser(web.before_step)
        host.list_unets()
        host.load(material().files[model])
        return Setup(host, web)

    return new


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    assert expected.std() > 1e-3
    return bool((found - expected).abs().max() <= PIPELINE_MAX_ABS * expected.abs().max().clamp(min=1))


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 3),
        ({"width": 96, "height": 80}, 3),
        ({"batch_size": 2, "tokens": 154, "negative_tokens": 154}, 3),
        ({"tokens": 154}, 6),  # cond and uncond alone
        ({"hr_scale": 1.5, "steps": 2}, 4),
    ],
    ids=["plain", "size", "batch", "lengths", "hires"],
)
def test_images_come_from_engines_alone(make, options, calls):
    setup = make()
    result = setup.generate(**options)
    assert same(result.images, setup.plain(**options))
    assert setup.calls() == (calls, 0) and setup.unet.calls == 0
    assert setup.calls("vae_decoder") == (options.get("batch_size", 1), 0)
    assert not setup.web.report.fallbacks
    key = setup.web.report.components["unet"].engines
    assert f"sdaccel: unet {next(iter(key))[:12]}" in result.info and "in torch" not in result.info


def test_a_batch_larger_than_every_profile_is_run_in_parts(make):
    setup = make()
    result = setup.generate(batch_size=3)
    assert same(result.images, setup.plain(batch_size=3))
    assert setup.calls() == (6, 0)  # 6 of at most 4: 4 and 2


def test_img2img_encodes_through_an_engine(make):
    setup = make()
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    result = setup.generate(init_image=image)
    assert same(result.images, setup.plain(init_image=image))
    assert setup.calls("vae_encoder") == (1, 0) and not setup.web.report.fallbacks


@pytest.mark.parametrize("model", ["sdxl", "refiner", "inpaint"])
def test_every_kind_of_unet(make, model):
    setup = make(model)
    result = setup.generate()
    assert same(result.images, setup.plain(model=model))
    assert setup.calls() == (3, 0)
    assert setup.calls("vae_decoder") == (1, 0)  # all have the same VAE, and so its engine


def test_automatic_picks_the_checkpoints_option(make):
    setup = make()
    assert [option.label for option in setup.host.sd_unet.unet_options] == [
        f"[sdaccel] {name}" for name in ("sd1", "inpaint", "sdxl", "refiner")
    ]
    setup.generate()
    assert setup.host.sd_unet.current_unet.option.label == "[sdaccel] sd1"
    assert setup.host.moves[0] == "cpu"


def test_a_renamed_checkpoint_is_found_by_its_content(make, tmp_path):
    renamed = shutil.copy(material().files["sd1"], tmp_path / "renamed.safetensors")
    setup = make()
    setup.host.sd_models.checkpoints_list["renamed"] = SimpleNamespace(filename=str(renamed), model_name="renamed")
    setup.host.load(renamed)
    setup.generate()
    assert setup.calls() == (3, 0)
    assert setup.host.sd_unet.current_unet.option.label == "[sdaccel] renamed"


def test_another_checkpoint_of_the_same_name_is_not_run_by_old_engines(make, tmp_path):
    other = shutil.copy(material().files["other"], tmp_path / "sd1.safetensors")
    setup = make()
    setup.host.sd_models.checkpoints_list = {"sd1": SimpleNamespace(filename=str(other), model_name="sd1")}
    setup.host.load(other)
    result = setup.generate()
    assert same(result.images, setup.plain(model="other"))
    assert setup.unet.calls == 3 and "no engine of unet for sd1" in setup.reasons()["unet"]
    assert "unet 3 calls: the store has no engine" in result.info
    assert not result.comments  # nobody has built one


def test_an_engine_built_meanwhile_is_used(make, tmp_path):
    store = tmp_path / "store"
    setup = make(store=store)
    setup.generate()
    assert setup.unet.calls == 3
    shutil.copytree(material().store, store, dirs_exist_ok=True)
    setup.generate()
    assert setup.calls() == (3, 0)


def test_a_size_without_profile_runs_in_torch_and_says_so(make):
    setup = make()
    result = setup.generate(width=128, height=64)
    assert same(result.images, setup.plain(width=128, height=64))
    assert setup.calls() == (0, 3)
    assert "width 16 is outside 8-12" in setup.reasons()["unet"]
    assert "sdaccel in torch: unet 3 calls: 128x64 pixels: no profile" in result.info
    assert "unet ran in torch" in result.comments


def test_hires_fix_falls_back_for_the_pass_that_has_no_profile(make):
    setup = make()
    result = setup.generate(hr_scale=2.0)
    assert same(result.images, setup.plain(hr_scale=2.0))
    assert setup.calls() == (3, 3)


def test_the_torch_unet_comes_back_and_goes_again(make):
    setup = make()
    setup.host.devices.device = torch.device("meta")  # as if the host computed elsewhere
    loaded = setup.web.loaded()
    setup.host.moves.clear()
    setup.unet.to = lambda device: setup.host.moves.append(str(device))
    setup.web.bring_back(loaded)
    setup.web._park(loaded)
    assert setup.host.moves == ["meta", "cpu"]
    setup.host.model.lowvram = True
    setup.web.bring_back(loaded)
    setup.web._park(loaded)
    assert len(setup.host.moves) == 2


def test_without_fallback_the_reason_is_an_error(make):
    setup = make(sdaccel_fallback=False)
    with pytest.raises(Exception, match="no profile"):
        setup.generate(width=128)
    setup.host.shared.opts.sdaccel_fallback = True
    setup.generate(width=128)


def test_switched_off(make):
    setup = make(sdaccel_enabled=False)
    result = setup.generate()
    assert same(result.images, setup.plain())
    assert setup.unet.calls == 3 and setup.host.sd_unet.current_unet is None
    assert "sdaccel" not in result.info


# --- networks

FILES = {
    "ink": lora(1),
    "My LoRA v1.5 – 水彩 (ñ)": lora(2),
    "full": others,
    "wrong": lambda unet: {next(iter(named(unet, "to_k"))): Full(torch.ones(3, 5))},
    "odd": lambda unet: dict.fromkeys(named(unet, "to_k"), SimpleNamespace()),
    "bias": lambda unet: {next(iter(named(unet, "to_k"))): Full(torch.zeros(1), torch.ones(3))},
}


def in_torch(setup: Setup, **options: Any) -> Any:
    """The same by the host alone."""
    setup.host.shared.opts.sdaccel_enabled = False
    try:
        return setup.generate(**options)
    finally:
        setup.host.shared.opts.sdaccel_enabled = True


@pytest.fixture
def lively(make, monkeypatch):
    """A host with networks. Its `plain` image differs from the one without them."""

    def new(model: str = "sd1", **options: Any) -> Setup:
        setup = make(model, networks=Networks(FILES), **options)
        monkeypatch.setitem(sys.modules, "networks", setup.host.networks)
        return setup

    return new


def adapters(setup: Setup) -> list[str]:
    return setup.web.report.components["unet"].adapters


@pytest.mark.parametrize(
    "networks",
    [
        [("ink", 0.8)],
        [("My LoRA v1.5 – 水彩 (ñ)", 1.0, 2)],
        [("full", -0.5)],
        [("ink", 0.5), ("full", 1.0), ("My LoRA v1.5 – 水彩 (ñ)", 0.7)],
        [("ink", 0.4), ("ink", 0.4)],
    ],
    ids=["lora", "named", "full", "three", "twice"],
)
def test_networks_are_taken_live(lively, networks):
    setup = lively()
    before = setup.generate()
    found = setup.generate(networks=networks)
    assert setup.calls() == (3, 0) and setup.unet.calls == 0 and not setup.web.report.fallbacks
    assert adapters(setup) == sorted({name for name, *_ in networks})
    assert not same(found.images, before.images)
    assert same(found.images, setup.plain(networks=networks))
    again = setup.generate()
    assert torch.equal(again.images, before.images) and adapters(setup) == []


def test_one_network_after_the_other_and_at_other_strengths(lively):
    setup = lively()
    made = {}
    for step in (("ink", 1.0), ("full", 1.0), ("ink", 1.0), ("ink", 0.3), ("ink", 1.0), ("ink", 0.0), ("ink", 1.0, 1)):
        found = setup.generate(networks=[step], steps=1).images
        assert setup.calls() == (1, 0)
        assert torch.equal(found, made.setdefault(step, found))
    for step, found in made.items():
        assert same(found, setup.plain(networks=[step], steps=1))
    assert len({float(found.sum()) for found in made.values()}) == len(made)


@pytest.mark.parametrize("in_place", [True, False])
def test_block_weights_are_followed(lively, in_place):
    """Extensions edit the modules of a network that the host has loaded."""
    setup = lively()
    whole = setup.generate(networks=[("ink", 1.0)], steps=1)

    def halve(p: Any) -> None:
        for name, module in setup.host.networks.loaded_networks[0].modules.items():
            if "input_blocks" in name and in_place:
                module.up_model.weight.mul_(0.5)
            elif "input_blocks" in name:
                module.up_model.weight = torch.nn.Parameter(module.up_model.weight * 0.5, requires_grad=False)

    setup.host.other_scripts.append(halve)
    found = setup.generate(networks=[("ink", 1.0)], steps=1)
    setup.host.other_scripts.clear()
    assert setup.calls() == (1, 0) and not same(found.images, whole.images)
    assert same(found.images, in_torch(setup, networks=[("ink", 1.0)], steps=1).images)


def test_a_strength_that_changes_between_steps(lively):
    setup = lively()

    def late(params: Any) -> None:
        for network in setup.host.networks.loaded_networks:
            network.unet_multiplier = float(params.sampling_step > 0)

    setup.host.script_callbacks.on_cfg_denoiser(late)
    found = setup.generate(networks=[("ink", 1.0)])
    assert setup.calls() == (3, 0)
    assert same(found.images, in_torch(setup, networks=[("ink", 1.0)]).images)


@pytest.mark.parametrize("model", ["sdxl", "inpaint"])
def test_networks_of_every_kind_of_unet(lively, model):
    setup = lively(model)
    networks = [("ink", 1.0), ("full", 1.0)] if model == "sdxl" else [("ink", 1.0)]
    found = setup.generate(networks=networks, steps=1)
    assert setup.calls() == (1, 0)
    assert same(found.images, setup.plain(model=model, networks=networks, steps=1))


def test_engines_and_torch_in_turn_with_a_network(lively):
    """Torch merges it into the module, which is not the file's any more; the engine has its own."""
    setup = lively()
    plain = setup.generate()
    options = {"networks": [("ink", 1.0)], "hr_scale": 2.0, "steps": 2}
    found = setup.generate(**options)
    assert setup.calls() == (2, 2) and adapters(setup) == ["ink"]
    merges = setup.host.networks.merges
    again = setup.generate(**options)
    assert setup.calls() == (2, 2) and setup.host.networks.merges == merges > 0
    assert torch.equal(again.images, found.images) and same(found.images, setup.plain(**options))
    assert torch.equal(setup.generate().images, plain.images)
    assert setup.calls() == (3, 0)


def test_a_module_that_the_host_has_merged_before_the_first_image(lively):
    setup = lively()
    in_torch(setup, networks=[("ink", 1.0)])
    found = setup.generate(networks=[("ink", 1.0)])
    assert setup.calls() == (3, 0) and same(found.images, setup.plain(networks=[("ink", 1.0)]))


def test_a_refiner_with_a_network(lively):
    setup = lively()
    options = {"networks": [("ink", 1.0)], "refiner": material().files["sd1"]}
    found = setup.generate(**options)
    assert setup.calls() == (3, 0) and same(found.images, setup.plain(**options))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "the network wrong gives a change of shape [3, 5] to diffusion_model_input_blocks"),
        ("bias", "the network bias gives diffusion_model_input_blocks"),
        ("odd", "what a network holds could not be read"),
    ],
)
def test_a_network_that_does_not_fit_runs_in_torch(lively, name, reason):
    setup = lively()
    before = setup.generate()
    networks = [("ink", 1.0), (name, 1.0)]
    found = setup.generate(networks=networks)
    assert setup.calls() == (0, 3) and reason in setup.reasons()["unet"]
    assert setup.host.networks.errors  # the host's own report of it
    assert same(found.images, setup.plain(networks=networks))
    assert torch.equal(setup.generate().images, before.images) and setup.calls() == (3, 0)


def test_networks_beside_the_layers_and_of_other_extensions_run_in_torch(lively, monkeypatch):
    setup = lively(lora_functional=True)
    setup.generate(networks=[("ink", 1.0)], steps=1)
    assert setup.calls() == (0, 1) and "lora_functional" in setup.reasons()["unet"]
    setup.host.shared.opts.lora_functional = False
    monkeypatch.setitem(sys.modules, "lycoris", SimpleNamespace(loaded_lycos=[SimpleNamespace(name="other")]))
    setup.generate(steps=1)
    assert "networks are active that the engine does not hold: other" in setup.reasons()["unet"]


# --- ControlNet


def hooked(setup: Setup, hook: UnetHook, **options: Any) -> torch.Tensor:
    """An image with the extension's forward in the UNet."""

    def put(p: Any) -> None:
        if hook.model is None:
            hook.hook(p.sd_model.model.diffusion_model)

    setup.host.other_scripts.append(put)
    try:
        return setup.generate(**options).images
    finally:
        setup.host.other_scripts.clear()
        found = setup.unet.__dict__["forward"]
        assert found.__func__.__qualname__.startswith("UnetHook.")  # its own
        hook.restore()


def by_host(hook: UnetHook, setup: Setup, **options: Any) -> torch.Tensor:
    return setup.plain(scripts=[lambda p: hook.model or hook.hook(p.sd_model.model.diffusion_model)], **options)


@pytest.mark.parametrize(
    ("model", "control", "options"),
    [
        ("sd1", {}, {}),
        ("sdxl", {}, {"steps": 1}),
        ("sd1", {"pooled": True}, {"steps": 1, "batch_size": 3}),
        ("sd1", {"until": 1}, {"hr_scale": 1.5, "steps": 2}),
        ("sd1", {}, {"steps": 1, "networks": [("ink", 1.0)]}),
    ],
    ids=["plain", "sdxl", "pooled", "end step and hires", "network"],
)
def test_residuals_of_the_controlnet_extension_are_inputs_of_the_engine(lively, model, control, options):
    setup = lively(model)
    options = {"tokens": 78, "negative_tokens": 78, **options}
    without = setup.generate(**options).images
    hook = UnetHook(**control)
    found = hooked(setup, hook, **options)
    assert setup.calls()[0] >= options.get("steps", 3) and setup.calls()[1] == setup.unet.calls == 0
    assert hook.calls and not setup.web.report.fallbacks
    assert not same(found, without)
    assert same(found, by_host(UnetHook(**control), setup, model=model, **options))
    assert torch.equal(setup.generate(**options).images, without)


def test_an_adapter_in_the_encoder_runs_in_torch(make):
    setup = make()
    found = hooked(setup, UnetHook(adapter=True), tokens=78, negative_tokens=78)
    assert setup.calls() == (0, 3) and "a T2I-Adapter adds to the UNet's blocks" in setup.reasons()["unet"]
    assert same(found, by_host(UnetHook(adapter=True), setup, tokens=78, negative_tokens=78))


def test_residuals_are_computed_once_where_no_engine_has_the_size(make):
    setup = make()
    hook = UnetHook()
    hooked(setup, hook, tokens=78, negative_tokens=78, width=128)
    assert setup.calls() == (0, 3) and "no profile" in setup.reasons()["unet"]
    assert hook.calls == 3 + 1


def test_an_extension_that_cannot_be_followed_runs_in_torch(make):
    setup = make()
    hook = UnetHook()
    hook.through_blocks = lambda unet, *args: unet.a_part_of_another_version
    hooked(setup, hook, tokens=78, negative_tokens=78, steps=1)
    assert setup.calls() == (0, 1) and "extension could not be followed" in setup.reasons()["unet"]


# --- what an engine does not hold


def test_edited_weights_are_followed(make):
    setup = make()
    first = setup.generate()
    with torch.no_grad():
        setup.unet.out._modules["2"].weight.add_(0.05)
    edited = setup.generate()
    assert setup.calls() == (3, 0) and not same(edited.images, first.images)
    assert same(edited.images, in_torch(setup).images)
    with torch.no_grad():
        setup.unet.out._modules["2"].weight.sub_(0.05)
    assert same(setup.generate().images, first.images)


def test_weights_merged_in_memory_are_noticed_at_once(make):
    setup = make()
    with torch.no_grad():
        setup.unet.time_embed._modules["0"].weight.mul_(1.1)
    setup.generate()
    assert setup.calls() == (0, 3) and "not those of the file" in setup.reasons()["unet"]


def test_hypernetworks_are_not_ignored(make):
    setup = make()
    setup.host.shared.loaded_hypernetworks.append(SimpleNamespace(name="paint"))
    setup.generate()
    assert "hypernetworks are active that the engine does not hold: paint" in setup.reasons()["unet"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_replaced_forward_runs_as_it_is(make, asks):
    """ControlNet: its forward may call the original one, or run the blocks itself."""
    setup = make()
    setup.generate()
    unet = setup.unet
    kind = type(unet)
    unet.forward = (
        (lambda *a, **k: kind.forward(unet, *a, **k) * 0.5) if asks else (lambda *a, **k: unet.compute(*a, **k) * 0.5)
    )
    moved = len(setup.host.moves)
    setup.generate()
    assert setup.calls()[0] == 0 and unet.calls == 3
    assert "forward of the UNet has been replaced by tests.integrations.test_webui" in setup.reasons()["unet"]
    assert "cpu" in setup.host.moves[moved:]  # the host's device here
    del unet.forward
    setup.generate()
    assert setup.calls() == (3, 0)


def test_parts_patched_before_the_first_image_are_noticed(make):
    setup = make()
    block = setup.unet.input_blocks
    block.forward = lambda *args: None
    setup.generate()
    assert "input_blocks.forward has been replaced" in setup.reasons()["unet"]
    del block.forward
    setup.unet.add_module("motion_module", torch.nn.Linear(2, 2))
    setup.generate()
    assert "parts that the file has not (motion_module" in setup.reasons()["unet"]


@pytest.mark.parametrize("first", [True, False])
def test_a_blocks_own_method_that_is_replaced_and_put_back(make, first):
    """ControlNet's reference replaces it, and leaves the class's own on the block."""
    setup = make()
    if not first:
        setup.generate(steps=1)
    block = setup.unet.input_blocks
    block._forward = lambda: None
    setup.generate(steps=1)
    assert setup.calls() == (0, 1) and "_forward" in setup.reasons()["unet"]
    block._forward = MethodType(type(block)._forward, block)
    setup.generate(steps=1)
    assert setup.calls() == (1, 0)


@pytest.mark.parametrize("first", [True, False])
def test_hypertile_counts_while_it_is_on(make, first):
    """It stays on the layers when it is switched off."""
    setup = make()
    if not first:
        setup.generate()
    block = setup.unet.input_blocks
    block.forward, block.__dict__["__webui_hypertile_params"] = lambda *args: None, SimpleNamespace(enabled=True)
    for enabled, calls in ((True, (0, 3)), (False, (3, 0)), (True, (0, 3)), (False, (3, 0))):
        block.__dict__["__webui_hypertile_params"].enabled = enabled
        setup.generate()
        assert setup.calls() == calls


def test_unknown_arguments_are_not_ignored(make):
    setup = make()
    setup.generate()
    x, t, context = torch.randn(1, 4, 8, 8), torch.tensor([10.0]), torch.randn(1, 77, 12)
    with torch.no_grad():
        expected = setup.unet.compute(x, t, context, encoder_attention_mask=torch.ones(1, 77))
        found = setup.host.sd_unet.current_unet(x, t, context, encoder_attention_mask=torch.ones(1, 77))
    assert torch.equal(found, expected)
    assert "called with encoder_attention_mask, which engines do not take" in setup.reasons()["unet"]


def test_sizes_that_the_host_resizes_run_in_torch(make):
    setup = make()
    setup.generate()
    x, t, context = torch.randn(1, 4, 9, 8), torch.tensor([10.0]), torch.randn(1, 77, 12)
    with torch.no_grad():
        setup.host.sd_unet.current_unet(x, t, context)
    assert "64x72 is no multiple of 16 pixels" in setup.reasons()["unet"]


def test_training_runs_in_torch(make):
    setup = make()
    setup.generate()
    context = torch.randn(1, 77, 12, requires_grad=True)
    out = setup.host.sd_unet.current_unet(torch.randn(1, 4, 8, 8), torch.tensor([10.0]), context)
    out.sum().backward()
    assert context.grad is not None and "gradients are wanted" in setup.reasons()["unet"]


def test_the_engines_of_another_checkpoint_are_not_run(make):
    setup = make(sd_unet="[sdaccel] sdxl")
    result = setup.generate()
    assert same(result.images, setup.plain())
    assert "the engines of another checkpoint chosen in Settings" in setup.reasons()["unet"]


def test_a_refiner_gets_its_own_engines(make):
    """The host switches models between steps, and does not ask for its SD Unet again."""
    setup = make()
    options = {"refiner": material().files["other"]}
    result = setup.generate(**options)
    assert same(result.images, setup.plain(**options))
    assert setup.calls() == (1, 0)
    (fallback,) = (each for each in setup.web.report.fallbacks if each.component == "unet")
    assert fallback.calls == 2 and "no engine of unet for other" in fallback.reason
    result = setup.generate(refiner=material().files["sd1"])
    assert same(result.images, setup.plain(model="other", refiner=material().files["sd1"]))
    assert setup.calls() == (2, 0)


def test_sdxl_base_and_refiner(make):
    setup = make("sdxl")
    options = {"refiner": material().files["refiner"]}
    result = setup.generate(**options)
    assert same(result.images, setup.plain(model="sdxl", **options))
    assert setup.calls() == (3, 0) and len(setup.web.report.components["unet"].engines) == 2


def test_an_edited_vae_runs_in_torch(make):
    setup = make()
    setup.generate()
    decoder = setup.host.model.first_stage_model.decoder
    decoder.forward = type(decoder).forward.__get__(decoder)  # as it was: no reason
    setup.generate()
    assert setup.calls("vae_decoder") == (1, 0)
    decoder.forward = lambda z: decoder.inner[0](z) * 0.5  # tiled VAE
    result = setup.generate()
    assert (
        setup.calls("vae_decoder") == (0, 1)
        and "forward of decoder has been replaced" in setup.reasons()["vae_decoder"]
    )
    assert not same(result.images, setup.plain())


def test_what_torch_notes_about_a_size_is_no_edit(make):
    setup = make()
    for size in (64, 128, 160, 64):
        setup.generate(height=size)
        assert setup.calls("vae_decoder") == ((1, 0) if size == 64 else (0, 1))


def test_another_vae_file_is_not_the_checkpoints(make):
    setup = make()
    setup.host.sd_vae.loaded_vae_file = str(material().files["other"])
    setup.web.loaded_callback()
    setup.generate()
    assert setup.calls() == (3, 0)
    assert "no engine of vae_decoder" in setup.reasons()["vae_decoder"]


def test_a_broken_engine_leaves_the_host_alive(make, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(material().store, store)
    for entry in Store(store).find_engines(component="unet"):
        for file in entry.path.glob("*.onnx"):
            file.write_bytes(file.read_bytes()[:-1] + b"!")
    setup = make(store=store)
    result = setup.generate()
    assert same(result.images, setup.plain())
    assert setup.calls() == (0, 3) and setup.reasons()["unet"]


def test_an_output_that_cannot_be_is_computed_again(make, monkeypatch):
    setup = make()

    def broken(context, *rest, **options):
        return {spec.name: torch.full((2,), torch.nan) for spec in context.engines[0].engine.outputs}

    monkeypatch.setattr(host, "run_in_parts", broken)
    result = setup.generate()
    assert same(result.images, setup.plain())
    assert setup.reasons()["unet"] == "the output of the engine was NaN."


def test_folders_stay_out_of_the_infotext(make, tmp_path):
    store = tmp_path / "store"
    setup = make(store=store)
    setup.web.report.fell_back("unet", f"{store} cannot be read")
    p = SimpleNamespace(extra_generation_params={})
    setup.web.describe(p)
    assert str(tmp_path) not in p.extra_generation_params["sdaccel in torch"]


def test_unloading_leaves_nothing(make):
    setup = make()
    setup.generate()
    vae = setup.host.model.first_stage_model
    assert "decode" in vae.__dict__
    setup.web.unload()
    assert "decode" not in vae.__dict__ and "encode" not in vae.__dict__
    assert setup.host.sd_unet.current_unet is None


# --- offers


def test_a_size_made_five_times_is_offered_and_forgotten_once_built(make, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(material().store, store)
    shutil.rmtree(store / "hosts", ignore_errors=True)  # sizes that other tests have made
    setup = make(store=store)
    for _ in range(5):
        assert not setup.web.offers()
        result = setup.generate(width=128, height=80, steps=1)
    (offer,) = setup.web.offers()
    assert (offer.width, offer.height, offer.times) == (128, 80, 5)
    assert offer.request() | {"model": ""} == {
        "model": "",
        "resolutions": ["128x80"],
        "batches": ["1"],
        "tokens": ["77"],
    }
    assert "You made 128×80 with sd1 5 times in torch" in result.comments
    WantedShapes(setup.web.store).drop(material().files["sd1"], 128, 80)
    assert not setup.web.offers()


def test_settings_page(make):
    setup = make()
    setup.web.settings()
    infos = setup.host.shared.opts.infos
    names = {"store", "python", "enabled", "fallback", "offers"}
    assert set(infos) == {f"sdaccel_{name}" for name in names}
    assert infos["sdaccel_store"].restrict_api and infos["sdaccel_python"].restrict_api


def test_a_page_that_anyone_reaches_sets_no_paths(make, monkeypatch):
    setup = make()
    setup.host.shared.cmd_opts.listen = True
    setup.web.settings()
    assert not {"sdaccel_store", "sdaccel_python"} & set(setup.host.shared.opts.infos)
    assert setup.web.store.root == material().store  # as saved
    monkeypatch.setenv("SDACCEL_ALLOW_REMOTE", "1")
    setup.web.settings()
    assert "sdaccel_store" in setup.host.shared.opts.infos


def test_a_model_that_is_none_of_ours_is_left_alone(make):
    setup = make()
    setup.host.sd_models.model_data.sd_model = SimpleNamespace(sd_checkpoint_info=None)
    assert setup.web.loaded() is None
    setup.web.begin(SimpleNamespace())
    setup.web.finish(None)
    with pytest.raises(UnsupportedCall):
        setup.web._ready("unet", torch.nn.Linear(1, 1), {})
