"""Our own engine for NVIDIA GPUs: fused graph → plan, tactics timed on the device, CUDA graphs at run time.

An engine's folder holds the plan (plan.json, constants.safetensors), what the tuner found at each profile's opt
(tactics.json), and every kernel that may run (its source and its machine code). Weights are the store's, in the
precision of the engine, shared by all engines of a checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdaccel import settings
from sdaccel.backends.base import Backend, BuildJob, Built, LoadedEngine
from sdaccel.eager import TYPES
from sdaccel.engine import weights as weights_file
from sdaccel.engine.manifest import TensorSpec, canonical_json
from sdaccel.engine.patch import Patch, Patches, changes
from sdaccel.engine.store import Entry
from sdaccel.errors import BackendError, EngineBroken, OutOfMemory, StoreError
from sdaccel.profile import OptimizationProfile
from sdaccel.resources import resource

if TYPE_CHECKING:
    from sdaccel.backends.cuda.timing_cache import TacticTable, TimingCache
    from sdaccel.backends.cuda.tuner import Tuner

TACTICS = "tactics.json"
CUBINS = "cubins.safetensors"
CUBIN_CACHE = Path("cache", "cubins")
"""of the store, beside the times of the tuner: machine code of shapes that no engine was built for"""
LEAST = (7, 5)

_log = logging.getLogger("sdaccel.cuda")

# Inputs that stay the same for all steps of a prompt.
PROMPT = ("encoder_hidden_states", "y")


class Cuda(Backend):
    name = "cuda"
    precisions: tuple[str, ...] = ("fp16", "bf16")
    tunes = True

    def __init__(self) -> None:
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            self.precisions = ("fp16",)  # bfloat16 came with compute capability 8.0

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device."
        if torch.version.cuda is None:
            return "this torch is not built for NVIDIA GPUs."
        capability = torch.cuda.get_device_capability()
        if capability < LEAST:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}; 7.5 is the least."
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return f"cuda-python is not installed: {_install()}."
        return _without_compiler()

    def device_type(self) -> str:
        return "cuda"

    def device(self) -> dict[str, str]:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "kind": "cuda",
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": str(found.multi_processor_count),
        }

    def where(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def tuner(self, cache: TacticTable) -> Tuner:
        from sdaccel.backends.cuda.launch import Device
        from sdaccel.backends.cuda.tuner import Tuner

        return Tuner(Device.current(), cache)

    def versions(self) -> dict[str, str]:
        from sdaccel.graph import VERSION

        return {
            "torch": torch.__version__.split("+")[0],
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "cudnn_frontend": _frontend_version(),
            "driver": _driver_version(),
            "fusions": VERSION,
            "kernels": kernels_version(),
        }

    # building

    def build(self, job: BuildJob, folder: Path) -> Built:
        from sdaccel.backends.cuda.executor import plain_torch

        try:
            with plain_torch(self.where()):
                return self._build(job, folder)
        except RuntimeError as error:  # of torch and the driver
            traceback.clear_frames(error.__traceback__)
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            if full:
                torch.cuda.empty_cache()
            kind = OutOfMemory if full else BackendError
            raise kind(
                f"{job.component} could not be built on the GPU: {error}".split("\n")[0],
                hint="A profile of fewer images at once, or smaller ones, needs less memory." if full else None,
            ) from error

    def _build(self, job: BuildJob, folder: Path) -> Built:
        import onnx_ir as ir

        from sdaccel.backends.cuda.executor import Executor, summary
        from sdaccel.backends.cuda.headroom import with_headroom
        from sdaccel.backends.cuda.launch import CACHE
        from sdaccel.backends.cuda.load_weights import load_weights
        from sdaccel.backends.cuda.lower import lower
        from sdaccel.backends.cuda.timing_cache import TacticTable
        from sdaccel.graph.hoist import invariant
        from sdaccel.graph.optimize import optimize

        job.progress("fusing", 0.0)
        fused = ir.from_proto(job.model)
        fired = optimize(fused, self.name)
        prologue = invariant(fused, [value.name for value in fused.graph.inputs if value.name in PROMPT])
        model = ir.to_proto(fused)
        plan = lower(model, job.weights.key, weights_file.layout(job.weights), prologue)
        if job.component.startswith("vae") and job.precision == "fp16":
            plan = with_headroom(plan)
        plan.save(folder)

        job.progress("loading weights", 0.1)
        dtype, device = TYPES[job.precision], self.where()
        weights = load_weights(plan, job.weights.path.parent, dtype, device)
        CACHE.folder = job.store.root / CUBIN_CACHE
        cache = self.timing_cache(job.store.root)
        if job.timing_cache is not None and job.timing_cache.exists():
            cache.take(job.timing_cache)
        tuner = self.tuner(cache)
        table = TacticTable()
        executor = Executor(plan, weights, dtype, device, table)
        ceilings = tuner.ceilings(dtype)
        profiles = []
        try:
            with CACHE.recording() as cubins:
                for index, profile in enumerate(job.profiles):
                    share = 0.8 / len(job.profiles)
                    job.progress(f"tuning for {profile}", 0.2 + share * index)
                    inputs = random_inputs(model, profile, device)
                    choices = executor.tune(inputs, tuner)
                    _save_times(cache)
                    error = _check_replays(executor, inputs, dtype)
                    profiles.append({"profile": str(profile), "replay_error": error, "steps": summary(choices)})
        finally:
            executor.forget()
            executor.weights.clear()
            del weights
            torch.cuda.empty_cache()
        if job.timing_cache is not None:
            cache.export(job.timing_cache)
        document = {"precision": job.precision, "dependent": executor.dependent, "measured": table.to_json()}
        (folder / TACTICS).write_text(json.dumps(document, indent=1), encoding="utf-8")
        _save_cubins(folder, cubins)
        refused = table.refused()
        for name, reason in refused.items():
            _log.warning("%s: %s is not used: %s", job.component, name, reason)
        ops: dict[str, int] = {}
        for step in (*plan.prologue, *plan.steps):
            ops[step.op] = ops.get(step.op, 0) + 1
        details = {
            "fused": fired,
            "ops": dict(sorted(ops.items())),
            "nodes": sum(ops.values()),
            "prologue": len(plan.prologue),
            "scaled": len(plan.exponents),
            "measured": tuner.measured,
            "refused": refused,
            "ceilings": ceilings,
            "profiles": profiles,
        }
        return Built((), details)

    def adopt(self, engine: Entry, job: BuildJob, folder: Path) -> Built | None:
        from sdaccel.backends.cuda.adopt import adopt

        return adopt(engine, job, folder)

    def timing_cache(self, root: Path) -> TimingCache:
        """What builds of the store at ``root`` have measured on this device, with these versions."""
        from sdaccel.backends.cuda.timing_cache import TimingCache

        identity = {**self.device(), **self.versions()}
        digest = hashlib.sha256(canonical_json(identity)).hexdigest()
        return TimingCache(root / "cache" / f"timing-{digest[:16]}.json", identity)

    # running

    def load(
        self,
        folder: Path,
        weights: Path,
        inputs: Sequence[TensorSpec],
        shared: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> LoadedEngine:
        from sdaccel.backends.cuda.executor import Executor, plain_torch
        from sdaccel.backends.cuda.launch import CACHE
        from sdaccel.backends.cuda.load_weights import load_weights
        from sdaccel.backends.cuda.plan import ExecutionPlan
        from sdaccel.backends.cuda.timing_cache import TacticTable

        plan = ExecutionPlan.read(folder)
        try:
            document = json.loads((folder / TACTICS).read_text(encoding="utf-8"))
            table = TacticTable.from_json(document["measured"])
            dtype = TYPES[document["precision"]]
            dependent = bool(document["dependent"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise EngineBroken(f"{folder / TACTICS} cannot be read: {error}.") from error
        _load_cubins(folder)
        CACHE.folder = weights.parent / CUBIN_CACHE
        device = self._device_of(shared or {})
        try:
            with plain_torch(device):  # the module's parameters among them, which autograd may want later
                tensors = load_weights(plan, weights, dtype, device, shared)
                executor = Executor(plan, tensors, dtype, device, table, settings.GRAPHS.value(), dependent)
        except torch.cuda.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            raise OutOfMemory(f"the weights do not fit into the GPU's memory: {error}".split("\n")[0]) from error
        except RuntimeError as error:
            raise BackendError(f"the weights cannot be loaded into the GPU: {error}".split("\n")[0]) from error
        same = frozenset(name for name, value in (shared or {}).items() if _same_memory(value, tensors.get(name)))
        derived = {step.inputs[1] for step in plan.steps if step.op == "UpsampleConv"}
        return CudaEngine(executor, same - derived, same & derived)

    def _device_of(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.device:
        """The GPU that the module is on, else the current one. Raises BackendError where engines are not for it."""
        here = self.where()
        device = next((value.device for value in parameters.values() if value.device.type == here.type), here)
        if device != here and torch.cuda.get_device_name(device) != torch.cuda.get_device_name(here):
            raise BackendError(
                f"the module is on {device}, a {torch.cuda.get_device_name(device)}; engines were built for a "
                f"{torch.cuda.get_device_name(here)}.",
                hint=f"Let torch see that GPU alone: CUDA_VISIBLE_DEVICES={device.index}",
            )
        return device


def _same_memory(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and a.data_ptr() == b.data_ptr()


class CudaEngine(LoadedEngine):
    def __init__(self, executor: Any, shared: frozenset[str] = frozenset(), derived: frozenset[str] = frozenset()):
        """``derived``: in memory of the module too, but sums of their taps are made of them once."""
        self.executor = executor
        self.shared = shared
        self._derived = derived
        self._lent = shared | derived
        self._held: dict[str, Hashable] = {}
        """Keys of the patches that it computes with."""

    def run(
        self, inputs: Mapping[str, torch.Tensor], outputs: Collection[str] | None = None, profile: int = 0
    ) -> dict[str, torch.Tensor]:
        return self.executor.run(inputs, outputs)

    def refit(self, patches: Patches) -> None:
        executor = self.executor
        mine = {
            name: patch
            for name, patch in patches.items()
            if name in executor.plan.weights and not (patch.edit and name in self.shared)
        }
        new, gone = changes(self._held, mine)
        self._held.update((name, object()) for name in (*new, *gone))  # unknown, should writing fail
        held = {name: patch.key for name, patch in mine.items()}
        here = {name for name in (*new, *gone) if name in self._derived and (name in gone or new[name].edit)}
        here.difference_update(executor.own)
        executor.remake(here)
        new, gone = {name: new[name] for name in new if name not in here}, [name for name in gone if name not in here]
        executor.write([*((name, self._effective(name, patch)) for name, patch in new.items()),
                        *((name, functools.partial(executor.base, name)) for name in gone)])  # fmt: skip
        self._held = held
        self.shared = self.shared.difference(executor.own)

    def _effective(self, name: str, patch: Patch) -> Callable[[], torch.Tensor]:
        """The new values of a weight, scaled as the plan has it."""
        base, power = self.executor.base(name), self.executor.plan.exponents.get(name, 0)
        if not power:
            return lambda: patch.apply(base)
        return lambda: patch.apply((base.float() * 2.0**-power).to(base.dtype)).to(base.device).float() * 2.0**power

    def shares_no_longer(self, parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        base = self.executor.base
        return any(name not in parameters or not _same_memory(parameters[name].data, base(name)) for name in self._lent)

    def renew(self) -> None:
        self.executor.renew()


def _check_replays(executor: Any, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> float:
    """The error of replays against the steps; kernels no longer overlap if that is its cause. Raises BackendError."""
    from sdaccel.backends.cuda.tuner import TOLERANCE

    limit = 10 * TOLERANCE[dtype]
    error = executor.replay_error(inputs)
    if not error <= limit and executor.dependent:
        _log.warning("kernels that overlap give another result (error %.2g): they will not overlap.", error)
        executor.forget()
        executor.dependent = False
        error = executor.replay_error(inputs)
    if not error <= limit:
        raise BackendError(f"the CUDA graph differs from its steps by {error:.2g} (at most {limit:g}).")
    return error


def random_inputs(model: Any, profile: OptimizationProfile, device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs of order one at the profile's opt, for the tuner. Optional ones are left out."""
    generator = torch.Generator().manual_seed(0)
    rows = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    defaults = {tensor.name for tensor in model.graph.initializer}
    words = {
        node.input[1]: rows[node.input[0]]
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[0] in rows
    }
    sizes = profile.opt()
    inputs = {}
    for value in model.graph.input:
        if value.name in defaults:
            continue
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == 7:
            inputs[value.name] = torch.randint(0, words.get(value.name, 2), shape, generator=generator).to(device)
        elif value.name == "timestep":
            inputs[value.name] = torch.full(shape, 500.0, device=device)
        else:
            inputs[value.name] = torch.randn(shape, generator=generator).to(device)
    return inputs


@functools.cache
def kernels_version() -> str:
    """Changes with every byte of kernels/ and of the operators that launch them."""
    digest = hashlib.sha256()
    ops = Path(__file__).parent
    for path in sorted((*resource("kernels").rglob("*.cu*"), *ops.rglob("*.py")), key=lambda path: path.name):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _driver_version() -> str:
    from sdaccel.backends.cuda.launch import driver_version

    return driver_version()


def _frontend_version() -> str:
    try:
        return metadata.version("nvidia-cudnn-frontend")
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _without_compiler() -> str | None:
    """Why no kernel can be compiled here, or none that this driver loads."""
    from sdaccel.backends.cuda import nvrtc

    try:
        compiler, driver = nvrtc.version(), int(_driver_version())
    except BackendError as error:
        return f"{str(error).removesuffix(error.hint or '').rstrip(' .')}: {_install()}."
    if compiler[0] > driver // 1000:
        made, known = ".".join(map(str, compiler)), f"{driver // 1000}.{driver % 1000 // 10}"
        return f"NVRTC {made} compiles what the driver, of CUDA {known}, cannot load: {_install(driver // 1000)}."
    return None


def _install(cuda: int | None = None) -> str:
    """The command that installs what kernels need, for that CUDA version or torch's."""
    major = str(cuda or torch.version.cuda).split(".")[0]
    return f'pip install "sdaccel[{"cuda12" if major == "12" else "cuda"}]"'


def _save_times(cache: TimingCache) -> None:
    try:
        cache.save()
    except StoreError as error:  # the engine has them all the same
        _log.warning("the next build measures anew: %s", error)


def _save_cubins(folder: Path, cubins: Mapping[str, bytes]) -> None:
    from safetensors.torch import save_file

    tensors = {key: torch.frombuffer(bytearray(cubin), dtype=torch.uint8) for key, cubin in sorted(cubins.items())}
    save_file(tensors, folder / CUBINS)


def _load_cubins(folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from sdaccel.backends.cuda.launch import CACHE

    try:
        for key, data in load_file(folder / CUBINS).items():
            CACHE.add(key, bytes(data.numpy()))
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineBroken(f"{folder / CUBINS} cannot be read: {error}.") from error
