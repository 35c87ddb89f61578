"""Sizes that were made in torch because no engine has them: counted, and offered to be built."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdaccel.engine.store import Store
from sdaccel.integrations.host_engines import Notes

OFTEN = 5
"""Generations of a size in torch after which a build of it is offered."""


@dataclass(frozen=True)
class Offer:
    """A size that was made in torch, several times, because no engine has it."""

    model: str
    """Path of the checkpoint."""
    width: int
    height: int
    batch: int
    tokens: int
    times: int

    @property
    def path(self) -> Path:
        return Path(self.model)

    def __str__(self) -> str:
        name = self.path.stem
        return f"You made {self.width}×{self.height} with {name} {self.times} times in torch: build an engine for it?"

    def request(self) -> dict[str, Any]:
        """What a build takes: model, resolutions, batches and tokens as the command line writes them."""
        return {
            "model": self.model,
            "resolutions": [f"{self.width}x{self.height}"],
            "batches": ["1" if self.batch == 1 else f"1-{self.batch}"],
            "tokens": ["77" if self.tokens <= 77 else f"77-{self.tokens}"],
        }


class WantedShapes:
    """Counts the generations whose size no engine had."""

    def __init__(self, store: Store):
        self._notes = Notes(store, "shapes.json")

    def add(self, model: Path, width: int, height: int, batch: int, tokens: int) -> int:
        """One more. Returns how many there have been."""
        key = f"{model.absolute()}|{width}x{height}"
        with self._notes.lock:
            table = self._notes.read()
            known = table.get(key)
            known = known if isinstance(known, dict) else {}
            times = int(known.get("times", 0)) + 1
            table[key] = asdict(
                Offer(
                    str(model.absolute()),
                    width,
                    height,
                    max(batch, int(known.get("batch", 1))),
                    max(tokens, int(known.get("tokens", 77))),
                    times,
                )
            )
            self._notes.write(table)
        return times

    def drop(self, model: Path, width: int, height: int) -> None:
        """The size has an engine now, or is not wanted."""
        key = f"{model.absolute()}|{width}x{height}"
        with self._notes.lock:
            table = self._notes.read()
            if table.pop(key, None) is not None:
                self._notes.write(table)

    def offers(self, at_least: int = OFTEN) -> list[Offer]:
        """What was made at least so often, the most frequent first."""
        found = []
        for item in self._notes.read().values():
            with suppress(TypeError):
                found.append(Offer(**item))
        return sorted((o for o in found if o.times >= at_least), key=lambda offer: -offer.times)
