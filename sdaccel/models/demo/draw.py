"""Draws scenes with signed distance functions: smooth edges, any size, any device, many scenes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdaccel.models.demo.scenes import COLOURS, SHAPES, Scene

STROKE = 0.2  # width of the outline style's stroke, in radii


def draw(
    scenes: Sequence[Scene],
    height: int,
    width: int,
    *,
    style: str = "plain",
    device: torch.device | str = "cpu",
) -> Tensor:
    """Images (N, 3, height, width), float32 in [-1, 1].

    `style` is "plain" (filled shapes), "outline" (only a stroke along the inside of each shape's edge; rings stay) or
    "blueprint" (white shapes on blue, whatever the scene's colours).
    Coordinates of a shape are in its radii with y pointing down: every shape fits the circle of radius 1.
    """
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=device) / 127.5 - 1
    colours = list(COLOURS)
    shorter = min(height, width)
    xs = (torch.arange(width, device=device) + 0.5) / shorter
    ys = (torch.arange(height, device=device) + 0.5) / shorter
    if style == "blueprint":
        scenes = [blueprint(scene) for scene in scenes]
    background = torch.tensor([colours.index(scene.background) for scene in scenes], device=device)
    image = palette[background][:, :, None, None].expand(-1, -1, height, width).clone()
    for name in SHAPES:
        for layer in range(2):
            rows = [i for i, s in enumerate(scenes) if len(s.things) > layer and s.things[layer].shape == name]
            if not rows:
                continue
            things = [scenes[i].things[layer] for i in rows]
            x, y, radius = (
                torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
                for values in zip(
                    *((t.x * width / shorter, t.y * height / shorter, t.radius) for t in things), strict=True
                )
            )
            distance = _DISTANCES[name]((xs[None, None, :] - x) / radius, (ys[None, :, None] - y) / radius)
            if style == "outline" and name != "ring":
                distance = torch.maximum(distance, -(distance + STROKE))
            cover = (0.5 - distance * radius * shorter).clamp(0, 1)[:, None]
            colour = palette[[colours.index(t.colour) for t in things]][:, :, None, None]
            image[rows] = torch.lerp(image[rows], colour.expand(-1, -1, height, width), cover)
    return image


def blueprint(scene: Scene) -> Scene:
    return replace(scene, background="blue", things=tuple(replace(thing, colour="white") for thing in scene.things))


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.78).abs() - 0.22


def _box(x: Tensor, y: Tensor, half_width: float, half_height: float) -> Tensor:
    dx, dy = x.abs() - half_width, y.abs() - half_height
    return torch.hypot(dx.clamp_min(0), dy.clamp_min(0)) + torch.maximum(dx, dy).clamp_max(0)


def _square(x: Tensor, y: Tensor) -> Tensor:
    return _box(x, y, 0.86, 0.86)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_box(x, y, 0.95, 0.33), _box(x, y, 0.33, 0.95))


def _polygon(corners: list[tuple[float, float]]) -> Callable[[Tensor, Tensor], Tensor]:
    """Signed distance to a simple polygon: to the nearest edge, negative where a ray crosses an odd number of edges."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        nearest = torch.full_like(x + y, math.inf)
        inside = torch.zeros_like(nearest, dtype=torch.bool)
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
            ex, ey = bx - ax, by - ay
            along = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey)).clamp(0, 1)
            nearest = torch.minimum(nearest, torch.hypot(x - ax - along * ex, y - ay - along * ey))
            if ey:
                inside ^= ((y >= ay) != (y >= by)) & (x < ax + (y - ay) * ex / ey)
        return torch.where(inside, -nearest, nearest)

    return distance


def _corners(count: int, radii: tuple[float, ...]) -> list[tuple[float, float]]:
    """`count` points around the centre, the first one up, at radii taken in turn."""
    return [
        (
            radii[i % len(radii)] * math.sin(2 * math.pi * i / count),
            -radii[i % len(radii)] * math.cos(2 * math.pi * i / count),
        )
        for i in range(count)
    ]


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _polygon(_corners(3, (1.0,))),
    "star": _polygon(_corners(10, (1.0, 0.45))),
    "cross": _cross,
    "ring": _ring,
}
