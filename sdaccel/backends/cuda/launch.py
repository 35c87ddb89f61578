"""Kernels on the device at hand: compiled when first wanted, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdaccel.backends.cuda import nvrtc
from sdaccel.engine import disk
from sdaccel.errors import BackendError


@dataclass(frozen=True)
class Device:
    """What launch parameters and tactics depend on."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    shared_per_block: int

    @classmethod
    def current(cls) -> Device:
        return cls.at(torch.cuda.current_device())

    @classmethod
    @functools.cache
    def at(cls, index: int) -> Device:
        found = torch.cuda.get_device_properties(index)
        return cls(
            index,
            found.name,
            (found.major, found.minor),
            found.multi_processor_count,
            found.L2_cache_size,
            found.shared_memory_per_block_optin,
        )

    @classmethod
    def cpu(cls) -> Device:
        """Has no kernels: every operator runs in torch."""
        return cls(-1, "cpu", (0, 0), 1, 0, 0)

    @property
    def arch(self) -> str:
        return nvrtc.target(self.capability)


# --- compiled code ----------------------------------------------------------------------------------------------------


class KernelCache:
    """Cubins by key, in memory and, once it has a folder, on disk. A damaged file is a miss."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._known: dict[str, bytes] = {}
        self._lock = threading.RLock()
        self._recorders: list[dict[str, bytes]] = []

    def add(self, key: str, cubin: bytes) -> None:
        with self._lock:
            self._known[key] = cubin

    def get(self, source: nvrtc.Source, defines: nvrtc.Defines, arch: str) -> bytes:
        key = nvrtc.key(source, defines, arch)
        with self._lock:
            cubin = self._known.get(key)
        cubin = cubin or self._read(key)
        if cubin is None:
            cubin = nvrtc.compile(source, defines, arch).data
            self._write(key, cubin)
        with self._lock:
            self._known[key] = cubin
        self.used(key)
        return cubin

    def used(self, key: str) -> None:
        """Tells those who record that this cubin, known by now, is run."""
        for recorder in self._recorders:
            recorder[key] = self._known[key]

    def compile_all(self, wanted: Iterable[tuple[str, nvrtc.Defines]], arch: str) -> None:
        """Compiles what is not known yet on all cores. What does not compile is left to `get`, which says why."""
        unique = {
            nvrtc.key(nvrtc.Source.read(file), defines, arch): (nvrtc.Source.read(file), defines)
            for file, defines in wanted
        }
        missing = [pair for key, pair in unique.items() if key not in self._known]

        def make(pair: tuple[nvrtc.Source, nvrtc.Defines]) -> None:
            with suppress(BackendError):
                self.get(*pair, arch)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(make, missing))

    @contextmanager
    def recording(self) -> Iterator[dict[str, bytes]]:
        """Collects the cubins that are asked for inside."""
        found: dict[str, bytes] = {}
        self._recorders = [*self._recorders, found]
        try:
            yield found
        finally:
            self._recorders = [other for other in self._recorders if other is not found]

    def _read(self, key: str) -> bytes | None:
        if self.folder is None:
            return None
        try:
            data = (self.folder / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        cubin, digest = data[:-32], data[-32:]
        return cubin if _sha256(cubin) == digest else None

    def _write(self, key: str, cubin: bytes) -> None:
        if self.folder is None:
            return
        path = self.folder / f"{key}.cubin"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            disk.overwrite(path, cubin + _sha256(cubin))
        except OSError:  # a cache: without it the next process compiles again
            return


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


CACHE = KernelCache()


# --- kernels ----------------------------------------------------------------------------------------------------------


_dependent: ContextVar[bool] = ContextVar("dependent", default=True)


@contextmanager
def dependent_launches(allowed: bool) -> Iterator[None]:
    """Whether kernels launched inside may start before the one before them ends (programmatic dependent launch)."""
    token = _dependent.set(allowed)
    try:
        yield
    finally:
        _dependent.reset(token)


@dataclass(frozen=True)
class Long:
    """An int64 argument."""

    value: int


class Kernel:
    """One entry point of one cubin, loaded on one device."""

    def __init__(self, name: str, function: Any, key: str):
        self.name = name
        self.key = key
        self._function = function
        self._shared = 48 << 10

    def __call__(
        self,
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        *,
        shared: int = 0,
        cluster: int = 1,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Launches ``grid`` blocks of ``block`` threads on torch's current stream, ``shared`` in bytes.

        args: a tensor is its data pointer, None a null pointer, int an int32, float a float32, `Long` an int64,
        `TensorMap` 128 bytes by value. pdl: may start before the kernel before it ends (it must wait itself).
        cooperative: all blocks run at once, or none does. Raises BackendError.
        """
        driver = _driver()
        if shared > self._shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self._function, limit, shared), self.name)
            self._shared = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
            attributes.append(attribute)
        if pdl and _dependent.get():
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        values = [_argument(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        _check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0), self.name)


_loaded: dict[tuple[int, str, str], Kernel] = {}
_loading = threading.RLock()


def kernel(file: str, entry: str, defines: nvrtc.Defines) -> Kernel:
    """The kernel ``entry`` of kernels/``file`` under the macros ``defines``, on the current device.

    Raises BackendError with the compiler's words.
    """
    name = (torch.cuda.current_device(), entry, f"{file} {sorted(defines.items())}")
    found = _loaded.get(name)
    if found is None:
        with _loading:
            found = _loaded.get(name)
            if found is None:
                found = _loaded[name] = _load(file, entry, defines)
    CACHE.used(found.key)  # loaded for another engine before, perhaps
    return found


def _load(file: str, entry: str, defines: nvrtc.Defines) -> Kernel:
    driver = _driver()
    source, arch = nvrtc.Source.read(file), Device.current().arch
    cubin = CACHE.get(source, defines, arch)
    torch.cuda.set_device(torch.cuda.current_device())  # makes torch's context current in this thread
    where = f"{file}: {entry}"
    (module,) = _check(driver.cuModuleLoadData(cubin), where)
    (function,) = _check(driver.cuModuleGetFunction(module, entry.encode()), where)
    return Kernel(entry, function, nvrtc.key(source, defines, arch))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, (bool, int)):
        return ctypes.c_int32(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, Long):
        return ctypes.c_int64(value.value)
    if isinstance(value, TensorMap):
        return value.data
    raise TypeError(f"a kernel cannot take a {type(value).__name__}")


@functools.cache
def driver_version() -> str:
    """The CUDA version that the driver supports, as it counts: 13000 is 13.0."""
    return str(_check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")[0])


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError("cuda-python is not installed.", hint='Run: pip install "sdaccel[cuda]"') from error
    return driver


def _check(result: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    error, *values = result
    if int(error):
        _, text = _driver().cuGetErrorString(error)
        raise BackendError(f"{where}: {text.decode() if text else error}.")
    return tuple(values)


# --- tensor maps ------------------------------------------------------------------------------------------------------

# CUtensorMapDataType, CUtensorMapSwizzle and so on, from cuda.h
_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class TensorMap:
    """How the copy engine of sm_90 and later sees a tensor (CUtensorMap)."""

    def __init__(self, data: Any):
        self.data = data

    @classmethod
    def tiled(
        cls,
        tensor: torch.Tensor,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: int = 128,
        element_strides: Sequence[int] | None = None,
        promotion: int = 3,
    ) -> TensorMap:
        """A map over ``tensor``'s memory, from its data pointer on. Innermost dimension first.

        dims, box: elements. strides: bytes, of all dimensions but the innermost, each a multiple of 16.
        swizzle: 0, 32, 64 or 128 bytes. promotion: 0 none, 1, 2, 3: 64, 128, 256 bytes a fetch into L2. Outside of
        ``dims`` reads give zero and writes are dropped. Raises BackendError for what the driver refuses.
        """
        rank = len(dims)
        buffer = (ctypes.c_char * 192)()
        address = -(-ctypes.addressof(buffer) // 64) * 64
        data = (ctypes.c_char * 128).from_buffer(buffer, address - ctypes.addressof(buffer))
        error = _encode_tiled()(
            address,
            _MAP_TYPES[tensor.dtype],
            rank,
            tensor.data_ptr(),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*(element_strides or [1] * rank)),
            0,
            _SWIZZLES[swizzle],
            promotion,
            0,
        )
        if error:
            raise BackendError(f"cuTensorMapEncodeTiled({list(dims)}, {list(strides)}, {list(box)}): error {error}.")
        return cls(data)


@functools.cache
def _encode_tiled() -> Any:
    library = ctypes.WinDLL("nvcuda.dll") if sys.platform == "win32" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined]
    function = library.cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [
        pointer,
        ctypes.c_int,
        number,
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        *[ctypes.c_int] * 4,
    ]
    return function
