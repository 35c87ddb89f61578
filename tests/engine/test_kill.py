"""A process that dies anywhere leaves only whole entries, and nothing that the next build has to be told about."""

import subprocess
from pathlib import Path

import pytest

from sdaccel.engine.store import Store
from tests.engine.small import build, child_command, child_environment, digest


def run(what: str, root: Path, last: int) -> subprocess.CompletedProcess:
    command = child_command(what, root, last)
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)


def prepare(what: str, root: Path) -> Store:
    """A store before the child: empty, with a broken engine and graph, or whole."""
    store = Store(root)
    if what == "build over broken entries":
        key = build(store)
        (store.root / "engines" / key / "model.onnx").write_bytes(b"truncated")
        graph = store.list("graphs")[0]
        graph.file("graph.onnx").write_bytes(b"another one!")
    elif what == "remove":
        build(store)
    return store


def points_of(what: str, tmp_path: Path) -> list[str]:
    prepare(what, tmp_path / "count")
    finished = run(what.split()[0], tmp_path / "count", -1)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("what", "least", "step"), [("build", 50, 1), ("build over broken entries", 40, 3), ("remove", 10, 1)]
)
def test_death_at_every_point(tmp_path, what, least, step):
    reference = Store(tmp_path / "reference")
    key = build(reference)
    points = points_of(what, tmp_path)
    assert len(points) >= least
    for index in range(0, len(points), step):
        root = tmp_path / str(index)
        store = prepare(what, root)
        finished = run(what.split()[0], root, index)
        assert finished.returncode not in (0, 1), f"it lived through {points[index]}: {finished.stderr}"
        where = f"after death at point {index}, {points[index]}"
        for kind in store.KINDS:
            for entry in store.list(kind):
                if what == "build over broken entries" and kind == "graphs" and entry.nbytes == len(b"another one!"):
                    continue  # not noticed before it is verified; the next build does
                store.verify(entry)
        if what != "build over broken entries":
            assert store.broken() == [], where
        assert build(store) == key
        store.open_engine(key)
        assert digest(store) == digest(reference), where
        assert list((root / "tmp").iterdir()) == [], where
        store.remove(key)
        assert [p for kind in store.KINDS for p in (root / kind).iterdir()] == [], where
