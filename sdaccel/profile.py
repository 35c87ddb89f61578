"""Optimization profiles: the ranges of shapes an engine is built for.

People speak of images (pixels, images at once, prompt tokens): `ImageProfile`. An engine speaks of the axes of
one component's inputs: `OptimizationProfile`. `ImageProfile.for_component` turns the first into the second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sdaccel.errors import ProfileError

SIDE_STEP, LEAST, MOST = 8, 64, 8192
"""Pixels."""
PROMPT_CHUNK = 77


@dataclass(frozen=True, order=True)
class Range:
    """``min <= opt <= max``; the engine runs anything between and is fastest at ``opt``."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise ProfileError(f"{self.min}-{self.opt}-{self.max} is not a range: it must be 1 <= min <= opt <= max.")

    def __contains__(self, number: int) -> bool:
        return self.min <= number <= self.max

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}-{self.opt}-{self.max}"

    @classmethod
    def of(cls, *numbers: int, near: int | None = None) -> Range:
        """A range of one number, of (min, max) or of (min, opt, max).

        Without an opt it is ``near`` where the range holds it, else the end closest to it (the max without ``near``).
        """
        if len(numbers) == 3:
            return cls(*numbers)
        low, high = numbers[0], numbers[-1]
        opt = high if near is None else min(max(near, low), high)
        return cls(low, opt, high)


@dataclass(frozen=True)
class OptimizationProfile:
    """Axis → `Range`, for one component: ``batch``, ``height``, ``width`` (as its input counts them), ``tokens``."""

    axes: tuple[tuple[str, Range], ...]

    @classmethod
    def make(cls, **axes: Range) -> OptimizationProfile:
        return cls(tuple(sorted(axes.items())))

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[int]]) -> OptimizationProfile:
        return cls.make(**{axis: Range(*numbers) for axis, numbers in data.items()})

    def to_json(self) -> dict[str, list[int]]:
        return {axis: [r.min, r.opt, r.max] for axis, r in self.axes}

    def __getitem__(self, axis: str) -> Range:
        return dict(self.axes)[axis]

    def opt(self) -> dict[str, int]:
        return {axis: r.opt for axis, r in self.axes}

    def misfit(self, shape: Mapping[str, int]) -> str | None:
        """Why this profile does not contain ``shape``; None if it does."""
        for axis, allowed in self.axes:
            if shape[axis] not in allowed:
                return f"{axis} {shape[axis]} is outside {allowed.min}-{allowed.max}"
        return None

    def distance(self, shape: Mapping[str, int]) -> float:
        """How far ``shape`` lies from opt: the sum of |log2(size / opt)| over the axes."""
        return sum(abs(math.log2(shape[axis] / allowed.opt)) for axis, allowed in self.axes)

    def __str__(self) -> str:
        return " ".join(f"{axis}={r}" for axis, r in self.axes)


def choose(profiles: Sequence[OptimizationProfile], shape: Mapping[str, int]) -> int:
    """The index of the profile to run ``shape`` with.

    Of the profiles that contain the shape it is the one whose opt is nearest (`OptimizationProfile.distance`); of
    equally near ones the first in the engine's order. Raises ProfileError with each profile's reason if none does.
    """
    reasons = [profile.misfit(shape) for profile in profiles]
    fitting = [index for index, reason in enumerate(reasons) if reason is None]
    if not fitting:
        why = "; ".join(sorted({reason for reason in reasons if reason})) or "it has no profile"
        raise ProfileError(f"no profile of the engine contains this shape: {why}.")
    return min(fitting, key=lambda index: profiles[index].distance(shape))


@dataclass(frozen=True)
class ImageProfile:
    """What a user asks for: width and height in pixels, images at once, prompt tokens (77 a chunk)."""

    width: Range
    height: Range
    batch: Range = Range(1, 1, 4)
    tokens: Range = Range(77, 77, 231)

    def __post_init__(self) -> None:
        for name, side in (("width", self.width), ("height", self.height)):
            for number in (side.min, side.opt, side.max):
                if number % SIDE_STEP or not LEAST <= number <= MOST:
                    raise ProfileError(
                        f"{name} {number} cannot be built: sides are multiples of {SIDE_STEP} from {LEAST} to {MOST}.",
                        hint=f"Try {min(max(round(number / SIDE_STEP) * SIDE_STEP, LEAST), MOST)}.",
                    )

    @classmethod
    def native(cls, side: int) -> ImageProfile:
        """The profile used when none is given: half to twice the model's native side, opt at native.

        Each is made the next smaller side that can be built: models are trained at 16 and at 600 pixels too.
        """
        low, opt, high = (min(max(size - size % SIDE_STEP, LEAST), MOST) for size in (side // 2, side, 2 * side))
        return cls(Range(low, opt, high), Range(low, opt, high))

    def for_component(self, component: str, factor: int = 8) -> OptimizationProfile:
        """The profile of ``component``; ``factor`` is the VAE's scale (pixels a latent).

        The UNet's batch counts guidance doubling and always admits 1 (guidance off, or one call a half). A ControlNet's
        profile is the UNet's, with the sides of the image that it takes in pixels.
        """
        if component == "vae_encoder":
            return OptimizationProfile.make(batch=self.batch, height=self.height, width=self.width)
        if component.startswith("text_encoder"):
            prompts = Range(1, max(1, self.batch.opt), max(8, 2 * self.batch.max))
            return OptimizationProfile.make(batch=prompts, tokens=Range(1, PROMPT_CHUNK, PROMPT_CHUNK))
        height, width = (Range(s.min // factor, s.opt // factor, s.max // factor) for s in (self.height, self.width))
        if component == "vae_decoder":
            return OptimizationProfile.make(batch=self.batch, height=height, width=width)
        batch = Range(1, 2 * self.batch.opt, 2 * self.batch.max)
        image = {"image_height": self.height, "image_width": self.width} if component.startswith("controlnet") else {}
        return OptimizationProfile.make(batch=batch, height=height, width=width, tokens=self.tokens, **image)

    def to_json(self) -> dict[str, list[int]]:
        sides = {"width": self.width, "height": self.height, "batch": self.batch, "tokens": self.tokens}
        return {name: [r.min, r.opt, r.max] for name, r in sides.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[int]]) -> ImageProfile:
        return cls(**{name: Range(*numbers) for name, numbers in data.items()})


_NUMBERS = re.compile(r"\d{1,5}(-\d{1,5}){0,2}")


def parse_range(text: str, *, near: int | None = None, what: str = "range") -> Range:
    """``4``, ``1-4`` or ``1-2-4`` (min-opt-max). Raises ProfileError."""
    if not _NUMBERS.fullmatch(text.strip()):
        raise ProfileError(f"{what} {text!r} cannot be read.", hint="Write 4, 1-4 or 1-2-4 (min-opt-max).")
    return Range.of(*(int(number) for number in text.strip().split("-")), near=near)


def parse_resolution(text: str, *, native: int | None = None) -> tuple[Range, Range]:
    """(width, height) from ``1024``, ``832x1216`` (width x height), ``512-1024`` or ``512-1024x768-1216``."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2:
        raise ProfileError(f"resolution {text!r} cannot be read.", hint="Write 1024, 832x1216 or 512-1024.")
    width, *rest = (parse_range(side, near=native, what="resolution") for side in sides)
    return width, rest[0] if rest else width


def parse_profiles(
    resolutions: Iterable[str], batches: Iterable[str] = (), tokens: Iterable[str] = (), *, native: int
) -> tuple[ImageProfile, ...]:
    """The image profiles of ``--res``, ``--batch`` and ``--tokens``: one for every combination, in the order given.

    ``native`` is the model's native side in pixels; it stands in when no resolution is given. Raises ProfileError.
    """
    default = ImageProfile.native(native)
    near = default.width.opt
    sizes = [parse_resolution(text, native=near) for text in resolutions] or [(default.width, default.height)]
    batch_ranges = [parse_range(text, near=1, what="batch") for text in batches] or [default.batch]
    token_ranges = [_tokens(text) for text in tokens] or [default.tokens]
    return tuple(
        dict.fromkeys(
            ImageProfile(width, height, batch, count)
            for width, height in sizes
            for batch in batch_ranges
            for count in token_ranges
        )
    )


def _tokens(text: str) -> Range:
    tokens = parse_range(text, near=PROMPT_CHUNK, what="tokens")
    if tokens.max > 4096:
        raise ProfileError(f"tokens {text} cannot be built: the most is 4096.", hint="Try --tokens 77-231.")
    return tokens
