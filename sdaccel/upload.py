"""Weights from the host to a GPU as fast as both can: through pinned buffers that several threads fill."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

THREADS = 8
SLOT = 16 << 20
"""Bytes: long enough for the bus, short enough that two pinned buffers a thread are no burden."""


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of CPU ``tensors`` on ``device``, with their types and shapes, contiguous, and there when it returns.

    Pages of a mapped file are read by all threads at once. Raises torch.cuda.OutOfMemoryError.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
    batches = list(_batches(tensors, copies))
    threads = max(1, min(THREADS, os.cpu_count() or 1, len(batches)))
    free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
    for _ in range(2 * threads):
        free.put((torch.empty(SLOT, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what had this memory before may still be at work

    def move(batch: Sequence[tuple[Tensor, Tensor]]) -> None:
        buffer, sent = free.get()
        sent.synchronize()
        parts = buffer.split([len(source) for source, _ in batch] + [SLOT - sum(len(source) for source, _ in batch)])
        for part, (source, _) in zip(parts, batch, strict=False):
            np.copyto(part.numpy(), source.numpy())  # torch would call up its own threads in each of ours
        with torch.cuda.stream(stream):
            for part, (_, target) in zip(parts, batch, strict=False):
                target.copy_(part, non_blocking=True)
            sent.record()
        free.put((buffer, sent))

    with ThreadPoolExecutor(threads, "sdaccel-upload") as pool:
        list(pool.map(move, batches))
    stream.synchronize()
    return copies


def _batches(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Bytes and where they go, as many together as a buffer holds."""
    batch: list[tuple[Tensor, Tensor]] = []
    room = SLOT
    for source, target in zip(sources, targets, strict=True):
        begin, (left, right) = 0, (_bytes(source.contiguous()), _bytes(target))
        while begin < len(left):
            end = min(begin + room, len(left))
            batch.append((left[begin:end], right[begin:end]))
            room -= end - begin
            begin = end
            if not room:
                yield batch
                batch, room = [], SLOT
    if batch:
        yield batch


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
