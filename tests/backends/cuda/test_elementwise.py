"""Elementwise ops: every tactic against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from sdaccel.backends.cuda.ops import elementwise
from sdaccel.errors import BackendError
from tests.backends.cuda.checks import DTYPES, check, image
from tests.tolerances import ROUNDING_REL


@pytest.mark.gpu
@pytest.mark.parametrize("sides", [(26, 18), (25, 17), (13, 9), (40, 31), (1, 1), (6, 5)], ids=str)
def test_upsample(sides: tuple[int, int]) -> None:
    for dtype in DTYPES:
        assert len(check(elementwise.upsample, image(3, 640, 13, 9, dtype), sides=sides, limit=ROUNDING_REL)) > 1
    x = image(1, 96, 13, 9, torch.float16)
    assert len(check(elementwise.upsample, x[:, 32:64], sides=sides, limit=ROUNDING_REL)) > 1
    assert check(elementwise.upsample, x[:, :4], sides=sides, limit=ROUNDING_REL) == ["torch"]


def test_upsample_is_torch_s_where_the_size_doubles() -> None:
    x = torch.randn(1, 3, 7, 5)
    expected = torch.nn.functional.interpolate(x, size=(13, 10), mode="nearest")
    assert torch.equal(elementwise.upsample.reference(x, sides=(13, 10)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("flip", [True, False])
def test_timestep_embedding(flip: bool) -> None:
    frequencies = elementwise.timestep_embedding.frequencies(320).cuda()
    limit = {dtype: 2 * value for dtype, value in ROUNDING_REL.items()}  # angles to 999 in float32
    for timestep in (torch.tensor([1, 501, 999]), torch.tensor([0.5, 999.25]), torch.tensor([981.0]).expand(17)):
        for dtype in DTYPES:
            names = check(
                elementwise.timestep_embedding,
                timestep.cuda(),
                frequencies,
                flip_sin_to_cos=flip,
                dtype=dtype,
                limit=limit,
            )
            assert len(names) > 1


def test_frequencies_are_diffusers() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    timestep = torch.tensor([7.0, 999.0])
    for width, shift in ((320, 0), (256, 0), (32, 1)):
        expected = embeddings.get_timestep_embedding(timestep, width, True, shift)
        found = elementwise.timestep_embedding.reference(
            timestep,
            elementwise.timestep_embedding.frequencies(width, shift),
            flip_sin_to_cos=True,
            dtype=torch.float32,
        )
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 77, 2048), (1, 231, 768), (3,), (1,), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.int64], ids=str)
def test_changed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = (100 * torch.randn(*shape, device="cuda")).to(dtype)
    stored = torch.zeros_like(value)
    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    elementwise.changed(value, stored, flag)
    assert flag.item() == 1 and torch.equal(value, stored)
    for position in (0, -1, value.numel() // 2):
        elementwise.changed(value, stored, flag)
        assert flag.item() == 0
        value.view(-1)[position] += 64
        elementwise.changed(value, stored, flag)
        assert flag.item() == 1 and torch.equal(value, stored)
    if dtype.is_floating_point:  # equal numbers of different bits, and NaN, which equals nothing
        value.fill_(-0.0)
        elementwise.changed(value, stored.fill_(0.0), flag)
        assert flag.item() == 1
        value.fill_(float("nan"))
        elementwise.changed(value, stored, flag)
        elementwise.changed(value, stored, flag)
        assert flag.item() == 0


@pytest.mark.gpu
def test_changed_in_a_graph_and_odd_addresses() -> None:
    value = torch.randn(4, 1001, device="cuda", dtype=torch.float16)
    stored, flag = value.clone(), torch.ones(1, dtype=torch.int32, device="cuda")
    elementwise.changed(value, stored, flag)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        elementwise.changed(value, stored, flag)
    for step in range(100):
        value[step % 4, step] += step % 2
        graph.replay()
        assert flag.item() == step % 2 and torch.equal(value, stored)
    odd = value.view(-1)[1:1002]
    kept = stored.view(-1)[3:1004]
    elementwise.changed(odd, kept, flag)
    assert flag.item() == 1 and torch.equal(odd, kept)


def test_changed_refuses_what_does_not_match() -> None:
    flag = torch.ones(1, dtype=torch.int32)
    with pytest.raises(BackendError, match="changed"):
        elementwise.changed(torch.zeros(3), torch.zeros(4), flag)
    with pytest.raises(BackendError, match="changed"):
        elementwise.changed(torch.zeros(3), torch.zeros(3), flag.float())
