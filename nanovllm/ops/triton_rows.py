"""Triton kernels over rows: RMS norm, gated activation, and the heads of q, k and v with RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _silu_kernel(out_ptr, gate_up_ptr, size, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (activated * up).to(dtype), mask=mask)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """`layers.activation.silu_and_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        assert gate_up.stride(1) == 1, "rows must be contiguous"
        _silu_kernel[(rows, triton.cdiv(size, COLUMNS_PER_PROGRAM))](
            out, gate_up, size, gate_up.stride(0), BLOCK=COLUMNS_PER_PROGRAM, enable_fp_fusion=True
        )
    return out


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


HEADS_PER_PROGRAM = 8


@triton.jit
def _heads_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    heads_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    num_kv_heads,
    half,
    eps,
    token_stride,
    cos_stride,
    sin_stride,
    q_stride,
    k_stride,
    v_stride,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (token, tile of heads). A head is two halves, of which each pair of elements turns by one angle."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    dtype = heads_ptr.dtype.element_ty
    inside = column < half
    rotated = head < num_heads + num_kv_heads
    mask = inside & (head < num_heads + 2 * num_kv_heads)
    at = heads_ptr + token * token_stride + head * (2 * half) + column
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * half) + eps)[:, None]
        weight = weight_ptr + head * (2 * half) + column
        x_weight = tl.load(weight, mask=inside & rotated, other=0.0).to(tl.float32)
        y_weight = tl.load(weight + half, mask=inside & rotated, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * sin_stride + column, mask=inside, other=0.0)
    first = tl.where(rotated, (x * cos - y * sin).to(dtype), first)
    second = tl.where(rotated, (y * cos + x * sin).to(dtype), second)
    q_at = q_ptr + token * q_stride + head * (2 * half) + column
    k_at = k_ptr + token * k_stride + (head - num_heads) * (2 * half) + column
    v_at = v_ptr + token * v_stride + (head - num_heads - num_kv_heads) * (2 * half) + column
    is_q, is_v = mask & (head < num_heads), mask & (head >= num_heads + num_kv_heads)
    is_k = mask & (head >= num_heads) & rotated
    tl.store(q_at, first, mask=is_q)
    tl.store(q_at + half, second, mask=is_q)
    tl.store(k_at, first, mask=is_k)
    tl.store(k_at + half, second, mask=is_k)
    tl.store(v_at, first, mask=is_v)
    tl.store(v_at + half, second, mask=is_v)


def place_heads_triton(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """`layers.heads.place_heads`."""
    tokens, total, head_dim = heads.shape
    if not tokens:
        return
    for tensor in (heads, q, k, v):
        assert tensor.stride()[1:] == (head_dim, 1), "the heads of a token must be contiguous"
    _heads_kernel[(tokens, triton.cdiv(total, HEADS_PER_PROGRAM))](
        q, k, v, heads, q if weight is None else weight, cos, sin, q.shape[1], k.shape[1], head_dim // 2, eps,
        heads.stride(0), cos.stride(0), sin.stride(0), q.stride(0), k.stride(0), v.stride(0),
        HAS_NORM=weight is not None, BLOCK_H=HEADS_PER_PROGRAM, BLOCK_D=triton.next_power_of_2(head_dim // 2),
        enable_fp_fusion=True,
    )  # fmt: skip
