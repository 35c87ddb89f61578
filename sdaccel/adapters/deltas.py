"""What an adapter's layer adds to a weight, in float32.

Every function takes a layer's parts as float32 tensors and the base weight W, out × in (× kernel), and gives ΔW as
a matrix or in W's shape. ``gamma`` is alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]


def lora(parts: Parts, gamma: float) -> Tensor:
    """ΔW = γ·B·A (LoRA, arXiv:2106.09685); with a core, ΔW = γ·M ×₁ B ×₂ A (LoCon's tucker form, arXiv:2309.14859)."""
    up, down = _matrix(parts["up"]), parts["down"]
    if "mid" in parts:
        return gamma * torch.einsum("mn...,im,nj->ij...", parts["mid"], up, _matrix(down))
    return gamma * (up @ _matrix(down))


def loha(parts: Parts, gamma: float) -> Tensor:
    """ΔW = γ·(B₁A₁) ⊙ (B₂A₂) (FedPara, arXiv:2108.06098), each half from its core where there is one."""
    halves = []
    for number in "12":
        first, second = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"]
        core = parts.get(f"hada_t{number}")
        halves.append(first.flatten(1) @ second.flatten(1) if core is None else _from_core(core, first, second))
    return gamma * halves[0] * halves[1]


def lokr(parts: Parts, gamma: float) -> Tensor:
    """ΔW = γ·W₁ ⊗ W₂ (arXiv:2309.14859, 3.3); γ is 1 where neither factor is decomposed."""
    left = parts.get("lokr_w1")
    if left is None:
        left = parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    right = parts.get("lokr_w2")
    if right is None and "lokr_t2" in parts:
        right = _from_core(parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
    elif right is None:
        second = parts["lokr_w2_b"]
        right = (parts["lokr_w2_a"] @ second.flatten(1)).reshape(-1, *second.shape[1:])
    return gamma * torch.kron(left.reshape(*left.shape, *[1] * (right.dim() - 2)), right.contiguous())


def ia3(parts: Parts, weight: Tensor) -> Tensor:
    """ΔW = W·v over inputs or outputs ((IA)³, arXiv:2205.05638); LyCORIS stores v, PEFT stores l = 1 + v."""
    if "ia3_l" in parts:
        vector, on_input = parts["ia3_l"] - 1, parts["ia3_l"].shape[0] == 1
        if parts["ia3_l"].dim() == 4:  # a convolution's, (1, n, 1, 1): inputs if it fits them alone
            on_input = vector.numel() == weight.shape[1] != weight.shape[0]
    else:
        vector, on_input = parts["weight"], bool(parts["on_input"].item())
    axis = 1 if on_input else 0
    return weight * vector.reshape([-1 if each == axis else 1 for each in range(weight.dim())])


def glora(parts: Parts, weight: Tensor, gamma: float) -> Tensor:
    """ΔW = γ·(W·A + B), A = a₁a₂, B = b₁b₂ (GLoRA, arXiv:2306.07967); LyCORIS before 2 has the two in turned order."""
    a1, a2, b1, b2 = (_matrix(parts[name]) for name in ("a1", "a2", "b1", "b2"))
    if a1.shape[0] != weight.shape[1]:
        a1, a2, b1, b2 = a2, a1, b2, b1
    turned = torch.einsum("oi...,ij->oj...", weight, a1 @ a2)
    if "bm" in parts:
        return gamma * (turned + torch.einsum("mn...,im,nj->ij...", parts["bm"], b1, b2).reshape(weight.shape))
    return gamma * (turned + (b1 @ b2).reshape(weight.shape))


def oft(parts: Parts, weight: Tensor, constraint: float, scale: float) -> Tensor:
    """ΔW = r·s·(R − I)ᵀW + (r − 1)·W in blocks of outputs, R = (I + Q)(I − Q)⁻¹ (OFT, arXiv:2306.07280).

    ``constraint`` bounds the norm of Q, the blocks less their transposes, to constraint × outputs (COFT).
    """
    rotation = _cayley(parts["oft_blocks"], constraint * weight.shape[0])
    count, size = rotation.shape[:2]
    moved = rotation - torch.eye(size, device=rotation.device)
    delta = scale * torch.einsum("knm,kn...->km...", moved, weight.reshape(count, size, -1)).reshape(weight.shape)
    rescale = _rows(parts.get("rescale"), weight)
    return delta if rescale is None else rescale * delta + (rescale - 1) * weight


def boft(parts: Parts, weight: Tensor, constraint: float, scale: float) -> Tensor:
    """W' = r·Bₘ…B₁W with butterfly factors B (BOFT, arXiv:2311.06243), each moved from I towards R by ``scale``."""
    rotations = _cayley(parts["oft_blocks"], constraint * weight.shape[0])
    size = rotations.shape[-1]
    identity = torch.eye(size, device=rotations.device)
    turned = weight.flatten(1)
    for level, rotation in enumerate(rotations):
        stride = 2**level * size // 2
        order = torch.arange(turned.shape[0], device=turned.device).reshape(-1, 2, stride).transpose(1, 2).reshape(-1)
        blocks = turned[order].reshape(-1, size, turned.shape[1])
        mixed = (identity + scale * (rotation - identity)) @ blocks
        turned = torch.empty_like(turned).index_copy_(0, order, mixed.reshape(turned.shape))
    rescale = _rows(parts.get("rescale"), turned)
    return ((turned if rescale is None else rescale * turned) - weight.flatten(1)).reshape(weight.shape)


def oft_of_peft(vectors: Tensor, weight: Tensor, scale: float, terms: int | None) -> Tensor:
    """ΔW = s·W(R − I)ᵀ in blocks of inputs × kernel; Q's upper triangle is stored (arXiv:2506.19847).

    R = (I − Q)(I + Q)⁻¹ or, as PEFT has it, I + 2Q + 2Q² + … + Qⁿ⁻¹ with n ``terms``. One block serves all.
    """
    size = side(vectors.shape[1])
    skew = torch.zeros(vectors.shape[0], size, size, device=vectors.device)
    rows, columns = torch.triu_indices(size, size, 1, device=vectors.device)
    skew[:, rows, columns] = vectors
    skew = skew - skew.transpose(1, 2)
    identity = torch.eye(size, device=skew.device)
    if terms is None:
        moved = torch.linalg.solve(identity + skew, identity - skew, left=False) - identity
    else:
        moved, power = torch.zeros_like(skew), skew
        for term in range(1, terms):
            moved = moved + (1 if term == terms - 1 > 1 else 2) * power
            power = power @ skew
    blocks = weight.reshape(weight.shape[0], -1, size)
    return scale * torch.einsum("okm,knm->okn", blocks, moved.expand(blocks.shape[1], size, size)).reshape(weight.shape)


def boft_of_peft(blocks: Tensor, rescale: Tensor, weight: Tensor, scale: float) -> Tensor:
    """ΔW = s·(r·W·Rᵀ − W) in blocks of inputs × kernel, R = (I − Q)(I + Q)⁻¹, Q = (B − Bᵀ)/2 (arXiv:2311.06243)."""
    rotation = _cayley(-0.5 * blocks[0], 0.0)
    parts = weight.reshape(weight.shape[0], rotation.shape[0], -1)
    turned = torch.einsum("okm,knm->okn", parts, rotation).reshape(weight.shape[0], -1)
    return scale * (rescale.reshape(-1, 1) * turned - weight.flatten(1)).reshape(weight.shape)


def side(values: int) -> int:
    """Of a square matrix with so many values above its diagonal."""
    return (1 + isqrt(1 + 8 * values)) // 2


def dora(delta: Tensor, magnitude: Tensor, weight: Tensor, scale: float, peft: bool) -> Tensor:
    """W' = m·(W + ΔW)/‖W + ΔW‖, over rows or, in LyCORIS, columns (DoRA, arXiv:2402.09353).

    PEFT scales ΔW before the norm is taken; A1111, Forge and ComfyUI scale W' − W.
    """
    if peft:
        delta, scale = scale * delta, 1.0
    merged = weight + delta
    on_columns = not peft and magnitude.shape[0] == 1 and weight.shape[0] != 1
    axes = [axis for axis in range(weight.dim()) if axis != int(on_columns)]
    shape = [1] * weight.dim()
    shape[int(on_columns)] = -1
    norm = torch.linalg.vector_norm(merged, dim=axes, keepdim=True)
    factor = magnitude.reshape(shape) / norm.clamp_min(torch.finfo(torch.float32).eps)
    return scale * (merged * factor - weight)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], prod(tensor.shape[1:]))


def _from_core(core: Tensor, out: Tensor, into: Tensor) -> Tensor:
    return torch.einsum("ij...,ip,jr->pr...", core, out, into)


def _rows(rescale: Tensor | None, weight: Tensor) -> Tensor | None:
    return None if rescale is None else rescale.reshape(-1, *[1] * (weight.dim() - 1))


def _cayley(blocks: Tensor, limit: float) -> Tensor:
    skew = blocks - blocks.transpose(-1, -2)
    if limit > 0:
        skew = skew * min(1.0, limit / (float(torch.linalg.vector_norm(skew)) + 1e-8))
    identity = torch.eye(skew.shape[-1], device=skew.device)
    return torch.linalg.solve(identity - skew, identity + skew, left=False)
