"""Copies of small host tensors to the device that do not block the host."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. On CUDA the copy is queued on the current stream and the call returns at once.

    A copy from pageable memory would wait for all earlier work on the stream. torch keeps the pinned memory until the
    copy is done.
    """
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def refill(memory: Tensor, values: Tensor) -> None:
    """Copy a host tensor of one dimension to the beginning of `memory` on a device, like `upload`."""
    memory[: len(values)].copy_(values.pin_memory() if memory.is_cuda else values, non_blocking=True)
