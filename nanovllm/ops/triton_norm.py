"""RMS normalisation in Triton, with the residual sum before it or without; a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    residual_ptr,
    x_ptr,
    weight_ptr,
    size,
    eps,
    out_stride,
    residual_stride,
    x_stride,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row). Rounds where the plain version does: after the sum, before the weight and after it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row * residual_stride + column
        residual = (tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(residual_at, residual, mask=mask)
        x = residual.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, (scaled * weight).to(dtype), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.norm.rms_norm` for x [rows, size] and weight [size]."""
    out = torch.empty_like(x)
    _launch(out, x, x, weight, eps, add=False)
    return out


def add_rms_norm_triton_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.norm.add_rms_norm_` for [rows, size] and weight [size]."""
    out = torch.empty_like(x)
    _launch(out, residual, x, weight, eps, add=True)
    return out


def _launch(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, add: bool) -> None:
    if not x.numel():
        return
    assert x.stride(1) == residual.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(x.shape[0],)](
        out, residual, x, weight, x.shape[1], eps, out.stride(0), residual.stride(0), x.stride(0),
        ADD=add, BLOCK=block, num_warps=min(16, max(1, block // 512)), enable_fp_fusion=True,
    )  # fmt: skip
