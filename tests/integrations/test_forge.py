"""The extension in Forge, against a stand-in of the host: every image equals the host's own torch image."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdaccel.errors import UnsupportedCall
from sdaccel.export.components import residual_layout
from sdaccel.integrations.forge import Forge
from sdaccel.integrations.host_watch import differs_from_file
from tests.integrations.hosts.extension import Hooks, Installed, architectures  # noqa: F401 - a fixture
from tests.integrations.hosts.forge import Control, ForgeHost, Model
from tests.integrations.hosts.ldm import material
from tests.tolerances import PIPELINE_MAX_ABS


def added(seed: int) -> Any:
    """A network of the host: what it adds to weights of attention, projections and norms."""

    def make(unet: Any) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        ends = ("to_q.weight", "to_out.0.bias", "proj_in.weight", "in_layers.0.weight")
        return {
            name: torch.randn(weight.shape, generator=random) * 0.1
            for name, weight in unet.named_parameters()
            if name.endswith(ends)
        }

    return make


NETWORKS = {"ink v1.5 ñ": added(1), "wash": added(2)}


class Script(Hooks):
    def process_before_every_sampling(self, p: Any) -> None:
        self.web.before_sampling(p)


class Setup(Installed):
    @property
    def forge(self) -> Forge:
        return self.web

    @property
    def unet(self) -> Any:
        return self.host.model.forge_objects.unet.model.diffusion_model

    def plain(self, model: str = "sd1", others: Any = (), **options: Any) -> torch.Tensor:
        host = ForgeHost(list(material().files.values()), self.host.networks)
        host.load(material().files[model])
        host.other_scripts += others
        return host.generate(**options).images


@pytest.fixture
def make():
    def new(model: str = "sd1", **options: Any) -> Setup:
        host = ForgeHost(list(material().files.values()))
        host.shared.opts.sdaccel_store = str(material().store)
        vars(host.shared.opts).update(options)
        forge = Forge(host)
        host.script = Script(forge)
        host.loaded_callbacks.append(forge.loaded_callback)
        host.step_callbacks.append(forge.before_step)
        host.load(material().files[model])
        return Setup(host, forge)

    return new


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    assert expected.std() > 1e-3
    return bool((found - expected).abs().max() <= PIPELINE_MAX_ABS)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 3),
        ({"width": 96, "height": 72}, 3),  # odd latents: this host's UNet computes them as engines do
        ({"batch_size": 3}, 6),
        ({"tokens": 154}, 6),
        ({"hr_scale": 1.5, "steps": 2}, 4),
        ({"model": "sdxl"}, 3),
        ({"model": "refiner"}, 3),
        ({"model": "inpaint"}, 3),
    ],
    ids=["plain", "size", "batch", "lengths", "hires", "sdxl", "refiner", "inpaint"],
)
def test_images_come_from_engines_alone(make, options, calls):
    setup = make(options.get("model", "sd1"))
    result = setup.generate(**{key: value for key, value in options.items() if key != "model"})
    assert same(result.images, setup.plain(**options))
    assert setup.calls() == (calls, 0) and setup.unet.calls == 0
    assert setup.calls("vae_decoder") == (options.get("batch_size", 1), 0)
    assert not setup.forge.report.fallbacks
    assert "sdaccel: unet" in result.info and "in torch" not in result.info


def test_img2img_encodes_through_an_engine(make):
    setup = make()
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    result = setup.generate(init_image=image)
    assert same(result.images, setup.plain(init_image=image))
    assert setup.calls("vae_encoder") == (1, 0) and not setup.forge.report.fallbacks


def test_a_size_without_profile_runs_in_torch_and_says_so(make):
    setup = make()
    result = setup.generate(width=128)
    assert same(result.images, setup.plain(width=128))
    assert setup.calls() == (0, 3) and "outside 8-12" in setup.reasons()["unet"]
    assert "sdaccel in torch: unet 3 calls: 128x64 pixels: no profile" in result.info


def test_a_batch_too_large_is_no_reason_where_the_size_is_one(make):
    setup = make()
    setup.generate(width=128, batch_size=4)
    assert "batch" not in setup.reasons()["unet"] and "width 16 is outside 8-12" in setup.reasons()["unet"]


def residuals(setup: Setup, seed: int = 0, batch: int = 2, latents: tuple[int, int] = (8, 8)) -> Any:
    """A ControlNet's for the tiny UNet, in the host's order: the last of "output" is for the deepest connection."""
    random = torch.Generator().manual_seed(seed)
    found: dict[str, list[Any]] = {"input": [], "output": [], "middle": []}
    for name, channels, level in residual_layout(setup.unet.inner[0].config):
        size = (batch, channels, *(side >> level for side in latents))
        found["middle" if name.startswith("mid") else "output"].append(torch.randn(size, generator=random) * 0.2)
    return found


def control(taken: Any, until: int = 9) -> Any:
    def add(p: Any) -> None:
        unet = p.sd_model.forge_objects.unet.clone()
        unet.control = Control(taken, until)
        p.sd_model.forge_objects.unet = unet

    return add


CHANGES = {
    "all": lambda found: None,
    "for all images": lambda found: found["output"].__setitem__(0, found["output"][0][:1]),
    "the deepest alone": lambda found: found["output"].__delitem__(slice(0, 3)),
    "more than connections": lambda found: found["output"].insert(0, found["output"][0] * 7),
    "some": lambda found: found["output"].__setitem__(slice(1, None, 2), [None] * len(found["output"][1::2])),
    "the middle": lambda found: found["output"].clear(),
    "no middle": lambda found: found["middle"].__setitem__(0, None),
    "an adapter that adds nothing": lambda found: found["input"].append(None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_controlnet_residuals_are_inputs_of_the_engine(make, change):
    setup = make()
    without = setup.generate(steps=1).images
    taken = residuals(setup)
    CHANGES[change](taken)
    setup.host.other_scripts.append(control(taken))
    found = setup.generate(steps=1).images
    assert setup.calls() == (1, 0) and not setup.forge.report.fallbacks
    assert not same(found, without) and same(found, setup.plain(steps=1, others=[control(taken)]))


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        ({"input": [torch.ones(1)]}, "residuals for input (T2I-Adapter)"),
        ({"output": [torch.ones(2, 1, 1, 1)]}, "a ControlNet residual is [2, 1, 1, 1]"),
        ({"middle": [torch.ones(2, 16, 4, 4, device="meta")]}, "on meta"),
    ],
    ids=["adapter", "shape", "device"],
)
def test_residuals_that_engines_lack_run_in_torch(make, taken, reason, monkeypatch):
    setup = make()
    monkeypatch.setattr(type(setup.unet), "_residuals", lambda self, control: {})
    setup.host.other_scripts.append(control(taken))
    setup.generate(steps=1)
    assert setup.calls() == (0, 1) and reason in setup.reasons()["unet"]


def test_residuals_of_parts_of_a_batch_and_with_an_end_step(make):
    setup = make()
    taken = residuals(setup, batch=6)
    setup.host.other_scripts.append(control(taken, until=2))
    found = setup.generate(batch_size=3)
    assert setup.calls() == (6, 0)
    assert same(found.images, setup.plain(batch_size=3, others=[control(taken, until=2)]))


def test_a_refiner_is_asked_for_its_own_engines(make):
    setup = make()
    setup.host.refiner = (1, material().files["other"])
    setup.generate(steps=3)
    assert setup.calls() == (1, 2) and setup.calls("vae_decoder") == (0, 1)
    assert "no engine of unet for other" in setup.reasons()["unet"]


def patches(p: Any) -> None:
    unet = p.sd_model.forge_objects.unet.clone()
    unet.model_options["transformer_options"]["patches"] = {"output_block_patch": [lambda out: out * 0.5]}
    p.sd_model.forge_objects.unet = unet


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (patches, "called with transformer_options patches, which engines do not take"),
    ],
)
def test_what_other_extensions_do_is_not_ignored(make, other, reason):
    setup = make()
    setup.host.other_scripts.append(other)
    result = setup.generate()
    assert same(result.images, setup.plain(others=[other]))
    assert setup.calls() == (0, 3) and reason in setup.reasons()["unet"]
    setup.host.other_scripts.clear()
    setup.generate()
    assert setup.calls() == (3, 0)


def test_networks_are_taken_live(make):
    setup = make()
    setup.host.networks = NETWORKS
    before = setup.generate()
    found = setup.generate(networks=[("ink v1.5 ñ", 0.8), ("wash", 0.5)])
    assert setup.calls() == (3, 0) and setup.unet.calls == 0 and not setup.forge.report.fallbacks
    assert setup.forge.report.components["unet"].adapters == ["ink v1.5 ñ", "wash"]
    assert not same(found.images, before.images)
    assert same(found.images, setup.plain(networks=[("ink v1.5 ñ", 0.8), ("wash", 0.5)]))
    assert torch.equal(setup.generate().images, before.images) and setup.calls() == (3, 0)
    assert setup.forge.report.components["unet"].adapters == []


def test_one_network_after_the_other_and_at_other_strengths(make):
    setup = make()
    setup.host.networks = NETWORKS
    made = {}
    for step in (("wash", 1.0), ("ink v1.5 ñ", 1.0), ("wash", 1.0), ("wash", 0.3), ("wash", 1.0)):
        found = setup.generate(networks=[step], steps=1).images
        assert setup.calls() == (1, 0) and torch.equal(found, made.setdefault(step, found))
    for step, found in made.items():
        assert same(found, setup.plain(networks=[step], steps=1))


def test_engines_and_torch_in_turn_with_a_network(make):
    setup = make()
    setup.host.networks = NETWORKS
    options = {"networks": [("wash", 1.0)], "hr_scale": 2.0, "steps": 2}
    found = setup.generate(**options)
    assert setup.calls() == (2, 2) and setup.forge.report.components["unet"].adapters == ["wash"]
    assert same(found.images, setup.plain(**options))


def test_networks_computed_as_layers_run_stay_in_torch(make):
    setup = make()

    def online(p: Any) -> None:
        unet = p.sd_model.forge_objects.unet.clone()
        unet.lora_patches[("/loras/ink.safetensors", 1.0, 1.0, True)] = {}
        p.sd_model.forge_objects.unet = unet

    setup.host.other_scripts.append(online)
    setup.generate(steps=1)
    assert "networks are active that the engine does not hold: ink" in setup.reasons()["unet"]


def test_a_weight_that_a_network_has_given_another_shape(make):
    setup = make()
    setup.host.networks = {"wide": lambda unet: {"out.2.weight": torch.ones(2, *unet.out._modules["2"].weight.shape)}}
    setup.web.begin(SimpleNamespace(sd_model=setup.host.model))
    setup.host._load_networks(SimpleNamespace(networks=[("wide", 1.0)]))
    unet = setup.host.model.forge_objects_after_applying_lora.unet
    unet.model.lora_loader.refresh(unet.lora_patches)
    engines = setup.forge.engines(setup.forge.loaded())
    with pytest.raises(UnsupportedCall, match=r"a network has made out.2.weight \[2, 4"):
        setup.forge.patches("unet", engines)


def test_a_patched_network_is_not_ignored(make):
    setup = make()

    def patch(p: Any) -> None:
        unet = p.sd_model.forge_objects.unet.clone()
        unet.object_patches["diffusion_model.out"] = torch.nn.Identity()
        p.sd_model.forge_objects.unet = unet

    setup.host.other_scripts.append(patch)
    setup.generate()
    assert "diffusion_model.out has been replaced by an object patch" in setup.reasons()["unet"]


def test_a_wrapper_of_another_extension_stays_around_ours(make):
    setup = make()
    seen = []

    def halve(apply: Any, args: Any) -> torch.Tensor:
        seen.append(args["cond_or_uncond"])
        return apply(args["input"], args["timestep"], **args["c"]) * 0.5

    def other(p: Any) -> None:
        unet = p.sd_model.forge_objects.unet.clone()
        unet.set_model_unet_function_wrapper(halve)
        p.sd_model.forge_objects.unet = unet

    setup.host.other_scripts.append(other)
    result = setup.generate()
    assert same(result.images, setup.plain(others=[other]))
    assert setup.calls() == (3, 0) and len(seen) == 6


def test_a_replaced_forward_runs_as_it_is(make):
    setup = make()
    setup.generate()
    unet = setup.unet
    kind = type(unet)
    unet.forward = lambda *args, **kwargs: kind.forward(unet, *args, **kwargs) * 0.5
    found = setup.generate()
    assert setup.calls() == (0, 3)
    assert "forward of the UNet has been replaced by tests.integrations.test_forge" in setup.reasons()["unet"]
    assert not same(found.images, setup.plain())
    assert unet.__dict__["forward"].__name__ == "<lambda>"
    del unet.forward
    setup.generate()
    assert setup.calls() == (3, 0)


def test_an_extension_that_takes_the_call_over_is_told(make):
    setup = make()

    def take(p: Any) -> None:
        p.sd_model.forge_objects.unet.model_options["model_function_wrapper"] = lambda apply, args: args["input"] * 0.9

    before = setup.forge.before_sampling
    setup.forge.before_sampling = lambda p: (before(p), take(p))
    setup.generate()
    assert setup.reasons()["unet"] == "another extension took over the call of the model"


def test_edited_weights_are_followed(make):
    setup = make()
    first = setup.generate()
    with torch.no_grad():
        setup.unet.out._modules["2"].weight.add_(0.05)
    found = setup.generate()
    assert setup.calls() == (3, 0) and not same(found.images, first.images)
    setup.host.shared.opts.sdaccel_enabled = False
    assert same(found.images, setup.generate().images)


def test_weights_in_eight_bits_are_not_the_files(make):
    setup = make()
    last = setup.unet.out._modules["2"]
    last.weight.data = last.weight.data.to(torch.float8_e4m3fn)
    found = differs_from_file(setup.forge.engines(setup.forge.loaded()).component("unet"), setup.unet)
    assert found and "in float8_e4m3fn" in found


def test_an_additional_vae_is_not_the_checkpoints(make):
    setup = make()
    vae = material().files["other"].with_name("my vae.safetensors")
    vae.write_bytes(material().files["other"].read_bytes())
    setup.host.sd_models.model_data.forge_loading_parameters["additional_modules"] = [str(vae)]
    setup.generate()
    assert setup.calls() == (3, 0) and "no engine of vae_decoder" in setup.reasons()["vae_decoder"]


def test_the_host_leaves_room_for_an_engine_on_the_gpu(make):
    setup = make()
    setup.host.devices.device = torch.device("meta")
    setup.forge.before_sampling(SimpleNamespace(sd_model=setup.host.model))
    weights = sum(parameter.numel() * 4 for parameter in setup.unet.parameters())
    assert weights < setup.host.model.forge_objects.unet.preserved < 3 * weights


def test_nothing_stays_in_the_host(make):
    setup = make()
    setup.generate()
    objects = setup.host.model.forge_objects_original
    assert "forward" not in setup.unet.__dict__
    assert "decode" not in objects.vae.first_stage_model.__dict__
    assert "model_function_wrapper" not in objects.unet.model_options
    assert not objects.vae.patcher.model_options.keys() & {"model_vae_decode_wrapper", "model_vae_encode_wrapper"}


def test_a_model_that_is_none_of_ours_is_left_alone(make):
    setup = make()
    setup.host.sd_models.model_data.sd_model = Model(forge_objects=None, sd_checkpoint_info=None)
    p = SimpleNamespace(sd_model=setup.host.model, extra_generation_params={})
    setup.forge.begin(p)
    setup.forge.before_sampling(p)
    setup.forge.describe(p)
    assert "no Stable Diffusion UNet" in setup.reasons()["unet"]
