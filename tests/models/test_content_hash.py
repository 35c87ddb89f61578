"""The content hash: every byte counts, storage does not, memory stays bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdaccel.models import Component, TensorRef, open_checkpoint
from sdaccel.models.tensors import canonical_dtype
from tests.models import tiny


def component(**tensors: torch.Tensor) -> Component:
    kinds = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    refs = {name: TensorRef(name, kinds[value.dtype], tuple(value.shape), value) for name, value in tensors.items()}
    return Component("unet", {}, refs)


@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl", "sdxl-refiner"])
def test_the_same_weights_however_they_are_stored(kind, tmp_path):
    pipe = tiny.pipeline(kind, tmp_path / "tokenizer")
    weights = tiny.original_weights(pipe, kind)
    ways = {"live float32": open_checkpoint(pipe)}
    pipe.save_pretrained(tmp_path / "full")
    ways["folder float32"] = open_checkpoint(tmp_path / "full")
    for module in (pipe.unet, pipe.vae, pipe.text_encoder, getattr(pipe, "text_encoder_2", None)):
        if module is not None:
            module.half()
    pipe.save_pretrained(tmp_path / "half", variant="fp16")
    ways["folder fp16"] = open_checkpoint(tmp_path / "half", variant="fp16")
    for dtype in (torch.float16, torch.float32):
        path = tiny.save_single_file(weights, tmp_path / f"{dtype}.safetensors", dtype)
        ways[f"file {dtype}"] = open_checkpoint(path)
    for name in ways["live float32"].components:
        hashes = {way: checkpoint.components[name].content_hash for way, checkpoint in ways.items()}
        assert len(set(hashes.values())) == 1, (name, hashes)
        assert len({checkpoint.components[name].parameters for checkpoint in ways.values()}) == 1


def test_the_last_byte_counts(tmp_path):
    pipe = tiny.pipeline("sd1", tmp_path / "tokenizer")
    weights = dict(sorted(tiny.original_weights(pipe, "sd1").items()))
    path = tiny.save_single_file(weights, tmp_path / "model.safetensors", torch.float32)
    content = path.read_bytes()
    before = open_checkpoint(path)
    owner = max(
        (ref.offset + ref.nbytes, name) for name, part in before.components.items() for ref in part.tensors.values()
    )[1]
    end = max(ref.offset + ref.nbytes for ref in before.components[owner].tensors.values())
    hashes = {name: part.content_hash for name, part in before.components.items()}
    other = tmp_path / "other.safetensors"
    other.write_bytes(content[: end - 1] + bytes([content[end - 1] ^ 1]) + content[end:])
    changed = {name: part.content_hash for name, part in open_checkpoint(other).components.items()}
    assert {name for name in hashes if hashes[name] != changed[name]} == {owner}


def test_every_byte_counts():
    torch.manual_seed(0)
    base = torch.randn(3, 5)
    first = component(x=base).content_hash
    for index in range(base.nbytes):
        flipped = base.clone()
        flipped.view(torch.uint8).reshape(-1)[index] ^= 1
        assert component(x=flipped).content_hash != first
    assert component(y=base).content_hash != first
    assert component(x=base.reshape(5, 3)).content_hash != first
    assert component(x=base, y=base[:0]).content_hash != first
    zeros = torch.zeros(4)
    assert component(x=zeros).content_hash != component(x=-zeros).content_hash
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert component(x=nan).content_hash != component(x=other).content_hash


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 65504.0, -0.0, 2.0**-24], torch.float16),
        ([float("inf"), -1.0], torch.float16),
        ([float("nan"), 1.0], torch.float32),
        ([1.0, 65536.0], torch.bfloat16),
        ([2.0**-25], torch.bfloat16),
        ([1.0 + 2.0**-12], torch.float32),
        ([1.0, 65536.0, 1.0 + 2.0**-10], torch.float32),
    ],
)
def test_canonical_dtype(values, expected):
    value = torch.tensor(values)
    ref = TensorRef("x", "F32", tuple(value.shape), value)
    assert canonical_dtype(ref) == expected
    narrow = value.to(expected)
    kind = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[expected]
    assert canonical_dtype(TensorRef("x", kind, tuple(value.shape), narrow)) == expected
    assert component(x=value).content_hash == component(x=narrow).content_hash
    assert component(x=value).content_hash == component(x=narrow.float()).content_hash


def test_chunks_do_not_matter(monkeypatch):
    from sdaccel.models import tensors

    torch.manual_seed(0)
    value = torch.randn(100_000)
    whole = component(x=value).content_hash
    monkeypatch.setattr(tensors.TensorRef.chunks, "__defaults__", (1000,))
    assert component(x=value).content_hash == whole


MEASURE = """
import resource, sys, tracemalloc
from pathlib import Path
import torch
from sdaccel.models import Component, TensorRef, read_header
path = Path(sys.argv[1])
dtype, shape, offset, nbytes = read_header(path)[0]["x"]
part = Component("unet", {}, {"x": TensorRef("x", dtype, shape, path, offset)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tracemalloc.start()
part.content_hash
print(nbytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss in kilobytes")
def test_memory_stays_bounded_on_a_large_tensor(tmp_path):
    import json
    import struct

    nbytes = 300 << 20
    header = json.dumps({"x": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)  # a hole: zeros that take no disk
    root = Path(__file__).resolve().parents[2]
    run = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, encoding="utf-8", check=True)
    size, grown, traced = map(int, done.stdout.split())
    assert size == nbytes and grown < 150 << 20 and traced < 100 << 20
