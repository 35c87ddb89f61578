"""GroupNorm: every tactic against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import group_norm
from tests.backends.cuda.checks import DTYPES, check, image
from tests.shapes import ODD_LATENTS, SD15, SDXL
from tests.tolerances import ROUNDING_REL

# (batch, channels, of the second input, height, width)
UNET = [
    *((2, channels, 0, SDXL.latent >> level, SDXL.latent >> level) for level, channels in enumerate(SDXL.channels)),
    *((2, channels, 0, SD15.latent >> level, SD15.latent >> level) for level, channels in enumerate(SD15.channels)),
    *((2, 1280, more, 32, 32) for more in (1280, 640)),
    *((2, channels, more, 64, 64) for channels, more in ((1280, 640), (640, 640), (640, 320))),
    *((2, channels, 320, 128, 128) for channels in (640, 320)),
    (16, 320, 0, 128, 128),
]
VAE = [(1, 512, 128), (1, 512, 256), (1, 512, 512), (1, 256, 512), (1, 256, 1024), (1, 128, 1024)]
AWKWARD = [
    *((batch, 320, 0, 8, 8) for batch in range(1, 18)),
    *((1, 320, 320, height, width) for height, width in ODD_LATENTS),
    (3, 640, 320, 1, 1),
    (1, 2560, 0, 1, 1),
    (2, 64, 0, 1, 77),
    (5, 96, 0, 13, 9),
    (1, 32, 0, 3, 1),
    (2, 40, 24, 31, 33),
    (1, 256, 0, 257, 255),
]


def vectors(channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale, bias = torch.randn(2, channels, device="cuda").to(dtype)
    return scale, bias


def run(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: str = "silu",
    add: torch.Tensor | None = None,
    groups: int = 32,
) -> list[str]:
    batch, channels, more, height, width = shape
    x = image(batch, channels, height, width, dtype)
    x2 = 2 * image(batch, more, height, width, dtype) + 1 if more else None
    if (channels + more) % groups:
        groups = 8
    return check(
        group_norm,
        x,
        *vectors(channels + more, dtype),
        x2,
        add,
        groups=groups,
        epsilon=1e-5,
        activation=activation,
        limit=ROUNDING_REL,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", UNET, ids=str)
def test_unet_shapes(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        names = run(shape, dtype)
        assert any("passes=2" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", VAE, ids=str)
def test_vae_shapes(shape: tuple[int, ...]) -> None:
    batch, channels, side = shape
    run((batch, channels, 0, side, side), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", AWKWARD, ids=str)
def test_awkward_shapes(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        run(shape, dtype, "none")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
def test_time_embedding_of_any_stride(rows: int) -> None:
    for shape in ((2, 640, 0, 17, 19), (2, 320, 320, 64, 64)):
        channels = shape[1] + shape[2]
        add = torch.randn(rows, channels + 64, device="cuda", dtype=torch.float16)[:, 64:]
        run(shape, torch.float16, add=3 * add)


@pytest.mark.gpu
def test_views_of_wider_images() -> None:
    x = image(2, 96, 20, 20, torch.float16)[:, 16:80]
    names = check(group_norm, x, *vectors(64, x.dtype), groups=32, epsilon=1e-6, activation="silu", limit=ROUNDING_REL)
    assert len(names) > 1


@pytest.mark.gpu
def test_tokens() -> None:
    x = torch.randn(2, 300, 512, device="cuda", dtype=torch.float16).transpose(1, 2)
    assert len(check(group_norm, x, *vectors(512, x.dtype), groups=32, epsilon=1e-6, limit=ROUNDING_REL)) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [50.0, 1000.0])
def test_a_mean_far_from_zero_costs_no_precision(mean: float) -> None:
    x = (image(1, 128, 256, 256, torch.float32) * 2 + mean).half()
    how = {"groups": 32, "epsilon": 1e-6, "activation": "silu"}
    check(group_norm, x, *vectors(128, x.dtype), limit=ROUNDING_REL, ours=True, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("channels, groups", [(4, 2), (12, 3), (20, 4)])
def test_channels_that_ours_does_not_take(channels: int, groups: int) -> None:
    x = image(2, channels, 6, 5, torch.float16)
    scale, bias = vectors(channels, x.dtype)
    assert check(group_norm, x, scale, bias, groups=groups, epsilon=1e-5, limit=ROUNDING_REL) == ["torch"]


@pytest.mark.gpu
def test_dependent_launches_in_a_graph_see_what_came_before() -> None:
    """Each norm reads what the one before it wrote, a thousand times over: errors add up, a race would be far off."""
    device = Device.current()
    start = image(2, 320, 32, 32, torch.float16)
    scale, bias = vectors(320, start.dtype)
    scale = 1 + 0.1 * scale

    def chain(pick: int) -> torch.Tensor:
        x = start
        for _ in range(20):
            found = group_norm.tactics(device, x, scale, bias, groups=32, epsilon=1e-5, activation="silu")
            x = found[pick if pick < 0 else pick % (len(found) - 1)].run()
        return x

    expected = chain(-1)
    for pick in range(7):
        chain(pick)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(pick)
        for _ in range(50):
            y.fill_(float("nan"))
            graph.replay()
            error = (y.double() - expected.double()).norm() / expected.double().norm()
            assert float(error) < 20 * ROUNDING_REL[torch.float16]


@pytest.mark.gpu
def test_ring_is_offered_where_rows_are_dense() -> None:
    """And one larger than shared memory and L2 together is right: its tiles come twice."""
    if Device.current().capability < (9, 0):
        pytest.skip("needs sm_90")
    for shape in ((2, 320, 0, 64, 64), (1, 640, 320, 40, 40), (1, 128, 0, 800, 800)):
        assert any("ring" in name for name in run(shape, torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 512, 512, 512), (1, 256, 1024, 1024)])
def test_no_pixel_differs_when_memory_is_busy(shape: tuple[int, ...]) -> None:
    """Tiles read a second time into a place that threads still read gave a wrong pixel in one call out of ten."""
    x = image(*shape, torch.float16)
    scale, bias = torch.randn(2, shape[1], device="cuda", dtype=x.dtype)
    ring = next(
        tactic
        for tactic in group_norm.tactics(Device.current(), x, scale, bias, groups=32, epsilon=1e-6, activation="silu")
        if "ring" in tactic.name
    )
    expected = ring.run()
    for _ in range(10):
        found = [ring.run() for _ in range(5)]
        assert all(torch.equal(y, expected) for y in found)


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    """Blocks that wait for each other must not wait for those of another launch."""
    device = Device.current()
    x = image(1, 512, 128, 128, torch.float16)
    scale, bias = vectors(512, x.dtype)
    found = group_norm.tactics(device, x, scale, bias, groups=32, epsilon=1e-6, activation="silu")
    expected = found[-1].run().double()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for tactic in found:
        results = []
        for turn in range(60):
            with torch.cuda.stream(streams[turn % 2]):
                results.append(tactic.run())
        torch.cuda.synchronize()
        for y in results:
            assert float((y.double() - expected).norm() / expected.norm()) < 2 * ROUNDING_REL[x.dtype], tactic.name


H200 = Device(0, "an H200", (9, 0), 132, 50 << 20, 227 << 10)


@pytest.mark.parametrize("shape", [*UNET, *((1, channels, 0, side, side) for _, channels, side in VAE)], ids=str)
def test_rings_fit_a_block(shape: tuple[int, ...]) -> None:
    batch, channels, more, height, width = shape
    norm = group_norm.Shape(batch, height * width, channels + more, (channels + more) // 32)
    found = group_norm.Ring.options(H200, norm)
    assert found
    for how in found:
        stages, tile = how.stages(H200, norm), how.tile_bytes(norm)
        assert 1 <= stages <= 32 and how.threads(norm) + 32 <= 1024
        assert how._fixed(norm) + stages * tile <= H200.shared_per_block
        assert how.lanes * norm.channels // 8 <= how.threads(norm)


@pytest.mark.parametrize("sms", [8, 14, 16, 20])
def test_small_parts_of_a_gpu_have_tactics(sms: int) -> None:
    """MIG slices of an H100 have 14 or 16 multiprocessors, the smallest of Blackwell 20."""
    slice_of = Device(0, "MIG 1g", (9, 0), sms, 6 << 20, 227 << 10)
    for channels, side in ((128, 64), (320, 64), (512, 128), (1280, 16)):
        x = torch.empty(2, side, side, channels, dtype=torch.float16).movedim(-1, 1)
        scale = torch.empty(channels, dtype=torch.float16)
        shape = group_norm.Shape(2, side * side, channels, channels // 32)
        assert all(how.cost(slice_of, shape) > 0 for how in group_norm.Fused.options(slice_of, shape))
        assert len(group_norm.tactics(slice_of, x, scale, scale, groups=32, epsilon=1e-5)) > 1


def test_calls_under_way_have_counters_of_their_own() -> None:
    device = torch.device("cpu")
    places = [group_norm._counters(device, 3) for _ in range(1000)]
    assert len({place.data_ptr() for place in places}) == 1000
    assert all(place.shape == (3,) and not place.any() for place in places)
