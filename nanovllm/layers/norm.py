"""Root mean square normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.row_kernels import add_rms_norm_, rms_norm


class RMSNorm:
    """RMS normalization with its weight, [size]; see `ops.row_kernels.rms_norm`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x in place; returns the normalised sum. Both [rows, size]."""
        return add_rms_norm_(residual, x, self.weight, self.eps)
