"""Options, markers and the one small model whose engines many tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exported import exported as exported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run share a store: see `tests.pipelines.shared_store`."""
    if "TEST_STORE" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="sdaccel-tests-", ignore_cleanup_errors=True)
        os.environ["TEST_STORE"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two, since torch has threads of its own. Beside another a GPU's kernels could not be timed."""
    return 0 if _has_gpu() else min(2, os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run with --slow")
    gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow)
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(gpu)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the user's settings, or writes into the user's store."""
    for name in list(os.environ):
        if name.startswith("SDACCEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SDACCEL_STORE", str(tmp_path_factory.getbasetemp() / "default-store"))


@dataclass(frozen=True)
class Built:
    """A tiny random Stable Diffusion 1 model (a diffusers folder, native 64x64) and a store with its engines.

    The engines hold 64 to 128 pixels a side, 1 to 2 images, 77 to 154 tokens. Tests must leave both as they are.
    """

    model: Path
    store: Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture(scope="session")
def tiny_store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    from sdaccel.builder import build
    from sdaccel.engine.store import Store
    from sdaccel.profile import parse_profiles

    root = tmp_path_factory.mktemp("tiny store")
    build(tiny_model, profiles=parse_profiles(["64-128"], ["1-2"], ["77-154"], native=64), store=Store(root))
    yield Built(tiny_model, root)


def write_tiny_model(folder: Path) -> Path:
    """A random model with a VAE of factor 8, saved as diffusers saves one."""
    import torch
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    from sdaccel.models.single_file import published
    from tests.models.tiny import text_encoder, tokenizer

    torch.manual_seed(3)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        down_block_types=("DownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        layers_per_block=1,
        mid_block_type="UNetMidBlock2D",
        cross_attention_dim=64,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    vae = AutoencoderKL(
        sample_size=64,
        block_out_channels=(4, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder(False, layers=1),
        tokenizer=tokenizer(folder / "words"),
        unet=unet,
        scheduler=PNDMScheduler.from_config(published("sd15", "scheduler")),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder / "model")
    return folder / "model"
