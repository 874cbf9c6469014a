"""Root mean square normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import cpu_rows
from nanovllm.ops.triton_support import use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's shape and dtype.

    The mean and the division run in fp32; the result is cast back before the weight multiplies it, which is
    where Transformers rounds. `weight` broadcasts against x: one row for all, or one row per head.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    if weight.dim() == 1 and use_triton(x):
        from nanovllm.ops.triton_rows import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    if weight.dim() == 1 and cpu_rows.takes(x, 2):
        return cpu_rows.rms_norm(x, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place and rounded to its dtype, and the normalised sum: [rows, size], weight [size]."""
    if use_triton(x):
        from nanovllm.ops.triton_rows import add_rms_norm_triton_

        return add_rms_norm_triton_(residual, x, weight, eps)
    if cpu_rows.takes(x, 2):
        return cpu_rows.add_rms_norm_(residual, x, weight, eps)
    residual += x
    return rms_norm(residual, weight, eps)


class RMSNorm:
    """RMS normalization with its weight, [size]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add_(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x in place; returns the normalised sum. Both [rows, size]."""
        return add_rms_norm_(residual, x, self.weight, self.eps)
