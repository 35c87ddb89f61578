"""Every kernel compiles for every GPU that it runs on, without spilling registers in earnest. Needs no GPU."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import pytest

from sdaccel.backends.cuda import nvrtc, ops
from sdaccel.errors import BackendError

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
MOST_SPILLED = 64
"""Bytes a thread; a few values kept over a prologue cost nothing, more would be in a loop."""


def variants() -> list[tuple[Any, ...]]:
    found = []
    for module in pkgutil.iter_modules(ops.__path__):
        if module.name == "registry":
            continue
        found += getattr(importlib.import_module(f"{ops.__name__}.{module.name}"), "VARIANTS", [])
    return found


def spilled(log: str, entry: str) -> int:
    """Bytes that ``entry`` stores outside of its registers, from ptxas' words."""
    part = log.partition(f"entry function '{entry}'")[2].partition("entry function")[0]
    return int(re.findall(r"(\d+) bytes spill stores", part)[0])


def _have_nvrtc() -> bool:
    try:
        return bool(nvrtc.architectures())
    except BackendError:
        return False


@pytest.mark.skipif(not _have_nvrtc(), reason="needs NVRTC")
@pytest.mark.parametrize("file", sorted({variant[0] for variant in variants()}))
def test_every_variant_compiles_for_every_target(file: str) -> None:
    known = nvrtc.architectures()
    for name, entry, defines, least, *specific in variants():
        if name != file:
            continue
        for capability in CAPABILITIES:
            if capability < least or (specific and capability != (9, 0)):
                continue
            if 10 * capability[0] + capability[1] not in known:
                continue
            arch = nvrtc.target(capability)
            made = nvrtc.compile(nvrtc.Source.read(file), defines, arch)
            assert made.data.startswith(b"\x7fELF"), arch
            bytes_spilled = spilled(made.log, entry)
            print(f"{file} {entry} {defines} {arch}: {re.findall(r'Used [0-9]+ registers', made.log)[0]}")
            assert bytes_spilled <= MOST_SPILLED, f"{file}: {entry} {defines} {arch} spills {bytes_spilled} bytes"
