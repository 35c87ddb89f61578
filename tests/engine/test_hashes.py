"""Hashes of checkpoints are taken once, as long as their files stay what they are."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from sdaccel.engine import entry, hashes
from sdaccel.engine.hashes import content_hash
from sdaccel.engine.store import Store
from sdaccel.models import tensors
from sdaccel.models.files import read_json
from sdaccel.models.tensors import Component, TensorRef, read_stamped_header


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "_STILL_NS", -1)
    (tmp_path / "store").mkdir()
    return Store(tmp_path / "store")


@pytest.fixture
def path(tmp_path):
    save_file({"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def hashed(monkeypatch):
    """The tensors that are read from here on."""
    found, plain = [], tensors._digest
    monkeypatch.setattr(tensors, "_digest", lambda ref: (found.append(ref.name), plain(ref))[1])
    return found


def opened(path) -> Component:
    found, _, stamp = read_stamped_header(path)
    refs = {name: TensorRef(name, e.dtype, e.shape, path, e.offset, stamp=stamp) for name, e in found.items()}
    return Component("unet", {}, refs)


def test_a_file_is_hashed_once(store, path, hashed):
    first = content_hash(opened(path), store)
    assert first == opened(path).content_hash and sorted(hashed) == ["a", "a", "b", "b"]
    del hashed[:]
    component = opened(path)
    assert content_hash(component, Store(store.root)) == component.content_hash == first and not hashed


def test_whatever_else_is_another_hash(store, path, hashed, tmp_path):
    first = content_hash(opened(path), store)
    component = opened(path)
    swapped = {"a": replace(component.tensors["b"], name="a"), "b": replace(component.tensors["a"], name="b")}
    assert content_hash(Component("unet", {}, swapped), store) != first
    data, found = bytearray(path.read_bytes()), path.stat()
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    if os.name != "nt":
        assert content_hash(opened(path), store) not in (first, None)
    live = Component("unet", {}, {"a": TensorRef("a", "F32", (2,), torch.ones(2))})
    del hashed[:]
    assert content_hash(live, store) == content_hash(live, store) and hashed == ["a"]


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data.replace(b'": "', b'": "0', 1), lambda data: data[:-3]]
)
def test_damaged_notes_are_none(store, path, hashed, damage):
    first = content_hash(opened(path), store)
    notes = store.root / hashes.FILE
    notes.write_bytes(damage(notes.read_bytes()))
    del hashed[:]
    assert content_hash(opened(path), store) == first and hashed
    assert read_json(notes)["seal"]


def test_a_store_that_is_not_there_stays_so(tmp_path, path, monkeypatch):
    monkeypatch.setattr(entry, "_STILL_NS", -1)
    assert content_hash(opened(path), Store(tmp_path / "none")) and not (tmp_path / "none").exists()


def test_a_file_that_has_just_been_written_is_not_noted(tmp_path, path):
    (tmp_path / "store").mkdir()
    content_hash(opened(path), Store(tmp_path / "store"))
    assert not (tmp_path / "store" / hashes.FILE).exists()


def test_notes_are_bounded(store, path, monkeypatch):
    monkeypatch.setattr(hashes, "MOST", 3)
    for index in range(5):
        hashes._note(store, f"{index:064x}", f"{index:064x}")
    assert len(hashes._read(store)) == 3 and f"{4:064x}" in hashes._read(store)
