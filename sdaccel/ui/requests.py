"""What somebody asks to be built, in the words of the form and of the command line; checked before it is queued."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sdaccel import settings
from sdaccel.errors import ModelError, ProfileError, SdaccelError, SettingError
from sdaccel.profile import ImageProfile, parse_profiles

if TYPE_CHECKING:
    from sdaccel.backends.base import Backend
    from sdaccel.builder import BuilderConfig
    from sdaccel.models.checkpoint import Checkpoint

DEMO = "demo"

_MOST = 64
_LONGEST = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class BuildRequest:
    """The engines of one model. ``resolutions``, ``batches`` and ``tokens`` are texts as ``--res`` and the like take.

    Without them and without a preset the model's native range is built.
    """

    model: str = DEMO
    """The path of a folder or a file, or "demo"."""
    preset: str | None = None
    resolutions: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    components: tuple[str, ...] | None = None
    """None: all that the model has."""
    precision: str | None = None
    """None: the backend's own."""
    backend: str = "auto"
    allow_pickle: bool = False
    profiles: tuple[ImageProfile, ...] = ()
    """Exactly these, instead of a preset or texts: what the rebuild of an engine asks for."""

    @property
    def name(self) -> str:
        """The model's name, short, for people."""
        return DEMO if self.model == DEMO else Path(self.model).stem or self.model

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for key in ("resolutions", "batches", "tokens", "components"):
            document[key] = None if document[key] is None else list(document[key])
        document["profiles"] = [profile.to_json() for profile in self.profiles]
        return document

    @classmethod
    def from_json(cls, document: Any) -> BuildRequest:
        """The request that `to_json` gave; what is left out has its default. Raises SettingError naming the field."""
        if not isinstance(document, Mapping):
            raise SettingError("a build request is an object of fields.", hint=f"Fields: {', '.join(_READERS)}.")
        unknown = sorted(str(key)[:40] for key in document.keys() - _READERS.keys())
        if unknown:
            raise SettingError(f"a build request has no field {unknown[0]!r}.", hint=f"It has {', '.join(_READERS)}.")
        return cls(**{name: _READERS[name](name, value) for name, value in document.items()})


def words(text: str) -> tuple[str, ...]:
    """What one field of a form holds: ``512, 832x1216`` → ("512", "832x1216")."""
    return tuple(word for word in re.split(r"[\s,;]+", text.strip()) if word)


# ---- reading JSON


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST or "\0" in value:
        raise SettingError(f"{name} must be text of 1 to {_LONGEST} characters.")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST:
        raise SettingError(f"{name} must be a list of at most {_MOST} texts.")
    return tuple(_text(name, item) for item in value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be true or false.")
    return value


def _profiles(name: str, value: Any) -> tuple[ImageProfile, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST:
        raise SettingError(f"{name} must be a list of at most {_MOST} profiles.")
    try:
        return tuple(ImageProfile.from_json(item) for item in value)
    except ProfileError as error:
        raise SettingError(f"{name}: {error}") from None
    except (TypeError, AttributeError):
        raise SettingError(f"{name} must give [min, opt, max] for width, height, batch and tokens.") from None


def _or_none(read: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else read(name, value)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "preset": _or_none(_text),
    "resolutions": _texts,
    "batches": _texts,
    "tokens": _texts,
    "components": _or_none(_texts),
    "precision": _or_none(_text),
    "backend": _text,
    "allow_pickle": _flag,
    "profiles": _profiles,
}


# ---- against a model and this machine


def open_checkpoint(request: BuildRequest) -> Checkpoint:
    """The model of ``request``, opened but not read. Raises ModelError, PickleRefused."""
    from sdaccel.model_choice import choose_model, demo_model, open_model

    if not request.model.strip():
        raise ModelError("no model is named.", hint="Name a diffusers folder or a .safetensors file.")
    try:
        choice = demo_model() if request.model == DEMO else choose_model(request.model)
        return open_model(choice, allow_pickle=request.allow_pickle)
    except (OSError, ValueError, RuntimeError) as error:  # what the system says to a path that can be none
        raise ModelError(f"{request.model!r:.200} cannot be opened: {error}.") from None


def backend_of(request: BuildRequest) -> Backend:
    """Who builds and runs the engines of ``request``; "auto" leaves it to SDACCEL_BACKEND.

    Raises SettingError, BackendError.
    """
    from sdaccel.backends.base import pick_backend

    return pick_backend(settings.BACKEND.value() if request.backend == "auto" else request.backend)


def image_profiles(request: BuildRequest, family: str, native: int) -> tuple[ImageProfile, ...]:
    """The profiles of ``request`` for a model of ``family`` whose native side is ``native`` pixels.

    Raises SettingError, ProfileError.
    """
    from sdaccel.presets import find_preset

    if request.profiles:
        if request.preset or request.resolutions or request.batches or request.tokens:
            raise SettingError("profiles stand alone.", hint="Leave out preset, resolutions, batches and tokens.")
        return request.profiles
    if request.preset is None:
        return parse_profiles(request.resolutions, request.batches, request.tokens, native=native)
    if request.resolutions or request.batches or request.tokens:
        raise SettingError(_PRESET_ALONE, hint=_PRESET_ALONE_HINT)
    return find_preset(request.preset).image_profiles(family, native)


_PRESET_ALONE = "a preset brings its own profiles."
_PRESET_ALONE_HINT = "Leave resolutions, batches and tokens empty, or choose no preset."


def parse(request: BuildRequest, checkpoint: Checkpoint | None = None) -> BuilderConfig:
    """How the engines of ``request`` are built. ``checkpoint``: its model, if that is open already.

    Raises ModelError, ProfileError, SettingError, BackendError: whatever is wrong first. `problems` tells all at once.
    """
    from sdaccel.builder import BuilderConfig, buildable_components

    checkpoint = checkpoint or open_checkpoint(request)
    profiles = image_profiles(request, checkpoint.family.value, checkpoint.native_side)
    backend = backend_of(request)
    if request.precision is not None:
        backend.check_precision(request.precision)
    _known_components(request)
    buildable_components(checkpoint, request.components)
    return BuilderConfig(request.components, profiles, request.precision, backend.name)


def _known_components(request: BuildRequest) -> None:
    from sdaccel.export.components import COMPONENTS

    if request.components is not None and not request.components:
        raise SettingError("no component is chosen.", hint=f"Choose of {', '.join(COMPONENTS)}.")
    for component in request.components or ():
        if component not in COMPONENTS:
            raise SettingError(f"there is no component {component!r}.", hint=f"Components: {', '.join(COMPONENTS)}.")


def problems(request: BuildRequest) -> dict[str, str]:
    """What is wrong with ``request``: field → message with its hint, all fields at once; empty if it can be built."""
    from sdaccel.builder import buildable_components

    found: dict[str, str] = {}

    def check(name: str, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except SdaccelError as error:
            found.setdefault(name, str(error))
            return None

    checkpoint = check("model", lambda: open_checkpoint(request))
    native = checkpoint.native_side if checkpoint else 512
    each = {"resolutions": request.resolutions, "batches": request.batches, "tokens": request.tokens}
    for name, texts in each.items():
        for text in texts:
            alone = [(text,) if field == name else () for field in each]
            check(name, lambda alone=alone: parse_profiles(*alone, native=native))  # type: ignore[misc]
    if request.preset is not None:
        from sdaccel.presets import find_preset

        preset = check("preset", lambda: find_preset(str(request.preset)))
        if any(each.values()):
            found.setdefault("preset", f"{_PRESET_ALONE} {_PRESET_ALONE_HINT}")
        elif preset is not None and checkpoint is not None:
            check("preset", lambda: preset.image_profiles(checkpoint.family.value, native))
    if request.profiles:
        check("profiles", lambda: image_profiles(request, "", native))
    check("components", lambda: _known_components(request))
    if checkpoint is not None and "components" not in found:
        check("components", lambda: buildable_components(checkpoint, request.components))
    backend = check("backend", lambda: backend_of(request))
    if backend is not None and request.precision is not None:
        check("precision", lambda: backend.check_precision(request.precision))
    return found
