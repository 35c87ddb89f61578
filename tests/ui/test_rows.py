"""Engines as rows: what they say, when they were used, deleting, building again, timing caches."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdaccel.backends.cuda.timing_cache import Measured, Signature, TimingCache
from sdaccel.backends.onnxruntime import OnnxRuntime
from sdaccel.engine.manifest import EngineManifest
from sdaccel.engine.store import Store
from sdaccel.errors import BackendError, SettingError, StoreError
from sdaccel.profile import ImageProfile, Range
from sdaccel.runtime import ExecutionContext, RunReport
from sdaccel.ui import rows
from sdaccel.ui.requests import BuildRequest, problems
from sdaccel.ui.rows import delete, engine_rows, export_timing_cache, import_timing_cache, rebuild_request
from tests.engine.small import MANIFEST, sha

WIDE = ImageProfile(Range(832, 832, 832), Range(1024, 1152, 1216), Range(1, 2, 2), Range(77, 77, 231))
TALL = ImageProfile(Range(512, 512, 768), Range(512, 512, 768), Range(1, 1, 4), Range(77, 77, 231))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "Speicher")


def here() -> dict[str, dict[str, str]]:
    backend = OnnxRuntime()
    return {"device": backend.device(), "versions": backend.versions()}


def publish(store: Store, component: str = "unet", name: str = "a", **changes: object) -> str:
    """The key of a small engine of this machine."""
    for kind, key in (("graphs", sha("graph")), ("weights", sha(f"weights {name}"))):
        store.publish(kind, key, lambda draft, kind=kind: {"n": (draft.path / f"{kind}.bin").write_bytes(b"x" * 100)})
    images = (WIDE, TALL)
    source = "vae" if component.startswith("vae") else component
    manifest: EngineManifest = replace(
        MANIFEST,
        component=component,
        source=source,
        weights=sha(name),
        weights_entries=(sha(f"weights {name}"),),
        image_profiles=images,
        profiles=tuple(dict.fromkeys(image.for_component(component) for image in images)),
        **{**here(), **changes},  # type: ignore[arg-type]
    )
    store.publish("engines", manifest.key, lambda draft: manifest.to_json())
    return manifest.key


def test_rows(store):
    unet = publish(store, details={"speed": {"milliseconds": {"torch": 30.0, "engine": 12.0}, "slower": False}})
    vae = publish(store, "vae_decoder", created="2026-11-30T13:00:00+00:00")
    text = publish(store, "text_encoder", created="2026-11-30T14:00:00+00:00", details={"speed": {"milliseconds": {}}})
    found = engine_rows(store)
    assert [row.key for row in found] == [text, vae, unet]
    row = found[2]
    assert (row.checkpoint, row.origin) == ("ein Modell für Bilder", "/models/é.safetensors")
    assert row.resolutions == ("832x1024-1216", "512-768")
    assert (row.batches, row.tokens) == (("1-2", "1-4"), ("77-231",))
    assert (row.component, row.precision, row.backend) == ("unet", "fp32", "onnxruntime")
    assert (row.state, row.reason, row.last_used, row.speed) == ("ready", "", None, 2.5)
    assert (row.size, row.shared) == (0, 200)
    assert (found[1].resolutions, found[1].tokens) == (row.resolutions, ())
    assert (found[0].resolutions, found[0].batches, found[0].tokens) == ((), ("1-8",), ("1-77",))
    assert found[0].speed is found[1].speed is None


def test_states_and_their_reasons(store):
    ready = publish(store)
    stale = publish(store, name="b", versions={**here()["versions"], "onnxruntime": "0.1"})
    lost = publish(store, name="c")
    broken = publish(store, name="d")
    (store.root / "engines" / broken / "engine.json").write_bytes(b"{}")
    for path in (store.root / "weights" / sha("weights c")).iterdir():
        path.unlink()
    found = {row.key: row for row in engine_rows(store)}
    assert found[ready].state == "ready"
    assert found[stale].state == "stale" and "onnxruntime 0.1 (now " in found[stale].reason
    assert found[lost].state == "broken" and found[lost].reason
    assert found[broken].state == "broken" and "its bytes have changed" in found[broken].reason
    assert (found[broken].component, found[broken].resolutions) == ("", ())


def test_an_empty_store_has_no_rows_and_stays_empty(store):
    assert engine_rows(store) == [] and not store.root.exists()


# ---- use


def test_a_load_is_noted_and_nothing_else_changes(tiny_store, tmp_path):
    shutil.copytree(tiny_store.store, tmp_path / "copy", ignore=shutil.ignore_patterns("used"))
    store = Store(tmp_path / "copy")
    entry = next(entry for entry in store.list() if entry.engine.component == "text_encoder")
    runs = ExecutionContext("text_encoder", store, OnnxRuntime(), [entry])
    assert store.last_used(entry.key) is None
    ids = {"input_ids": torch.zeros(1, 77, dtype=torch.int64)}
    runs.run(ids, RunReport())
    used = store.last_used(entry.key)
    assert used is not None and abs(time.time() - used) < 60
    row = next(row for row in engine_rows(store) if row.key == entry.key)
    assert (row.last_used, row.state) == (used, "ready")
    os.utime(store.root / "used" / entry.key, (1e9, 1e9))
    runs.run(ids, RunReport())
    assert store.last_used(entry.key) == 1e9  # once a load, not once a call
    assert store.get("engines", entry.key) == entry
    delete(store, [entry.key])
    assert store.last_used(entry.key) is None


def test_use_is_not_noted_where_nothing_can_be_written(store):
    key = publish(store)
    (store.root / "used").write_text("", encoding="utf-8")  # root may write everywhere
    store.note_use(key)
    assert store.last_used(key) is None
    delete(store, [key])
    Store(store.root / "not there").note_use(key)
    assert not (store.root / "not there").exists()
    with pytest.raises(StoreError, match="is no key"):
        store.note_use("../../x")


# ---- deleting


def test_delete_tells_what_it_frees(store):
    first, second, third = publish(store), publish(store, "text_encoder"), publish(store, name="b")
    assert delete(store, [first]) > 0
    assert [w.key for w in store.list("weights")] == sorted([sha("weights a"), sha("weights b")])
    freed = delete(store, [second, second, "0" * 64])  # twice, and one that is gone
    assert freed > 100
    assert [w.key for w in store.list("weights")] == [sha("weights b")]
    assert delete(store, [third]) > 200
    assert all(store.list(kind) == [] for kind in store.KINDS)
    assert delete(store, []) == 0


def test_delete_goes_on_after_one_that_is_in_use(store, monkeypatch):
    first, second = publish(store), publish(store, name="b")
    remove = Store.remove

    def refuse(self, key):
        if key == first:
            raise StoreError("it is in use.", hint="Close the programs that use it, then try again.")
        return remove(self, key)

    monkeypatch.setattr(Store, "remove", refuse)
    with pytest.raises(StoreError, match=r"1 of 2 engines .* freed\): it is in use. Close the programs"):
        delete(store, [first, second])
    assert [row.key for row in engine_rows(store)] == [first]


def test_a_broken_engine_is_deleted_with_its_broken_weights(store):
    key = publish(store)
    (store.root / "engines" / key / "engine.json").write_bytes(b"")
    weights = store.root / "weights" / sha("weights a")
    (weights / "weights.bin").write_bytes(b"short")
    assert delete(store, [key]) > 0
    assert not weights.exists() and store.broken() == []


@pytest.mark.parametrize("key", ["", "..", "../../etc", "A" * 64])
def test_what_is_no_key_deletes_nothing(store, key):
    publish(store)
    with pytest.raises(StoreError, match="is no key"):
        delete(store, [key])
    assert len(store.list()) == 1


# ---- building again


def test_a_rebuild_asks_for_the_very_same(tiny_store):
    store = Store(tiny_store.store)
    for entry in store.list():
        request = rebuild_request(entry)
        assert request.model == str(tiny_store.model) and request.components == (entry.engine.component,)
        assert (request.precision, request.backend) == ("fp32", "onnxruntime")
        assert request.profiles == entry.engine.image_profiles
        assert problems(request) == {}
        assert BuildRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_the_demo_is_rebuilt_by_its_name(store):
    from sdaccel.models.demo import demo_model_path

    key = publish(store, origin=str(demo_model_path()))
    assert rebuild_request(store.get("engines", key)).model == "demo"


def test_a_pipeline_cannot_be_rebuilt_from_here(store):
    key = publish(store, origin="pipeline StableDiffusionPipeline")
    with pytest.raises(SettingError, match=r"live pipeline StableDiffusionPipeline.*sdaccel\.accelerate"):
        rebuild_request(store.get("engines", key))


# ---- timing caches


@pytest.fixture
def gpu(monkeypatch):
    """As if there were a GPU, of a kind that tests can choose."""
    device = {"name": "GPU"}
    monkeypatch.setattr(
        rows, "_timing_cache", lambda store: TimingCache(store.root / "cache" / f"{device['name']}.json", dict(device))
    )
    return device


def measure(store: Store, gpu: dict[str, str]) -> None:
    cache = TimingCache(store.root / "cache" / f"{gpu['name']}.json", gpu)
    for side in (8, 16):
        cache.put(Signature("conv", "fp16", (side,)), Measured("fast", 1.5, {"fast": 1.5, "slow": 2.0}, {}))
    cache.save()


def test_times_travel(store, gpu, tmp_path):
    measure(store, gpu)
    file = tmp_path / "Zeiten.json"
    assert export_timing_cache(store, file) == 2
    other = Store(tmp_path / "another")
    assert import_timing_cache(other, file) == 2
    assert rows._timing_cache(other).measured == rows._timing_cache(store).measured
    gpu["name"] = "another GPU"
    with pytest.raises(SettingError, match="measured on another device"):
        import_timing_cache(other, file)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 1, "device": {"name": "GPU"}, "measured": 3}', "[" * 100_000]
)
def test_what_is_no_timing_cache(store, gpu, tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingError, match="is not a timing cache"):
        import_timing_cache(store, file)


def test_timing_caches_that_cannot_be(store, gpu, tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="nothing has been measured on this GPU yet"):
        export_timing_cache(store, tmp_path / "x.json")
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        import_timing_cache(store, tmp_path / "none.json")
    measure(store, gpu)
    with pytest.raises(SettingError, match="cannot be written"):
        export_timing_cache(store, tmp_path / "no folder" / "x.json")
    export_timing_cache(store, tmp_path / "x.json")
    monkeypatch.setattr(rows, "MAX_TIMING_CACHE", 10)
    with pytest.raises(SettingError, match="too many for a timing cache"):
        import_timing_cache(store, tmp_path / "x.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_told(store, tmp_path):
    for call in (export_timing_cache, import_timing_cache):
        with pytest.raises(BackendError, match=r"cuda: .*Run: sdaccel doctor"):
            call(store, tmp_path / "x.json")
