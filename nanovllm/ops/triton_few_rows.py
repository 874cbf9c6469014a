"""Products of few rows with a dense weight in Triton: each program streams some rows of the weight once.

Used where a device's table of tuned kernels names it for a shape (`kernel_config.few_rows_config_on`); else torch
multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernel_config import FEW_ROWS, FewRowsConfig


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    in_features,
    out_features,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of the weight's rows). Sums go over the tiles of a row in order, in fp32.

    A column of the matrix units' tile is a row of x and computed alone: its bits do not depend on the other rows.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + n[:, None] * weight_stride + k[None, :]
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for begin in range(0, in_features, BLOCK_K):
        inside = begin + k < in_features
        weight = tl.load(weight_at + begin, mask=(n < out_features)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at + begin, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
        total = tl.dot(weight, x, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < out_features, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + row[None, :] * out_features + n[:, None]
    mask = (row < rows)[None, :] & (n < out_features)[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=mask)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewRowsConfig) -> Tensor:
    """x W^T + b for x [rows, in] of at most FEW_ROWS rows: [rows, out]. 16-bit tensors, rows contiguous."""
    (rows, in_features) = x.shape
    out_features = weight.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    assert rows <= FEW_ROWS and x.stride(1) == weight.stride(1) == 1, "few rows, each contiguous"
    _few_rows_kernel[(triton.cdiv(out_features, config.weight_rows),)](
        out, x, weight, weight if bias is None else bias, rows, in_features, out_features, x.stride(0),
        weight.stride(0), HAS_BIAS=bias is not None, ROWS=FEW_ROWS, BLOCK_N=config.weight_rows,
        BLOCK_K=config.columns, num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
