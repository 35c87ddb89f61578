"""Attention: softmax(scale q kᵀ) v, head by head.

q [B, S, heads · D], k and v [B, L, heads · D] with the last dimension contiguous and the other strides free (views of a
fused row of queries, keys and values), result [B, S, heads · D] contiguous. ``causal``: a query sees the keys up to its
own place, counted from the first.

Tactics: torch's own four (cuDNN, flash, memory-efficient, plain); ``cross-wgmma`` (sm_90) and ``cross``, for few keys,
with all of them in shared memory; ``flash-wgmma`` (sm_90) and ``flash-mma``, for many keys, with a running maximum;
``gemm``, for one wide head (the VAE's), with scores of some query rows at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sdaccel.backends.cuda.gemm import ELEMENTS, spin_limit
from sdaccel.backends.cuda.launch import Device, Long, TensorMap, kernel
from sdaccel.backends.cuda.ops import softmax
from sdaccel.backends.cuda.tactic import Tactic

SCORES_BYTES = 256 << 20
"""How much memory scores may take."""

CROSS_KEYS = 256
"""The most keys that the cross-attention kernel takes."""

HEAD_DIMS = (40, 64, 80, 160)
"""Those of the published UNets, which the kernels are tested with."""


def reference(q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float, causal: bool = False) -> Tensor:
    """In the inputs' own type; holds the scores of some query rows of some heads at a time, `SCORES_BYTES` of them."""
    queries, keys, values = (_by_head(x, heads).flatten(0, 1) for x in (q, k, v))
    out = torch.empty_like(queries)
    row_bytes = 2 * q.element_size() * k.shape[1]  # scores and weights
    rows = max(1, min(q.shape[1], SCORES_BYTES // row_bytes))
    some = max(1, SCORES_BYTES // (rows * row_bytes))  # heads
    for head, row in itertools.product(range(0, len(out), some), range(0, q.shape[1], rows)):
        part = slice(head, head + some), slice(row, row + rows)
        scores = queries[part] @ keys[part[0]].mT * scale
        if causal:
            scores = scores.masked_fill(_later(q.shape[1], k.shape[1], q.device)[part[1]], -math.inf)
        out[part] = scores.softmax(-1) @ values[part[0]]
    return _joined(out.unflatten(0, (q.shape[0], heads)))


def tactics(
    device: Device, q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float, causal: bool = False
) -> list[Tactic]:
    of_torch = list(_torch(q, k, v, heads, scale, causal))
    if causal or scale <= 0:
        return of_torch
    cross = [*_cross_sm90(device, q, k, v, heads, scale), *_cross(device, q, k, v, heads, scale)]
    first = [*cross, *_gemm(device, q, k, v, heads, scale)]
    flash = [*_flash_sm90(device, q, k, v, heads, scale), *_flash_sm80(device, q, k, v, heads, scale)]
    return [*first, *of_torch, *flash]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads · D] → [B, heads, S, D], a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """[B, heads, S, D] → [B, S, heads · D]; a view of what flash and cuDNN return."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _later(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)


# --- torch ------------------------------------------------------------------------------------------------------------


def _torch(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, causal: bool) -> Iterator[Tactic]:
    from torch.backends import cuda as backends
    from torch.nn.attention import SDPBackend, sdpa_kernel

    views = (_by_head(q, heads), _by_head(k, heads), _by_head(v, heads))

    def run(backend: SDPBackend | None) -> Tensor:
        if backend is None:
            return _joined(F.scaled_dot_product_attention(*views, is_causal=causal, scale=scale))
        with sdpa_kernel(backend):
            return _joined(F.scaled_dot_product_attention(*views, is_causal=causal, scale=scale))

    parameters = backends.SDPAParams(*views, None, 0.0, causal, False)
    able: dict[str, tuple[SDPBackend, Callable[..., bool]]] = {
        "cudnn": (SDPBackend.CUDNN_ATTENTION, backends.can_use_cudnn_attention),
        "flash": (SDPBackend.FLASH_ATTENTION, backends.can_use_flash_attention),
        "efficient": (SDPBackend.EFFICIENT_ATTENTION, backends.can_use_efficient_attention),
    }
    for name, (backend, check) in able.items():
        if check(parameters):
            yield Tactic(f"sdpa-{name}", partial(run, backend))
    yield Tactic("torch", partial(run, None))
    if 4 * q.shape[0] * heads * q.shape[1] * k.shape[1] <= SCORES_BYTES:
        yield Tactic("sdpa-math", partial(run, SDPBackend.MATH))


# --- few keys ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cross:
    """How kernels/cross_attention.cu is cut."""

    warps: int
    """a block"""
    tiles: int
    """of 16 query rows that a warp holds at once"""
    blocks: int
    """that share a multiprocessor"""

    def __str__(self) -> str:
        return f"cross<warps={self.warps},tiles={self.tiles},blocks={self.blocks}>"

    def defines(self, dtype: torch.dtype, head_dim: int, keys: int) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "KEYS": _padded(keys),
            "WARPS": self.warps,
            "TILES": self.tiles,
            "MIN_BLOCKS": self.blocks,
        }

    def shared(self, head_dim: int, keys: int) -> int:
        """bytes: keys without padding, rows of values an odd number of 16-byte chunks long"""
        return _padded(keys) * 2 * (head_dim + 8 * (head_dim // 8 | 1))

    def blocks_a_head(self, device: Device, heads: int, queries: int, shared: int) -> int:
        """The number that ends first: a wave of blocks lasts as long as a warp's tiles, and 1.5 tiles to load."""
        tiles = -(-queries // (16 * self.tiles))
        at_once = device.sms * max(1, min(self.blocks, device.shared_per_block // shared))

        def waves_time(blocks: int) -> float:
            waves = -(-blocks * heads // at_once)
            return waves * (self.tiles * -(-tiles // (blocks * self.warps)) + 1.5)

        return min(range(1, -(-tiles // self.warps) + 1), key=waves_time)


def _padded(keys: int) -> int:
    return -(-keys // 16) * 16


def cross_parameters(head_dim: int, keys: int, queries: int) -> list[Cross]:
    """The heuristic's choice first. What limits is registers: scores of a row against all keys stay in them."""
    if queries <= 1024:
        few = [Cross(4, 1, 2), Cross(2, 1, 2), Cross(8, 1, 1)]
        return few[:2] if head_dim > 80 or keys > 160 else few
    if head_dim <= 80 and keys <= 80:
        return [Cross(8, 1, 2), Cross(4, 1, 3), Cross(8, 2, 1), Cross(4, 1, 4)]
    return [Cross(4, 1, 2), Cross(8, 1, 1)]


def _cross(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Iterator[Tactic]:
    head_dim, keys = q.shape[-1] // heads, k.shape[1]
    if device.capability < (8, 0) or keys > CROSS_KEYS or not _fits(q, k, v, head_dim):
        return
    for parameters in cross_parameters(head_dim, keys, q.shape[1]):
        if parameters.shared(head_dim, keys) <= device.shared_per_block:
            run = partial(_run_cross, device, parameters, q, k, v, heads, scale)
            yield Tactic(str(parameters), run, (("cross_attention.cu", parameters.defines(q.dtype, head_dim, keys)),))


def _run_cross(device: Device, parameters: Cross, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    batch, queries, width = q.shape
    head_dim, keys = width // heads, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = kernel("cross_attention.cu", "cross_attention", parameters.defines(q.dtype, head_dim, keys))
    shared = parameters.shared(head_dim, keys)
    run(
        (parameters.blocks_a_head(device, batch * heads, queries, shared), heads, batch),
        32 * parameters.warps,
        (q, k, v, out, queries, keys, *_strides(q, k, v), scale * math.log2(math.e)),
        shared=shared,
        pdl=device.capability >= (9, 0),
    )
    return out


def _fits(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> bool:
    """Whether our kernels can read these: 16-byte pieces everywhere."""
    return (
        q.dtype in ELEMENTS
        and head_dim in HEAD_DIMS
        and all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (q, k, v))
        and all(x.stride(i) % 8 == 0 for x in (q, k, v) for i in (0, 1))
        and q.numel() > 0
        and k.numel() > 0
    )


# --- few keys, sm_90 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossSm90:
    """How kernels/cross_attention_sm90.cu is cut."""

    keys: int
    """in shared memory, of which the last may be none"""
    stages: int
    """tiles of 64 query rows under way"""
    blocks: int
    """that share a multiprocessor"""

    def __str__(self) -> str:
        return f"cross-wgmma<keys={self.keys},stages={self.stages},blocks={self.blocks}>"

    def defines(self, dtype: torch.dtype, head_dim: int) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "KEYS": self.keys,
            "STAGES": self.stages,
            "MIN_BLOCKS": self.blocks,
            **spin_limit(),
        }

    def shared(self, head_dim: int) -> int:
        """bytes: rows are stored 64 columns wide; 1024 to align them, 64 for barriers"""
        return -(-head_dim // 64) * 128 * (2 * self.keys + 64 * self.stages) + 1024 + 64

    def blocks_a_head(self, device: Device, heads: int, queries: int) -> int:
        """The number that ends first: a wave of blocks lasts as long as a block's tiles, and 1.5 to begin and end."""
        tiles = math.ceil(queries / 64)

        def time(each: int) -> float:
            waves = math.ceil(math.ceil(tiles / each) * heads / (device.sms * self.blocks))
            return waves * (each + 1.5)

        return math.ceil(tiles / min(range(1, tiles + 1), key=time))


_WIDTHS = (32, 64, 80, 96, 128, 160, 192, 224, 240, 256)  # of a product, in keys


def cross_sm90_parameters(device: Device, head_dim: int, keys: int) -> list[CrossSm90]:
    """The heuristic's choice first: as many blocks as registers and shared memory allow."""
    width = next(n for n in _WIDTHS if n >= keys)
    registers = 8 * math.ceil(max(24 + 0.6 * width, 26 + head_dim / 2 + width / 4) / 8)
    found = []
    for stages in (2, 1, 3):
        shared = CrossSm90(width, stages, 1).shared(head_dim)
        if shared <= device.shared_per_block:
            at_once = min(65536 // (128 * registers), (device.shared_per_block + 1024) // (shared + 1024))
            found.append(CrossSm90(width, stages, at_once))
    return found


def _cross_sm90(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Iterator[Tactic]:
    if k.shape[1] > CROSS_KEYS or not _fits_copies(device, q, k, v, heads):
        return
    head_dim = q.shape[-1] // heads
    for parameters in cross_sm90_parameters(device, head_dim, k.shape[1]):
        run = partial(_run_cross_sm90, device, parameters, q, k, v, heads, scale)
        yield Tactic(str(parameters), run, (("cross_attention_sm90.cu", parameters.defines(q.dtype, head_dim)),))


def _run_cross_sm90(
    device: Device, parameters: CrossSm90, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float
) -> Tensor:
    batch, queries, width = q.shape
    head_dim, keys = width // heads, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = kernel("cross_attention_sm90.cu", "cross_attention", parameters.defines(q.dtype, head_dim))
    maps = [_map(x, heads, rows) for x, rows in ((q, 64), (k, parameters.keys), (v, parameters.keys), (out, 64))]
    run(
        (heads, parameters.blocks_a_head(device, batch * heads, queries), batch),
        128,
        (*maps, queries, keys, scale * math.log2(math.e)),
        shared=parameters.shared(head_dim),
        pdl=True,
    )
    return out


def _fits_copies(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int) -> bool:
    """Whether this device has the copy engine and the products of sm_90a, and these can be read by them."""
    return (
        device.capability[0] == 9
        and _fits(q, k, v, q.shape[-1] // heads)
        and min(x.stride(i) for x in (q, k, v) for i in (0, 1)) >= 8
    )


# --- many keys, sm_90 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlashSm90:
    """How kernels/flash_attention_sm90.cu is cut."""

    warpgroups: int
    """that multiply; each has 64 query rows"""
    keys: int
    """a tile"""
    stages: int
    """tiles of keys, and of values, under way"""
    turns: bool = True
    """warpgroups issue their products in turn, so that one multiplies while another is at its exponentials"""
    polynomial: int = 0
    """of eight exponentials, how many the multipliers compute instead of the special function unit"""
    split: bool = False
    """what does not fill a last wave of blocks is cut finer, and its keys are shared by the warpgroups"""

    def __str__(self) -> str:
        return (
            f"flash-wgmma<warpgroups={self.warpgroups},keys={self.keys},stages={self.stages},turns={int(self.turns)},"
            f"polynomial={self.polynomial}{',split=1' if self.split else ''}>"
        )

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def defines(self, dtype: torch.dtype, head_dim: int) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "WARPGROUPS": self.warpgroups,
            "KEYS": self.keys,
            "STAGES": self.stages,
            "QUERY_STAGES": self.query_stages(head_dim),
            "TURNS": int(self.turns and self.warpgroups > 1),
            "POLYNOMIAL": self.polynomial,
            "SPLIT": int(self.split),
            **spin_limit(),
        }

    def query_stages(self, head_dim: int) -> int:
        return 2 if head_dim <= 64 else 1

    def shared(self, head_dim: int) -> int:
        """bytes: rows are stored 64 columns wide; 1024 to align them, 512 for barriers; what is summed apart"""
        row = -(-head_dim // 64) * 128
        merge = (self.warpgroups - 1) * 512 * (head_dim // 2 + 4) if self.split else 0
        return row * (self.query_stages(head_dim) * self.rows + 2 * self.stages * self.keys) + 1024 + 512 + merge


def flash_sm90_parameters(device: Device, head_dim: int, heads: int, queries: int, keys: int) -> list[FlashSm90]:
    """The heuristic's choice first: blocks of two or three warpgroups, whichever end first. heads: of all images."""
    if head_dim == 160:
        return [FlashSm90(2, 96, 2), FlashSm90(1, 64, 2)]
    if head_dim == 80:
        return [FlashSm90(2, 128, 2), FlashSm90(3, 96, 2)]
    if queries <= 512:
        return [FlashSm90(2, 128, 3), FlashSm90(1, 128, 3)]
    found = [FlashSm90(2, 192, 2), FlashSm90(3, 128, 3)]

    if keys > 2 * 128:
        found.append(FlashSm90(3, 128, 4, split=True))

    def time(parameters: FlashSm90) -> float:
        pieces = -(-queries // parameters.rows) * heads
        if parameters.split:  # what is cut finer runs at less than full speed
            left = -(-pieces % device.sms * parameters.warpgroups // device.sms)
            return pieces // device.sms * parameters.warpgroups + 1.2 * left
        return -(-pieces // device.sms) * parameters.warpgroups

    return sorted(found, key=time)


def _flash_sm90(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Iterator[Tactic]:
    if not _fits_copies(device, q, k, v, heads):
        return
    head_dim = q.shape[-1] // heads
    for parameters in flash_sm90_parameters(device, head_dim, q.shape[0] * heads, q.shape[1], k.shape[1]):
        if parameters.shared(head_dim) <= device.shared_per_block:
            run = partial(_run_flash_sm90, device, parameters, q, k, v, heads, scale)
            yield Tactic(str(parameters), run, (("flash_attention_sm90.cu", parameters.defines(q.dtype, head_dim)),))


def _run_flash_sm90(
    device: Device, parameters: FlashSm90, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float
) -> Tensor:
    batch, queries, width = q.shape
    head_dim, keys = width // heads, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = kernel("flash_attention_sm90.cu", "flash_attention", parameters.defines(q.dtype, head_dim))
    maps = [_map(x, heads, rows) for x, rows in ((q, parameters.rows), (k, parameters.keys), (v, parameters.keys))]
    pieces = -(-queries // parameters.rows) * heads * batch
    run(
        (min(pieces * (parameters.warpgroups if parameters.split else 1), device.sms),),
        128 * (parameters.warpgroups + 1),
        (*maps, out, queries, keys, heads, batch, scale * math.log2(math.e)),
        shared=parameters.shared(head_dim),
        pdl=True,
    )
    return out


def _map(x: Tensor, heads: int, rows: int) -> TensorMap:
    """Boxes of ``rows`` rows of one head, 64 columns wide: what a narrower head has not is zero."""
    batch, length, width = x.shape
    head_dim = width // heads
    strides = (2 * head_dim, 2 * x.stride(1), 2 * (x.stride(0) if batch > 1 else length * x.stride(1)))
    return TensorMap.tiled(x, (head_dim, heads, length, batch), strides, (64, 1, rows, 1))


# --- many keys, sm_80 and later ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlashSm80:
    """How kernels/flash_attention_sm80.cu is cut."""

    warps: int
    """a block"""
    tiles: int
    """of 16 query rows that a warp holds at once"""
    keys: int
    """a tile"""
    blocks: int
    """that share a multiprocessor"""

    def __str__(self) -> str:
        return f"flash-mma<warps={self.warps},tiles={self.tiles},keys={self.keys},blocks={self.blocks}>"

    def defines(self, dtype: torch.dtype, head_dim: int) -> dict[str, object]:
        return {
            "SDACCEL_T": ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "KEYS": self.keys,
            "WARPS": self.warps,
            "TILES": self.tiles,
            "MIN_BLOCKS": self.blocks,
        }

    def shared(self, head_dim: int) -> int:
        """bytes: two tiles of keys and of values"""
        return 4 * self.keys * (head_dim + 8 * (head_dim // 8 | 1))


def flash_sm80_parameters(head_dim: int) -> list[FlashSm80]:
    """The heuristic's choice first."""
    if head_dim <= 64:
        return [FlashSm80(4, 2, 64, 2), FlashSm80(4, 1, 64, 3)]
    return [FlashSm80(4, 1, 64, 2)]


def _flash_sm80(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Iterator[Tactic]:
    head_dim = q.shape[-1] // heads
    if device.capability < (8, 0) or not _fits(q, k, v, head_dim):
        return
    for parameters in flash_sm80_parameters(head_dim):
        if parameters.shared(head_dim) <= device.shared_per_block:
            run = partial(_run_flash_sm80, device, parameters, q, k, v, heads, scale)
            yield Tactic(str(parameters), run, (("flash_attention_sm80.cu", parameters.defines(q.dtype, head_dim)),))


def _run_flash_sm80(
    device: Device, parameters: FlashSm80, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float
) -> Tensor:
    batch, queries, width = q.shape
    head_dim = width // heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = kernel("flash_attention_sm80.cu", "flash_attention_sm80", parameters.defines(q.dtype, head_dim))
    run(
        (-(-queries // (16 * parameters.tiles * parameters.warps)), heads, batch),
        32 * parameters.warps,
        (q, k, v, out, queries, k.shape[1], *_strides(q, k, v), scale * math.log2(math.e)),
        shared=parameters.shared(head_dim),
        pdl=device.capability >= (9, 0),
    )
    return out


def _strides(*tensors: Tensor) -> list[int | Long]:
    return [stride for x in tensors for stride in (x.stride(1), Long(x.stride(0)))]


# --- one wide head ----------------------------------------------------------------------------------------------------


def _gemm(device: Device, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Iterator[Tactic]:
    if heads > 1 or not q.is_cuda or q.dtype not in ELEMENTS:
        return
    for scores, limit in itertools.product((torch.float32, q.dtype), (SCORES_BYTES, SCORES_BYTES // 8)):
        rows = _rows_at_a_time(q.shape[1], scores.itemsize * q.shape[0] * k.shape[1], limit)
        if limit == SCORES_BYTES or rows < q.shape[1]:
            name = f"gemm<scores={str(scores).removeprefix('torch.')},megabytes={limit >> 20}>"
            yield Tactic(name, partial(_run_gemm, device, q, k, v, scale, scores, rows))


def _rows_at_a_time(queries: int, row_bytes: int, limit: int) -> int:
    """Parts of nearly the same size, in whole tiles of 128 rows, whose scores take about ``limit`` bytes at most."""
    parts = -(-queries * row_bytes // limit)
    return min(queries, -(-queries // (parts * 128)) * 128)


def _run_gemm(device: Device, q: Tensor, k: Tensor, v: Tensor, scale: float, scores: torch.dtype, rows: int) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    nothing = torch.empty(1, 1, 1, dtype=q.dtype, device=q.device)
    for start in range(0, q.shape[1], rows):
        part = q[:, start : start + rows]
        if scores == q.dtype:  # scaled before it is rounded: large scores stay in range
            raw, left = torch.baddbmm(nothing, part, k.mT, beta=0, alpha=scale), 1.0
        else:
            raw, left = torch.bmm(part, k.mT, out_dtype=scores), scale
        weights = softmax.tactics(device, raw, scale=left, dtype=q.dtype)[0].run()
        torch.bmm(weights, v, out=out[:, start : start + rows])
    return out


# --- for the tests that compile everything ----------------------------------------------------------------------------

VARIANTS: list[tuple[object, ...]] = [
    *(
        ("cross_attention.cu", "cross_attention", how.defines(dtype, head_dim, keys), (8, 0))
        for dtype, head_dim, keys, how in (
            (torch.float16, 64, 77, Cross(8, 1, 2)),
            (torch.float16, 40, 77, Cross(8, 2, 1)),
            (torch.bfloat16, 160, 231, Cross(4, 1, 2)),
        )
    ),
    *(
        ("cross_attention_sm90.cu", "cross_attention", how.defines(dtype, head_dim), (9, 0), "90a")
        for dtype, head_dim, how in (
            (torch.float16, 64, CrossSm90(80, 2, 5)),
            (torch.bfloat16, 40, CrossSm90(80, 1, 6)),
            (torch.float16, 160, CrossSm90(240, 1, 1)),
        )
    ),
    *(
        ("flash_attention_sm80.cu", "flash_attention_sm80", how.defines(dtype, head_dim), (8, 0))
        for dtype, head_dim, how in (
            (torch.float16, 64, FlashSm80(4, 2, 64, 2)),
            (torch.bfloat16, 160, FlashSm80(4, 1, 64, 2)),
        )
    ),
    *(
        ("flash_attention_sm90.cu", "flash_attention", how.defines(dtype, head_dim), (9, 0), "90a")
        for dtype, head_dim, how in (
            (torch.float16, 40, FlashSm90(2, 192, 2)),
            (torch.bfloat16, 64, FlashSm90(3, 128, 2, polynomial=1)),
            (torch.float16, 64, FlashSm90(3, 128, 4, split=True)),
            (torch.float16, 80, FlashSm90(2, 128, 2)),
            (torch.bfloat16, 160, FlashSm90(2, 96, 2)),
        )
    ),
]
