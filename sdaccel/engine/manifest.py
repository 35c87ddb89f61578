"""What an engine is, for what and made by what (`EngineManifest`), and how such a document is sealed on disk.

A sealed document is one JSON object in one exact spelling (`seal`): keys in order, two spaces of indent, UTF-8, and a
field ``seal`` with the SHA-256 of the rest. `unseal` accepts that spelling alone, so a change of any byte, even of a
space, is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, NoReturn

from sdaccel.errors import EngineBroken, ProfileError
from sdaccel.profile import ImageProfile, OptimizationProfile

FORMAT_VERSION = 1

MAX_BYTES = 16 << 20
MAX_DEPTH = 48
DTYPES = ("float32", "float16", "bfloat16", "int64")
SOURCES = ("unet", "vae", "text_encoder", "text_encoder_2", "controlnet")

_HASH = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_AXIS = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LARGEST = 2**31 - 1


# Sealed documents


def canonical_json(value: Any) -> bytes:
    """The one spelling that hashes are taken over. Raises ValueError or TypeError for what JSON cannot say."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seal(document: Mapping[str, Any]) -> bytes:
    """``document`` as it stands on disk, with its seal. Raises ValueError or TypeError for what JSON cannot say."""
    digest = hashlib.sha256(canonical_json(document)).hexdigest()
    sealed = {**document, "seal": digest}
    return (json.dumps(sealed, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: object = "manifest") -> dict[str, Any]:
    """The document that `seal` wrote as ``data``, without its seal.

    Raises EngineBroken, naming ``where``, for anything else: not JSON, too large or nested too deep, a key twice, NaN,
    or any byte that `seal` would not have written.
    """
    if len(data) > MAX_BYTES:
        raise EngineBroken(f"{where}: {len(data)} bytes is too long for a manifest (the most is {MAX_BYTES}).")
    try:
        document = json.loads(
            data.decode(),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if not isinstance(document, dict):
            raise ValueError("it is not an object")
        document.pop("seal", None)
        _limit_depth(document)
        whole = seal(document) == data
    except RecursionError:
        raise EngineBroken(f"{where}: nested too deep for a manifest (the most is {MAX_DEPTH}).") from None
    except ValueError as error:
        raise EngineBroken(f"{where}: not a manifest: {error}.") from None
    if not whole:
        raise EngineBroken(f"{where}: its bytes have changed since it was written.")
    return document


def _integer(text: str) -> int:
    if len(text) > 20:  # a million digits would take minutes
        raise ValueError("a number is too large")
    return int(text)


def _float(text: str) -> float:
    number = float(text) if len(text) <= 64 else math.inf
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _limit_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        _limit_depth(item, depth + 1)


# Engines


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. A dimension is a number or the name of an axis; an ``optional`` input may be left out."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    optional: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "optional": self.optional}


def engine_key(
    *,
    component: str,
    architecture: str,
    weights: str,
    precision: str,
    backend: str,
    profiles: Sequence[OptimizationProfile],
    device: Mapping[str, str],
    versions: Mapping[str, str],
    format: int = FORMAT_VERSION,
) -> str:
    """The engine's key: SHA-256 (hex) over everything that shapes an engine. The order of profiles counts."""
    identity = {
        "architecture": architecture,
        "backend": backend,
        "component": component,
        "device": dict(device),
        "format": format,
        "precision": precision,
        "profiles": [profile.to_json() for profile in profiles],
        "versions": dict(versions),
        "weights": weights,
    }
    return hashlib.sha256(canonical_json(identity)).hexdigest()


@dataclass(frozen=True)
class EngineManifest:
    """What an engine is: the content of its engine.json.

    ``architecture`` is the key of the graph it was built from, ``weights`` the checkpoint component's content hash and
    ``weights_entries`` the keys of the weights it reads in the store: the converted checkpoint's first, then any that
    the backend laid out anew. ``created`` is ISO 8601 in UTC, ``build_seconds`` wall-clock seconds. ``details`` is free
    JSON for people and reports; nothing is decided by it.
    """

    component: str
    source: str
    family: str
    model: str
    origin: str
    architecture: str
    weights: str
    weights_entries: tuple[str, ...]
    precision: str
    backend: str
    profiles: tuple[OptimizationProfile, ...]
    image_profiles: tuple[ImageProfile, ...]
    device: dict[str, str]
    versions: dict[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    config: dict[str, Any]
    created: str
    build_seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The engine's name in the store (see `engine_key`)."""
        return engine_key(
            component=self.component,
            architecture=self.architecture,
            weights=self.weights,
            precision=self.precision,
            backend=self.backend,
            profiles=self.profiles,
            device=self.device,
            versions=self.versions,
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("profiles", "image_profiles", "inputs", "outputs"):
            document[name] = [item.to_json() for item in document[name]]
        document["weights_entries"] = list(self.weights_entries)
        document["build_seconds"] = float(self.build_seconds)
        return {"format": FORMAT_VERSION, **document}

    @classmethod
    def from_json(cls, document: Any, where: object = "engine.json") -> EngineManifest:
        """The manifest that `to_json` gave. Raises EngineBroken, naming ``where`` and the field, for anything off."""
        check = _Check(where)
        names = {f.name for f in fields(cls)}
        check.keys(document, names | {"format"}, "the manifest")
        if document["format"] != FORMAT_VERSION or isinstance(document["format"], bool):
            raise EngineBroken(f"{where}: format {_short(document['format'])} is not {FORMAT_VERSION}, which we read.")
        profiles = check.list(document["profiles"], "profiles", _profile)
        weights_entries = check.list(document["weights_entries"], "weights_entries", _Check.hash, most=16)
        for name, items in (("profiles", profiles), ("weights_entries", weights_entries)):
            if not items:
                check.fail(name, [], "a list of at least one")
        return cls(
            component=check.word(document["component"], "component"),
            source=check.one_of(document["source"], SOURCES, "source"),
            family=check.word(document["family"], "family"),
            model=check.text(document["model"], "model"),
            origin=check.text(document["origin"], "origin"),
            architecture=check.hash(document["architecture"], "architecture"),
            weights=check.hash(document["weights"], "weights"),
            weights_entries=weights_entries,
            precision=check.word(document["precision"], "precision"),
            backend=check.word(document["backend"], "backend"),
            profiles=profiles,
            image_profiles=check.list(document["image_profiles"], "image_profiles", _image_profile),
            device=check.texts(document["device"], "device"),
            versions=check.texts(document["versions"], "versions"),
            inputs=check.list(document["inputs"], "inputs", _tensor_spec),
            outputs=check.list(document["outputs"], "outputs", _tensor_spec),
            config=check.object(document["config"], "config"),
            created=check.time(document["created"], "created"),
            build_seconds=check.seconds(document["build_seconds"], "build_seconds"),
            details=check.object(document["details"], "details"),
        )


def _short(value: Any) -> str:
    """``value`` for an error message, which must stay readable whatever the file holds."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Check:
    """Strict readers of JSON values. Each raises EngineBroken with the file, the field, the value and what is right."""

    def __init__(self, where: object):
        self.where = where

    def fail(self, name: str, value: Any, right: str) -> NoReturn:
        raise EngineBroken(f"{self.where}: {name} is {_short(value)}, which is not {right}.")

    def keys(self, value: Any, names: set[str], name: str) -> None:
        if not isinstance(value, dict):
            self.fail(name, value, "an object")
        for wrong in sorted(names ^ value.keys()):
            fault = "lacks" if wrong in names else "has an unknown"
            raise EngineBroken(f"{self.where}: {name} {fault} {_short(wrong)}.")

    def text(self, value: Any, name: str, most: int = 4096) -> str:
        if not isinstance(value, str) or len(value) > most:
            self.fail(name, value, f"text of at most {most} characters")
        return value

    def word(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            self.fail(name, value, "a word of letters, digits and _.+- (at most 64)")
        return value

    def one_of(self, value: Any, allowed: tuple[str, ...], name: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            self.fail(name, value, f"one of {', '.join(allowed)}")
        return value

    def hash(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            self.fail(name, value, "a SHA-256 in hex")
        return value

    def whole(self, value: Any, name: str, least: int = 0, most: int = _LARGEST) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(name, value, f"a whole number from {least} to {most}")
        return value

    def seconds(self, value: Any, name: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
            self.fail(name, value, "a number of seconds")
        return float(value)

    def time(self, value: Any, name: str) -> str:
        try:
            utc = datetime.fromisoformat(self.text(value, name, 40).replace("Z", "+00:00")).utcoffset()
        except ValueError:
            utc = None
        if utc is None or utc.total_seconds():
            self.fail(name, value, "a time in ISO 8601 and UTC")
        return value

    def object(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(name, value, "an object")
        return value

    def texts(self, value: Any, name: str) -> dict[str, str]:
        items = self.object(value, name).items()
        return {self.text(key, f"a name in {name}", 256): self.text(item, f"{name}.{key[:60]}") for key, item in items}

    def list(self, value: Any, name: str, read: Any, most: int = 4096) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            self.fail(name, value, f"a list of at most {most}")
        return tuple(read(self, item, f"{name}[{index}]") for index, item in enumerate(value))


def _range(check: _Check, value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) != 3:
        check.fail(name, value, "[min, opt, max]")
    return [check.whole(number, name, least=1) for number in value]


def _ranges(check: _Check, value: Any, name: str) -> dict[str, list[int]]:
    for axis in check.object(value, name):
        if not _AXIS.fullmatch(axis):
            check.fail(f"an axis of {name}", axis, "a lower-case word")
    return {axis: _range(check, numbers, f"{name}.{axis}") for axis, numbers in value.items()}


def _profile(check: _Check, value: Any, name: str) -> OptimizationProfile:
    try:
        return OptimizationProfile.from_json(_ranges(check, value, name))
    except ProfileError as error:
        raise EngineBroken(f"{check.where}: {name}: {error}") from None


def _image_profile(check: _Check, value: Any, name: str) -> ImageProfile:
    check.keys(value, {"width", "height", "batch", "tokens"}, name)
    try:
        return ImageProfile.from_json(_ranges(check, value, name))
    except ProfileError as error:
        raise EngineBroken(f"{check.where}: {name}: {error}") from None


def _tensor_spec(check: _Check, value: Any, name: str) -> TensorSpec:
    check.keys(value, {"name", "dtype", "shape", "optional"}, name)
    if not isinstance(value["optional"], bool):
        check.fail(f"{name}.optional", value["optional"], "true or false")
    return TensorSpec(
        name=check.text(value["name"], f"{name}.name", 256),
        dtype=check.one_of(value["dtype"], DTYPES, f"{name}.dtype"),
        shape=check.list(value["shape"], f"{name}.shape", _dimension, most=16),
        optional=value["optional"],
    )


def _dimension(check: _Check, value: Any, name: str) -> int | str:
    if isinstance(value, str):
        return check.text(value, name, 64)
    return check.whole(value, name)
