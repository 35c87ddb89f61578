"""ExecutionPlan: the fused graph as an ordered list of steps, and how it lies on disk.

``plan.json`` is for people too: every step with its operator, inputs, outputs and attributes, and every weight with its
place in the store. The graph's own constants lie beside it in ``constants.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sdaccel.errors import EngineBroken

FORMAT = 2
PLAN = "plan.json"
CONSTANTS = "constants.safetensors"


@dataclass(frozen=True)
class Step:
    """One operator. An empty input name is an optional input left out."""

    name: str
    op: str
    """``GroupNorm`` of our own domain, or ``ai.onnx.Reshape``"""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightPlace:
    """A weight's bytes: in the entry ``entry`` of the store's weights, at ``offset`` of its file."""

    entry: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExecutionPlan:
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    """Inputs that may be left out; they are then added to nothing."""
    outputs: tuple[str, ...]
    prologue: tuple[Step, ...]
    """Depends on the prompt alone: run again only when the prompt changes."""
    steps: tuple[Step, ...]
    weights: Mapping[str, WeightPlace]
    joined: Mapping[str, tuple[str, ...]]
    """A weight that is several weights of the same width, one below the other"""
    constants: Mapping[str, torch.Tensor]
    exponents: Mapping[str, int] = field(default_factory=dict)
    """Weights that are scaled, by two to this (headroom.py)"""

    def save(self, folder: Path) -> None:
        document = {
            "format": FORMAT,
            "inputs": self.inputs,
            "optional": self.optional,
            "outputs": self.outputs,
            "prologue": [asdict(step) for step in self.prologue],
            "steps": [asdict(step) for step in self.steps],
            "weights": {name: asdict(place) for name, place in self.weights.items()},
            "joined": self.joined,
            "exponents": self.exponents,
        }
        (folder / PLAN).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
        save_file({name: value.contiguous() for name, value in self.constants.items()}, folder / CONSTANTS)

    @classmethod
    def read(cls, folder: Path) -> ExecutionPlan:
        """Raises EngineBroken for anything `save` did not write."""
        try:
            document = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise EngineBroken(f"{folder / PLAN}: format {document['format']!r} is not {FORMAT}, which we read.")
            return cls(
                inputs=tuple(document["inputs"]),
                optional=tuple(document["optional"]),
                outputs=tuple(document["outputs"]),
                prologue=tuple(map(_step, document["prologue"])),
                steps=tuple(map(_step, document["steps"])),
                weights={
                    name: WeightPlace(**{**place, "shape": tuple(place["shape"])})
                    for name, place in document["weights"].items()
                },
                joined={name: tuple(parts) for name, parts in document["joined"].items()},
                exponents={name: int(power) for name, power in document["exponents"].items()},
                # Copies: Windows does not move a folder with a file that is mapped.
                constants={name: value.clone() for name, value in load_file(folder / CONSTANTS).items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise EngineBroken(f"{folder}: the plan cannot be read: {error}.") from error


def _step(item: Mapping[str, Any]) -> Step:
    return Step(item["name"], item["op"], tuple(item["inputs"]), tuple(item["outputs"]), item["attributes"])
