"""K and V in 8 bits, with a scale for each token and KV head.

A row, K or V of one token and one KV head, is head_dim elements of one byte and then its scale, an fp32 in four bytes
of the same tensor. The value of an element is element * scale, with

    scale = max(max |x| / L, the smallest normal fp32),   element = x / scale to the nearest, ties to even

where L is the largest element: 127 for int8, 448 for float8_e4m3fn. A row depends on its own token and head only, so KV
has the same bytes in whatever chunks, batch or block the token is computed, and copies move scales with the elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES, dtype_name

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def stored_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of KV blocks for an engine argument, in a model of `dtype`."""
    return _STORED.get(kv_cache_dtype, dtype)


def has_scales(dtype: torch.dtype) -> bool:
    """Whether rows of KV blocks of this dtype end with a scale."""
    return dtype in LARGEST


def head_dim_of(pool: Tensor) -> int:
    """Elements of a head in KV blocks `[..., row]`, whose rows may have scales."""
    return pool.shape[-1] - SCALE_BYTES if has_scales(pool.dtype) else pool.shape[-1]


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `[tokens, heads, head_dim + SCALE_BYTES]` of x `[tokens, heads, head_dim]`, in C++ or in torch.

    Both give the same bytes. A row with a NaN or infinity has no defined elements, and holds NaN when it is read.
    """
    if not (x.is_cpu and x.dtype in KERNEL_DTYPES and x.stride(2) == 1):
        return quantize_rows_torch(x, dtype)
    tokens, heads, head_dim = x.shape
    rows = torch.empty(tokens, heads, head_dim + SCALE_BYTES, dtype=dtype)
    _cpu_kernels.quantize_rows(
        dtype=KERNEL_DTYPES[x.dtype], kv_dtype=dtype_name(dtype), x=x.data_ptr(), strides=(x.stride(0), x.stride(1)),
        rows=rows.data_ptr(), tokens=tokens, heads=heads, head_dim=head_dim, threads=torch.get_num_threads(),
    )  # fmt: skip
    return rows


def quantize_rows_torch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`quantize_rows` in plain torch, for x of any shape `[..., head_dim]`."""
    wide = x.float()
    largest = wide.new_full((), LARGEST[dtype])  # on a GPU torch multiplies with the reciprocal of a Python number
    scale = (wide.abs().amax(dim=-1, keepdim=True) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    elements = (wide / scale).nan_to_num_()
    if dtype == torch.int8:
        elements = elements.round_()
    return torch.cat((elements.to(dtype).view(torch.uint8), scale.view(torch.uint8)), dim=-1).view(dtype)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values `[..., head_dim]` of rows `[..., head_dim + SCALE_BYTES]`, each rounded once to `dtype`."""
    head_dim = head_dim_of(rows)
    scale = rows.view(torch.uint8)[..., head_dim:].contiguous().view(torch.float32)
    return (rows[..., :head_dim].float() * scale).to(dtype)
