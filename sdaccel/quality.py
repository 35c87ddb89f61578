"""Quality measures: how near two results are, and whether an image shows what its prompt says.

The second kind works for the demo model's world (plain shapes on a plain background, see `sdaccel.models.demo.scenes`)
by colour and shape analysis alone: no network, numpy and Pillow only.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from sdaccel.errors import SettingError
from sdaccel.models.demo.scenes import COLOURS, PLACES, SHAPES

# ---- nearness ----


def max_abs_error(a: Any, b: Any) -> float:
    """The largest |a - b|; NaN if either holds one. Any two arrays, tensors or images of one shape."""
    a, b = _pair(a, b)
    return float(np.max(np.abs(a - b))) if a.size else 0.0


def relative_error(a: Any, reference: Any) -> float:
    """‖a - reference‖ / ‖reference‖, in the 2-norm over all elements; 0 when both are all zero."""
    a, reference = _pair(a, reference)
    error, norm = float(np.linalg.norm(a - reference)), float(np.linalg.norm(reference))
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def psnr(a: Any, b: Any, *, peak: float | None = None) -> float:
    """Peak signal-to-noise ratio in dB, infinite for equal inputs.

    `peak` is the largest value a sample can take: by default 255 for images and integers, 1 for floats.
    """
    if peak is None:
        peak = 1.0 if np.issubdtype(_array(a).dtype, np.floating) else 255.0
    a, b = _pair(a, b)
    error = float(np.mean(np.square(a - b)))
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy() if value.is_floating_point() else value.detach().cpu().numpy()
    return np.asarray(value)


def _pair(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    a, b = _array(a).astype(np.float64), _array(b).astype(np.float64)
    if a.shape != b.shape:
        raise SettingError(f"Only results of one shape can be compared, not {a.shape} and {b.shape}.")
    return a, b


# ---- what an image shows ----

WORKING_SIDE = 256  # larger images are first reduced to this shorter side
COLOUR_TOLERANCE = 80.0  # RGB distance (0..255 a channel) up to which a colour still has a name
SHAPE_OVERLAP = 0.8  # least intersection over union with a shape's template
SMALL_BELOW = 0.22  # radius, as a fraction of the shorter side, that parts small from large
_DUST = 0.0025  # of the image's area: smaller specks are no object


@dataclass(frozen=True)
class SceneObject:
    """`colour` and `shape` are "unclear" where no name fits. x, y in 0..1; `radius` is a fraction of the shorter side.

    `hollow` says that only an outline is drawn (a ring is a shape of its own, and is not hollow).
    """

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    hollow: bool

    @property
    def size(self) -> str:
        return "small" if self.radius < SMALL_BELOW else "large"

    @property
    def place(self) -> str:
        """Which of `scenes.PLACES` the object is nearest to."""
        return max(PLACES, key=lambda place: _stands(self, place))


@dataclass(frozen=True)
class Scene:
    background: str
    objects: tuple[SceneObject, ...]


def read_scene(image: Any) -> Scene:
    """What an image shows; objects from left to right.

    `image`: a PIL image, or (height, width, 3) as uint8 or as floats in 0..1; sides of 192 and more are reliable.
    """
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    names = list(COLOURS)
    palette = np.array(list(COLOURS.values()), np.float32)
    nearest = np.argmax(pixels @ palette.T - 0.5 * np.square(palette).sum(1), axis=-1)  # the least distance
    rim = max(2, min(height, width) // 32)
    border = np.ones((height, width), bool)
    border[rim:-rim, rim:-rim] = False
    ground = int(np.bincount(nearest[border], minlength=len(names)).argmax())
    is_ground = nearest == ground
    background = _colour_name(np.median(pixels[is_ground], axis=0))
    if is_ground[border].mean() < 0.85:
        background = "unclear"
    labels, count = _components(~is_ground)
    objects = []
    for label in range(1, count + 1):
        mask = labels == label
        if mask.sum() >= _DUST * mask.size:
            objects.append(_read_object(pixels, mask, np.median(pixels[is_ground], axis=0)))
    return Scene(background, tuple(sorted(objects, key=lambda o: o.x)))


def _pixels(image: Any) -> np.ndarray:
    if not isinstance(image, Image.Image):
        array = _array(image)
        if array.ndim != 3 or array.shape[2] != 3:
            raise SettingError(f"An image has the shape (height, width, 3), not {array.shape}.")
        if np.issubdtype(array.dtype, np.floating):
            array = np.rint(np.clip(np.nan_to_num(array), 0, 1) * 255)
        image = Image.fromarray(array.astype(np.uint8))
    image = image.convert("RGB")
    scale = WORKING_SIDE / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BOX)
    return np.asarray(image, np.float32)


def _colour_name(rgb: np.ndarray) -> str:
    distances = sorted((math.dist(rgb, value), name) for name, value in COLOURS.items())
    (first, name), (second, _) = distances[:2]
    return name if first <= COLOUR_TOLERANCE and first <= 0.7 * second else "unclear"


def _components(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Four-connected components, by joining the runs of neighbouring rows: labels 1..count, 0 outside."""
    parents = [0]

    def root(label: int) -> int:
        while parents[label] != label:
            parents[label] = parents[parents[label]]
            label = parents[label]
        return label

    runs: list[tuple[int, int, int, int]] = []
    above: list[tuple[int, int, int, int]] = []
    steps = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    for row in range(mask.shape[0]):
        here = []
        edges = (np.flatnonzero(steps[row] == sign).tolist() for sign in (1, -1))
        for start, end in zip(*edges, strict=True):
            touching = [root(label) for _, s, e, label in above if s < end and start < e]
            label = min(touching, default=len(parents))
            if not touching:
                parents.append(label)
            for other in touching:
                parents[other] = label
            here.append((row, start, end, label))
        runs += here
        above = here
    numbers: dict[int, int] = {}
    labels = np.zeros(mask.shape, np.int32)
    for row, start, end, label in runs:
        labels[row, start:end] = numbers.setdefault(root(label), len(numbers) + 1)
    return labels, len(numbers)


def _read_object(pixels: np.ndarray, mask: np.ndarray, ground: np.ndarray) -> SceneObject:
    height, width = mask.shape
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    top, left = int(rows[0]), int(columns[0])
    crop = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    outside, _ = _components(~np.pad(crop, 1))
    whole = (outside != outside[0, 0])[1:-1, 1:-1]
    fill = crop.sum() / whole.sum()
    scaled, (tall, wide) = _scaled(whole), crop.shape
    template, overlap = max(((t, _overlap(scaled, t.mask)) for t in _templates()), key=lambda found: found[1])
    shape = template.shape
    if not 0.78 < (wide / tall) / (template.wide / template.tall) < 1.28 or overlap < SHAPE_OVERLAP:
        shape = "unclear"
    hollow = fill < 0.88
    if shape == "circle" and 0.53 < fill < 0.88:
        shape, hollow = "ring", False
    radius = (wide / template.wide + tall / template.tall) / 2
    inside = pixels[mask]
    contrast = np.linalg.norm(inside - ground, axis=-1)
    return SceneObject(
        colour=_colour_name(np.median(inside[contrast >= np.median(contrast)], axis=0)),
        shape=shape,
        x=float(left + wide / 2) / width,
        y=float(top + tall / 2 - template.middle * radius) / height,
        radius=float(radius / min(height, width)),
        hollow=bool(hollow),
    )


@dataclass(frozen=True)
class _Template:
    """A filled shape of radius 1, scaled to its bounding box: `wide` × `tall`, whose middle lies at (0, `middle`)."""

    shape: str
    mask: np.ndarray
    wide: float
    tall: float
    middle: float


@functools.cache
def _templates() -> tuple[_Template, ...]:
    """Every shape, sharp and with its corners rounded, as decoders round the smaller ones."""

    def points(count: int, *radii: float) -> list[tuple[float, float]]:
        angles = [(2 * math.pi * i / count, radii[i % len(radii)]) for i in range(count)]
        return [(r * math.sin(a), -r * math.cos(a)) for a, r in angles]

    arm, end, half = 0.33, 0.95, 0.86
    corner = [(arm, end), (arm, arm), (end, arm)]
    quarters = [corner, [(x, -y) for x, y in corner[::-1]]]
    quarters += [[(-x, -y) for x, y in corner], [(-x, y) for x, y in corner[::-1]]]
    outlines = {
        "circle": points(360, 1.0),
        "square": [(half, half), (half, -half), (-half, -half), (-half, half)],
        "triangle": points(3, 1.0),
        "star": points(10, 1.0, 0.45),
        "cross": [point for quarter in quarters for point in quarter],
    }
    unit, middle = 100, 150
    templates = []
    for shape, outline in outlines.items():
        sharp = Image.new("L", (2 * middle + 1, 2 * middle + 1))
        ImageDraw.Draw(sharp).polygon([(middle + unit * x, middle + unit * y) for x, y in outline], fill=255)
        for blur in (0.0, 0.08, 0.14):
            mask = np.asarray(sharp.filter(ImageFilter.GaussianBlur(blur * unit))) > 127
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
            templates.append(
                _Template(
                    shape,
                    _scaled(mask[top:bottom, left:right]),
                    (right - left) / unit,
                    (bottom - top) / unit,
                    ((top + bottom) / 2 - middle) / unit,
                )
            )
    return tuple(templates)


def _scaled(mask: np.ndarray) -> np.ndarray:
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize((64, 64), Image.Resampling.BILINEAR)
    return np.asarray(image) > 127


def _overlap(mask: np.ndarray, template: np.ndarray) -> float:
    return float((mask & template).sum() / max(1, (mask | template).sum()))


# ---- whether it shows what was asked for ----


@dataclass(frozen=True)
class Wanted:
    """What a prompt asks for. Empty words ask for nothing; each thing is (size, colour, shape, place)."""

    background: str
    things: tuple[tuple[str, str, str, str], ...]
    relation: str


@dataclass(frozen=True)
class Match:
    """`attributes` holds only what the prompt asks for: count, shape, colour, background, size, place, relation."""

    ok: bool
    reasons: tuple[str, ...]
    attributes: dict[str, bool]


@dataclass(frozen=True)
class Accuracy:
    """Shares in 0..1: `overall` of prompts with everything right, `attributes` of the prompts that ask for each."""

    overall: float
    total: int
    attributes: dict[str, float]
    failures: tuple[tuple[str, tuple[str, ...]], ...] = field(repr=False, default=())


STYLES = ("plain", "outline", "blueprint", "any")
_SIZES = {"small": "small", "little": "small", "tiny": "small", "large": "large", "big": "large", "huge": "large"}
_PLACES = {"left": "left", "right": "right", "top": "top", "bottom": "bottom"} | dict.fromkeys(
    ("centre", "center", "middle"), "centre"
)
_COLOUR, _SHAPE = "|".join(COLOURS), "|".join(SHAPES)
_THING = re.compile(rf"\b(?:({'|'.join(_SIZES)})\s+)?({_COLOUR})\s+({_SHAPE})\b")
_GROUND = re.compile(
    rf"\b(?:(?:on|over|against)\s+(?:(?:a|an|the|one)\s+)?)?({_COLOUR})\s+(?:background|backdrop)\b"
    rf"|\b(?:on|over|against)\s+(?:(?:a|an|the|one)\s+)?({_COLOUR})\b(?!\s+(?:{_SHAPE})\b)"
)
_PLACE = re.compile(rf"\b({'|'.join(_PLACES)})\b(?!\s+of\b)")
_RELATION = re.compile(r"\b(left of|right of|on top of|above|over|below|under|beneath)\b")
_RELATIONS = {"on top of": "above", "over": "above", "under": "below", "beneath": "below"}


def read_prompt(prompt: str) -> Wanted:
    """What a prompt in the demo model's words asks for; a SettingError if it names no coloured shape."""
    text = prompt.lower()
    ground = _GROUND.search(text)
    background = (ground[1] or ground[2]) if ground else ""
    if ground:
        text = f"{text[: ground.start()]} . {text[ground.end() :]}"
    found = list(_THING.finditer(text))
    if not 1 <= len(found) <= 2:
        raise SettingError(
            f"The prompt {prompt!r} names {len(found)} coloured shapes; one or two can be checked, as in "
            f"'a red circle on a blue background'. Colours: {', '.join(COLOURS)}. Shapes: {', '.join(SHAPES)}."
        )
    if len(found) == 1:
        parts, relation = [text], None
    else:
        parts = [text[found[0].end() : found[1].start()], text[found[1].end() :]]
        relation = _RELATION.search(parts[0])
    things = []
    for thing, part in zip(found, parts, strict=True):
        place = None if relation else _PLACE.search(part)
        things.append((_SIZES.get(thing[1], ""), thing[2], thing[3], _PLACES[place[1]] if place else ""))
    return Wanted(background, tuple(things), _RELATIONS.get(relation[1], relation[1]) if relation else "")


def prompt_matches(image: Any, prompt: str, *, style: str = "plain") -> Match:
    """Whether an image shows everything that its prompt names, and nothing more.

    `style`: "plain" wants filled shapes, "outline" wants outlines, "any" takes both. "blueprint", the demo LoRA's,
    wants filled white shapes on blue in place of the prompt's colours.
    """
    if style not in STYLES:
        raise SettingError(f"style must be one of {', '.join(STYLES)}, not {style!r}.")
    wanted, scene = read_prompt(prompt), read_scene(image)
    if style == "blueprint":
        things = tuple((size, "white", shape, place) for size, _, shape, place in wanted.things)
        wanted, style = Wanted("blue", things, wanted.relation), "plain"
    padded: list[SceneObject | None] = [*scene.objects, *[None] * len(wanted.things)]
    best: tuple[dict[str, bool], list[str]] | None = None
    for objects in itertools.permutations(padded[:8], len(wanted.things)):
        attributes, reasons = _compare(wanted, scene, objects, style)
        if best is None or len(reasons) < len(best[1]):
            best = attributes, reasons
    assert best is not None  # there is always one way to assign
    return Match(not best[1], tuple(best[1]), best[0])


def prompt_accuracy(images: Iterable[Any], prompts: Sequence[str], *, style: str = "plain") -> Accuracy:
    """The share of images that show what their prompts say, overall and for each attribute asked for."""
    images = list(images)
    if len(images) != len(prompts) or not images:
        raise SettingError(f"One image a prompt is needed, not {len(images)} images for {len(prompts)} prompts.")
    matches = [prompt_matches(image, prompt, style=style) for image, prompt in zip(images, prompts, strict=True)]
    answers: dict[str, list[bool]] = {}
    for match in matches:
        for name, ok in match.attributes.items():
            answers.setdefault(name, []).append(ok)
    return Accuracy(
        overall=sum(match.ok for match in matches) / len(matches),
        total=len(matches),
        attributes={name: sum(values) / len(values) for name, values in answers.items()},
        failures=tuple((p, m.reasons) for p, m in zip(prompts, matches, strict=True) if not m.ok),
    )


def _compare(
    wanted: Wanted, scene: Scene, objects: tuple[SceneObject | None, ...], style: str
) -> tuple[dict[str, bool], list[str]]:
    attributes: dict[str, bool] = {}
    reasons: list[str] = []

    def check(attribute: str, ok: bool, reason: str) -> None:
        attributes[attribute] = attributes.get(attribute, True) and ok
        if not ok:
            reasons.append(reason)

    count = len(scene.objects)
    check("count", count == len(wanted.things), f"{count} objects, not {len(wanted.things)}")
    if wanted.background:
        check("background", scene.background == wanted.background, f"the background is {scene.background}")
    for (size, colour, shape, place), thing in zip(wanted.things, objects, strict=True):
        name = f"the {colour} {shape}"
        check(
            "colour", thing is not None and thing.colour == colour, f"{name} is {thing.colour if thing else 'missing'}"
        )
        check("shape", thing is not None and thing.shape == shape, f"{name} is a {thing.shape if thing else 'nothing'}")
        if size:
            check("size", thing is not None and thing.size == size, f"{name} is not {size}")
        if place:
            near = thing is not None and _stands(thing, place) > 0
            check("place", near, f"{name} is not at the {place}")
        if style != "any" and shape != "ring":
            hollow = thing is not None and thing.hollow
            check("style", thing is not None and hollow == (style == "outline"), f"{name} is not in the {style} style")
    if wanted.relation:
        first, second = objects
        stands = first is not None and second is not None and _relates(first, second, wanted.relation)
        check("relation", stands, f"the first is not {wanted.relation} the second")
    return attributes, reasons


def _stands(thing: SceneObject, place: str) -> float:
    """Positive where the object is at a place of the image, and the more so the plainer it is."""
    dx, dy = thing.x - 0.5, thing.y - 0.5
    if place == "centre":
        return 0.12 - max(abs(dx), abs(dy))
    towards, across = {"left": (-dx, dy), "right": (dx, dy), "top": (-dy, dx), "bottom": (dy, dx)}[place]
    return towards - max(0.07, abs(across))


def _relates(first: SceneObject, second: SceneObject, relation: str) -> bool:
    dx, dy = second.x - first.x, second.y - first.y
    towards = {"left of": dx, "right of": -dx, "above": dy, "below": -dy}[relation]
    return towards > 0.1
