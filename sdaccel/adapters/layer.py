"""One layer of an adapter: its parts on disk, what they must look like together, and its weight delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sdaccel.adapters import deltas
from sdaccel.adapters.deltas import Parts
from sdaccel.errors import ModelError
from sdaccel.models.tensors import TensorRef

FORMATS = {
    "lora": "LoRA",
    "locon": "LoRA with a core (LoCon, tucker)",
    "loha": "LoHa",
    "lokr": "LoKr",
    "ia3": "(IA)³",
    "full": "full difference",
    "norm": "norm difference",
    "glora": "GLoRA",
    "oft": "OFT",
    "boft": "BOFT",
    "peft-oft": "OFT on inputs",
    "peft-boft": "BOFT on inputs",
}
_NEEDS: dict[str, tuple[set[str], set[str]]] = {  # required and optional parts
    "lora": ({"down", "up"}, {"up_bias"}),
    "locon": ({"down", "up", "mid"}, set()),
    "loha": ({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}, {"hada_t1", "hada_t2"}),
    "lokr": (set(), {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}),
    "ia3": (set(), {"weight", "on_input", "ia3_l"}),
    "full": ({"diff"}, set()),
    "norm": (set(), {"w_norm", "b_norm"}),
    "glora": ({"a1", "a2", "b1", "b2"}, {"bm"}),
    "oft": ({"oft_blocks"}, {"rescale"}),
    "boft": ({"oft_blocks"}, {"rescale"}),
    "peft-oft": ({"oft_R"}, set()),
    "peft-boft": ({"boft_R", "boft_s"}, set()),
}
_RANKS = {"lora": ("down", 0), "locon": ("down", 0), "loha": ("hada_w1_b", 0)}
_EVERYWHERE = {"alpha", "diff_b"}
_DECOMPOSED = {"dora_scale", "magnitude"}


def kind_of(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The format of a layer that has these parts. None: none that is known."""
    if "down" in shapes or "up" in shapes:
        return "locon" if "mid" in shapes else "lora"
    if any(part.startswith("hada_") for part in shapes):
        return "loha"
    if any(part.startswith("lokr_") for part in shapes):
        return "lokr"
    if "oft_blocks" in shapes:
        return "oft" if len(shapes["oft_blocks"]) == 3 else "boft"
    if "oft_R" in shapes:
        return "peft-oft"
    if "boft_R" in shapes or "boft_s" in shapes:
        return "peft-boft"
    if "a1" in shapes:
        return "glora"
    if "ia3_l" in shapes or "on_input" in shapes:
        return "ia3"
    if "w_norm" in shapes or "b_norm" in shapes:
        return "norm"
    return "full" if "diff" in shapes or "diff_b" in shapes else None


@dataclass(frozen=True, eq=False)
class Layer:
    """What a file says of one module."""

    name: str
    """As the file writes it."""
    component: str
    """"unet", "text_encoder", "text_encoder_2", "transformer"; "" when the file does not say."""
    module: str
    """Without the component's prefix, in the file's style."""
    kind: str
    """A key of FORMATS."""
    parts: Mapping[str, TensorRef]
    keys: tuple[str, ...]
    rank: int | None
    alpha: float | None
    """LoRA and the like: γ = alpha / rank, 1 where the file has none. OFT: the bound on the norm."""
    rs: bool = False
    """Rank-stabilized: γ = alpha / √rank (arXiv:2312.03732)."""
    peft: bool = False
    """How strengths other than 1 act on DoRA: as in PEFT (and diffusers), else as in A1111, Forge and ComfyUI."""
    terms: int | None = None
    """OFT of PEFT: how many terms of the Neumann series stand for the inverse; None: the inverse itself."""

    @property
    def decomposed(self) -> bool:
        """DoRA."""
        return not _DECOMPOSED.isdisjoint(self.parts)

    @property
    def format(self) -> str:
        return FORMATS[self.kind] + (" with DoRA" if self.decomposed else "")

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.parts.values())

    @property
    def gamma(self) -> float:
        if self.alpha is None or not self.rank:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)

    @property
    def changes_weight(self) -> bool:
        return bool(set(self.parts) - {"diff_b", "b_norm", "up_bias", "alpha"})

    @property
    def changes_bias(self) -> bool:
        return not {"diff_b", "b_norm", "up_bias"}.isdisjoint(self.parts)

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Rows (outputs) and columns (inputs × kernel) of the weights it fits; None: any, or said by the weight."""
        return sizes({part: ref.shape for part, ref in self.parts.items()}, self.kind)

    def added(self, value: Tensor, weight: Tensor, scale: float, parts: Parts | None = None) -> Tensor:
        """``value`` plus ΔW of the base ``weight``; see `delta`. In float32; but a plain LoRA in half precision like
        ``value`` is added by one product on the GPU, which rounds once."""
        if self.kind != "lora" or self.decomposed or parts is None or not self.changes_weight:
            return value.float() + self.delta(weight, scale, parts)
        up, down = (parts[name].flatten(1) for name in ("up", "down"))
        half = value.is_cuda and up.dtype == down.dtype == value.dtype
        if not half:
            value, up, down = value.float(), up.float(), down.float()
        with torch.no_grad():
            found = torch.addmm(value.reshape(up.shape[0], -1), up, down, alpha=scale * self.gamma)
        return found.reshape(value.shape)

    def delta(self, weight: Tensor, scale: float, parts: Parts | None = None) -> Tensor:
        """ΔW at strength ``scale``, float32, in the shape of ``weight`` (out × in, or out × in × kernel) on its device.

        LoRA, LoHa, LoKr and full differences read nothing of ``weight`` but its shape. A linear layer's parts fit a
        1×1 convolution and the reverse. ``parts``: what the adapter's `parts_on` has given. Formulas:
        sdaccel.adapters.deltas. Raises ModelError.
        """
        if not self.changes_weight:
            raise ModelError(f"{self.name}: it has nothing for a weight, only for a bias.")
        self.check(weight.shape, self.name)
        parts = self.read(weight.device) if parts is None else {name: part.float() for name, part in parts.items()}
        with torch.no_grad():
            base = weight.detach().float()
            try:
                found = self._delta(parts, base, scale).reshape(weight.shape)
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError, ValueError) as error:
                shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
                raise ModelError(
                    f"{self.name}: its {self.format} ({shapes}) does not fit a weight {tuple(weight.shape)}."
                ) from error
        return found

    def _delta(self, parts: Mapping[str, Tensor], base: Tensor, scale: float) -> Tensor:
        alpha = self.alpha or 0.0
        if self.kind == "ia3":
            return scale * deltas.ia3(parts, base)
        if self.kind == "glora":
            return scale * deltas.glora(parts, base, self.gamma)
        if self.kind == "oft":
            return deltas.oft(parts, base, alpha, scale)
        if self.kind == "boft":
            return deltas.boft(parts, base, alpha, scale)
        if self.kind == "peft-oft":
            return deltas.oft_of_peft(parts["oft_R"], base, scale, self.terms)
        if self.kind == "peft-boft":
            return deltas.boft_of_peft(parts["boft_R"], parts["boft_s"], base, scale)
        if self.kind in ("full", "norm"):
            plain = parts["diff" if self.kind == "full" else "w_norm"]
        else:
            plain = {"loha": deltas.loha, "lokr": deltas.lokr}.get(self.kind, deltas.lora)(parts, self.gamma)
        plain = plain.reshape(base.shape)
        if self.decomposed:
            magnitude = parts["magnitude" if "magnitude" in parts else "dora_scale"]
            return deltas.dora(plain, magnitude, base, scale, self.peft)
        return scale * plain

    def delta_bias(self, bias: Tensor, scale: float, parts: Parts | None = None) -> Tensor:
        """What it adds to the bias, float32, out. ``parts``: as of `delta`. Raises ModelError."""
        part = next(part for part in ("diff_b", "b_norm", "up_bias") if part in self.parts)
        ref = self.parts[part]
        if ref.count != bias.numel():
            raise ModelError(f"{ref.name}: its shape {ref.shape} does not fit a bias {tuple(bias.shape)}.")
        found = (self.read(bias.device) if parts is None else parts)[part].float().reshape(bias.shape)
        return scale * (self.gamma if part == "up_bias" else 1.0) * found

    def check(self, shape: tuple[int, ...], where: str) -> None:
        """Raises ModelError, naming both shapes, where a weight of ``shape`` does not fit."""
        rows, columns = self.size
        found = (shape[0] if shape else 1, prod(shape[1:]))
        if self.kind in ("ia3", "glora"):  # of these the kernel is no part
            found = (found[0], shape[1] if len(shape) > 1 else 1)
        if self.kind == "ia3":
            rows, columns = self._vector_size(found)
        if rows in (None, found[0]) and columns in (None, found[1]):
            return
        mine = " × ".join("any" if size is None else str(size) for size in (rows, columns))
        key = next((key for key in self.keys if not key.endswith("alpha")), self.name)
        raise ModelError(f"{key}: its {self.format} is for weights {mine}, but {where} is {tuple(shape)}.")

    def _vector_size(self, found: tuple[int, int]) -> tuple[int | None, int | None]:
        ref = self.parts.get("ia3_l")
        if ref is None:
            count = self.parts["weight"].count
            return (None, count) if self.parts["on_input"].read().item() else (count, None)
        on_input = ref.shape[0] == 1
        if len(ref.shape) == 4:
            on_input = ref.count == found[1] != found[0]
        return (None, ref.count) if on_input else (ref.count, None)

    def read(self, device: torch.device) -> dict[str, Tensor]:
        """All parts on ``device``, float32."""
        return {part: ref.read().to(device).float() for part, ref in self.parts.items()}


def fault(shapes: Mapping[str, tuple[int, ...]], kind: str) -> str | None:
    """Why these parts are no layer of this kind; None when they are."""
    needed, optional = _NEEDS[kind]
    if kind == "full" and "diff" not in shapes:
        needed = set()
    missing = needed - set(shapes)
    extra = (
        set(shapes)
        - needed
        - optional
        - _EVERYWHERE
        - (_DECOMPOSED if kind in ("lora", "locon", "loha", "lokr") else set())
    )
    if missing:
        return f"{FORMATS[kind]} without {', '.join(sorted(missing))}"
    if extra:
        return f"{FORMATS[kind]} with {', '.join(sorted(extra))}, which has no place in it"
    if kind == "ia3" and "ia3_l" not in shapes and {"weight", "on_input"} - set(shapes):
        return "(IA)³ without its weight"
    if kind == "loha" and ("hada_t1" in shapes) != ("hada_t2" in shapes):
        return "LoHa with one core of two"
    if kind == "lokr":
        for number in "12":
            whole, pair = f"lokr_w{number}", {f"lokr_w{number}_a", f"lokr_w{number}_b"}
            if (whole in shapes) == bool(pair & set(shapes)) or 0 < len(pair & set(shapes)) < 2:
                return f"LoKr with neither w{number} nor both of its factors, or with all"
    if any(0 in shape for shape in shapes.values()):
        return "a part without values"
    try:
        sizes(shapes, kind)
    except (IndexError, KeyError, ValueError):
        listed = ", ".join(f"{part} {shape}" for part, shape in sorted(shapes.items()))
        return f"shapes that do not belong together: {listed}"
    return None


def rank_of(shapes: Mapping[str, tuple[int, ...]], kind: str) -> int | None:
    if kind == "lokr":
        part = next((part for part in ("lokr_w1_b", "lokr_w2_b") if part in shapes), None)
        return shapes[part][0] if part else None
    if kind == "glora":
        return min(shapes["a1"][:2])
    if kind in _RANKS:
        part, axis = _RANKS[kind]
        return shapes[part][axis]
    return None


def sizes(shapes: Mapping[str, tuple[int, ...]], kind: str) -> tuple[int | None, int | None]:
    """Rows and columns of the weight. Raises ValueError, IndexError where parts contradict each other."""
    if kind in ("lora", "locon"):
        up, down = shapes["up"], shapes["down"]
        kernel = 1
        if kind == "locon":
            mid = shapes["mid"]
            _same(mid[:2], (up[1], down[0]))
            kernel = prod(mid[2:])
        _same((up[1], *up[2:]), (down[0], *[1] * len(up[2:])) if kind == "lora" else (up[1], *[1] * len(up[2:])))
        return up[0], prod(down[1:]) * kernel
    if kind == "loha":
        cored = "hada_t1" in shapes
        found = []
        for number in "12":
            first, second = shapes[f"hada_w{number}_a"], shapes[f"hada_w{number}_b"]
            core = shapes.get(f"hada_t{number}", ())
            if cored:
                _same(core[:2], (first[0], second[0]))
            else:
                _same(prod(first[1:]), second[0])
            found.append((first[1] if cored else first[0], prod(second[1:]) * prod(core[2:])))
        _same(*found)
        return found[0]
    if kind == "lokr":
        left = shapes.get("lokr_w1") or _product(shapes["lokr_w1_a"], shapes["lokr_w1_b"])
        if "lokr_t2" in shapes:
            core, first, second = shapes["lokr_t2"], shapes["lokr_w2_a"], shapes["lokr_w2_b"]
            _same(core[:2], (first[0], second[0]))
            right = (first[1], second[1], *core[2:])
        else:
            right = shapes.get("lokr_w2") or _product(shapes["lokr_w2_a"], shapes["lokr_w2_b"])
        _same(len(left), 2)
        return left[0] * right[0], left[1] * prod(right[1:])
    if kind in ("oft", "boft"):
        blocks = shapes["oft_blocks"]
        _same((len(blocks), blocks[-1]), ({"oft": 3, "boft": 4}[kind], blocks[-2]))
        if kind == "boft":
            _same((blocks[-1] % 2, blocks[-3] * blocks[-1] % 2 ** (blocks[0] - 1) if blocks[0] < 64 else 1), (0, 0))
        return blocks[-3] * blocks[-2], None
    if kind == "peft-oft":
        count, values = shapes["oft_R"]
        side = deltas.side(values)
        _same(side * (side - 1) // 2, values)
        return None, count * side if count > 1 else None
    if kind == "peft-boft":
        factors, count, side, other = shapes["boft_R"]
        _same((factors, side), (1, other))  # more than one come with a permutation that is not in the file
        return prod(shapes["boft_s"]), count * side
    if kind == "glora":
        (x, y), (p, q) = shapes["a1"][:2], shapes["a2"][:2]
        _same((x, y), (q, p))
        turned = shapes["b1"][0] == min(x, y) != shapes["b2"][0]
        into = x if not turned else y
        return shapes["b2" if turned else "b1"][0], into
    if kind == "ia3":
        if "ia3_l" in shapes:
            return None, None
        vector = prod(shapes["weight"])
        return None if vector else 0, None
    if kind == "full" and "diff" in shapes:
        return shapes["diff"][0], prod(shapes["diff"][1:])
    if kind == "norm" and "w_norm" in shapes:
        return shapes["w_norm"][0], prod(shapes["w_norm"][1:])
    return None, None


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    _same((len(left), left[1]), (2, right[0]))
    return (left[0], *right[1:])


def _same(found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{found} is not {expected}")
