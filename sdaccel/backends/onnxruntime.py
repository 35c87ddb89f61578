"""ONNX Runtime: the embedded default, on any machine.

A build lets ONNX Runtime optimize the fused graph once, for the CPU at hand, and keeps the result, so that a load only
maps weights. What the optimizer leaves as it was is read from the shared weights entry; what it lays out anew
(convolution weights in blocks of channels) goes into a second weights entry, again one for all engines of a checkpoint.
"""

from __future__ import annotations

import hashlib
import platform
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnxruntime as ort
import torch

from sdaccel import settings
from sdaccel.backends.base import Backend, BuildJob, Built, LoadedEngine, Progress
from sdaccel.engine import weights as weights_file
from sdaccel.engine.manifest import TensorSpec, canonical_json
from sdaccel.engine.store import Entry
from sdaccel.errors import BackendError

if TYPE_CHECKING:
    import onnx

PLAN = "model.onnx"

_FOLDER = "session.model_external_initializers_file_folder_path"
_NUMPY = {"float32": np.float32, "float16": np.float16, "int64": np.int64}
_TORCH = {"float32": torch.float32, "float16": torch.float16, "int64": torch.int64}
_SAFETENSORS = {1: "F32", 10: "F16", 7: "I64"}
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

        return {"onnxruntime": ort.__version__, "fusions": VERSION}

    # building

    def build(self, job: BuildJob, folder: Path) -> Built:
        import onnx
        import onnx_ir as ir

        from sdaccel.graph.optimize import optimize

        job.progress("fusing", 0.0)
        for tensor in _external(job.model):
            _place(tensor, job.weights.key, *_extent(tensor))
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
        serialized = ir.to_proto(fused).SerializeToString()
        _in_background(lambda: self._session(serialized, options), "optimizing for this CPU", job.progress)

        job.progress("storing", 0.8)
        model = onnx.load(str(plan), load_external_data=False)
        packed = self._share(model, data, job)
        (folder / PLAN).write_bytes(model.SerializeToString(deterministic=True))
        plan.unlink()
        data.unlink(missing_ok=True)
        ops = Counter(node.op_type for node in model.graph.node)
        details = {"fused": fired, "ops": dict(sorted(ops.items())), "nodes": sum(ops.values())}
        return Built((packed.key,) if packed else (), details)

    def _share(self, model: onnx.ModelProto, data: Path, job: BuildJob) -> Entry | None:
        """Points each weight of ``model`` at the shared entry where it is unchanged there, else at one of its own."""
        if not data.exists():
            return None
        shared = job.weights.file(weights_file.FILE)
        places = weights_file.layout(job.weights)
        own: dict[str, list[onnx.TensorProto]] = {}
        tensors: dict[str, _InFile] = {}
        for tensor in _external(model):
            offset, length = _extent(tensor)
            found = _read(data, offset, length)
            place = places.get(tensor.name)
            if place is not None and np.array_equal(found, _read(shared, place.offset, place.nbytes)):
                _place(tensor, job.weights.key, place.offset, length)
                continue
            name = hashlib.sha256(found.data).hexdigest()
            own.setdefault(name, []).append(tensor)
            tensors[name] = _InFile(data, offset, length, _SAFETENSORS[tensor.data_type], tuple(tensor.dims))
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
                _place(tensor, key, packed[name].offset, packed[name].nbytes)
        return entry

    # running

    def load(
        self,
        folder: Path,
        weights: Path,
        inputs: Sequence[TensorSpec],
        shared: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> LoadedEngine:
        options = self._options(weights, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        return _Session(self._session((folder / PLAN).read_bytes(), options), inputs)

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


class _Session(LoadedEngine):
    def __init__(self, session: ort.InferenceSession, inputs: Sequence[TensorSpec]):
        self.session = session
        self._dtypes = {spec.name: _TORCH[spec.dtype] for spec in inputs}
        self._outputs = [output.name for output in session.get_outputs()]

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


def _read(path: Path, offset: int, length: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, length, offset=offset)


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """``tensor`` as an array, without a copy (or a call into torch) that is not needed."""
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.requires_grad:
        tensor = tensor.detach().to("cpu", dtype)
    return tensor.contiguous().numpy()


def _external(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]


def _extent(tensor: onnx.TensorProto) -> tuple[int, int]:
    """(offset, length) in bytes of an external tensor."""
    places = {item.key: item.value for item in tensor.external_data}
    return int(places.get("offset", 0)), int(places["length"])


def _place(tensor: onnx.TensorProto, entry: str, offset: int, length: int) -> None:
    del tensor.external_data[:]
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
