"""An engine of one checkpoint → the engine of another of the same architecture, precision and profiles.

Plan, tactics and kernels come of names, shapes and types alone; so do the exponents of `headroom` and what is joined.
What is made of values (sums of taps of enlarged images) is made when an engine is loaded. What is left to do is to
point the plan's weights at their places in the other entry.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from sdaccel.backends.base import BuildJob, Built
from sdaccel.backends.cuda.plan import ExecutionPlan, WeightPlace
from sdaccel.engine.store import Entry
from sdaccel.engine.weights import layout


def adopt(engine: Entry, job: BuildJob, folder: Path) -> Built | None:
    """None where the weights differ in a name, a shape or a type. See `Backend.adopt`."""
    plan = ExecutionPlan.read(engine.path)
    places = layout(job.weights)
    weights = {}
    for name, old in plan.weights.items():
        place = places.get(name)
        if place is None or (place.shape, place.dtype) != (old.shape, old.dtype):
            return None
        weights[name] = WeightPlace(job.weights.key, place.offset, place.nbytes, place.dtype, place.shape)
    for name in engine.files:
        shutil.copyfile(engine.file(name), folder / name)
    replace(plan, weights=weights).save(folder)
    return Built()
