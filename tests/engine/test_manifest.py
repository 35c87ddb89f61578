import copy
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import fields, replace

import pytest

from sdaccel.engine import manifest
from sdaccel.engine.entry import MANIFESTS
from sdaccel.engine.manifest import EngineManifest, TensorSpec, canonical_json, engine_key, seal, unseal
from sdaccel.engine.store import Store
from sdaccel.errors import EngineBroken
from sdaccel.profile import ImageProfile, OptimizationProfile, Range
from tests.engine.small import MANIFEST, build, child_environment, sha

FUZZ = int(os.environ.get("SDACCEL_FUZZ", "500"))

WIDE = OptimizationProfile.make(batch=Range(1, 2, 8), height=Range(64, 64, 128), width=Range(64, 64, 128))
IDENTITY = {
    "component": "vae_decoder",
    "architecture": sha("another graph"),
    "weights": sha("another content"),
    "precision": "fp16",
    "backend": "tensorrt",
    "profiles": (WIDE,),
    "device": {"type": "cuda", "capability": "9.0"},
    "versions": {"onnxruntime": "1.33.0"},
}


# The key (case G14)


@pytest.mark.parametrize("field", IDENTITY)
def test_everything_that_shapes_an_engine_is_in_its_key(field):
    assert replace(MANIFEST, **{field: IDENTITY[field]}).key != MANIFEST.key


def test_every_small_change_gives_another_key(monkeypatch):
    profile = MANIFEST.profiles[0]
    axes = dict(profile.axes)
    batch = axes["batch"]
    changed = [
        replace(MANIFEST, device={"type": "cpu", "driver": "1"}),
        replace(MANIFEST, device={"typ": "ecpu"}),
        replace(MANIFEST, versions={}),
        replace(MANIFEST, versions={"onnxruntime": "1.32.0", "torch": "2.13.0"}),
        replace(MANIFEST, versions={"onnxruntime": "1.32.00"}),
        replace(MANIFEST, weights=MANIFEST.weights[:-1] + ("0" if MANIFEST.weights[-1] != "0" else "1")),
        replace(MANIFEST, profiles=(profile, WIDE)),
        replace(MANIFEST, profiles=(WIDE, profile)),
        replace(MANIFEST, profiles=(profile, profile)),
    ]
    for axis in axes:
        changed.append(
            replace(MANIFEST, profiles=(OptimizationProfile.make(**{k: v for k, v in axes.items() if k != axis}),))
        )
    for other in (Range(1, 2, 9), Range(1, 3, 8), Range(2, 2, 8)):
        assert other != batch
        changed.append(replace(MANIFEST, profiles=(OptimizationProfile.make(**{**axes, "batch": other}),)))
    keys = [item.key for item in changed]
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    identity = {name: getattr(MANIFEST, name) for name in IDENTITY}
    keys += [engine_key(**identity, format=2), MANIFEST.key]
    monkeypatch.undo()
    assert MANIFEST.key not in keys[:-2] + keys[-2:-1]
    assert len({*keys, MANIFEST.key}) >= len(changed) + 2


def test_what_does_not_shape_an_engine_is_not_in_its_key():
    others = {
        "source": "vae",
        "family": "sdxl",
        "model": "renamed",
        "origin": "/moved.safetensors",
        "weights_entries": (sha("x"),),
        "image_profiles": (),
        "inputs": (),
        "outputs": (),
        "config": {},
        "created": "2027-01-01T00:00:00+00:00",
        "build_seconds": 9.0,
        "details": {},
    }
    assert {*others, *IDENTITY} == {f.name for f in fields(EngineManifest)}
    for name, value in others.items():
        assert replace(MANIFEST, **{name: value}).key == MANIFEST.key
    assert replace(MANIFEST, device=dict(reversed({"a": "1", "b": "2"}.items()))).key == (
        replace(MANIFEST, device={"a": "1", "b": "2"}).key
    )


def test_the_key_is_known_before_the_manifest_and_in_every_process():
    identity = {name: getattr(MANIFEST, name) for name in IDENTITY}
    assert engine_key(**identity) == MANIFEST.key
    code = "from tests.engine.small import MANIFEST; print(MANIFEST.key)"
    for seed in ("1", "2"):
        environment = {**child_environment(), "PYTHONHASHSEED": seed}
        finished = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert finished.stdout.strip() == MANIFEST.key


# Reading and writing


def test_a_manifest_survives_the_disk():
    assert EngineManifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert EngineManifest.from_json(unseal(seal(MANIFEST.to_json()))) == MANIFEST
    odd = replace(
        MANIFEST,
        profiles=(WIDE, MANIFEST.profiles[0]),
        image_profiles=(),
        created="2026-11-30T12:00:00.123456Z",
        build_seconds=3,
        config={"deep": [[{"a": None}]], "π": -0.0, "big": 2**53},
        details={},
    )
    assert EngineManifest.from_json(unseal(seal(odd.to_json()))) == odd


@pytest.mark.parametrize(
    ("field", "value"),
    [(f.name, None) for f in fields(EngineManifest)]
    + [(f.name, [[]]) for f in fields(EngineManifest)]
    + [
        ("format", 2),
        ("format", True),
        ("format", "1"),
        ("component", "../unet"),
        ("component", ""),
        ("source", "unet2"),
        ("architecture", "a" * 63),
        ("weights", "A" * 64),
        ("weights_entries", []),
        ("weights_entries", ["../" + "a" * 61]),
        ("precision", "fp 16"),
        ("profiles", []),
        ("profiles", [{"batch": [1, 2]}]),
        ("profiles", [{"batch": [0, 1, 2]}]),
        ("profiles", [{"batch": [3, 2, 1]}]),
        ("profiles", [{"batch": [1, 1, 2**31]}]),
        ("profiles", [{"batch": [1, True, 2]}]),
        ("profiles", [{"batch": [1, 1.0, 2]}]),
        ("profiles", [{"self": {}}]),
        ("profiles", [{"__class__": [1, 1, 1]}]),
        ("image_profiles", [{"width": [512, 512, 512]}]),
        ("image_profiles", [{k: [7, 7, 7] for k in ("width", "height", "batch", "tokens")}]),
        ("device", {"type": 1}),
        ("versions", {"x": None}),
        ("inputs", [{"name": "x", "dtype": "float64", "shape": [], "optional": False}]),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": [-1], "optional": False}]),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": [], "optional": 0}]),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": []}]),
        ("created", "yesterday"),
        ("created", "2026-11-30T12:00:00"),
        ("created", "2026-11-30T12:00:00+01:00"),
        ("build_seconds", -1),
        ("build_seconds", True),
        ("build_seconds", float("nan")),
        ("build_seconds", 10**30),
        ("model", "x" * 5000),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(EngineBroken, match=f"engine.json: .*{field}"):
        EngineManifest.from_json({**MANIFEST.to_json(), field: value})


def test_fields_that_are_missing_or_unknown():
    document = MANIFEST.to_json()
    for name in document:
        with pytest.raises(EngineBroken, match=f"lacks '{name}'"):
            EngineManifest.from_json({k: v for k, v in document.items() if k != name})
    with pytest.raises(EngineBroken, match="unknown 'extra'"):
        EngineManifest.from_json({**document, "extra": 1})
    for other in (None, [], "text", 1):
        with pytest.raises(EngineBroken):
            EngineManifest.from_json(other)


def test_a_message_stays_short_and_clean_whatever_the_file_holds():
    for value in ("x" * 10**6, "\x1b[31m\x00" * 1000, list(range(10**5)), {"\ud800": 1}):
        with pytest.raises(EngineBroken) as caught:
            EngineManifest.from_json({**MANIFEST.to_json(), "precision": value})
        assert len(str(caught.value)) < 300 and str(caught.value).isascii() and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe{}",
        b"{" * 100_000,
        b"[" * 1_000_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 1_000_000 + b"}",
        b'{"a": 0.' + b"9" * 1_000_000 + b"}",
        b'{"a": 1, "a": 1}',
        b'{"a": "\\ud800"}',
        b'{"seal": "' + b"0" * 64 + b'"}',
        b" " * (manifest.MAX_BYTES + 1),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_seal_has_not_written_is_refused(data):
    begin = time.perf_counter()
    with pytest.raises(EngineBroken, match="here"):
        unseal(data, "here")
    assert time.perf_counter() - begin < 1


def test_nesting_is_limited_in_both_directions():
    deep: dict = {}
    for _ in range(manifest.MAX_DEPTH - 2):
        deep = {"a": deep}
    assert unseal(seal(deep)) == deep
    for _ in range(5):
        deep = {"a": deep}
    with pytest.raises(EngineBroken, match="deep"):
        unseal(seal(deep))


def test_hashes_do_not_depend_on_the_order_of_keys():
    assert canonical_json({"b": 1, "a": [1.5, None, "é"]}) == '{"a":[1.5,null,"é"],"b":1}'.encode()
    assert seal({"b": 1, "a": 2}) == seal({"a": 2, "b": 1})


def test_tensor_specs_and_image_profiles_are_read_back():
    spec = TensorSpec("y", "float16", ("batch", 2816), optional=True)
    again = EngineManifest.from_json(
        replace(MANIFEST, inputs=(spec,), image_profiles=(ImageProfile.native(1024),)).to_json()
    )
    assert again.inputs == (spec,) and again.image_profiles == (ImageProfile.native(1024),)


# Mutations (SDACCEL_FUZZ=10000 for the long run)

VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\x00",
    "../../etc/passwd", "/etc/passwd", "C:\\x", "\\\\host\\share", "nul", "\ud800", "\u202e", "é" * 99, "x" * 9999,
    "0" * 64, "f" * 64, [], {}, [[]], {"": {}}, [None] * 10_000, {str(i): i for i in range(1000)}, {"seal": "0" * 64},
]  # fmt: skip


def deep(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + 64)
    inserts = (
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b"9" * 10_000,
        b"NaN",
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\\ud800",
        b'"',
        b"}",
    )
    return chance.choice(
        (
            lambda: data[:at] + bytes([data[at - 1] ^ chance.randrange(1, 256)]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + data[end:],
            lambda: data[:end] + data[at:],
            lambda: data[:at] + chance.randbytes(chance.randrange(1, 32)) + data[at:],
            lambda: data[:at] + chance.choice(inserts) + data[at:],
            lambda: data[:at] + chance.choice(inserts) + data[end:],
            lambda: data.replace(b"\n", b"\r\n"),
            lambda: chance.randbytes(chance.randrange(2000)),
        )
    )()


def mutate_document(document: dict, chance: random.Random) -> dict:
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        places: list = [(document, key) for key in document]
        for holder, key in places:  # grows while it is read: every node of the tree
            inner = holder[key]
            if isinstance(inner, dict):
                places += [(inner, name) for name in list(inner)[:100]]
            elif isinstance(inner, list):
                places += [(inner, index) for index in range(min(len(inner), 100))]
        holder, key = chance.choice(places)
        what = chance.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[chance.choice(("extra", "../x", "\x00", "nul", "", "\ud800", str(key) * 50))] = holder.pop(key)
        elif what == 2:
            holder[key] = copy.deepcopy(chance.choice(places)[0])
        elif what == 3:
            holder[key] = deep(chance.choice((10, 100, 400)))
        else:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
    return document


def resealed(document: dict, chance: random.Random) -> bytes:
    """With the right seal where there is one, for a mutation that is more than damage."""
    try:
        return seal(document)
    except (ValueError, RecursionError):
        return (json.dumps({**document, "seal": "0" * 64}, sort_keys=True, indent=2) + "\n").encode()


def test_mutated_manifests_raise_only_our_errors(tmp_path):
    store = Store(tmp_path)
    key = build(store)
    chance = random.Random(20261130)
    accepted = {"bytes": 0, "documents": 0}
    slowest = 0.0
    keys = {"engines": key, "weights": store.list("weights")[0].key, "graphs": MANIFEST.architecture}
    paths = {kind: store.root / kind / k / MANIFESTS[kind] for kind, k in keys.items()}
    contents = {kind: path.read_bytes() for kind, path in paths.items()}
    for number in range(FUZZ):
        kind = "engines" if number % 4 else chance.choice(store.KINDS)
        how = "bytes" if number % 2 else "documents"
        if how == "bytes":
            data = mutate_bytes(contents[kind], chance)
            if data == contents[kind]:
                continue
        else:
            data = resealed(mutate_document(unseal(contents[kind]), chance), chance)
        paths[kind].write_bytes(data)
        begin = time.perf_counter()
        try:
            store.open_engine(key) if kind == "engines" else store.verify(store.get(kind, keys[kind]))
            accepted[how] += 1
        except EngineBroken as error:
            assert len(str(error)) < 2000
        slowest = max(slowest, time.perf_counter() - begin)
        assert slowest < 1, f"mutation {number} took {slowest:.1f} s"
        if number % 50 == 0:
            store.list(kind)
            store.broken()
        paths[kind].write_bytes(contents[kind])
    assert accepted["bytes"] == 0
    # A manifest sealed anew by someone is theirs to answer for: free text such as the model's name may differ.
    assert accepted["documents"] < FUZZ * 0.25
    store.open_engine(key)
