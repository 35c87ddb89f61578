"""The model that the package ships, so that the main job runs offline: plain shapes on a plain background.

It follows prompts such as "a small red circle on the left on a blue background" or "a yellow star above a green ring
on a white background" (README.md beside this file has the vocabulary and the scores). Its recommended guidance scale
is `GUIDANCE_SCALE`, with 20 steps of the scheduler in its folder; it is at home at 256×256, and works from there to
1024×1024.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from sdaccel.models.demo.scenes import random_caption, random_scene

GUIDANCE_SCALE = 5.0


def demo_model_path() -> Path:
    """The diffusers folder of the demo model."""
    return Path(__file__).parent / "weights"


def demo_lora_path() -> Path:
    """The demo model's LoRA, in diffusers format: it draws white shapes on blue, whatever colours the prompt names."""
    return Path(__file__).parent / "lora" / "blueprint.safetensors"


def held_out_prompts(n: int, seed: int = 0, *, relations: bool = False) -> list[str]:
    """`n` prompts about combinations of shape, colour and background that training never showed.

    Each names its background; some name two things, joined by "and". With `relations`, two things may also stand
    "left of", "right of", "above" or "below" each other, which the model does not follow reliably (see README.md).
    Equal arguments give equal prompts.
    """
    rng = random.Random(seed)
    prompts: list[str] = []
    while len(prompts) < n:
        scene = random_scene(rng, held_out=True)
        caption = random_caption(scene if relations else replace(scene, relation=""), rng)
        if scene.background in caption and caption not in prompts:
            prompts.append(caption)
    return prompts
