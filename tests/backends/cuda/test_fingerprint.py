"""Sums and samples of weights, read by one kernel: against torch, tensor by tensor."""

import pytest
import torch

from sdaccel.backends.cuda.fingerprint import SAMPLES, fingerprints, places, readable
from sdaccel.integrations.watch import _sum_of_bits

SHAPES = ((), (1,), (3,), (16,), (17,), (320,), (8, 5), (1280, 640), (64, 3, 3, 3), (320, 64, 3, 3), (7, 9, 1, 1))


def one_by_one(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    at = torch.from_numpy(places(tensor.numel())).to(tensor.device)
    return int(_sum_of_bits(tensor)), tensor.contiguous().flatten()[at].float().cpu()


def test_places_are_spread_from_the_first_to_the_last():
    assert places(0).tolist() == [0] and places(1).tolist() == [0]
    assert places(5).tolist() == [0, 1, 2, 3, 4]
    assert len(places(1000)) == SAMPLES and places(1000)[[0, -1]].tolist() == [0, 999]


def test_only_dense_floats_on_a_gpu_are_read():
    assert not readable(torch.zeros(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1])
def test_equal_torch(dtype, offset):
    """Also where tensors do not begin on 16 bytes, and with channels innermost."""
    tensors = []
    for shape in SHAPES:
        count = torch.Size(shape).numel()
        tensor = torch.randn(count + offset, device="cuda").to(dtype)[offset:].view(shape)
        tensors.append(tensor)
        if len(shape) == 4 and not offset:
            tensors.append(tensor.contiguous(memory_format=torch.channels_last))
    assert all(map(readable, tensors))
    totals, samples = fingerprints(tensors)
    for tensor, total, row in zip(tensors, totals, samples, strict=True):
        expected, values = one_by_one(tensor)
        assert total == expected
        assert torch.equal(row[: len(values)], values) and bool((row[len(values) :] == values[-1]).all())


@pytest.mark.gpu
def test_what_has_gaps_is_not_read():
    assert not readable(torch.zeros(8, 8, device="cuda")[:, :4])
    assert not readable(torch.zeros(0, device="cuda"))
    assert not readable(torch.zeros(8, device="cuda", dtype=torch.int64))
