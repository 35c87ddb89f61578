"""A small store for tests: weights, a graph, an engine of a few hundred bytes. Imports no torch: children start fast.

Run as a program it is such a child: ``python -m tests.engine.small WHAT STORE [...]``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdaccel.engine import disk
from sdaccel.engine.manifest import EngineManifest, TensorSpec
from sdaccel.engine.store import Draft, Store
from sdaccel.profile import ImageProfile

PROFILE = ImageProfile.native(512)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


MANIFEST = EngineManifest(
    component="unet",
    source="unet",
    family="sd1",
    model="ein Modell für Bilder",
    origin="/models/é.safetensors",
    architecture=sha("graph"),
    weights=sha("content"),
    weights_entries=(sha("weights"),),
    precision="fp32",
    backend="onnxruntime",
    profiles=(PROFILE.for_component("unet"),),
    image_profiles=(PROFILE,),
    device={"type": "cpu"},
    versions={"onnxruntime": "1.32.0"},
    inputs=(
        TensorSpec("sample", "float32", ("batch", 4, "height", "width")),
        TensorSpec("mid_residual", "float32", ("batch", "channels", "height", "width"), optional=True),
    ),
    outputs=(TensorSpec("sample_out", "float32", ("batch", 4, "height", "width")),),
    config={"in_channels": 4, "block_out_channels": [320, 640], "act_fn": "silu", "norm_eps": 1e-05},
    created="2026-11-30T12:00:00+00:00",
    build_seconds=1.25,
    details={"ops": {"Conv": 3}, "checked": True},
)


def nothing(point: str) -> None:
    pass


def build(store: Store, model: str = "a", at: Callable[[str], None] = nothing) -> str:
    """Publishes weights and an engine of ``model`` and the graph that all models share. Returns the engine's key."""

    def weights(draft: Draft) -> dict[str, Any]:
        at("start of the weights")
        with draft.create("weights.safetensors", size=92) as file:
            file.write(b"header--")
            for part in range(3):
                file.write(bytes([part]) * 28)
        return {"precision": "fp32"}

    def graph(draft: Draft) -> dict[str, Any]:
        with (draft.path / "graph.onnx").open("wb") as file:
            file.write(b"half a gr")
            file.flush()
            at("inside the graph")
            file.write(b"aph")
        return {"nodes": 3}

    def engine(draft: Draft) -> dict[str, Any]:
        (draft.path / "model.onnx").write_bytes(b"optimized graph")
        at("between the engine's files")
        (draft.path / "empty.bin").write_bytes(b"")
        return manifest.to_json()

    manifest = replace(MANIFEST, model=model, weights=sha(model), weights_entries=(sha(f"weights {model}"),))
    store.publish("weights", manifest.weights_entries[0], weights)
    store.publish("graphs", manifest.architecture, graph)
    store.publish("engines", manifest.key, engine)
    return manifest.key


def digest(store: Store) -> str:
    """A hash over every name and byte of the entries."""
    whole = hashlib.sha256()
    for kind in store.KINDS:
        for path in sorted((store.root / kind).rglob("*")):
            whole.update(f"{path.relative_to(store.root)}\n".encode())
            whole.update(path.read_bytes() if path.is_file() else b"")
    return whole.hexdigest()


def child_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.engine.small", *map(str, arguments)]


def child_environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


# Children


def die() -> None:
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)


def run_until(store: Store, what: str, last: int) -> None:
    """Builds or removes, and dies at the ``last``-th point: before or half-way through a change of the disk.

    With ``last`` -1 it lives and prints every point.
    """
    points: list[str] = []

    def at(point: str) -> None:
        points.append(point)
        if len(points) - 1 == last:
            die()

    def deadly(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            at(f"before {name}")
            if name == "write":
                file, data = arguments
                function(file, data[: len(data) // 2])
                at("half a write")
                return function(file, data[len(data) // 2 :])
            if name == "delete" and arguments[0].is_dir():
                next(arguments[0].iterdir()).unlink()
                at("half a delete")
            return function(*arguments, **options)

        return call

    for name in ("write", "fsync", "fsync_folder", "rename", "delete"):
        setattr(disk, name, deadly(name, getattr(disk, name)))
    Path.mkdir = deadly("mkdir", Path.mkdir)  # type: ignore[method-assign]
    if what == "remove":
        store.remove(store.list()[0].key)
    else:
        build(store, at=at)
    at("the end")
    print("\n".join(points))


def build_together(store: Store, go: Path, calls: Path) -> None:
    """Waits for the file ``go``, then publishes one key; every call of fill leaves a line in ``calls``."""

    def fill(draft: Draft) -> dict[str, Any]:
        with calls.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        with draft.create("graph.onnx") as writer:
            for part in range(20):
                writer.write(os.urandom(1000) + bytes([part]))
                time.sleep(0.02)
        return {"by": os.getpid()}

    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.01)
    entry = store.publish("graphs", sha("one"), fill)
    store.verify(entry)
    print(entry.files["graph.onnx"].sha256[0], entry.manifest["by"])


def hold_lock(store: Store, key: str) -> None:
    """Publishes for ever."""

    def fill(draft: Draft) -> dict[str, Any]:
        (draft.path / "half.bin").write_bytes(b"half")
        print("ready", flush=True)
        time.sleep(600)
        return {}

    store.publish("graphs", key, fill)


def without_flock() -> None:
    """Makes this process believe that the file system has no locks."""
    import errno
    import fcntl

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    fcntl.flock = flock


def main() -> None:
    what, root, *rest = sys.argv[1:]
    if what.endswith("-without-flock"):
        without_flock()
    store = Store(root)
    if what in ("build", "remove"):
        run_until(store, what, int(rest[0]))
    elif what == "together":
        build_together(store, Path(rest[0]), Path(rest[1]))
    elif what.startswith("hold"):
        hold_lock(store, rest[0])
    elif what.startswith("once"):
        print(store.publish("graphs", rest[0], lambda draft: {"by": os.getpid()}).manifest["by"])


if __name__ == "__main__":
    main()
