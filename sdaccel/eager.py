"""A component in torch as its host runs it: what engines are measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def as_used_on_a_gpu(module: Any, dtype: torch.dtype) -> None:
    """Half precision, images channels last: what makes torch fastest. Up-sampling by two, as at sides that divide."""
    for parameter in module.parameters():
        value = parameter.data.to("cuda", dtype)
        parameter.data = value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
    if hasattr(module, "unet"):
        module.unet.num_upsamplers = sum(block.upsamplers is not None for block in module.unet.up_blocks)


def inputs_on_a_gpu(inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Token ids and timesteps keep their type."""
    return {
        name: value.to("cuda") if name == "timestep" or not value.is_floating_point() else value.to("cuda", dtype)
        for name, value in inputs.items()
    }


def calls(module: Any, component: str) -> Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Calls the module as its pipeline does. The UNet's own forward: no ControlNet residuals are added."""
    if component != "unet":
        return lambda inputs: module(*inputs.values())

    def unet(inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        extra = {"added_cond_kwargs": {"y": inputs["y"]}} if "y" in inputs else {}
        given = (inputs["sample"], inputs["timestep"], inputs["encoder_hidden_states"])
        return module.unet(*given, **extra, return_dict=False)

    return unet


def gpu_milliseconds(call: Callable[[], Any], repeats: int = 5, warmup: int = 2) -> float:
    """Median wall-clock time of ``call`` until the GPU has finished it."""
    times = []
    for number in range(warmup + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
