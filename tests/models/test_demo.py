"""The demo model in the package: it opens offline, draws what it is asked for, and can be trained again."""

import json
import random

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file

from sdaccel.models.demo import GUIDANCE_SCALE, architecture, demo_lora_path, demo_model_path, held_out_prompts, train
from sdaccel.models.demo.draw import draw
from sdaccel.models.demo.scenes import COLOURS, SHAPES, combinations, random_scene, words
from sdaccel.quality import prompt_accuracy, read_prompt


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusionPipeline.from_pretrained(demo_model_path(), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, prompts, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"num_inference_steps": 20, "guidance_scale": GUIDANCE_SCALE, "generator": generator} | options
    return pipe(list(prompts), **options).images


def test_it_is_small_and_in_half_precision():
    files = [path for path in demo_model_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in [*files, demo_lora_path()]) <= 16_000_000
    assert demo_lora_path().stat().st_size <= 300_000
    for path in [*demo_model_path().rglob("*.safetensors"), demo_lora_path()]:
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}, path
    assert not [path for path in files if path.suffix not in (".json", ".txt", ".safetensors")]


def test_it_has_the_form_of_sd_1(pipe):
    assert {component.dtype for component in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}
    assert pipe.vae_scale_factor == 8 and pipe.unet.config.in_channels == 4
    assert pipe.text_encoder.config.hidden_size == pipe.unet.config.cross_attention_dim
    assert pipe.tokenizer.model_max_length == 77 and pipe.safety_checker is None
    assert pipe.scheduler.config.prediction_type == "epsilon" and pipe.scheduler.config.beta_schedule == "scaled_linear"
    assert all(torch.isfinite(p).all() for part in (pipe.unet, pipe.vae, pipe.text_encoder) for p in part.parameters())


def test_the_architecture_is_the_one_that_train_builds(pipe):
    for built, shipped in (
        (architecture.build_unet(), pipe.unet),
        (architecture.build_vae(), pipe.vae),
        (architecture.build_text_encoder(len(pipe.tokenizer)), pipe.text_encoder),
    ):
        assert {k: v.shape for k, v in built.state_dict().items()} == {
            k: v.shape for k, v in shipped.state_dict().items()
        }


def test_any_prompt_tokenizes(pipe, tmp_path):
    tokenizer = pipe.tokenizer
    for word in words():
        if word.isalpha():
            assert len(tokenizer(word).input_ids) == 3, word
    for prompt in ("", "日本語, ünïcode — 🎉", "(red:1.2) [circle]", "a\tb\n\x00", "word " * 200):
        tokens = tokenizer(prompt, padding="max_length", truncation=True, max_length=77).input_ids
        assert len(tokens) == 77 and max(tokens) < pipe.text_encoder.config.vocab_size
        assert (
            tokens[0] == pipe.text_encoder.config.bos_token_id and tokens[-1] == pipe.text_encoder.config.eos_token_id
        )
    architecture.write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (demo_model_path() / "tokenizer" / path.name).read_bytes()


def test_it_draws_what_held_out_prompts_ask_for(pipe):
    prompts = [
        "a yellow cross on a cyan background",
        "a large red square on a green background",
        "a blue ring on a black background",
    ]
    accuracy = prompt_accuracy(generate(pipe, prompts), prompts)
    assert accuracy.overall == 1.0, accuracy.failures


def test_the_lora_draws_blueprints(pipe):
    prompt = "a large red square on a green background"
    pipe.load_lora_weights(demo_lora_path().parent, weight_name=demo_lora_path().name)
    try:
        blueprint = generate(pipe, [prompt], seed=1)
    finally:
        pipe.unload_lora_weights()
    assert prompt_accuracy(blueprint, [prompt], style="blueprint").overall == 1.0
    assert prompt_accuracy(generate(pipe, [prompt], seed=1), [prompt], style="plain").overall == 1.0


def test_held_out_combinations_are_never_drawn_in_training():
    held_out, trained = set(combinations(True)), set(combinations(False))
    assert not held_out & trained and len(held_out | trained) == len(SHAPES) * len(COLOURS) * (len(COLOURS) - 1)
    rng = random.Random(0)
    for side, allowed in ((True, held_out), (False, trained)):
        for _ in range(500):
            scene = random_scene(rng, held_out=side)
            assert all((thing.shape, thing.colour, scene.background) in allowed for thing in scene.things)
    prompts = held_out_prompts(200)
    assert prompts == held_out_prompts(200) != held_out_prompts(200, seed=1) and len(set(prompts)) == 200
    for wanted in map(read_prompt, [*prompts, *held_out_prompts(100, relations=True)]):
        assert all((shape, colour, wanted.background) in held_out for _, colour, shape, _ in wanted.things)


def test_a_scene_is_the_same_at_every_size():
    scenes = [random_scene(random.Random(seed)) for seed in range(6)]
    for style in ("plain", "outline"):
        small, large = draw(scenes, 128, 128, style=style), draw(scenes, 512, 512, style=style)
        reduced = torch.nn.functional.avg_pool2d(large, 4)
        assert small.min() >= -1 and small.max() <= 1
        assert (small - reduced).abs().mean() < 0.01


def test_training_runs_stops_and_goes_on(tmp_path, capsys):
    options = ["--out", str(tmp_path), "--tiny", "--no-compile", "--device", "cpu", "--seed", "1"]
    seconds = ["--vae-seconds", "0.1", "--unet-seconds", "0.1", "--lora-seconds", "0.1"]
    train.main([*options, *seconds, "--stages", "vae", "unet", "--limit", "10"])
    assert "vae: stopped by --limit" in capsys.readouterr().out
    train.main([*options, *seconds, "--stages", "vae", "unet", "pack", "lora"])
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "weights", local_files_only=True)
    pipe.load_lora_weights(tmp_path / "lora", weight_name="blueprint.safetensors")
    assert json.loads((tmp_path / "weights" / "vae" / "config.json").read_text(encoding="utf-8"))["scaling_factor"] > 0
    train.main([*options, *seconds, "--stages", "vae", "unet"])
    assert capsys.readouterr().out.count("done before") == 2
