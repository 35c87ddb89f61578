"""Weights from the host to a GPU as fast as both can: through pinned buffers that several threads fill."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

THREADS = 8
PIECE = 16 << 20
"""Bytes: long enough for the bus, short enough that two pinned buffers a thread are no burden."""


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of CPU ``tensors`` on ``device``, with their types and shapes, contiguous, and there when it returns.

    Pages of a mapped file are read by all threads at once. Raises torch.cuda.OutOfMemoryError.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
    pieces = [
        pair
        for tensor, copy in zip(tensors, copies, strict=True)
        if tensor.numel()
        for pair in zip(_bytes(tensor.contiguous()).split(PIECE), _bytes(copy).split(PIECE), strict=True)
    ]
    threads = max(1, min(THREADS, os.cpu_count() or 1, len(pieces)))
    free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
    for _ in range(2 * threads):
        free.put((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what had this memory before may still be at work

    def move(source: Tensor, target: Tensor) -> None:
        buffer, sent = free.get()
        sent.synchronize()
        part = buffer[: len(source)]
        np.copyto(part.numpy(), source.numpy())  # torch would call up its own threads in each of ours
        with torch.cuda.stream(stream):
            target.copy_(part, non_blocking=True)
            sent.record()
        free.put((buffer, sent))

    with ThreadPoolExecutor(threads, "sdaccel-upload") as pool:
        list(pool.map(move, *zip(*pieces, strict=True)) if pieces else ())
    stream.synchronize()
    return copies


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
