"""Profiles: parsing, the choice rule, and what each component gets of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdaccel.errors import ProfileError
from sdaccel.profile import (
    ImageProfile,
    OptimizationProfile,
    Range,
    choose,
    parse_profiles,
    parse_range,
    parse_resolution,
)


def square(low: int, opt: int, high: int) -> OptimizationProfile:
    return OptimizationProfile.make(batch=Range(1, 2, 8), height=Range(low, opt, high), width=Range(low, opt, high))


def shape(height: int, width: int, batch: int = 2) -> dict[str, int]:
    return {"batch": batch, "height": height, "width": width}


# ---- the choice rule


def test_every_profile_of_an_engine_is_tried():
    profiles = [square(32, 32, 32), square(64, 64, 64), square(96, 128, 128)]
    assert [choose(profiles, shape(side, side)) for side in (32, 64, 96, 128)] == [0, 1, 2, 2]


def test_of_several_that_contain_the_shape_the_nearest_opt_wins():
    profiles = [square(16, 128, 128), square(16, 32, 128), square(16, 64, 128)]
    assert choose(profiles, shape(32, 32)) == 1
    assert choose(profiles, shape(60, 60)) == 2
    assert choose(profiles, shape(128, 128)) == 0


def test_of_equally_near_ones_the_first_wins():
    one, other = square(16, 32, 128), square(16, 32, 64)
    assert choose([one, other], shape(32, 32)) == 0
    assert choose([other, one], shape(32, 32)) == 0
    # 64 lies as far above 32 as below 128
    assert choose([square(16, 32, 128), square(16, 128, 128)], shape(64, 64)) == 0


def test_a_shape_outside_all_profiles_is_refused_with_the_reasons():
    with pytest.raises(ProfileError, match="height 40 is outside 32-32"):
        choose([square(32, 32, 32)], shape(40, 32))
    with pytest.raises(ProfileError, match="it has no profile"):
        choose([], shape(8, 8))


sizes = st.integers(8, 64)


@given(st.lists(st.tuples(sizes, sizes, sizes).map(sorted), min_size=1, max_size=5), sizes, sizes)
def test_the_choice_contains_the_shape_and_none_is_nearer(ranges, height, width):
    profiles = [square(*numbers) for numbers in ranges]
    wanted = shape(height, width)
    fitting = [p for p in profiles if p.misfit(wanted) is None]
    if not fitting:
        with pytest.raises(ProfileError):
            choose(profiles, wanted)
        return
    chosen = profiles[choose(profiles, wanted)]
    assert chosen in fitting
    assert chosen.distance(wanted) == min(p.distance(wanted) for p in fitting)


# ---- what a component gets


def test_batch_4_is_4_for_the_vae_and_1_to_8_for_the_unet():
    (image,) = parse_profiles(["512"], ["4"], ["77"], native=512)
    assert image.batch == Range(4, 4, 4)
    assert image.for_component("unet")["batch"] == Range(1, 8, 8)
    assert image.for_component("vae_decoder")["batch"] == Range(4, 4, 4)


@pytest.mark.parametrize("batch", ["1", "2", "4", "1-4", "3-8"])
def test_a_unet_always_admits_batch_1_for_guidance_0(batch):
    (image,) = parse_profiles(["512"], [batch], [], native=512)
    unet = image.for_component("unet")["batch"]
    assert (unet.min, unet.opt, unet.max) == (1, 2 * image.batch.opt, 2 * image.batch.max)
    assert 1 in image.for_component("text_encoder")["batch"]


def test_sides_are_latents_for_the_unet_and_pixels_for_the_encoder():
    (image,) = parse_profiles(["832x1216"], [], [], native=1024)
    assert image.for_component("unet").opt() == {"batch": 2, "height": 152, "width": 104, "tokens": 77}
    assert image.for_component("vae_decoder")["width"] == Range(104, 104, 104)
    assert image.for_component("vae_encoder")["width"] == Range(832, 832, 832)
    assert image.for_component("text_encoder")["tokens"] == Range(1, 77, 77)


def test_without_a_profile_it_is_half_to_twice_the_native_side():
    (image,) = parse_profiles([], native=512)
    assert image == ImageProfile(Range(256, 512, 1024), Range(256, 512, 1024), Range(1, 1, 4), Range(77, 77, 231))


@pytest.mark.parametrize(
    ("native", "sides"), [(16, (64, 64, 64)), (66, (64, 64, 128)), (600, (296, 600, 1200)), (8192, (4096, 8192, 8192))]
)
def test_any_native_side_has_a_profile(native, sides):
    (image,) = parse_profiles([], native=native)
    assert image.width == image.height == Range(*sides)
    (image,) = parse_profiles(["64-128"], native=native)
    assert (image.width.min, image.width.max) == (64, 128)


# ---- parsing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", (Range(1024, 1024, 1024), Range(1024, 1024, 1024))),
        ("832x1216", (Range(832, 832, 832), Range(1216, 1216, 1216))),
        ("832×1216", (Range(832, 832, 832), Range(1216, 1216, 1216))),
        ("512-1024", (Range(512, 768, 1024), Range(512, 768, 1024))),
        ("512-640-1024x768", (Range(512, 640, 1024), Range(768, 768, 768))),
    ],
)
def test_resolutions(text, expected):
    assert parse_resolution(text, native=768) == expected


@pytest.mark.parametrize("text", ["", "x", "512x512x512", "512-", "-512", "a", "512 x", "1e3", "512-1-2-3", "123456"])
def test_what_is_no_resolution(text):
    with pytest.raises(ProfileError):
        parse_resolution(text)


@pytest.mark.parametrize("text", ["0", "4-1", "1-5-4"])
def test_what_is_no_range(text):
    with pytest.raises(ProfileError, match="min <= opt <= max"):
        parse_range(text)


@pytest.mark.parametrize(("res", "hint"), [("427x640", "Try 424"), ("20", "Try 64"), ("9000", "Try 8192")])
def test_sides_that_cannot_be_built_come_with_one_that_can(res, hint):
    with pytest.raises(ProfileError, match=hint):
        parse_profiles([res], native=512)


def test_each_combination_is_a_profile_once():
    profiles = parse_profiles(["512", "768", "512"], ["1", "2"], ["77"], native=512)
    assert [(p.width.opt, p.batch.opt) for p in profiles] == [(512, 1), (512, 2), (768, 1), (768, 2)]


def test_too_many_tokens():
    with pytest.raises(ProfileError, match="4096"):
        parse_profiles([], [], ["77-5000"], native=512)


@given(st.tuples(*[st.integers(1, 64)] * 3).map(sorted))
def test_profiles_survive_json(numbers):
    profile = square(*numbers)
    assert OptimizationProfile.from_json(profile.to_json()) == profile
    sides = Range(*(8 * max(8, n) for n in numbers))
    image = ImageProfile(sides, sides)
    assert ImageProfile.from_json(image.to_json()) == image
