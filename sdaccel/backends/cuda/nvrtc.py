"""CUDA source → cubin, by NVRTC. Needs no GPU: machine code for any architecture is compiled anywhere.

Sources lie in kernels/ and include only files of kernels/include/, so nothing of the CUDA toolkit has to be installed.
A cubin's key covers the source, its headers, the macros, the architecture and the compiler's version.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdaccel.errors import BackendError
from sdaccel.resources import resource

Defines = Mapping[str, Any]

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([A-Za-z0-9_]+\.cuh)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One .cu file with all it includes."""

    name: str
    text: bytes
    headers: tuple[tuple[str, bytes], ...]

    @classmethod
    @functools.cache
    def read(cls, name: str) -> Source:
        """Raises BackendError for a file that is not there."""
        folder = resource("kernels")
        text = _text(folder / name)
        headers: dict[str, bytes] = {}
        waiting = _INCLUDE.findall(text)
        while waiting:
            header = waiting.pop().decode()
            if header not in headers:
                headers[header] = _text(folder / "include" / header)
                waiting += _INCLUDE.findall(headers[header])
        return cls(name, text, tuple(sorted(headers.items())))


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes().replace(b"\r\n", b"\n")
    except OSError as error:
        raise BackendError(f"the kernel source {path} cannot be read: {error}.") from error


@dataclass(frozen=True)
class Cubin:
    data: bytes
    log: str
    """What the compiler said: registers, shared memory and spills of each kernel."""


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version. Raises BackendError when it is not installed."""
    return tuple(_call("nvrtcVersion"))  # type: ignore[return-value]


@functools.cache
def architectures() -> frozenset[int]:
    """What this NVRTC compiles for: 75, 80, … 120."""
    return frozenset(_call("nvrtcGetSupportedArchs")[-1])


# Instructions of one architecture alone (wgmma, tcgen05) hide behind the letter a.
_SPECIFIC = frozenset({90, 100, 103, 110, 120, 121})


def target(capability: tuple[int, int]) -> str:
    """The architecture to compile for on a GPU: its own, or PTX of the newest this NVRTC knows below it."""
    number = 10 * capability[0] + capability[1]
    if number in architectures():
        return f"sm_{number}{'a' if number in _SPECIFIC else ''}"
    older = [known for known in architectures() if known < number]
    if not older:
        raise BackendError(f"a GPU of compute capability {capability[0]}.{capability[1]} is too old: 7.5 is the least.")
    return f"compute_{max(older)}"


def key(source: Source, defines: Defines, arch: str) -> str:
    """Names the cubin of ``source`` under ``defines``: SHA-256 in hex."""
    digest = hashlib.sha256(repr((version(), arch, _options(defines, arch))).encode())
    for name, text in ((source.name, source.text), *source.headers):
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def compile(source: Source, defines: Defines, arch: str) -> Cubin:
    """Machine code (for ``sm_…``) or PTX (for ``compute_…``). Raises BackendError with the compiler's own words."""
    names = [name.encode() for name, _ in source.headers]
    texts = [text for _, text in source.headers]
    (program,) = _call("nvrtcCreateProgram", source.text, source.name.encode(), len(names), texts, names)
    try:
        options = [option.encode() for option in _options(defines, arch)]
        try:
            _call("nvrtcCompileProgram", program, len(options), options)
        except BackendError as error:
            macros = ", ".join(f"{name}={value}" for name, value in defines.items())
            raise BackendError(f"{source.name} ({macros}) does not compile for {arch}:\n{_log(program)}") from error
        kind = "PTX" if arch.startswith("compute") else "CUBIN"
        return Cubin(_get(kind, program), _log(program))
    finally:
        _call("nvrtcDestroyProgram", program)


def _options(defines: Defines, arch: str) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    verbose = [] if arch.startswith("compute") else ["--ptxas-options=-v"]
    return [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space", *verbose, *macros]


def _log(program: object) -> str:
    return _get("ProgramLog", program).decode(errors="replace").strip("\0 \n")


def _get(what: str, program: object) -> bytes:
    (size,) = _call(f"nvrtcGet{what}Size", program)
    data = bytes(size + 2)  # NVRTC writes into it, and Python shares bytes objects of length one
    _call(f"nvrtcGet{what}", program, data)
    return data[:size]


def _call(function: str, *arguments: object) -> tuple:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendError("cuda-python is not installed.", hint='Run: pip install "sdaccel[cuda]"') from error
    try:
        status, *results = getattr(nvrtc, function)(*arguments)
    except RuntimeError as missing:  # its library is not found
        raise BackendError(f"NVRTC cannot be loaded: {missing}.", hint='Run: pip install "sdaccel[cuda]"') from missing
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BackendError(f"{function}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}.")
    return tuple(results)
