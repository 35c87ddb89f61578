"""The engines of a store as rows of a table, and what can be done with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdaccel.engine.store import Entry, Store
from sdaccel.errors import EngineNotFound, SettingError, StoreError
from sdaccel.listing import Listed, list_engines, side_text, size_text
from sdaccel.resources import expanded
from sdaccel.ui.requests import BuildRequest

if TYPE_CHECKING:
    from sdaccel.backends.cuda.timing_cache import TimingCache

MAX_TIMING_CACHE = 64 << 20


@dataclass(frozen=True)
class EngineRow:
    """An engine of the store, in words and numbers for people. Of a broken one little is known."""

    key: str
    checkpoint: str
    component: str
    resolutions: tuple[str, ...]
    """Of its profiles: "512-1024", "832x1216" (width x height); empty for text encoders."""
    batches: tuple[str, ...]
    """Images at once; of text encoders prompts at once."""
    tokens: tuple[str, ...]
    """Empty for the VAE."""
    precision: str
    backend: str
    size: int
    """Bytes of its own files."""
    shared: int
    """Bytes of weights and graph that other engines may use too."""
    last_used: float | None
    """When it was last loaded for a host, in seconds since 1970; None: never since it was built."""
    speed: float | None
    """How many times as fast as torch, as measured when it was built; None where it was not measured."""
    state: str
    """"ready", "stale" or "broken"."""
    reason: str
    created: str = ""
    """ISO 8601, UTC."""
    origin: str = ""
    """The path of the checkpoint, or "pipeline" and its class."""


def engine_rows(store: Store) -> list[EngineRow]:
    """Every engine, newest first, the broken ones last."""
    return [_row(store, item) for item in list_engines(store)]


def _row(store: Store, item: Listed) -> EngineRow:
    used = store.last_used(item.key)
    if item.entry is None:
        nothing: tuple[str, ...] = ()
        return EngineRow(
            item.key, "", "", nothing, nothing, nothing, "", "", item.nbytes, 0, used, None, item.state, item.reason
        )
    engine = item.entry.engine
    resolutions, batches, tokens = _sizes(item.entry)
    return EngineRow(
        key=item.key,
        checkpoint=engine.model,
        component=engine.component,
        resolutions=resolutions,
        batches=batches,
        tokens=tokens,
        precision=engine.precision,
        backend=engine.backend,
        size=item.nbytes,
        shared=item.shared,
        last_used=used,
        speed=_speed(item.entry),
        state=item.state,
        reason=item.reason,
        created=engine.created,
        origin=engine.origin,
    )


def _sizes(entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Resolutions, batches and tokens, each once, in the order of the profiles."""
    engine = entry.engine
    if engine.component.startswith("text_encoder"):
        own = [dict(profile.axes) for profile in engine.profiles]
        batch, tokens = (_once(side_text(axes[axis]) for axes in own if axis in axes) for axis in ("batch", "tokens"))
        return (), batch, tokens
    images = engine.image_profiles
    resolutions = _once(
        side_text(image.width) if image.width == image.height else f"{side_text(image.width)}x{side_text(image.height)}"
        for image in images
    )
    batches = _once(side_text(image.batch) for image in images)
    tokens = () if engine.component.startswith("vae") else _once(side_text(image.tokens) for image in images)
    return resolutions, batches, tokens


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _speed(entry: Entry) -> float | None:
    try:
        times: Any = entry.engine.details["speed"]["milliseconds"]
        return float(times["torch"]) / float(times["engine"])
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return None


# ---- deleting, building again


def delete(store: Store, keys: Iterable[str]) -> int:
    """Removes engines, then what only they used. Returns the bytes freed; one that is gone already counts nothing.

    Raises StoreError after the others have gone if one could not be removed.
    """
    chosen = list(dict.fromkeys(keys))
    broken = {item.key for item in store.broken("engines")}
    freed, failed = 0, []
    for key in chosen:
        try:
            freed += store.remove(key)
        except EngineNotFound:
            continue
        except StoreError as error:
            failed.append(str(error))
    if broken & set(chosen):  # a broken manifest does not tell which weights it used
        damaged = [(item.kind, item.key) for item in store.broken() if item.kind != "engines"]
        freed += store.collect(also=damaged)
    if failed:
        raise StoreError(
            f"{len(failed)} of {len(chosen)} engines could not be deleted ({size_text(freed)} freed): "
            f"{' '.join(dict.fromkeys(failed))}"
        )
    return freed


def rebuild_request(entry: Entry) -> BuildRequest:
    """The request that makes this engine again, for this machine as it is now.

    An engine that is ready is found instead of built: delete it first. Which VAE or variant of weights was chosen when
    it was built is not known any more; the model's own are taken. Raises SettingError for one that was built from a
    live pipeline.
    """
    from sdaccel.model_choice import demo_model
    from sdaccel.ui.requests import DEMO

    engine = entry.engine
    if engine.origin.startswith("pipeline "):
        raise SettingError(
            f"the engine {entry.key[:12]} was built from a live {engine.origin}, not from a file.",
            hint="Build it from its checkpoint on the Build page, or call sdaccel.accelerate(pipe) again.",
        )
    origin = expanded(engine.origin).absolute()
    return BuildRequest(
        model=DEMO if origin == demo_model().path.absolute() else str(origin),
        components=(engine.component,),
        precision=engine.precision,
        backend=engine.backend,
        profiles=engine.image_profiles,
    )


# ---- what the tuner has measured


def export_timing_cache(store: Store, path: Path) -> int:
    """Writes what builds have measured on this GPU into a file. Returns how many measurements.

    Raises BackendError without a GPU, SettingError if nothing has been measured or the file cannot be written.
    """
    cache = _timing_cache(store)
    if not cache.measured:
        raise SettingError("nothing has been measured on this GPU yet.", hint="Build an engine for it first.")
    try:
        cache.export(Path(path))
    except OSError as error:
        raise SettingError(f"{path} cannot be written: {error.strerror or error}.") from None
    return len(cache.measured)


def import_timing_cache(store: Store, path: Path) -> int:
    """Adds what was exported on another machine of the same kind. Returns how many measurements.

    Raises BackendError without a GPU, SettingError for a file that is none or is of another device.
    """
    cache = _timing_cache(store)
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}.") from None
    if size > MAX_TIMING_CACHE:
        raise SettingError(f"{path} has {size:,} bytes, too many for a timing cache ({MAX_TIMING_CACHE:,} at most).")
    number = cache.take(Path(path))
    cache.save()
    return number


def _timing_cache(store: Store) -> TimingCache:
    from sdaccel.backends.base import pick_backend

    return pick_backend("cuda").timing_cache(store.root)  # type: ignore[attr-defined]


__all__ = [
    "EngineRow",
    "delete",
    "engine_rows",
    "export_timing_cache",
    "import_timing_cache",
    "rebuild_request",
]
