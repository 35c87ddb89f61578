"""GEGLU: every tactic against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from sdaccel.backends.cuda.ops import geglu
from tests.backends.cuda.checks import DTYPES, check
from tests.tolerances import ROUNDING_REL


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 328, 1280, 2560, 5120])
@pytest.mark.parametrize("rows", [(2, 1024), (1, 1), (3, 77), (1, 4097)], ids=str)
def test_halves(channels: int, rows: tuple[int, int]) -> None:
    for dtype in DTYPES:
        x = 2 * torch.randn(*rows, 2 * channels, device="cuda", dtype=dtype)
        assert len(check(geglu, x, limit=ROUNDING_REL)) > 1


@pytest.mark.gpu
def test_rows_of_wider_rows_and_odd_widths() -> None:
    wide = torch.randn(2, 77, 3 * 640, device="cuda", dtype=torch.float16)
    assert len(check(geglu, wide[..., 640:], limit=ROUNDING_REL)) > 1
    assert check(geglu, wide[..., :12], limit=ROUNDING_REL) == ["torch"]


@pytest.mark.gpu
def test_far_from_zero() -> None:
    """Where the error function is 1 but for the last digits, or the gate is nearly shut."""
    gate = torch.linspace(-9, 9, 32768).half().cuda()
    x = torch.cat((torch.ones_like(gate), gate))[None]
    check(geglu, x, limit=ROUNDING_REL)
