"""An adapter file in words and numbers, for people and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sdaccel.adapters.file import Adapter, Shapes

_BASES = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")
_SHOWN = 20


def describe(adapter: Adapter, names: Mapping[str, Shapes] | None = None) -> dict[str, Any]:
    """What the file is and, with the shapes of a model (component → state_dict name → shape), what of it applies.

    Raises ModelError as Adapter.fit.
    """
    layers = adapter.layers
    facts: dict[str, Any] = {
        "file": str(adapter.path),
        "format": adapter.format,
        "trainer": adapter.metadata.get("ss_network_module"),
        "trainer_arguments": adapter.metadata.get("ss_network_args"),
        "title": adapter.metadata.get("modelspec.title"),
        "hash": adapter.metadata.get("sshs_model_hash"),
        "base_model": next((adapter.metadata[key] for key in _BASES if adapter.metadata.get(key)), None),
        "family": adapter.family.value if adapter.family else None,
        "ranks": sorted({layer.rank for layer in layers if layer.rank is not None}),
        "alphas": sorted({layer.alpha for layer in layers if layer.alpha is not None}),
        "keys": adapter.keys,
        "bytes": adapter.nbytes,
        "components": dict(Counter(layer.component or "not said" for layer in layers)),
        "layers": [
            {"name": layer.name, "component": layer.component, "format": layer.format, "rank": layer.rank,
             "alpha": layer.alpha, "bytes": layer.nbytes, "keys": list(layer.keys)}
            for layer in layers
        ],
        "refused": dict(adapter.refused),
        "applies": None,
        "unused": {},
    }  # fmt: skip
    if names is not None:
        fitted = adapter.fit(names)
        facts["applies"] = [f"{fit.component}.{fit.name}" for fit in fitted.fits]
        facts["unused"] = dict(fitted.unused)
    return facts


def lines(facts: Mapping[str, Any]) -> list[str]:
    """``facts`` as text; every key that is refused or not used is among them, escaped where a terminal would obey."""
    parts = ", ".join(f"{count} layers of {name}" for name, count in facts["components"].items())
    found = [
        f"format: {facts['format']}",
        f"target: {facts['family'] or 'not known'}; {parts}",
        f"rank: {_numbers(facts['ranks'])}; alpha: {_numbers(facts['alphas'])}",
        f"size: {facts['keys']} keys, {facts['bytes'] / 2**20:.1f} MiB",
    ]
    for name in ("base_model", "trainer", "trainer_arguments", "title", "hash"):
        if facts[name]:
            found.append(f"{name.replace('_', ' ')}: {_plain(facts[name])}")
    found += [f"refused: {_plain(key)}: {_plain(reason)}" for key, reason in facts["refused"].items()]
    if facts["applies"] is not None:
        found.append(f"changes {len(facts['applies'])} weights of the model")
        found += [f"not used: {_plain(name)}: {_plain(reason)}" for name, reason in facts["unused"].items()]
    return found


def _numbers(values: list[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:_SHOWN])
    return (shown + (", …" if len(values) > _SHOWN else "")) or "none"


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)[:500]
