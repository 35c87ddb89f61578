"""Every kernel compiles for every GPU that it runs on, without spilling registers in earnest. Needs no GPU."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sdaccel.backends.cuda import fingerprint, nvrtc, ops

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
MOST_SPILLED = 512
"""Bytes a thread. Values kept over a prologue cost nothing; this many would be a tile that does not fit."""


def variants() -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [*fingerprint.VARIANTS]
    for module in pkgutil.iter_modules(ops.__path__):
        if module.name == "registry":
            continue
        found += getattr(importlib.import_module(f"{ops.__name__}.{module.name}"), "VARIANTS", [])
    return found


def usage(log: str, entry: str) -> tuple[int, int]:
    """Registers of ``entry``, and the bytes that it stores outside of them, from ptxas' words."""
    part = log.partition(f"entry function '{entry}'")[2].partition("entry function")[0]
    return int(re.findall(r"Used (\d+) registers", part)[0]), int(re.findall(r"(\d+) bytes spill stores", part)[0])


def targets(variant: tuple[Any, ...]) -> list[str]:
    _, _, _, least, *specific = variant
    wanted = [(9, 0)] if specific else [capability for capability in CAPABILITIES if capability >= least]
    return [nvrtc.target((a, b)) for a, b in wanted if 10 * a + b in nvrtc.architectures()]


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA has no compiler for macOS")
@pytest.mark.parametrize("file", sorted({variant[0] for variant in variants()}))
def test_every_variant_compiles_for_every_target(file: str) -> None:
    work = [(variant[1], variant[2], arch) for variant in variants() if variant[0] == file for arch in targets(variant)]
    source = nvrtc.Source.read(file)
    wanted = {(str(defines), arch): (defines, arch) for _, defines, arch in work}
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda item: nvrtc.compile(source, *item), wanted.values())
        made = dict(zip(wanted, compiled, strict=True))
    for entry, defines, arch in work:
        cubin = made[str(defines), arch]
        assert cubin.data.startswith(b"\x7fELF"), arch
        registers, stored = usage(cubin.log, entry)
        print(f"{file} {entry} {defines} {arch}: {registers} registers, {stored} bytes spilled")
        assert stored <= MOST_SPILLED, f"{file}: {entry} {defines} {arch} spills {stored} bytes"


def test_a_compiler_without_words_leaves_other_bytes_alone() -> None:
    """Its empty log is one byte, which it writes: into no object that Python shares."""
    single = [bytes([value]) for value in range(256)]
    text = b'extern "C" __global__ void nothing() {}'
    nvrtc.compile(nvrtc.Source("nothing.cu", text, ()), {}, "compute_90")
    assert b"".join(single) == bytes(range(256))
