"""Group normalisation, with an addend before it and SiLU after it: y = act(norm(concat(x, x2) + add) * scale + bias).

x [B, C1, ...], x2 [B, C2, ...] or None, add [B or 1, C] or None, scale and bias [C]; channels innermost in memory.
activation: none | silu.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.launch import Device, Long, kernel
from sdaccel.backends.cuda.ops.layout import C_TYPE, HALVES, aligned, empty_image, pixels
from sdaccel.backends.cuda.tactic import Tactic

FILE, FILE_SM90 = "group_norm.cu", "group_norm_sm90.cu"
MAX_THREADS, UNROLL = 512, 4  # as in the source
VARIANTS = [
    (FILE, "group_norm_fused", {"SDACCEL_T": "half_t", "SILU": 1, "PER_GROUP": 10}, (7, 5)),
    (FILE, "group_norm_fused", {"SDACCEL_T": "bf16_t", "SILU": 0, "PER_GROUP": 3}, (7, 5)),
    (FILE, "group_norm_stats", {"SDACCEL_T": "half_t", "SILU": 1, "STREAM": 0}, (7, 5)),
    (FILE, "group_norm_persistent", {"SDACCEL_T": "half_t", "SILU": 1, "STREAM": 0}, (7, 5)),
    (FILE, "group_norm_apply", {"SDACCEL_T": "bf16_t", "SILU": 1, "STREAM": 1}, (7, 5)),
    *(
        (
            FILE_SM90,
            "group_norm",
            {"SDACCEL_T": "half_t", "SILU": 1, "CHANNELS": channels, "PER_GROUP": n, "LANES": lanes, "ITEMS": 2},
            (9, 0),
        )
        for channels, n, lanes in ((320, 10, 16), (2560, 80, 2), (96, 3, 53))
    ),
]


def reference(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    x2: Tensor | None = None,
    add: Tensor | None = None,
    *,
    groups: int,
    epsilon: float,
    activation: str = "none",
) -> Tensor:
    if x2 is not None:
        x = torch.cat((x, x2), dim=1)
    if add is not None:
        x = x + add.reshape(*add.shape[:2], *[1] * (x.dim() - 2))
    y = F.group_norm(x, groups, scale, bias, epsilon)
    return F.silu(y) if activation == "silu" else y


def tactics(
    device: Device,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    x2: Tensor | None = None,
    add: Tensor | None = None,
    *,
    groups: int,
    epsilon: float,
    activation: str = "none",
) -> list[Tactic]:
    def plain() -> Tensor:
        y = reference(x, scale, bias, x2, add, groups=groups, epsilon=epsilon, activation=activation)
        return y.movedim(1, -1).contiguous().movedim(-1, 1)

    found: list[tuple[float, Tactic]] = []
    if _suits(x, scale, bias, groups, x2, add):
        channels = scale.shape[0]
        shape = Shape(x.shape[0], math.prod(x.shape[2:]), channels, channels // groups)

        def run(how: Fused | TwoPass | Persistent | Ring) -> Tactic:
            silu = activation == "silu"
            sources: tuple[tuple[str, dict[str, object]], ...] = ()
            if isinstance(how, (Fused, Ring)):
                sources = ((FILE_SM90 if isinstance(how, Ring) else FILE, how.defines(shape, x.dtype, silu)),)
            return Tactic(how.name, lambda: how(device, shape, x, x2, add, scale, bias, epsilon, silu), sources)

        fused = sorted(Fused.options(device, shape), key=lambda how: (how.cost(device, shape), how.name))[:6]
        dense = all(piece is None or (pixels(piece) or (0, 0))[1] == piece.shape[1] for piece in (x, x2))
        ours: list[Fused | TwoPass | Persistent | Ring] = [
            *fused,
            *TwoPass.options(device, shape),
            *Persistent.options(device, shape),
            *(Ring.options(device, shape) if dense else []),
        ]
        found = [(how.cost(device, shape), run(how)) for how in ours]
    return [tactic for _, tactic in sorted(found, key=lambda pair: pair[0])] + [Tactic("torch", plain)]


def _suits(x: Tensor, scale: Tensor, bias: Tensor, groups: int, x2: Tensor | None, add: Tensor | None) -> bool:
    pieces = [x] if x2 is None else [x, x2]
    channels = sum(piece.shape[1] for piece in pieces)
    return (
        x.dtype in HALVES
        and all(t is None or t.dtype == x.dtype for t in (x2, add, scale, bias))
        and x.numel() > 0
        and channels == scale.shape[0] <= 8 * MAX_THREADS
        and channels % groups == 0
        and channels % math.lcm(channels // groups, 8) == 0
        and all(
            piece.shape[1] % 8 == 0 and (strides := pixels(piece)) is not None and not any(n % 8 for n in strides)
            for piece in pieces
        )
        and (add is None or (add.stride(1) == 1 and (add.shape[0] == 1 or add.stride(0) % 8 == 0)))
        and scale.is_contiguous()
        and bias.is_contiguous()
        and aligned(x, x2, add, scale, bias)
    )


@dataclass(frozen=True)
class Shape:
    images: int
    rows: int
    channels: int
    per_group: int

    @property
    def least_slice(self) -> int:
        """Channels that are whole groups and whole 16 bytes."""
        return math.lcm(self.per_group, 8)

    @property
    def bytes(self) -> int:
        return 2 * self.images * self.rows * self.channels


def _threads(slice: int, rows: int, most: int = MAX_THREADS) -> int:
    chunks = slice // 8
    return -(-chunks * max(1, min(most // chunks, rows)) // 32) * 32


def _scratch(slice: int, per_group: int, threads: int) -> int:
    groups = slice // per_group
    return 68 * threads + 16 * (groups + threads // 32) + 24 * groups


def _source(x: Tensor, x2: Tensor | None, add: Tensor | None) -> list[object]:
    """The arguments that all three kernels begin with."""
    batch, row = pixels(x) or (0, 0)
    batch2, row2 = (pixels(x2) or (0, 0)) if x2 is not None else (0, 0)
    step = add.stride(0) if add is not None and add.shape[0] > 1 else 0
    return [x, Long(batch), row, x.shape[1], x2, Long(batch2), row2, add, Long(step)]


@dataclass(frozen=True)
class Fused:
    """One read, one write: ``cluster`` blocks hold ``slice`` channels of an image in shared memory."""

    slice: int
    cluster: int
    threads: int

    @property
    def name(self) -> str:
        return f"ours<cluster={self.cluster},slice={self.slice},threads={self.threads}>"

    @classmethod
    def options(cls, device: Device, shape: Shape) -> Iterator[Fused]:
        clusters = (1, 2, 4, 8) if device.capability >= (9, 0) else (1,)
        for slice in range(shape.least_slice, shape.channels + 1, shape.least_slice):
            if shape.channels % slice or slice > 8 * MAX_THREADS:
                continue
            for cluster in clusters:
                if cluster > shape.rows:
                    continue
                share = -(-shape.rows // cluster)
                for threads in {_threads(slice, share, most) for most in (512, 256) if slice // 8 <= most}:
                    how = cls(slice, cluster, threads)
                    if how.shared(shape) <= device.shared_per_block:
                        yield how

    def shared(self, shape: Shape) -> int:
        share = -(-shape.rows // self.cluster)
        items = -(-share // (self.threads // (self.slice // 8)))
        units = 8 // math.gcd(8, shape.per_group)
        return 16 * items * self.threads + 8 * units * self.threads + 24 * (self.slice // shape.per_group)

    def defines(self, shape: Shape, dtype: torch.dtype, silu: bool) -> dict[str, object]:
        return {"SDACCEL_T": C_TYPE[dtype], "SILU": int(silu), "PER_GROUP": shape.per_group}

    def cost(self, device: Device, shape: Shape) -> float:
        """Microseconds, roughly: what a multiprocessor has to move, at half its part of an H200's memory bandwidth."""
        blocks = shape.images * (shape.channels // self.slice) * self.cluster
        slice_bytes = 2 * self.slice
        sectors = 32 * -(-(slice_bytes + 16) // 32) if slice_bytes % 32 else slice_bytes
        moved = 2 * sectors * -(-shape.rows // self.cluster)
        resident = max(1, device.shared_per_block // (self.shared(shape) + 1024))
        # not all multiprocessors can be grouped by four or eight
        idle = 2 * self.cluster if resident == 1 and self.cluster > 2 else 0
        rounds = -(-blocks // max(self.cluster, device.sms - idle))
        alone = 1.3 if rounds > 1 and resident == 1 else 1.0  # nothing overlaps its reductions
        return 2.0 + 0.3 * (self.cluster > 1) + 0.05 * self.cluster + alone * rounds * moved / 16e3

    def __call__(
        self,
        device: Device,
        shape: Shape,
        x: Tensor,
        x2: Tensor | None,
        add: Tensor | None,
        scale: Tensor,
        bias: Tensor,
        epsilon: float,
        silu: bool,
    ) -> Tensor:
        y = empty_image(x, shape.channels)
        fused = kernel(FILE, "group_norm_fused", self.defines(shape, x.dtype, silu))
        fused(
            (self.cluster, shape.channels // self.slice, shape.images),
            self.threads,
            [*_source(x, x2, add), scale, bias, y, shape.rows, shape.channels, epsilon, self.slice],
            shared=self.shared(shape),
            cluster=self.cluster,
            pdl=device.capability >= (9, 0),
        )
        return y


@dataclass(frozen=True)
class TwoPass:
    """Statistics, then normalisation, ``images`` and ``slice`` channels at a time so that L2 may hold them between."""

    slice: int
    images: int

    @property
    def name(self) -> str:
        return f"ours<passes=2,slice={self.slice},images={self.images}>"

    @classmethod
    def options(cls, device: Device, shape: Shape) -> list[TwoPass]:
        """The whole at once; what fits into 60 % of L2 by images; if not even one does, slices of their channels."""
        room = 0.6 * device.l2_bytes
        found = [cls(shape.channels, shape.images)]
        image = shape.bytes / shape.images
        if shape.bytes > room:
            if shape.images > 1:
                found.append(cls(shape.channels, max(1, min(shape.images - 1, int(room / image)))))
            for limit in (room, 1.2 * room):
                fits = [
                    slice
                    for slice in range(shape.least_slice, shape.channels, shape.least_slice)
                    if shape.channels % slice == 0 and slice >= 16 and 2 * shape.rows * slice <= limit
                ]
                if image > room and fits and cls(fits[-1], 1) not in found:
                    found.append(cls(fits[-1], 1))
        return found

    def cost(self, device: Device, shape: Shape) -> float:
        part = 2 * self.images * shape.rows * self.slice
        parts = -(-shape.images // self.images) * (shape.channels // self.slice)
        sparse = 1.0 + 128 / (2 * self.slice) if self.slice < shape.channels else 1.0
        again = max(0.3, 1 - 0.6 * device.l2_bytes / part)
        return parts * (8.0 + sparse * (2 + again) * part / 4.2e6)

    def __call__(
        self,
        device: Device,
        shape: Shape,
        x: Tensor,
        x2: Tensor | None,
        add: Tensor | None,
        scale: Tensor,
        bias: Tensor,
        epsilon: float,
        silu: bool,
    ) -> Tensor:
        y = empty_image(x, shape.channels)
        defines = {"SDACCEL_T": C_TYPE[x.dtype], "SILU": int(silu)}
        hopper = device.capability >= (9, 0)
        threads = _threads(self.slice, shape.rows)
        tiles = -(-shape.rows // (threads // (self.slice // 8) * UNROLL))
        for start in range(0, shape.images, self.images):
            part = slice(start, start + self.images)
            images = min(self.images, shape.images - start)
            blocks = max(1, min(2 * device.sms // images, tiles))
            cluster = next(n for n in (4, 2, 1) if blocks >= n) if hopper else 1
            blocks -= blocks % cluster
            row_bytes = 2 * images * self.slice
            stream = 2 * row_bytes * shape.rows > device.l2_bytes
            keep = min(shape.rows, int(0.7 * device.l2_bytes / row_bytes))
            stats = kernel(FILE, "group_norm_stats", {**defines, "STREAM": 0})
            apply = kernel(FILE, "group_norm_apply", {**defines, "STREAM": int(stream)})
            some = add if add is None or add.shape[0] == 1 else add[part]
            source = _source(x[part], x2 if x2 is None else x2[part], some)
            count = blocks // cluster
            groups = shape.channels // shape.per_group
            partials = torch.empty((images, groups, count, 4), dtype=torch.float32, device=x.device)
            sizes = [shape.rows, shape.channels, shape.per_group]
            for first in range(0, shape.channels, self.slice):
                stats(
                    (blocks, 1, images),
                    threads,
                    [*source, partials, *sizes, first, self.slice, keep],
                    shared=_scratch(self.slice, shape.per_group, threads),
                    cluster=cluster,
                    pdl=hopper,
                )
                apply(
                    (blocks, 1, images),
                    threads,
                    [*source, scale, bias, y[part], partials, count, *sizes, epsilon, first, self.slice],
                    shared=8 * groups,
                    pdl=hopper,
                )
        return y


@dataclass(frozen=True)
class Persistent:
    """Both in one cooperative launch: ``resident`` of what each thread reads stays in shared memory, more in L2."""

    resident: int

    @property
    def name(self) -> str:
        return f"ours<resident={self.resident}>"

    @classmethod
    def options(cls, device: Device, shape: Shape) -> list[Persistent]:
        """One for images that are worth a wait of all multiprocessors for each other."""
        if shape.bytes < 4 << 20 or shape.images > device.sms // 8:
            return []
        threads, items = cls._threads(device, shape)
        room = device.shared_per_block - _scratch(shape.channels, shape.per_group, threads)
        return [cls(min(items, room // (16 * threads)))]

    @staticmethod
    def _threads(device: Device, shape: Shape) -> tuple[int, int]:
        """Threads of a block, and the rows that each reads."""
        share = -(-shape.rows // (device.sms // shape.images))
        threads = _threads(shape.channels, share)
        return threads, -(-share // (threads // (shape.channels // 8)))

    def cost(self, device: Device, shape: Shape) -> float:
        threads, items = self._threads(device, shape)
        blocks = device.sms // shape.images * shape.images
        held = 16 * threads * min(self.resident, items) * blocks + 0.6 * device.l2_bytes
        return 7.0 + (2 + max(0.0, 1 - held / shape.bytes)) * shape.bytes / 4e6

    def __call__(
        self,
        device: Device,
        shape: Shape,
        x: Tensor,
        x2: Tensor | None,
        add: Tensor | None,
        scale: Tensor,
        bias: Tensor,
        epsilon: float,
        silu: bool,
    ) -> Tensor:
        threads, _ = self._threads(device, shape)
        blocks = device.sms // shape.images
        groups = shape.channels // shape.per_group
        y = empty_image(x, shape.channels)
        partials = torch.empty((shape.images, groups, blocks, 4), dtype=torch.float32, device=x.device)
        counters = torch.zeros(shape.images, dtype=torch.int32, device=x.device)
        keep = int(0.7 * device.l2_bytes / (16 * threads * blocks * shape.images))
        norm = kernel(FILE, "group_norm_persistent", {"SDACCEL_T": C_TYPE[x.dtype], "SILU": int(silu), "STREAM": 0})
        sizes = [shape.rows, shape.channels, shape.per_group]
        norm(
            (blocks, 1, shape.images),
            threads,
            [*_source(x, x2, add), scale, bias, y, partials, counters, *sizes, epsilon, self.resident, keep],
            shared=16 * threads * self.resident + _scratch(shape.channels, shape.per_group, threads),
            cooperative=True,
        )
        return y


# --- one launch, sm_90 on ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Both in one cooperative launch: tiles of whole rows pass through shared memory, as many as fit stay there."""

    lanes: int
    """rows at once"""
    items: int
    """such rows a tile"""

    @property
    def name(self) -> str:
        return f"ours<ring,lanes={self.lanes},items={self.items}>"

    @classmethod
    def options(cls, device: Device, shape: Shape) -> list[Ring]:
        if device.capability < (9, 0) or shape.images > device.sms // 8:
            return []
        share = math.ceil(shape.rows / cls._blocks(device, shape))
        lanes = min(RING_THREADS // (shape.channels // 8), share)
        choice = (1, 2) if share <= 8 * lanes else (2, 4)
        found = [cls(lanes, items) for items in choice if items == 1 or items * lanes < 2 * share]
        return [how for how in found if how.stages(device, shape) >= min(3, how._tiles(device, shape))]

    @staticmethod
    def _blocks(device: Device, shape: Shape) -> int:
        """of an image"""
        return min(device.sms // shape.images, shape.rows)

    def _tiles(self, device: Device, shape: Shape) -> int:
        """of a block"""
        return math.ceil(math.ceil(shape.rows / self._blocks(device, shape)) / (self.lanes * self.items))

    def tile_bytes(self, shape: Shape) -> int:
        return 2 * shape.channels * self.lanes * self.items

    def threads(self, shape: Shape) -> int:
        """that calculate"""
        return math.ceil(self.lanes * shape.channels / 8 / 32) * 32

    def _fixed(self, shape: Shape) -> int:
        """bytes of shared memory beside the tiles"""
        groups = shape.channels // shape.per_group
        return 512 + math.ceil(8 * groups / 128) * 128 + 64 // math.gcd(8, shape.per_group) * self.threads(shape)

    def stages(self, device: Device, shape: Shape) -> int:
        fit = (device.shared_per_block - self._fixed(shape)) // self.tile_bytes(shape)
        return min(RING_STAGES, fit, self._tiles(device, shape))

    def defines(self, shape: Shape, dtype: torch.dtype, silu: bool) -> dict[str, object]:
        return {
            "SDACCEL_T": C_TYPE[dtype],
            "SILU": int(silu),
            "CHANNELS": shape.channels,
            "PER_GROUP": shape.per_group,
            "LANES": self.lanes,
            "ITEMS": self.items,
        }

    def cost(self, device: Device, shape: Shape) -> float:
        blocks = shape.images * self._blocks(device, shape)
        held = self.tile_bytes(shape) * self.stages(device, shape) * blocks + 0.5 * device.l2_bytes
        busy = min(1.0, 1.5 * blocks / device.sms)
        return 5.0 + 0.1 / self.items + (2 + max(0.0, 1 - held / shape.bytes)) * shape.bytes / (4e6 * busy)

    def __call__(
        self,
        device: Device,
        shape: Shape,
        x: Tensor,
        x2: Tensor | None,
        add: Tensor | None,
        scale: Tensor,
        bias: Tensor,
        epsilon: float,
        silu: bool,
    ) -> Tensor:
        blocks, stages = self._blocks(device, shape), self.stages(device, shape)
        y = empty_image(x, shape.channels)
        totals = torch.empty(
            (shape.images, shape.channels // shape.per_group, blocks, 2), dtype=torch.float32, device=x.device
        )
        x_batch, x2_batch = ((pixels(piece) or (0, 0))[0] if piece is not None else 0 for piece in (x, x2))
        add_batch = add.stride(0) if add is not None and add.shape[0] > 1 else 0
        keep = int(0.5 * device.l2_bytes / (self.tile_bytes(shape) * blocks * shape.images))
        norm = kernel(FILE_SM90, "group_norm", self.defines(shape, x.dtype, silu))
        norm(
            (blocks, 1, shape.images),
            self.threads(shape) + 32,
            [
                *(x, Long(x_batch), x.shape[1], x2, Long(x2_batch), add, Long(add_batch), scale, bias, y),
                *(totals, _counters(x.device, shape.images), shape.rows, epsilon, stages, keep),
                int(2 * shape.bytes > device.l2_bytes),
            ],
            shared=self._fixed(shape) + stages * self.tile_bytes(shape),
            cooperative=True,
        )
        return y


RING_THREADS, RING_STAGES = 640, 32

_COUNTERS = 1 << 14
_counters_of: dict[torch.device, Tensor] = {}
_calls = itertools.count()


def _counters(device: torch.device, images: int) -> Tensor:
    """For blocks to wait for each other: what no other call under way has. The kernel leaves them fit for the next."""
    if device not in _counters_of:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(images, dtype=torch.int32, device=device)
        _counters_of[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    places = _COUNTERS // images
    start = next(_calls) % places * images
    return _counters_of[device][start : start + images]
