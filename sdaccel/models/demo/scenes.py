"""The demo model's world: what a scene is, how it is named, and which scenes training never sees.

A scene is one or two plain shapes on a plain background. Everything is relative, so that the same scene can be drawn
at any size: x and y run from 0 to 1 over the width and the height (y points down), a radius is a fraction of the
shorter side. Pure Python, so that the prompt detector can share these words without importing torch.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 25),
    "yellow": (250, 220, 20),
    "green": (20, 160, 50),
    "cyan": (20, 210, 225),
    "blue": (25, 60, 220),
    "purple": (170, 40, 200),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "ring")
SIZES: dict[str, tuple[float, float]] = {"small": (0.125, 0.165), "large": (0.28, 0.34), "": (0.15, 0.32)}
PLACES: tuple[str, ...] = ("left", "right", "top", "bottom", "centre")
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")

SYNONYMS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "little", "tiny"),
    "large": ("large", "large", "big"),
    "left": ("on the left", "at the left", "on the left side"),
    "right": ("on the right", "at the right", "on the right side"),
    "top": ("at the top", "on top"),
    "bottom": ("at the bottom", "on the bottom"),
    "centre": ("in the centre", "in the center", "in the middle"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
OPENINGS = ("a drawing of ", "a picture of ", "an image of ", "a photo of ")
CHATTER = (
    "high quality",
    "best quality",
    "simple",
    "minimal",
    "flat design",
    "highly detailed",
    "4k",
    "hd",
    "sharp",
    "art",
)

_GAP = 0.035  # between an object and the border, or another object


@dataclass(frozen=True)
class Thing:
    """One shape. `size` and `place` are the words a caption uses for it, empty when it says nothing."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    size: str = ""
    place: str = ""


@dataclass(frozen=True)
class Scene:
    """`relation`: how the first thing stands to the second; empty when there is one, or the caption just says "and"."""

    background: str
    things: tuple[Thing, ...]
    relation: str = ""


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """Whether training never shows this shape in this colour on this background: one combination in ten."""
    colours = list(COLOURS)
    return (3 * SHAPES.index(shape) + 7 * colours.index(colour) + 4 * colours.index(background)) % 10 == 1


def combinations(held_out: bool) -> list[tuple[str, str, str]]:
    """Every (shape, colour, background) with two different colours, from one side of the split."""
    every = itertools.product(SHAPES, COLOURS, COLOURS)
    return [(s, c, b) for s, c, b in every if c != b and is_held_out(s, c, b) == held_out]


_COMBINATIONS = {side: combinations(side) for side in (True, False)}
_ON = {side: {b: [(s, c) for s, c, other in v if other == b] for b in COLOURS} for side, v in _COMBINATIONS.items()}


def random_scene(rng: random.Random, *, aspect: float = 1.0, held_out: bool = False, pairs: float = 0.4) -> Scene:
    """A scene whose combinations are all held out, or all trained on.

    `aspect` is width / height of the canvas it will be drawn on: distances to the border depend on it.
    `pairs` is the share of scenes with two things.
    """
    shape, colour, background = rng.choice(_COMBINATIONS[held_out])
    if rng.random() < pairs:
        others = [(s, c) for s, c in _ON[held_out][background] if c != colour]
        if others:
            return _pair(rng, background, (shape, colour), rng.choice(others), aspect)
    size = rng.choice(("small", "large", "", ""))
    place = rng.choice(("", "", "", *PLACES))
    radius = rng.uniform(*SIZES[size])
    x, y = _position(rng, place, radius, aspect)
    return Scene(background, (Thing(shape, colour, x, y, radius, size, place),))


def _span(radius: float, aspect: float) -> tuple[float, float]:
    """The smallest x and y at which a thing is clear of the border."""
    reach = radius + _GAP
    return reach / max(aspect, 1.0), reach / max(1.0 / aspect, 1.0)


def _position(rng: random.Random, place: str, radius: float, aspect: float) -> tuple[float, float]:
    near_x, near_y = _span(radius, aspect)

    def middle() -> float:
        return rng.uniform(0.47, 0.53)

    def side(near: float) -> float:
        return rng.uniform(near, max(near, 0.36))

    if place == "left":
        return side(near_x), middle()
    if place == "right":
        return 1 - side(near_x), middle()
    if place == "top":
        return middle(), side(near_y)
    if place == "bottom":
        return middle(), 1 - side(near_y)
    if place == "centre":
        return middle(), middle()
    return rng.uniform(near_x, 1 - near_x), rng.uniform(near_y, 1 - near_y)


def _pair(rng: random.Random, background: str, first: tuple[str, str], second: tuple[str, str], aspect: float) -> Scene:
    relation = rng.choice(RELATIONS)
    radii = rng.uniform(0.13, 0.2), rng.uniform(0.13, 0.2)
    spans = [_span(r, aspect) for r in radii]
    centres = []
    for low, (near_x, near_y) in zip((True, False), spans, strict=True):
        if relation in ("left of", "right of"):
            x = rng.uniform(near_x, max(near_x, 0.27))
            centres.append((x if low else 1 - x, rng.uniform(max(near_y, 0.38), 0.62)))
        else:
            y = rng.uniform(near_y, max(near_y, 0.27))
            centres.append((rng.uniform(max(near_x, 0.38), 0.62), y if low else 1 - y))
    if relation in ("right of", "below"):
        centres.reverse()
    things = tuple(
        Thing(shape, colour, x, y, radius)
        for (shape, colour), (x, y), radius in zip((first, second), centres, radii, strict=True)
    )
    return Scene(background, things, relation if rng.random() < 0.75 else "")


def canonical_caption(scene: Scene) -> str:
    """The plainest prompt: "a small red circle on the left on a blue background"."""
    return _caption(scene, random.Random(0), plain=True)


def random_caption(scene: Scene, rng: random.Random) -> str:
    """One of many phrasings; every word that is there is true of the scene, though the background may go unnamed."""
    return _caption(scene, rng, plain=False)


def _caption(scene: Scene, rng: random.Random, *, plain: bool) -> str:
    def word(key: str) -> str:
        return SYNONYMS[key][0] if plain else rng.choice(SYNONYMS[key])

    def often(share: float) -> bool:
        return plain or rng.random() < share

    article = "a " if often(0.8) else rng.choice(("", "the ", "one "))
    names = [
        f"{article}{word(thing.size) + ' ' if thing.size else ''}{thing.colour} {thing.shape}" for thing in scene.things
    ]
    if len(names) == 2:
        what = f"{names[0]} {word(scene.relation) if scene.relation else 'and'} {names[1]}"
    else:
        place = scene.things[0].place
        what = f"{names[0]} {word(place)}" if place else names[0]
    if often(0.92):
        ground = f"{'the ' if article == 'the ' else 'a '}{scene.background} background"
        ways: tuple[str, ...] = (f"{what} on {ground}",)
        if not plain:
            ways = (
                *ways * 5,
                f"{what}, {scene.background} background",
                f"{what} on {scene.background}",
                f"on {ground}, {what}",
                f"{what} over {ground}" if len(names) == 1 and not scene.things[0].place else f"{what} on {ground}",
                f"{scene.background} background with {what}",
            )
        what = rng.choice(ways)
    if not often(0.85):
        what = rng.choice(OPENINGS) + what
    if not often(0.93):
        what = f"{what}, {', '.join(rng.sample(CHATTER, rng.randint(1, 2)))}"
    return what


def empty_caption(rng: random.Random) -> str:
    """A prompt that names nothing: mostly empty, else words of no meaning here, as negative prompts often are."""
    if rng.random() < 0.75:
        return ""
    if rng.random() < 0.5:
        return ", ".join(rng.sample(CHATTER, rng.randint(1, 3)))
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 6)))


def words() -> list[str]:
    """All words of all captions, each of which the tokenizer makes one token."""
    phrases = [*COLOURS, *SHAPES, *PLACES, *OPENINGS, *CHATTER, *(p for v in SYNONYMS.values() for p in v)]
    phrases += ["a an the one on with and of to background , ."]
    return sorted({word for phrase in phrases for word in phrase.split()})
