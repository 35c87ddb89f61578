"""Microseconds of every tactic:
python -m tests.backends.cuda.bench_conv [part of a shape's name [tiles a shape [multicast]]]
"""

from __future__ import annotations

import sys

import torch

from sdaccel.backends.cuda import gemm
from sdaccel.backends.cuda.launch import Device
from sdaccel.backends.cuda.ops import conv, upsample_conv
from tests.backends.cuda.bench_linear import compile_all, report

# name: (batch, channels, side, channels of the result, kernel, stride, channels of a second input)
SHAPES = {
    "sdxl 320 @128": (2, 320, 128, 320, 3, 1, 0),
    "sdxl 640+320 @128": (2, 640, 128, 320, 3, 1, 320),
    "sdxl 640 @64": (2, 640, 64, 640, 3, 1, 0),
    "sdxl 1280+640 @64": (2, 1280, 64, 640, 3, 1, 640),
    "sdxl 1280 @32": (2, 1280, 32, 1280, 3, 1, 0),
    "sdxl 1280+1280 @32": (2, 1280, 32, 1280, 3, 1, 1280),
    "sdxl 1x1 1280+640 @64": (2, 1280, 64, 640, 1, 1, 640),
    "sdxl down 640 @64": (2, 640, 64, 640, 3, 2, 0),
    "sd15 320 @64": (2, 320, 64, 320, 3, 1, 0),
    "sd15 640 @32": (2, 640, 32, 640, 3, 1, 0),
    "sd15 1280 @16": (2, 1280, 16, 1280, 3, 1, 0),
    "sd15 1280 @8": (2, 1280, 8, 1280, 3, 1, 0),
    "sd15 1280+1280 @8": (2, 1280, 8, 1280, 3, 1, 1280),
    "vae 512 @128": (1, 512, 128, 512, 3, 1, 0),
    "vae 512 @512": (1, 512, 512, 512, 3, 1, 0),
    "vae 256 @512": (1, 256, 512, 256, 3, 1, 0),
    "vae 128 @1024": (1, 128, 1024, 128, 3, 1, 0),
    "vae 256 to 128 @1024": (1, 256, 1024, 128, 3, 1, 0),
}
# name: (batch, channels, side)
UPSAMPLE = {
    "sdxl up 1280 @32": (2, 1280, 32),
    "sdxl up 640 @64": (2, 640, 64),
    "sd15 up 1280 @8": (2, 1280, 8),
    "vae up 512 @256": (1, 512, 256),
    "vae up 256 @512": (1, 256, 512),
}


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)


def main(wanted: str = "", offered: str = "6", multicast: str = "") -> None:
    gemm.OFFERED, gemm.MULTICAST = int(offered), bool(multicast)
    device = Device.current()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    cases = {}
    for name, (batch, channels, side, out, kernel, stride, second) in SHAPES.items():
        if wanted not in name:
            continue
        x, x2 = image(batch, channels, side, side), image(batch, second, side, side) if second else None
        weight, bias = image(out, channels + second, kernel, kernel) / 50, image(1, out, 1, 1).flatten()
        residual = image(batch, out, side // stride, side // stride)
        options = {"stride": stride, "padding": kernel // 2}
        found = conv.tactics(device, x, weight, bias, residual, x2, **options)
        operations = 2.0 * residual.numel() * weight[0].numel()
        moved = 2.0 * (x.numel() + weight.numel() + 2 * residual.numel() + (0 if x2 is None else x2.numel()))
        cases[name] = operations, moved, found
    for name, (batch, channels, side) in UPSAMPLE.items():
        if wanted not in name:
            continue
        x, weight = image(batch, channels, side, side), image(channels, channels, 3, 3) / 50
        found = upsample_conv.tactics(device, x, weight, image(1, channels, 1, 1).flatten(), sides=(2 * side, 2 * side))
        moved = 2.0 * (5 * x.numel() + weight.numel())
        cases[name] = 2.0 * 4 * x.numel() * weight[0].numel(), moved, found
    tactics = [tactic for *_, found in cases.values() for tactic in found]
    names = {id(t): type(t.run).__module__ for t in tactics}
    compile_all("gemm_sm90.cu", [t for t in tactics if names[id(t)].endswith("linear")], device)
    compile_all("conv_sm90.cu", [t for t in tactics if not names[id(t)].endswith("linear")], device)
    for name, case in cases.items():
        report(name, *case, flush)


if __name__ == "__main__":
    main(*sys.argv[1:])
