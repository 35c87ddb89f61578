"""The detector is held to what was drawn: it must see what is there, and must not see what is not."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from sdaccel.errors import SettingError
from sdaccel.models.demo.draw import draw
from sdaccel.models.demo.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    Scene,
    Thing,
    canonical_caption,
    random_caption,
    random_scene,
)
from sdaccel.quality import (
    max_abs_error,
    prompt_accuracy,
    prompt_matches,
    psnr,
    read_prompt,
    read_scene,
    relative_error,
)


def pictures(scenes, height=256, width=256, style="plain", blur=0.0, noise=0.0):
    """uint8 images; `blur` in pixels and `noise` in grey levels imitate a small VAE."""
    pixels = ((draw(scenes, height, width, style=style) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    rng = np.random.default_rng(0)
    for image in pixels:
        soft = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(blur)), np.float32)
        yield np.clip(soft + noise * rng.standard_normal(soft.shape), 0, 255).astype(np.uint8)


def one(shape="circle", colour="red", background="blue", x=0.5, y=0.5, radius=0.25):
    return Scene(background, (Thing(shape, colour, x, y, radius),))


@pytest.mark.parametrize(
    ("count", "height", "width", "style", "blur"),
    [
        (40, 256, 256, "plain", 0.0),
        (100, 256, 256, "plain", 2.0),
        (30, 256, 256, "outline", 1.2),
        (20, 192, 192, "plain", 1.5),
        (10, 256, 384, "plain", 2.0),
        (10, 384, 256, "plain", 2.0),
        (5, 512, 512, "plain", 4.0),
        (3, 1024, 1024, "outline", 4.0),
    ],
)
def test_drawn_scenes_match_their_captions(count, height, width, style, blur):
    rng = random.Random(height + width + count)
    scenes = [random_scene(rng, aspect=width / height, held_out=rng.random() < 0.5) for _ in range(count)]
    captions = [random_caption(scene, rng) for scene in scenes]
    accuracy = prompt_accuracy(pictures(scenes, height, width, style, blur, noise=5.0), captions, style=style)
    assert accuracy.overall >= 0.99, accuracy.failures
    assert accuracy.total == count


def test_other_scenes_do_not_match():
    rng = random.Random(3)
    scenes = [random_scene(rng) for _ in range(40)]
    images = list(pictures(scenes, blur=1.5, noise=5.0))
    for image, scene, other in zip(images, scenes, scenes[1:] + scenes[:1], strict=True):
        if {(t.shape, t.colour) for t in scene.things} != {(t.shape, t.colour) for t in other.things}:
            assert not prompt_matches(image, canonical_caption(other)).ok


def test_one_wrong_attribute_is_enough_and_is_named():
    (image,) = pictures([one()], blur=1.5, noise=5.0)
    right = prompt_matches(image, "a red circle on a blue background")
    assert right.ok and not right.reasons and all(right.attributes.values())
    for colour in COLOURS:
        if colour not in ("red", "blue"):
            wrong = prompt_matches(image, f"a {colour} circle on a blue background")
            assert wrong.reasons == (f"the {colour} circle is red",) and not wrong.attributes["colour"]
            wrong = prompt_matches(image, f"a red circle on a {colour} background")
            assert wrong.reasons == ("the background is blue",) and not wrong.attributes["background"]
    for shape in SHAPES[1:]:
        wrong = prompt_matches(image, f"a red {shape} on a blue background")
        assert wrong.reasons == (f"the red {shape} is a circle",) and not wrong.attributes["shape"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [0.12, 0.33])
def test_every_shape_is_told_from_every_other(shape, radius):
    for image in pictures([one(shape, "white", "green", radius=radius)], blur=2.0, noise=5.0):
        (found,) = read_scene(image).objects
        assert (found.shape, found.colour, found.hollow) == (shape, "white", False)
        assert found.radius == pytest.approx(radius, rel=0.12)
        assert (found.x, found.y) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.5, abs=0.02))
        assert found.size == ("small" if radius < 0.2 else "large")


@pytest.mark.parametrize(
    ("place", "x", "y"),
    [("left", 0.25, 0.5), ("right", 0.75, 0.5), ("top", 0.5, 0.25), ("bottom", 0.5, 0.75), ("centre", 0.5, 0.5)],
)
def test_places(place, x, y):
    (image,) = pictures([one(x=x, y=y, radius=0.15)])
    for other in PLACES:
        assert prompt_matches(image, f"a red circle {'in' if other == 'centre' else 'at'} the {other}").ok == (
            other == place
        )


def test_relations_sizes_and_counts():
    two = Scene("white", (Thing("circle", "red", 0.25, 0.5, 0.16), Thing("square", "green", 0.75, 0.5, 0.16)))
    (image,) = pictures([two], blur=1.5)
    assert prompt_matches(image, "a red circle left of a green square on a white background").ok
    assert prompt_matches(image, "a green square to the right of a red circle").ok
    assert prompt_matches(image, "a green square and a red circle on white").ok
    assert not prompt_matches(image, "a red circle right of a green square on a white background").ok
    assert not prompt_matches(image, "a red circle above a green square on a white background").ok
    assert not prompt_matches(image, "a green circle left of a red square on a white background").ok
    assert "2 objects, not 1" in prompt_matches(image, "a red circle on a white background").reasons
    (image,) = pictures([one(radius=0.15)])
    assert prompt_matches(image, "a small red circle").ok and not prompt_matches(image, "a large red circle").ok
    assert "1 objects, not 2" in prompt_matches(image, "a red circle and a green square").reasons


def test_what_is_no_shape_or_no_colour_is_unclear():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (256, 256, 3), np.uint8)
    grey = np.full((256, 256, 3), 128, np.uint8)
    for image in (noise, grey, np.zeros_like(grey)):
        assert not prompt_matches(image, "a red circle on a blue background").ok
    assert read_scene(grey).background == "unclear"
    blob = np.full((256, 256, 3), COLOURS["blue"], np.uint8)
    blob[60:100, 60:200] = COLOURS["red"]
    assert read_scene(blob).objects[0].shape == "unclear"
    blob[60:100, 60:200] = (130, 130, 130)
    assert read_scene(blob).objects[0].colour == "unclear"


def test_outlines_and_filled_shapes_are_told_apart():
    scenes = [one(shape, radius=0.2) for shape in SHAPES]
    for style, other in (("plain", "outline"), ("outline", "plain")):
        for image, shape in zip(pictures(scenes, style=style, blur=1.2), SHAPES, strict=True):
            prompt = f"a red {shape} on a blue background"
            assert prompt_matches(image, prompt, style=style).ok
            assert prompt_matches(image, prompt, style="any").ok
            assert prompt_matches(image, prompt, style=other).ok == (shape == "ring")


def test_blueprints_are_white_on_blue_whatever_the_prompt():
    (drawn,) = pictures([one("star", "red", "green")], style="blueprint", blur=1.2)
    (plain,) = pictures([one("star", "red", "green")], blur=1.2)
    prompt = "a red star on a green background"
    assert prompt_matches(drawn, prompt, style="blueprint").ok and not prompt_matches(drawn, prompt).ok
    assert prompt_matches(plain, prompt).ok and not prompt_matches(plain, prompt, style="blueprint").ok
    assert not prompt_matches(drawn, "a red ring on a green background", style="blueprint").ok


def test_images_may_come_as_pil_bytes_or_floats():
    (image,) = pictures([one()])
    expected = read_scene(image)
    assert read_scene(Image.fromarray(image)) == read_scene(image / 255.0) == expected
    assert read_scene(torch.from_numpy(image)) == expected
    with pytest.raises(SettingError, match="height, width, 3"):
        read_scene(image.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("prompt", "background", "things", "relation"),
    [
        ("a red circle on a blue background", "blue", [("", "red", "circle", "")], ""),
        ("Tiny RED star, white background, 4k", "white", [("small", "red", "star", "")], ""),
        ("on a black background, a big cyan ring in the middle", "black", [("large", "cyan", "ring", "centre")], ""),
        ("a green cross on the left over white", "white", [("", "green", "cross", "left")], ""),
        ("a red ring over a blue ring on red", "red", [("", "red", "ring", ""), ("", "blue", "ring", "")], "above"),
        ("a red ring to the left of a blue star", "", [("", "red", "ring", ""), ("", "blue", "star", "")], "left of"),
        ("a red ring and a blue star", "", [("", "red", "ring", ""), ("", "blue", "star", "")], ""),
    ],
)
def test_prompts_are_read(prompt, background, things, relation):
    wanted = read_prompt(prompt)
    assert (wanted.background, list(wanted.things), wanted.relation) == (background, things, relation)


def test_every_caption_is_read_as_it_was_meant():
    rng = random.Random(0)
    for _ in range(500):
        scene = random_scene(rng)
        wanted = read_prompt(random_caption(scene, rng))
        assert [(t.size, t.colour, t.shape, t.place) for t in scene.things] == list(wanted.things)
        assert wanted.relation == scene.relation and wanted.background in ("", scene.background)


def test_bad_questions_are_refused():
    (image,) = pictures([one()])
    with pytest.raises(SettingError, match="0 coloured shapes"):
        prompt_matches(image, "an astronaut on a horse")
    with pytest.raises(SettingError, match="'wavy'"):
        prompt_matches(image, "a red circle", style="wavy")
    with pytest.raises(SettingError, match="1 images for 2 prompts"):
        prompt_accuracy([image], ["a red circle", "a red circle"])


def test_nearness():
    a = np.zeros((4, 4, 3), np.uint8)
    b = a.copy()
    b[0, 0, 0] = 255
    assert psnr(a, a) == math.inf
    assert psnr(a, b) == pytest.approx(10 * math.log10(48))
    assert psnr(a / 255, b / 255) == pytest.approx(psnr(a, b))
    assert psnr(torch.zeros(2), torch.full((2,), 0.1)) == pytest.approx(20, abs=1e-4)
    assert max_abs_error(a, b) == 255
    assert math.isnan(max_abs_error(np.array([0.0]), np.array([np.nan])))
    assert relative_error([3.0, 4.0], [3.0, 0.0]) == pytest.approx(4 / 3)
    assert relative_error([0.0], [0.0]) == 0 and relative_error([1.0], [0.0]) == math.inf
    with pytest.raises(SettingError, match="one shape"):
        psnr(a, a[:2])
