"""Which worker is given which batch, and which batch is to blame when a worker is lost.

A worker has several batches under way, so its loss does not tell which of them it was. None is blamed at first: each
is drawn again, in the same composition, with nothing else beside it. One that takes a worker along then is guilty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from sdaccel.jobs.task import BatchTask, ImageResult

AHEAD = 2
"""Batches that a worker is given at once, so that it need not wait for the next."""
RESTARTS = 3
"""So often in a row a worker may be lost without having been given anything, before no other takes its place."""


@dataclass(kw_only=True, eq=False)
class Seat:
    """A place for a worker; when one is lost, another takes it."""

    model: str | None = None
    batches: dict[int, BatchTask] = field(default_factory=dict)
    idle_losses: int = 0

    @property
    def there(self) -> bool:
        """Whether its worker has started."""
        raise NotImplementedError

    @property
    def worn_out(self) -> bool:
        return self.idle_losses > RESTARTS


AnySeat = TypeVar("AnySeat", bound=Seat)


class Dispatcher(Generic[AnySeat]):
    """For one thread at a time."""

    def __init__(self) -> None:
        self._waiting: deque[BatchTask] = deque()
        self._suspects: set[int] = set()
        """Ids of batches that a worker was lost with."""
        self._notes: list[str] = []
        self._number = 0

    def has_room(self, seats: Sequence[AnySeat]) -> bool:
        """Whether one more batch would find somebody soon. Where nobody is there yet, it may wait."""
        if self._waiting:
            return False
        there = [seat for seat in seats if seat.there]
        return not there or any(map(self._takes, there))

    def add(self, batch: BatchTask) -> None:
        self._waiting.append(batch)

    def hand_out(self, seats: Sequence[AnySeat]) -> Iterator[tuple[AnySeat, int, BatchTask]]:
        """Gives waiting batches to those who have room: (seat, its number for the batch, batch)."""
        while self._waiting:
            batch = self._waiting[0]
            free = [seat for seat in seats if self._takes(seat)]
            if batch.id in self._suspects:
                free = [seat for seat in free if not seat.batches]
            if not free:
                return
            self._waiting.popleft()
            seat = min(free, key=lambda one: (len(one.batches), one.model != batch.model))
            self._number += 1
            seat.batches[self._number], seat.model = batch, batch.model
            yield seat, self._number, batch

    def drawn(self, seat: AnySeat, number: int) -> BatchTask | None:
        """The batch of that number, which is no longer with ``seat``; None if it was taken from there already."""
        seat.idle_losses = 0
        return seat.batches.pop(number, None)

    def lost(self, seat: AnySeat) -> tuple[list[BatchTask], bool]:
        """What the worker had that is gone, and whether it was that which took it along."""
        lost = list(seat.batches.values())
        guilty = len(lost) == 1 and lost[0].id in self._suspects
        self._suspects.update(batch.id for batch in lost)
        seat.batches.clear()
        seat.model = None
        seat.idle_losses = 0 if lost else seat.idle_losses + 1
        return lost, guilty

    def note(self, text: str) -> None:
        """Is told with the next image that is drawn."""
        self._notes.append(text)

    def noted(self, results: list[ImageResult]) -> None:
        """Adds what is to be told to the first of ``results``."""
        if results and self._notes:
            results[0] = replace(results[0], notes=(*results[0].notes, *self._notes))
            self._notes.clear()

    def _takes(self, seat: AnySeat) -> bool:
        alone = any(batch.id in self._suspects for batch in seat.batches.values())
        return seat.there and len(seat.batches) < AHEAD and not alone
