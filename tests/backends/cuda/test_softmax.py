"""Softmax of rows: every tactic against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from sdaccel.backends.cuda.ops import softmax
from tests.backends.cuda.checks import DTYPES, check
from tests.shapes import TOKENS
from tests.tolerances import ROUNDING_REL


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, *TOKENS, 64, 1000, 1024, 1032, 4096, 9000, 9001, 16384, 20000, 36864, 65536])
@pytest.mark.parametrize("rows", [(1,), (2, 3, 41)], ids=str)
def test_rows(columns: int, rows: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        for source in (torch.float32, dtype):
            x = (8 * torch.randn(*rows, columns, device="cuda")).to(source)
            assert len(check(softmax, x, scale=0.125, dtype=dtype, limit=ROUNDING_REL)) > 1


@pytest.mark.gpu
def test_large_scores_and_masked_columns() -> None:
    x = 300 * torch.randn(7, 4096, device="cuda")
    x[:, 1000:] = -torch.inf
    x[3, :999] = -torch.inf
    check(softmax, x, scale=1.0, dtype=torch.float16, limit=ROUNDING_REL)


@pytest.mark.gpu
def test_columns_of_wider_rows() -> None:
    x = torch.randn(5, 3, 640, device="cuda")[..., :77]
    assert len(check(softmax, x, scale=2.0, dtype=torch.bfloat16, limit=ROUNDING_REL)) > 1
