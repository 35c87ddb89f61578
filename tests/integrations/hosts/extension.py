"""The extension in a stand-in of a host: its script's hooks, and what a test asks of the two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.hosts.ldm import tiny_architectures


class Hooks:
    """What the shim registers as a script, without the host's base class."""

    def __init__(self, web: Any):
        self.web = web

    def process(self, p: Any) -> None:
        self.web.begin(p)

    def postprocess_batch(self, p: Any) -> None:
        self.web.describe(p)

    def postprocess(self, p: Any, processed: Any) -> None:
        self.web.finish(processed)


class Installed:
    def __init__(self, host: Any, web: Any):
        self.host, self.web = host, web

    @property
    def unet(self) -> Any:
        """The host's torch module, which counts its calls."""
        raise NotImplementedError

    def generate(self, **options: Any) -> Any:
        self.unet.tally[0] = 0
        return self.host.generate(**options)

    def reasons(self) -> dict[str, str]:
        return {fallback.component: fallback.reason for fallback in self.web.report.fallbacks}

    def calls(self, component: str = "unet") -> tuple[int, int]:
        """(through engines, through torch)"""
        run = self.web.report.components.get(component)
        return (run.calls, run.torch_calls) if run else (0, 0)


@pytest.fixture(autouse=True, scope="module")
def architectures() -> Iterator[None]:
    torch.set_num_threads(1)
    with tiny_architectures():
        yield
