"""The operations of `row_kernels` in Triton; those that torch runs in few launches are torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.torch_rows import add_, copy_, cos_sin, sigmoid, softmax

__all__ = [
    "add_",
    "add_rms_norm_",
    "clamped_swiglu",
    "copy_",
    "cos_sin",
    "draw",
    "gelu_tanh_and_mul",
    "place_heads",
    "rms_norm",
    "sigmoid",
    "silu_and_mul",
    "softmax",
    "store_kv",
]

COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _gated_unit_kernel(  # type: ignore[no-untyped-def]
    out_ptr, gate_up_ptr, size, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, tile of columns). Each activation is the gate times a sigmoid."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    logit = gate
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        up = (up + 1.0).to(dtype).to(tl.float32)
        logit = 1.702 * gate
    if ACTIVATION == "gelu_tanh":
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    activated = (gate / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (activated * up).to(dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated_unit(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated_unit(gate_up, "gelu_tanh")


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    return _gated_unit(gate_up, "clamped_swiglu")


def _gated_unit(gate_up: Tensor, activation: str) -> Tensor:
    rows = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        assert gate_up.stride(1) == 1, "rows must be contiguous"
        _gated_unit_kernel[(rows, triton.cdiv(size, COLUMNS_PER_PROGRAM))](
            out, gate_up, size, gate_up.stride(0),
            ACTIVATION=activation, BLOCK=COLUMNS_PER_PROGRAM, enable_fp_fusion=True,
        )  # fmt: skip
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
    """Program (row). Rounds where the plain version does: after the sum, before a weight that has x's dtype, and after
    it."""
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
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(weight_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, (scaled * weight).to(dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch(out, x, x, weight, eps, add=False)
    return out


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
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
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + half, mask=mask, other=0.0)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * half) + eps)[:, None]
        weight = weight_ptr + head * (2 * half) + column
        x_weight = tl.load(weight, mask=inside & rotated, other=0.0).to(tl.float32)
        y_weight = tl.load(weight + half, mask=inside & rotated, other=0.0).to(tl.float32)
        narrow = weight_ptr.dtype.element_ty
        x = ((x * scale).to(narrow).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(narrow).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * sin_stride + column, mask=inside, other=0.0)
    first = tl.where(rotated, (x * cos - y * sin).to(dtype), first)
    second = tl.where(rotated, (y * cos + x * sin).to(dtype), second)
    q_at = q_ptr + token * q_stride + head * (2 * half) + column
    k_at = k_ptr + token * k_stride + (head - num_heads) * (2 * half) + column
    v_at = v_ptr + token * v_stride + (head - num_heads - num_kv_heads) * (2 * half) + column
    is_q = mask & (head < num_heads)
    is_v = mask & (head >= num_heads + num_kv_heads)
    is_k = mask & (head >= num_heads) & rotated
    tl.store(q_at, first, mask=is_q)
    tl.store(q_at + half, second, mask=is_q)
    tl.store(k_at, first, mask=is_k)
    tl.store(k_at + half, second, mask=is_k)
    tl.store(v_at, first, mask=is_v)
    tl.store(v_at + half, second, mask=is_v)


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
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


DRAWN_PER_PROGRAM = 2048


@triton.jit
def _finalise(z):  # type: ignore[no-untyped-def]
    """SplitMix64's mixing of a 64-bit state."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(
    do_not_specialize=["width", "tiles", "scores_stride", "tokens_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "best_ptr", "index_ptr"],
)
def _draw_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    tokens_ptr,
    starts_ptr,
    best_ptr,
    index_ptr,
    width,
    tiles,
    scores_stride,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """Program (row, tile): the largest value of the tile and its column in the row."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * scores_stride + column, mask=column < width, other=float("-inf"))
    token = tl.load(tokens_ptr + row * tokens_stride + column, mask=column < width, other=0)
    start = tl.load(starts_ptr + row).to(tl.uint64)
    number = _finalise(start + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = ((number >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    value = score.to(tl.float64) - tl.log(-tl.log(uniform))
    best, index = tl.max(value, 0, return_indices=True)
    tl.store(best_ptr + row * tiles + tile, best)
    tl.store(index_ptr + row * tiles + tile, (tile * BLOCK + index).to(tl.int64))


def draw(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    rows, width = scores.shape
    assert scores.stride(1) == tokens.stride(-1) == 1, "rows must be contiguous"
    tiles = triton.cdiv(width, DRAWN_PER_PROGRAM)
    best = torch.empty(rows, tiles, dtype=torch.float64, device=scores.device)
    index = torch.empty(rows, tiles, dtype=torch.int64, device=scores.device)
    _draw_kernel[(rows, tiles)](
        scores, tokens, starts, best, index, width, tiles, scores.stride(0),
        tokens.stride(0) if tokens.dim() == 2 else 0, BLOCK=DRAWN_PER_PROGRAM, enable_fp_fusion=True,
    )  # fmt: skip
    return index.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


STORED_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(  # type: ignore[no-untyped-def]
    pool_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    tokens,
    head_dim,
    block_size,
    block_stride,
    kv_stride,
    head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (column < head_dim)
    k = tl.load(k_ptr + head * k_head_stride + token[:, None] * k_token_stride + column, mask=mask)
    v = tl.load(v_ptr + head * v_head_stride + token[:, None] * v_token_stride + column, mask=mask)
    row = (slot // block_size) * block_stride + head * head_stride + (slot % block_size) * head_dim
    tl.store(pool_ptr + row[:, None] + column, k, mask=mask)
    tl.store(pool_ptr + kv_stride + row[:, None] + column, v, mask=mask)


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    tokens, heads, head_dim = k.shape
    if k.numel() == 0:
        return
    assert k.stride(2) == 1 and v.stride(2) == 1, "head_dim must be contiguous"
    assert pool[0].is_contiguous(), "a KV block must be contiguous"
    grid = (triton.cdiv(tokens, STORED_PER_PROGRAM), heads)
    _store_kernel[grid](
        pool, k, v, slots, tokens, head_dim, pool.shape[3], *pool.stride()[:3], *k.stride()[:2], *v.stride()[:2],
        BLOCK_T=STORED_PER_PROGRAM, BLOCK_D=triton.next_power_of_2(head_dim), enable_fp_fusion=True,
    )  # fmt: skip
