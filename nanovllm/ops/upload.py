"""Small tensors made on the host, brought to the device without holding up either."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. On CUDA the copy is queued on the current stream and the host goes on at once.

    From pageable memory the host would wait for the copy, and so for all work that was put on the stream before it.
    torch keeps the pinned memory until the copy is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
