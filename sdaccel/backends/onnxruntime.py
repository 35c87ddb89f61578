"""ONNX Runtime: the embedded default, on any machine.

A build lets ONNX Runtime optimize the fused graph once, for the CPU at hand, and keeps the result, so that a load only
maps weights. What the optimizer leaves as it was is read from the shared weights entry; what it lays out anew
(convolution weights in blocks of channels) goes into a second weights entry, again one for all engines of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnxruntime as ort
import torch

from sdaccel import settings
from sdaccel.backends import onnxruntime_refit
from sdaccel.backends.base import Backend, BuildJob, Built, LoadedEngine, Progress
from sdaccel.engine import disk
from sdaccel.engine import weights as weights_file
from sdaccel.engine.manifest import TensorSpec, canonical_json
from sdaccel.engine.patch import Patch, Patches, changes
from sdaccel.engine.store import Entry
from sdaccel.errors import BackendError, EngineBroken, UnsupportedCall

if TYPE_CHECKING:
    import onnx

PLAN = "model.onnx"
WEIGHTS = "weights.json"
"""Where the weights of the checkpoint are among the plan's initializers."""

FORMAT = "2"
_FOLDER = "session.model_external_initializers_file_folder_path"
_NUMPY = {"float32": np.float32, "float16": np.float16, "int64": np.int64}
_TORCH = {"float32": torch.float32, "float16": torch.float16, "int64": torch.int64}
SAFETENSORS = {1: "F32", 10: "F16", 7: "I64"}
_ARRAYS = {1: np.float32, 10: np.float16, 7: np.int64}
"""by onnx.TensorProto.DataType"""
_ERRORS = (
    ort.capi.onnxruntime_pybind11_state.Fail,
    ort.capi.onnxruntime_pybind11_state.InvalidArgument,
    ort.capi.onnxruntime_pybind11_state.InvalidGraph,
    ort.capi.onnxruntime_pybind11_state.InvalidProtobuf,
    ort.capi.onnxruntime_pybind11_state.NoSuchFile,
    ort.capi.onnxruntime_pybind11_state.NotImplemented,
    ort.capi.onnxruntime_pybind11_state.RuntimeException,
    ort.capi.onnxruntime_pybind11_state.EPFail,
)

T = TypeVar("T")


class OnnxRuntime(Backend):
    name = "onnxruntime"
    precisions = ("fp32",)

    def unavailable(self) -> str | None:
        return None

    def device_type(self) -> str:
        on_gpu = "CUDAExecutionProvider" in ort.get_available_providers() and torch.cuda.is_available()
        return "cuda" if on_gpu else "cpu"

    def device(self) -> dict[str, str]:
        machine = {"machine": platform.machine().lower(), "isa": torch.backends.cpu.get_cpu_capability()}
        if self.device_type() == "cuda":
            major, minor = torch.cuda.get_device_capability()
            return {"kind": "cuda", "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}", **machine}
        return {"kind": "cpu", **machine}

    def versions(self) -> dict[str, str]:
        from sdaccel.graph import VERSION

        return {"onnxruntime": ort.__version__, "fusions": VERSION, "plan": FORMAT}

    # building

    def build(self, job: BuildJob, folder: Path) -> Built:
        import onnx
        import onnx_ir as ir

        from sdaccel.graph.optimize import optimize

        job.progress("fusing", 0.0)
        for tensor in external(job.model):
            place_at(tensor, job.weights.key, *extent(tensor))
        fused = ir.from_proto(job.model)
        fired = optimize(fused, f"{self.name}, images" if job.component.startswith("vae") else self.name)
        fused.opset_imports["com.microsoft"] = 1
        plan = folder / "optimized.onnx"
        data = folder / "optimized.data"
        options = self._options(job.weights.path.parent, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
        options.optimized_model_filepath = str(plan)
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", data.name)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        proto = ir.to_proto(fused)
        read_by = onnxruntime_refit.uses(proto.graph)
        serialized = proto.SerializeToString()
        try:
            _in_background(lambda: self._session(serialized, options), "optimizing for this CPU", job.progress)
        except BackendError as error:
            if shutil.disk_usage(folder).free < job.weights.nbytes:  # it writes by itself, and does not say what failed
                raise disk.no_room(data, job.weights.nbytes) from error
            raise

        job.progress("storing", 0.8)
        model = onnx.load(str(plan), load_external_data=False)
        values = _Values(model, data, job)
        written = onnxruntime_refit.places(read_by, model.graph, values.base, values.optimized)
        packed = self._share(model, data, job, values, written)
        document = {"entry": job.weights.key, **onnxruntime_refit.to_json(written, read_by, model.graph, values.places)}
        (folder / WEIGHTS).write_text(json.dumps(document, indent=1), encoding="utf-8")
        (folder / PLAN).write_bytes(model.SerializeToString(deterministic=True))
        plan.unlink()
        data.unlink(missing_ok=True)
        ops = Counter(node.op_type for node in model.graph.node)
        details = {"fused": fired, "ops": dict(sorted(ops.items())), "nodes": sum(ops.values())}
        return Built((packed.key,) if packed else (), details)

    def _share(
        self, model: onnx.ModelProto, data: Path, job: BuildJob, values: _Values, written: Mapping[str, Any]
    ) -> Entry | None:
        """Points each weight of ``model`` at the shared entry where it is unchanged there, else at one of its own."""
        own: dict[str, list[onnx.TensorProto]] = {}
        tensors: dict[str, _InFile | _InMemory] = {}
        for tensor in model.graph.initializer:
            outside = tensor.data_location == tensor.EXTERNAL
            if not outside and tensor.name not in written:
                continue
            base, layout = written.get(tensor.name, (tensor.name, ""))
            place = values.places.get(base)
            found = values.optimized(tensor.name)
            if place is not None and (layout == "plain" or (not layout and np.array_equal(found, values.base(base)))):
                place_at(tensor, job.weights.key, place.offset, place.nbytes)
                continue
            name = hashlib.sha256(np.ascontiguousarray(found).data).hexdigest()
            own.setdefault(name, []).append(tensor)
            kind, dims = SAFETENSORS[tensor.data_type], tuple(tensor.dims)
            tensors[name] = _InFile(data, *extent(tensor), kind, dims) if outside else _InMemory(found, kind, dims)
        return self._pack(own, tensors, job)

    def _pack(
        self, own: Mapping[str, Sequence[onnx.TensorProto]], tensors: Mapping[str, weights_file.Readable], job: BuildJob
    ) -> Entry | None:
        """A weights entry of ``tensors``, to which the initializers in ``own`` are pointed; both by SHA-256."""
        if not own:
            return None
        identity = {
            "weights": job.weights.key,
            "graph": job.architecture,
            "device": self.device(),
            "versions": self.versions(),
            "tensors": sorted(own),
        }
        key = hashlib.sha256(canonical_json(identity)).hexdigest()
        entry = weights_file.publish_tensors(job.store, key, tensors, {"packed_for": self.name, "of": job.weights.key})
        packed = weights_file.layout(entry)
        for name, users in own.items():
            for tensor in users:
                place_at(tensor, key, packed[name].offset, packed[name].nbytes)
        return entry

    def adopt(self, engine: Entry, job: BuildJob, folder: Path) -> Built | None:
        from sdaccel.backends.onnxruntime_adopt import adopt

        return adopt(engine, job, folder, self._pack)

    # running

    def load(
        self,
        folder: Path,
        weights: Path,
        inputs: Sequence[TensorSpec],
        shared: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> LoadedEngine:
        plan = (folder / PLAN).read_bytes()
        known = _Weights.read(folder, weights)

        def session(changed: Mapping[str, np.ndarray]) -> ort.InferenceSession:
            options = self._options(weights, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
            if changed:
                held = [ort.OrtValue.ortvalue_from_numpy(value) for value in changed.values()]
                options.add_external_initializers(list(changed), held)
            return self._session(_with_shapes(plan, changed, known.grown(changed)), options)

        return _Engine(session, known, inputs)

    def _options(self, weights: Path, level: Any) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = level
        options.intra_op_num_threads = settings.THREADS.value()
        options.add_session_config_entry(_FOLDER, str(weights))
        return options

    def _session(self, model: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        providers = ["CPUExecutionProvider"]
        if self.device_type() == "cuda":
            providers.insert(0, "CUDAExecutionProvider")
        try:
            return ort.InferenceSession(model, options, providers=providers)
        except _ERRORS as error:
            raise BackendError(f"ONNX Runtime {ort.__version__} cannot load the graph: {error}") from error


class _Engine(LoadedEngine):
    """A session, made anew when weights change: it packs them for its kernels when it is made."""

    def __init__(
        self,
        make: Callable[[Mapping[str, np.ndarray]], ort.InferenceSession],
        weights: _Weights,
        inputs: Sequence[TensorSpec],
    ):
        self.session = make({})
        self._make = make
        self._weights = weights
        self._held: dict[str, tuple[Hashable, dict[str, np.ndarray]]] = {}
        """Weight → key of its patch, and its initializers."""
        self._dtypes = {spec.name: _TORCH[spec.dtype] for spec in inputs}
        self._outputs = [output.name for output in self.session.get_outputs()]

    def refit(self, patches: Patches) -> None:
        mine = {name: patch for name, patch in patches.items() if self._weights.takes(name)}
        new, gone = changes({name: key for name, (key, _) in self._held.items()}, mine)
        if not new and not gone:
            return
        held = {name: value for name, value in self._held.items() if name in mine}
        held.update((name, (patch.key, self._weights.changed(name, patch))) for name, patch in new.items())
        session = self._make({name: value for _, values in held.values() for name, value in values.items()})
        self.session, self._held = session, held

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None, profile: int = 0
    ) -> dict[str, torch.Tensor]:
        feed = {name: _array(tensor, self._dtypes[name]) for name, tensor in inputs.items()}
        names = self._outputs if outputs is None else list(outputs)
        try:
            results = self.session.run(names, feed)
        except _ERRORS as error:
            raise BackendError(f"ONNX Runtime could not run the engine: {error}") from error
        return {name: torch.from_numpy(result) for name, result in zip(names, results, strict=True)}


def entry_of(document: Mapping[str, Any]) -> str:
    """The key of the weights entry that a plan's `WEIGHTS` names. Raises ValueError for anything else."""
    key = str(document["entry"])
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError(f"{key!r} is no key of the store")
    return key


class _Weights:
    """The weights of the checkpoint among a plan's initializers."""

    def __init__(self, document: Mapping[str, Any], folder: Path):
        self._initializers: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
        for name, (weight, layout, shape) in document["written"].items():
            self._initializers.setdefault(weight, []).append((name, layout, tuple(shape)))
        self._fixed = frozenset(document["fixed"])
        file = folder / entry_of(document) / weights_file.FILE
        self._base = {
            name: _InFile(file, int(offset), int(nbytes), str(dtype), tuple(shape))
            for name, (offset, nbytes, dtype, shape) in document["places"].items()
        }

    @classmethod
    def read(cls, engine: Path, weights: Path) -> _Weights:
        try:
            return cls(json.loads((engine / WEIGHTS).read_text(encoding="utf-8")), weights)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineBroken(f"{engine / WEIGHTS} cannot be read: {error}.") from error

    def takes(self, name: str) -> bool:
        """Whether the graph computes with this weight. Raises UnsupportedCall where it cannot be changed."""
        if name in self._fixed:
            raise UnsupportedCall(f"{name} is changed, which ONNX Runtime has folded into other weights.")
        return name in self._initializers

    def changed(self, name: str, patch: Patch) -> dict[str, np.ndarray]:
        """The initializers that hold this weight, with the patch. Raises UnsupportedCall, EngineBroken."""
        try:
            base = self._base[name].read()
        except (OSError, RuntimeError) as error:  # gone, or shorter
            raise EngineBroken(
                f"{self._base[name].path} was removed or changed while its engine was in use.", hint="Build again."
            ) from error
        value = patch.apply(base)
        array, found = _array(value, base.dtype), {}
        for initializer, layout, shape in self._initializers[name]:
            laid = onnxruntime_refit.laid_out(array, layout)
            found[initializer] = laid.reshape(shape) if value.shape == base.shape else laid
        return found

    def grown(self, changed: Mapping[str, np.ndarray]) -> list[str]:
        """Those of these initializers that have another number of rows than in the plan."""
        shapes = {name: shape for uses in self._initializers.values() for name, _, shape in uses}
        return [name for name, value in changed.items() if value.shape != shapes[name]]


class _Values:
    """The checkpoint's weights and an optimized graph's initializers, read when they are asked for."""

    def __init__(self, model: onnx.ModelProto, data: Path, job: BuildJob):
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._data = data
        self._shared = job.weights.file(weights_file.FILE)
        self.places = weights_file.layout(job.weights)

    def base(self, name: str) -> np.ndarray:
        place = self.places[name]
        return _InFile(self._shared, place.offset, place.nbytes, place.dtype, place.shape).read().numpy()

    def optimized(self, name: str) -> np.ndarray:
        from onnx import numpy_helper

        tensor = self._tensors[name]
        if tensor.data_location != tensor.EXTERNAL:
            return np.array(numpy_helper.to_array(tensor))
        return _read(self._data, *extent(tensor)).view(_ARRAYS[tensor.data_type]).reshape(tuple(tensor.dims))


def _with_shapes(plan: bytes, values: Mapping[str, np.ndarray], names: Collection[str]) -> bytes:
    """The plan with these initializers in the shapes of their values. Raises UnsupportedCall."""
    if not names:
        return plan
    try:
        import onnx
    except ImportError:
        raise UnsupportedCall(
            f"{min(names)} has become larger, which needs the package onnx.", hint="Run: python -m pip install onnx"
        ) from None
    model = onnx.load_model_from_string(plan)
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.dims[:] = values[tensor.name].shape
            place_at(tensor, "", 0, values[tensor.name].nbytes)
    return model.SerializeToString()


@dataclass(frozen=True)
class _InFile:
    """A tensor as it lies in a file, read when it is wanted."""

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        data = torch.from_numpy(_read(self.path, self.offset, self.nbytes))
        return data.view(weights_file.DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True)
class _InMemory:
    values: np.ndarray
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.values)).view(self.shape)


def _read(path: Path, offset: int, length: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, length, offset=offset)


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """``tensor`` as an array, without a copy (or a call into torch) that is not needed."""
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.requires_grad:
        tensor = tensor.detach().to("cpu", dtype)
    return tensor.contiguous().numpy()


def external(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]


def extent(tensor: onnx.TensorProto) -> tuple[int, int]:
    """(offset, length) in bytes of an external tensor."""
    places = {item.key: item.value for item in tensor.external_data}
    return int(places.get("offset", 0)), int(places["length"])


def place_at(tensor: onnx.TensorProto, entry: str, offset: int, length: int) -> None:
    tensor.data_location = tensor.EXTERNAL
    for field in ("raw_data", "float_data", "external_data"):
        tensor.ClearField(field)
    location = f"{entry}/{weights_file.FILE}"
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _in_background(work: Callable[[], T], stage: str, progress: Progress) -> T:
    """Runs ``work``, which may be deep in native code, so that Ctrl-C and Cancelled need not wait for it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    while thread.is_alive():
        progress(stage, 0.1)
        thread.join(0.2)
    if errors:
        raise errors[0]
    return results[0]
