"""LayerNorm with what is added before it: every tactic against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from sdaccel.backends.cuda.ops import layer_norm
from tests.backends.cuda.checks import DTYPES, check
from tests.tolerances import ROUNDING_REL

WIDTHS = (320, 640, 768, 1024, 1280, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [*WIDTHS, 8, 96, 384, 1536, 2560])
@pytest.mark.parametrize("rows", [(2, 1024), (1, 1), (17, 77), (3, 231)], ids=str)
def test_every_sum(channels: int, rows: tuple[int, int]) -> None:
    for dtype in DTYPES:
        x, residual = torch.randn(2, *rows, channels, device="cuda").to(dtype)
        scale, bias, bias_in = torch.randn(3, channels, device="cuda").to(dtype)
        for more in ((None, None), (residual, None), (None, bias_in), (3 * residual, bias_in)):
            names = check(layer_norm, x + 1, scale, bias, *more, epsilon=1e-5, limit=ROUNDING_REL)
            assert len(names) > 1


@pytest.mark.gpu
def test_rows_of_wider_rows() -> None:
    wide = torch.randn(2, 154, 3 * 640, device="cuda", dtype=torch.float16)
    scale, bias = torch.randn(2, 640, device="cuda", dtype=torch.float16)
    x, residual, _ = wide.split(640, -1)
    assert len(check(layer_norm, x, scale, bias, residual, epsilon=1e-5, limit=ROUNDING_REL)) > 1


@pytest.mark.gpu
def test_what_ours_does_not_take() -> None:
    for shape in ((2, 9, 20), (2, 3, 4104)):
        x = torch.randn(*shape, device="cuda", dtype=torch.float16)
        scale, bias = torch.randn(2, shape[-1], device="cuda", dtype=torch.float16)
        assert check(layer_norm, x, scale, bias, x, epsilon=1e-5, limit=ROUNDING_REL) == ["torch"]
    x = torch.randn(2, 640, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    scale, bias = torch.randn(2, 640, device="cuda", dtype=torch.float16)
    assert check(layer_norm, x, scale, bias, epsilon=1e-5, limit=ROUNDING_REL) == ["torch"]
