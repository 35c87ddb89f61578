from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import sdaccel
from tests import pipelines
from tests.tolerances import PIPELINE_MAX_ABS


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def accelerated() -> Callable[..., Any]:
    """A new accelerated pipeline of a kind; its engines are built once in the whole run."""

    def make(kind: str, *, profiles: Any = (), fallback: bool = True, build: str = "if-missing", **options: Any) -> Any:
        pipe = pipelines.make(kind, **options)
        store = pipelines.shared_store()
        return sdaccel.accelerate(pipe, store=store, profiles=profiles, fallback=fallback, build=build)

    return make


@cache
def plain(kind: str, seed: int = 0) -> Any:
    """The same pipeline in torch, for comparison: not to be changed."""
    return pipelines.make(kind, seed=seed)


def images(pipe: Any, kind: str, **changed: Any) -> np.ndarray:
    return pipe(**pipelines.inputs(kind, **changed)).images


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    assert expected.std() > 0.01, "an image this flat would hide errors"
    return float(np.abs(found - expected).max())


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return error(found, expected) <= PIPELINE_MAX_ABS


def reasons(pipe: Any) -> dict[str, str]:
    """component → why it ran in torch, in the last call."""
    return {fallback.component: fallback.reason for fallback in pipe.sdaccel.last_report.fallbacks}


def through_engines(pipe: Any) -> bool:
    report = pipe.sdaccel.last_report
    runs = report.components.values()
    return report.ok and not report.fallbacks and all(run.calls and not run.torch_calls for run in runs)
