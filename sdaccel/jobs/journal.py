"""What is to be drawn and what became of it: an append-only SQLite file, which several processes may share.

An image is known by its key. Its row is written once, with the batch that it is drawn in and the name of its file; what
happens to it afterwards is a row of ``events``. Nothing is ever changed or deleted: a process may end at any point,
and the next one reads where it was. SQLite's write-ahead log makes each transaction whole; it needs a local disk
(https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sdaccel.errors import StoreError
from sdaccel.jobs.job import Job
from sdaccel.jobs.storage import MAKE_ROOM, DiskFull
from sdaccel.jobs.task import BatchTask, ImageResult, ImageTask

FILE = "journal.sqlite"
CRASHES = 2
"""So often an image may take its worker down, or end in an error, before it is set aside."""
_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (id INTEGER PRIMARY KEY, model TEXT);
CREATE TABLE IF NOT EXISTS images (
    key TEXT PRIMARY KEY, batch INTEGER NOT NULL, position INTEGER NOT NULL, number INTEGER NOT NULL,
    name TEXT COLLATE NOCASE UNIQUE, content TEXT NOT NULL, settings TEXT NOT NULL, job TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS images_by_batch ON images (batch, position);
CREATE INDEX IF NOT EXISTS images_by_content ON images (content);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, kind TEXT NOT NULL, batch INTEGER NOT NULL, key TEXT,
    owner TEXT, data TEXT
);
CREATE INDEX IF NOT EXISTS events_by_batch ON events (batch, id);
"""

DONE, FAILED, CRASHED, RETRIED, LOST, STARTED = "done", "failed", "crashed", "retried", "lost", "started"


@dataclass
class ImageState:
    """done: its file's name. failed: why it was set aside."""

    crashes: int = 0
    done: str | None = None
    seconds: float | None = None
    failed: str | None = None

    @property
    def open(self) -> bool:
        return self.done is None and self.failed is None


class Journal:
    """The journal in ``folder``. Raises StoreError where it cannot be read, DiskFull where it cannot be written."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._owners = folder / "owners"
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            self._owners.mkdir(parents=True, exist_ok=True)
            self._alive = FileLock(self._lock_of(self.owner), thread_local=False)
            self._alive.acquire()
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error.strerror or error}.") from None
        try:
            self._open(folder)
        except BaseException:
            self._let_go()
            raise

    def _open(self, folder: Path) -> None:
        with self._told():
            self._database = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        # SQLite does not wait for another process that turns the log on at the same time.
        with self._told(), FileLock(folder / "opening.lock"):
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version > _FORMAT:
                raise StoreError(f"{self.path} was written by a newer sdaccel (format {version}, not {_FORMAT}).")
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version={_FORMAT}")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()
        self._let_go()

    def _let_go(self) -> None:
        self._alive.release()
        with suppress(OSError):
            self._lock_of(self.owner).unlink(missing_ok=True)

    # ---- what is to be drawn

    @contextmanager
    def planning(self) -> Iterator[None]:
        """What is asked and added inside of it is one step, between which no other process adds anything."""
        with self._told(), self._transaction():
            yield
        # What follows may be lost with the machine's power: files are found by their keys then. Plans may not: a file
        # has its name from there.
        with self._told():
            self._database.execute("PRAGMA synchronous=NORMAL")

    def known(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that have a row."""
        return {key for key in keys if self._one("SELECT 1 FROM images WHERE key=?", key)}

    def count(self) -> int:
        """Of images that are drawn or to be drawn."""
        return int(self._one("SELECT COUNT(*) FROM images WHERE name IS NOT NULL")[0])  # type: ignore[index]

    def drawn_otherwise(self, content: str, settings: str) -> str | None:
        """The settings under which the same content is here, if they are others."""
        row = self._one("SELECT settings FROM images WHERE content=? AND settings<>? LIMIT 1", content, settings)
        return row[0] if row else None

    def name_is_taken(self, name: str) -> bool:
        return self._one("SELECT 1 FROM images WHERE name=?", name) is not None

    def add(
        self,
        batches: Sequence[tuple[str | None, Sequence[ImageTask], Sequence[int]]],
        name: Callable[[ImageTask, Callable[[str], bool]], str],
        contents: Mapping[str, tuple[str, str]],
    ) -> None:
        """Writes images that have no row yet, all or none of them.

        batches: (model, images, positions to be written). name: gives an image's file a name that is not taken.
        contents: key → (content hash, settings as JSON).
        """
        with self._told(), self._transaction():
            for model, images, wanted in batches:
                row = self._database.execute("INSERT INTO batches (model) VALUES (?)", (model,))
                for position, image in enumerate(images):
                    companion = position not in wanted
                    key = f"{image.key}+{row.lastrowid}" if companion else image.key
                    self._database.execute(
                        "INSERT INTO images VALUES (?,?,?,?,?,?,?,?)",
                        (
                            key,
                            row.lastrowid,
                            position,
                            image.index,
                            None if companion else name(image, self.name_is_taken),
                            *contents[image.key],
                            _written(image.job),
                        ),
                    )

    # ---- drawing

    def batches_of(self, keys: Iterable[str]) -> list[int]:
        """Ids of the batches that hold ``keys``, in the order in which they were planned."""
        rows = (self._one("SELECT batch FROM images WHERE key=?", key) for key in keys)
        return sorted({row[0] for row in rows if row})

    def states(self, batch: int) -> dict[str, ImageState]:
        """key → what became of it, of those images of a batch that have files."""
        rows = self._all("SELECT key FROM images WHERE batch=? AND name IS NOT NULL ORDER BY position", batch)
        states = {key: ImageState() for (key,) in rows}
        for kind, key, data in self._all("SELECT kind, key, data FROM events WHERE batch=? ORDER BY id", batch):
            state = states.get(key)
            if state is None:
                continue
            if kind == DONE:
                facts = json.loads(data)
                state.done, state.seconds = facts["name"], facts["seconds"]
            elif kind == FAILED:
                state.failed = json.loads(data)["error"]
            elif kind == CRASHED:
                state.crashes += 1
            elif kind == RETRIED and state.done is None:
                state.crashes, state.failed = 0, None
            elif kind == LOST:
                state.done = state.seconds = None
        return states

    def everything(self) -> Iterator[tuple[ImageTask, ImageState]]:
        """All images that have files or are to have them, whoever asked for them."""
        for (batch,) in self._all("SELECT id FROM batches ORDER BY id"):
            states = self.states(batch)
            yield from ((image, states[image.key]) for image in self._images(batch) if image.key in states)

    def _images(self, batch: int) -> tuple[ImageTask, ...]:
        rows = self._all("SELECT key, number, name, job FROM images WHERE batch=? ORDER BY position", batch)
        return tuple(ImageTask(key, _read(job), number, name or "") for key, number, name, job in rows)

    def claim(self, batch: int, keys: set[str]) -> list[BatchTask] | None:
        """What is left to draw of ``batch``, now ours; None while another living process has it.

        Of a batch that has ended in a crash before, each image comes by itself, so that one does not take others along.
        """
        with self._told(), self._transaction():
            row = self._one(
                "SELECT owner FROM events WHERE batch=? AND kind=? ORDER BY id DESC LIMIT 1", batch, STARTED
            )
            if row and row[0] != self.owner and self._lives(row[0]):
                return None if any(state.open for state in self.states(batch).values()) else []
            states = self.states(batch)
            wanted = [key for key, state in states.items() if state.open and key in keys]
            if wanted:
                self._append(STARTED, batch)
        if not wanted:
            return []
        ((model,),) = self._all("SELECT model FROM batches WHERE id=?", batch)
        images = self._images(batch)
        together = tuple(i for i, image in enumerate(images) if image.key in wanted and not states[image.key].crashes)
        alone = [image for image in images if image.key in wanted and states[image.key].crashes]
        tasks = [BatchTask(batch, model, images, together)] if together else []
        return tasks + [BatchTask(batch, model, (image,), (0,)) for image in alone]

    def done(self, batch: int, results: Iterable[ImageResult]) -> None:
        with self._told(), self._transaction():
            for result in results:
                facts = {"name": result.name, "bytes": result.nbytes, "seconds": result.seconds}
                self._append(DONE, batch, result.key, facts)

    def crashed(self, batch: int, keys: Iterable[str], error: str) -> list[str]:
        """Notes that drawing these images ended in ``error``; returns the keys that are set aside for it now."""
        aside = []
        states = self.states(batch)
        with self._told(), self._transaction():
            for key in keys:
                self._append(CRASHED, batch, key, {"error": error})
                if states[key].crashes + 1 >= CRASHES:
                    self._append(FAILED, batch, key, {"error": error})
                    aside.append(key)
        return aside

    def retry(self, batch: int, keys: Iterable[str]) -> None:
        """Images that were set aside may be tried again."""
        with self._told(), self._transaction():
            for key in keys:
                self._append(RETRIED, batch, key)

    def lost(self, batch: int, keys: Iterable[str]) -> None:
        """The files of images are gone: they are to be drawn again."""
        with self._told(), self._transaction():
            for key in keys:
                self._append(LOST, batch, key)

    # ---- rows

    def _append(self, kind: str, batch: int, key: str | None = None, facts: Mapping[str, object] | None = None) -> None:
        self._database.execute(
            "INSERT INTO events (time, kind, batch, key, owner, data) VALUES (?,?,?,?,?,?)",
            (time.time(), kind, batch, key, self.owner, json.dumps(facts or {}, ensure_ascii=False)),
        )

    def _one(self, query: str, *values: object) -> tuple | None:
        with self._told():
            return self._database.execute(query, values).fetchone()

    def _all(self, query: str, *values: object) -> list[tuple]:
        with self._told():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._database.in_transaction:
            yield
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if "full" in str(error):
                raise DiskFull(f"the disk of {self.path} is full.", hint=MAKE_ROOM) from None
            raise StoreError(f"the journal {self.path} cannot be used: {error}.") from None

    # ---- owners

    def _lock_of(self, owner: str) -> Path:
        return self._owners / f"{owner}.lock"

    def _lives(self, owner: str) -> bool:
        """Whether a process that claimed something is still there: it holds its lock until it ends."""
        path = self._lock_of(owner)
        if not path.exists():
            return False
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return False


def _written(job: Job) -> str:
    found = job.to_json()
    if job.batch:
        found |= {"batch": [each.to_json() for each in job.batch], "position": job.position}
    return json.dumps({"job": found, "source": job.source}, ensure_ascii=False)


def _read(text: str) -> Job:
    value = json.loads(text)
    job = value["job"]
    batch = tuple(Job.from_json(each) for each in job.pop("batch", ()))
    position = job.pop("position", 0)
    return Job.from_json(job | {"batch": batch, "position": position}, value["source"])
