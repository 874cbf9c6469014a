"""Small tensors made on the host, brought to the device without holding up either."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. On CUDA the copy is queued on the current stream and the host goes on at once.

    From pageable memory the host would wait for the copy, and so for all work that was put on the stream before it.
    torch keeps the pinned memory until the copy is done.
    """
    return _reachable(values, device).to(device, non_blocking=True)


def refill(memory: Tensor, values: Tensor) -> None:
    """Write a host tensor of one dimension to the beginning of `memory`, as `upload` would bring it to its device."""
    memory[: len(values)].copy_(_reachable(values, memory.device), non_blocking=True)


def _reachable(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory() if device.type == "cuda" else values
