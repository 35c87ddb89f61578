"""The .safetensors header reader: what it accepts, and that everything else is one clear error (also case G13)."""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sdaccel.errors import ModelError
from sdaccel.models import TensorRef, open_checkpoint, read_header
from tests.models import tiny
from tests.tolerances import ENDLESS

FUZZ = int(os.environ.get("SDACCEL_FUZZ", "3000"))


def write(path: Path, header: bytes | dict, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape=None) -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_official_library_writes(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "half": torch.randn(3, 5).half(),
        "é.weight": torch.randn(2, 3, 1, 1),
        "brain": torch.randn(7).bfloat16(),
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
    }
    path = tmp_path / "a b.ü.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt", "ü": "é"})
    entries, metadata = read_header(path)
    assert metadata == {"format": "pt", "ü": "é"}
    assert entries.keys() == tensors.keys()
    with safe_open(str(path), "pt") as official:
        for name, (dtype, shape, offset, nbytes) in entries.items():
            ref = TensorRef(name, dtype, shape, path, offset)
            assert ref.nbytes == nbytes
            assert torch.equal(ref.read(), official.get_tensor(name))
            assert torch.equal(torch.cat([*ref.chunks(8), ref.read().reshape(-1)[:0]]), ref.read().reshape(-1))


def test_no_copy_unless_unaligned_and_writes_never_reach_the_file(tmp_path):
    aligned = write(
        tmp_path / "a", b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  ', struct.pack("<2f", 1, 2)
    )
    (_, _, offset, _) = read_header(aligned)[0]["x"]
    assert offset % 4 == 0
    one, two = (TensorRef("x", "F32", (2,), aligned, offset).read() for _ in range(2))
    assert one.data_ptr() == two.data_ptr()
    one[0] = 7
    assert two[0] == 7  # the same pages…
    assert read_header(aligned) and aligned.read_bytes()[-8:] == struct.pack("<2f", 1, 2)  # …but not the file's

    odd = write(tmp_path / "b", b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   ', struct.pack("<2f", 3, 4))
    ref = TensorRef("x", "F32", (2,), odd, read_header(odd)[0]["x"].offset)
    assert ref.offset % 4 and ref.read().tolist() == [3, 4] and ref.read().data_ptr() % 4 == 0
    assert torch.cat(list(ref.chunks())).tolist() == [3, 4]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_system_that_refuses_private_pages(tmp_path, monkeypatch):
    path = write(tmp_path / "a", {"x": entry(0, 8)}, struct.pack("<2f", 1, 2))
    real = mmap.mmap

    def refuse(number, length, access):
        if access == mmap.ACCESS_COPY:
            raise OSError("cannot allocate memory")
        return real(number, length, access=access)

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert TensorRef("x", "F32", (2,), path, read_header(path)[0]["x"].offset).read().tolist() == [1, 2]


def test_a_file_that_shrinks_after_opening(tmp_path):
    path = write(tmp_path / "a", {"x": entry(0, 4000)}, bytes(4000))
    ref = TensorRef("x", "F32", (1000,), path, read_header(path)[0]["x"].offset)
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ModelError, match="changed since it was opened"):
        ref.read()
    with pytest.raises(ModelError, match="changed since it was opened"):
        list(ref.chunks())
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        ref.read()


PLAIN = {"x": entry(0, 8), "y": entry(8, 16)}
PAGE = "<!DOCTYPE html>\n<html><head><title>Log in</title></head><body>" + "x" * 500 + "</body></html>"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4265146304\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"abc", "not a safetensors file"),
        (PAGE.encode(), "not a safetensors file, but an HTML page.*log in"),
        (b"\xef\xbb\xbf\n <HTML>" + b" " * 50, "an HTML page"),
        (b'{"error": "Invalid username or password."}', "a JSON text"),
        (b"Entry not found, sorry", "a text starting with b'Entry not found"),
        (LFS.encode(), "a Git LFS pointer.*git lfs pull"),
        (b"PK\x03\x04" + bytes(500), "a zip archive.*pickle"),
        (b"\x80\x02}q\x00(X" + bytes(500), "a Python pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(500), "a GGUF file"),
        (bytes(1000), "not a safetensors file"),
        (bytes(range(256)) * 4, "not a safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 500) + b'{"x":{"dtype"', "incomplete: 21 of at least 508 bytes"),
    ],
)
def test_something_else_saved_as_safetensors(content, says, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{says}"):
        read_header(path)
    with pytest.raises(ModelError, match=says):
        open_checkpoint(path)


def test_incomplete(tmp_path):
    path = write(tmp_path / "model.safetensors", PLAIN, bytes(16))
    size = path.stat().st_size
    for kept in (size - 1, size - 16):
        with path.open("r+b") as file:
            file.truncate(kept)
        with pytest.raises(ModelError, match=f"incomplete: {kept} of {size} bytes"):
            read_header(path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{}}', "occurs twice"),
        (b'{"x":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', "occurs twice"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply|no JSON"),
        (b'{"x":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,8]}}', "too large"),
        (b'{"x":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', "not a whole number"),
        (b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "not a whole number"),
        (b'{"x":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', "no valid shape"),
        (b'{"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "no valid shape"),
        (b'{"x":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}', "no valid shape"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}}', "no valid data_offsets"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', "span -8"),
        (b'{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "needs 12 bytes but its data_offsets span 8"),
        (b'{"x":{"dtype":"F32","shape":[' + b"9999999999999999999," * 30 + b'2],"data_offsets":[0,8]}}', "span 8"),
        (b'{"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}', "unknown dtype 'F33'"),
        (b'{"x":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}', "unknown dtype"),
        (b'{"x":{"dtype":"F32","shape":[2]}}', "needs exactly"),
        (b'{"x":null}', "needs exactly"),
        (b'{"__metadata__":{"a":1}}', "__metadata__"),
        (b'{"__metadata__":[]}', "__metadata__"),
        (b'{"\xff":1}', "not UTF-8"),
        (b"{]", "no JSON"),
        (b"{}[]", "no JSON"),
        (json.dumps({"x": entry(0, 8), "y": entry(4, 12)}).encode(), "overlap"),
        (json.dumps({"x": entry(0, 8), "y": entry(0, 8)}).encode(), "overlap"),
        (json.dumps({"x": entry(0, 4), "y": entry(8, 12)}).encode(), "gap"),
        (json.dumps({"x": entry(4, 8)}).encode(), "gap"),
        (json.dumps({"x": entry(0, 4)}).encode(), "4 bytes follow"),
    ],
)
def test_broken_headers(header, says, tmp_path):
    data = bytes(12 if b'"y"' in header and b"12" in header else 8)
    path = write(tmp_path / "model.safetensors", header, data)
    start = time.thread_time()
    with pytest.raises(ModelError, match=says):
        read_header(path)
    assert time.thread_time() - start < ENDLESS


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            read_header(path)


# ---- fuzzing

JUNK = (
    b"[" * 3000, b'{"a":' * 500, b"9" * 5000, b"-1", b"1e400", b"NaN", b"null", b"true", b'"F16"', b"[]", b"{}",
    b'"\\ud800"', b"\x00", b"\xff\xfe", b",", b":", b'"', b"}", b"18446744073709551615", b"9223372036854775807", b"  ",
)  # fmt: skip


def mutate(header: bytes, chance: random.Random) -> tuple[bytes, int]:
    """A header changed in one to four places, and the length to claim for it."""
    raw = bytearray(header)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw) + 1)
        kind = chance.randrange(7)
        if kind == 0 and raw:
            raw[min(at, len(raw) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at:at] = chance.choice(JUNK)
        elif kind == 2:
            del raw[at : at + chance.randrange(1, 40)]
        elif kind == 3:
            raw[at:at] = raw[at : at + chance.randrange(1, 200)]
        elif kind == 4:
            raw[at : at + 8] = chance.choice(JUNK)
        elif kind == 5:
            raw = bytearray(_change_number(bytes(raw), chance))
        else:
            other = chance.randrange(len(raw) + 1)
            raw[at:at], raw[other:other] = raw[other : other + 20], raw[at : at + 20]
    length = (
        len(raw) if chance.random() < 0.9 else chance.choice((0, 1, len(raw) - 1, len(raw) + 1, 1 << 40, (1 << 64) - 1))
    )
    return bytes(raw), max(length, 0)


def _change_number(raw: bytes, chance: random.Random) -> bytes:
    spots = [at for at, byte in enumerate(raw) if 48 <= byte <= 57]
    if not spots:
        return raw
    at = chance.choice(spots)
    return raw[:at] + str(chance.choice((0, 1, 9, 2**31, 2**63, -5))).encode() + raw[at + 1 :]


def run_fuzz(rounds: int, seed: int, header: bytes, data: int, path: Path, call) -> tuple[int, float]:
    chance = random.Random(seed)
    refused, slowest = 0, 0.0
    for index in range(rounds):
        raw, length = mutate(header, chance)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", length) + raw)
            file.truncate(8 + len(raw) + (data if chance.random() < 0.9 else chance.randrange(data + 1)))
        start = time.thread_time()
        try:
            call(path)
        except ModelError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"round {index}: {type(error).__name__}: {error} for {raw[:2000]!r}") from error
        slowest = max(slowest, time.thread_time() - start)
    return refused, slowest


@pytest.mark.timeout(0)
def test_mutated_headers_raise_only_our_errors(tmp_path):
    names = ("model.diffusion_model.conv.weight", "model.diffusion_model.conv.bias", "é", "last")
    header = json.dumps(
        {"__metadata__": {"format": "pt"}} | {name: entry(8 * at, 8 * at + 8) for at, name in enumerate(names)}
    )
    path = tmp_path / "model.safetensors"
    refused, slowest = run_fuzz(FUZZ, 20261130, header.encode(), 32, path, read_header)
    assert refused > FUZZ / 2 and slowest < ENDLESS


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_checkpoints_with_mutated_headers_raise_only_our_errors(kind, tmp_path):
    pipe = tiny.pipeline(kind, tmp_path)
    path = tiny.save_single_file(tiny.original_weights(pipe, kind), tmp_path / "model.safetensors")
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], len(content) - 8 - length
    rounds = max(FUZZ // 30, 100)
    refused, slowest = run_fuzz(rounds, 20261130, header, data, tmp_path / "fuzz.safetensors", open_checkpoint)
    assert refused > rounds / 2 and slowest < ENDLESS
