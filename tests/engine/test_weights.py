import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from sdaccel.engine import weights
from sdaccel.engine.store import Store
from sdaccel.engine.weights import FILE, layout, publish_tensors, publish_weights, weights_key
from sdaccel.errors import Cancelled, EngineBroken, ModelError
from sdaccel.models.tensors import Component, TensorRef, read_header

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Ref:
    """A tensor of a checkpoint, as the store sees it."""

    tensor: torch.Tensor
    reads: list = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> torch.Tensor:
        self.reads.append(1)
        return self.tensor


@dataclass(frozen=True)
class Part:
    """A component: its content hash is that of the values, whatever their type."""

    tensors: dict[str, Ref]
    name: str = "unet"

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.sha256()
        for name, ref in sorted(self.tensors.items()):
            digest.update(f"{name} {ref.shape}".encode())
            digest.update(ref.tensor.detach().double().numpy().tobytes())
        return digest.hexdigest()


def part(tensors: dict[str, torch.Tensor]) -> Part:
    return Part({name: Ref(tensor) for name, tensor in tensors.items()})


def halves() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "mid.weight": torch.randn(6, 4, 3, 3).half(),
        "in.bias": torch.randn(7).half(),
        "scalar": torch.tensor(0.5).half(),
        "empty": torch.zeros(0, 3).half(),
        "extremes": torch.tensor([65504.0, -65504.0, 6e-8, -0.0, 0.0]).half(),
        "ключ": torch.randn(3, 2).half(),
    }


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_what_is_stored_is_what_torch_converts(store, precision):
    tensors = {**halves(), "position_ids": torch.arange(77)[None]}
    entry = publish_weights(store, part(tensors), precision)
    assert entry.key == weights_key(part(tensors).content_hash, precision)
    loaded = safetensors.torch.load_file(entry.file(FILE))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor if tensor.dtype == torch.int64 else tensor.to(weights.PRECISIONS[precision])
        assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected), name
    store.verify(entry)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_half_file_and_a_float_pipeline_give_the_same_bytes(tmp_path, precision):
    entries = []
    for index, change in enumerate((lambda t: t, lambda t: t.float(), lambda t: t.float().t().contiguous().t())):
        tensors = {name: change(t) if t.dim() == 2 or index < 2 else t for name, t in halves().items()}
        if index:
            tensors = dict(reversed(tensors.items()))
        entries.append(publish_weights(Store(tmp_path / str(index)), part(tensors), precision))
    for entry in entries[1:]:
        for path in entries[0].path.iterdir():
            assert (entry.path / path.name).read_bytes() == path.read_bytes()
        assert entry.key == entries[0].key


def test_float_to_half_keeps_what_half_can_say(store):
    tensors = {"w": torch.tensor([1.0, 2**-24, 65504.0, float("inf"), float("-inf"), float("nan")])}
    loaded = safetensors.torch.load_file(publish_weights(store, part(tensors), "fp16").file(FILE))
    assert torch.equal(loaded["w"][:5], tensors["w"][:5].half()) and loaded["w"][5].isnan()


@pytest.mark.parametrize("value", [65520.0, -1e6, 3e38])
def test_overflow_names_the_tensor_and_the_value(store, value):
    tensors = {"fine": torch.zeros(3), "up.3.weight": torch.tensor([[0.0, value], [float("inf"), 0.0]])}
    with pytest.raises(
        ModelError, match=rf"unet up\.3\.weight holds {value:g}.*fp16 \(65504\).*bf16 or fp32".replace("+", r"\+")
    ):
        publish_weights(store, part(tensors), "fp16")
    assert store.list("weights") == [] and list((store.root / "tmp").iterdir()) == []
    publish_weights(store, part(tensors), "bf16")


def test_a_bfloat16_checkpoint_beyond_half(store):
    with pytest.raises(ModelError, match="w holds 999424"):
        publish_weights(store, part({"w": torch.tensor([1e6]).bfloat16()}), "fp16")


def test_another_precision_is_refused(store):
    with pytest.raises(ModelError, match="'int8': fp32, fp16, bf16"):
        publish_weights(store, part(halves()), "int8")


def test_content_and_precision_are_in_the_key():
    keys = {weights_key(content * 64, precision) for content in "ab" for precision in weights.PRECISIONS}
    assert len(keys) == 6


def test_the_second_engine_converts_nothing(store):
    publish_weights(store, part(halves()), "fp32")
    again = part(halves())
    publish_weights(store, again, "fp32")
    assert all(not ref.reads for ref in again.tensors.values())
    publish_weights(store, again, "fp16")
    assert all(len(ref.reads) == 1 for ref in again.tensors.values())
    assert len(store.list("weights")) == 2


def test_the_layout_is_aligned_complete_and_without_gaps(store):
    tensors = {**halves(), "ids": torch.arange(3), "other_ids": torch.arange(2)}
    entry = publish_weights(store, part(tensors), "fp16")
    places = layout(entry)
    data = entry.file(FILE).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 64 == 0
    assert list(places)[:2] == ["ids", "other_ids"] and list(places)[2:] == sorted(halves())
    end = start
    for name, place in places.items():
        assert place.offset == end and place.offset % {"I64": 8, "F16": 2}[place.dtype] == 0
        end += place.nbytes
        read = torch.frombuffer(bytearray(data[place.offset : end]) or bytearray(2), dtype=weights.DTYPES[place.dtype])
        assert torch.equal(read[: tensors[name].numel()].view(place.shape), tensors[name])
    assert end == len(data) == entry.nbytes
    with safetensors.safe_open(entry.file(FILE), "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_any_shape_and_stride_in_pieces_of_any_size(store, monkeypatch, piece):
    monkeypatch.setattr(weights, "_PIECE", piece)
    base = torch.randn(4, 6, 5)
    tensors = {
        "plain": base,
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "strided": torch.randn(40)[::3],
        "sliced": base[:, 1:5, ::2],
        "one row": torch.randn(9, 1).t(),
        "expanded": torch.randn(1).expand(3, 8),
        "parameter": torch.nn.Parameter(torch.randn(2, 9)),
        "scalar": torch.tensor(2.0),
    }
    loaded = safetensors.torch.load_file(publish_weights(store, part(tensors), "fp32").file(FILE))
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_progress_and_cancelling(store, monkeypatch):
    monkeypatch.setattr(weights, "_PIECE", 16)
    seen: list[tuple[int, int]] = []
    entry = publish_weights(store, part(halves()), "fp32", progress=lambda *numbers: seen.append(numbers))
    total = sum(place.nbytes for place in layout(entry).values())
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) > 10

    def cancel(done, total):
        if done > total / 2:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        publish_weights(store, part(halves()), "fp16", progress=cancel)
    assert len(store.list("weights")) == 1 and list((store.root / "tmp").iterdir()) == []


def test_a_component_that_reads_otherwise_than_it_says_is_refused(store):
    class Liar(Ref):
        @property
        def shape(self):
            return (3,)

    with pytest.raises(ModelError, match="16 bytes"):
        publish_weights(store, Part({"w": Liar(torch.zeros(4))}), "fp32")
    assert store.list("weights") == []


def test_tensors_of_a_backend_are_kept_as_they_are(store):
    tensors = {"packed": torch.arange(12, dtype=torch.uint8), "w": torch.randn(3, 3), "flag": torch.tensor([True])}
    entry = publish_tensors(
        store, "a" * 64, {name: Ref(tensor) for name, tensor in tensors.items()}, {"packed_for": "someone"}
    )
    assert entry.manifest["packed_for"] == "someone"
    loaded = safetensors.torch.load_file(entry.file(FILE))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"xx",
        (9999).to_bytes(8, "little") + b"{}",
        *(
            len(text).to_bytes(8, "little") + text + b"1234"
            for text in (
                json.dumps({"w": info}).encode()
                for info in (
                    None,
                    {},
                    {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]},
                    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
                    {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": [1], "data_offsets": [0]},
                )
            )
        ),
    ],
)
def test_a_header_that_is_none_is_refused(store, data):
    entry = store.publish("weights", "b" * 64, lambda d: {"n": (d.path / FILE).write_bytes(data)})
    with pytest.raises(EngineBroken):
        layout(entry)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_bounded(store, tmp_path):
    def anonymous() -> int:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(text.split("RssAnon:")[1].split()[0]) << 10

    rows, columns = 96 << 10, 1 << 10  # 384 MiB in float32
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(rows * columns * 4)
    big = torch.from_file(str(tmp_path / "big.bin"), size=rows * columns, dtype=torch.float32).view(rows, columns)
    component = Part({"big": Ref(big), "bigger": Ref(big[: rows // 4].t())})
    object.__setattr__(component, "content_hash", "c" * 64)
    peak, stop = [0], threading.Event()

    def watch():
        while not stop.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)

    publish_weights(store, part(halves()), "fp16")
    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    entry = publish_weights(store, component, "fp16")
    stop.set()
    watcher.join()
    assert entry.nbytes > 200 << 20
    assert peak[0] - before <= 256 << 20, f"{(peak[0] - before) / 2**20:.0f} MiB"
    os.truncate(tmp_path / "big.bin", 0)


def test_a_checkpoint_on_disk_and_the_same_in_memory_give_the_same_entry(tmp_path):
    torch.manual_seed(1)
    tensors = {"a.weight": torch.randn(8, 5).half(), "a.bias": torch.randn(8).half(), "b.weight": torch.randn(3, 3)}
    stored = {"x": tensors["a.weight"].t().contiguous(), "y": tensors["a.bias"], "z": tensors["b.weight"]}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    header, _ = read_header(tmp_path / "model.safetensors")
    on_disk = {
        name: TensorRef(
            name,
            header[old].dtype,
            tuple(tensors[name].shape),
            tmp_path / "model.safetensors",
            header[old].offset,
            transposed=old == "x",
        )
        for name, old in zip(tensors, stored, strict=True)
    }
    live = {name: TensorRef(name, "F32", tuple(t.shape), torch.nn.Parameter(t.float())) for name, t in tensors.items()}
    for precision in ("fp32", "fp16"):
        first, second = (
            publish_weights(Store(tmp_path / place), Component("unet", {}, refs), precision)
            for place, refs in (("disk", on_disk), ("live", live))
        )
        assert first.key == second.key
        for path in first.path.iterdir():
            assert (second.path / path.name).read_bytes() == path.read_bytes()
        loaded = safetensors.torch.load_file(first.file(FILE))
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor.to(weights.PRECISIONS[precision]))
