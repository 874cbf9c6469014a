"""Attention of many query rows over KV blocks, in Triton, carrying (output, LSE) of earlier blocks on: no merge after.

The state is normalised after every block, inside the kernel as between two calls, so a row's bits do not depend on how
blocks are grouped into calls; and a tile that a row does not see changes none of its bits, so they do not depend on the
rows beside it either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.attention import AttentionState, DeviceTable
from nanovllm.ops.triton_decode import dot_precision

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    acc,
    top,
    total,
    q,
    k_ptr,
    v_ptr,
    position,
    first,
    begin,
    end,
    scale_log2,
    window,
    column,
    head_dim,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys [begin, end) of one block; unless MASKED, every row sees all of them."""
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = n[:, None] * head_dim + column[None, :]
        if MASKED:
            k = tl.load(k_ptr + at, mask=(n < end)[:, None] & (column < head_dim)[None, :], other=0.0)
        elif PADDED:
            k = tl.load(k_ptr + at, mask=(column < head_dim)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + at)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            distance = position[:, None] - (first + n)[None, :]
            visible = (distance >= 0) & (n < end)[None, :]
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(v_ptr + at, mask=(n < end)[:, None] & (column < head_dim)[None, :], other=0.0)
        elif PADDED:
            v = tl.load(v_ptr + at, mask=(column < head_dim)[None, :], other=0.0)
        else:
            v = tl.load(v_ptr + at)
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pool_ptr,
    spans_ptr,
    blocks_ptr,
    out_ptr,
    lse_ptr,
    group,
    head_dim,
    block_size,
    scale,
    window,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_stride,
    kv_head_stride,
    out_token_stride,
    out_head_stride,
    lse_head_stride,
    lse_token_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (row tile, head, segment): BLOCK_M query rows of one head over all blocks of their segment."""
    span = spans_ptr + tl.program_id(2) * 8
    query_len = tl.load(span + 1)
    tile = tl.cdiv(query_len, BLOCK_M) - 1 - tl.program_id(0)  # rows that see the most first
    if tile < 0:
        return
    head = tl.program_id(1)
    first_position, kv_end, query_position = tl.load(span + 4), tl.load(span + 5), tl.load(span + 6)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = token < query_len
    position = query_position + token
    lowest = query_position + tile * BLOCK_M
    highest = query_position + tl.minimum(tile * BLOCK_M + BLOCK_M, query_len) - 1
    column = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (column < head_dim)[None, :]
    row = tl.load(span).to(tl.int64) + token
    q = tl.load(q_ptr + head * q_head_stride + row[:, None] * q_token_stride + column[None, :], mask=mask, other=0.0)
    out_at = out_ptr + head * out_head_stride + row[:, None] * out_token_stride + column[None, :]
    acc = tl.load(out_at, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + head * lse_head_stride + row * lse_token_stride, mask=row_mask, other=float("-inf"))
    block_at = blocks_ptr + tl.load(span + 2)
    for index in range(tl.load(span + 3)):
        first = first_position + index * block_size
        end = tl.minimum(block_size, tl.minimum(kv_end, highest + 1) - first)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(lowest - window + 1 - first, 0) // BLOCK_N * BLOCK_N
        if begin < end:
            k_ptr = pool_ptr + tl.load(block_at + index).to(tl.int64) * block_stride + head // group * kv_head_stride
            v_ptr = k_ptr + kv_stride
            top = lse * LOG2E
            total = tl.where(lse == float("-inf"), 0.0, 1.0)
            if HAS_WINDOW:
                masked_from = begin
            else:  # up to here every row sees every key
                masked_from = tl.maximum(tl.minimum(end, lowest + 1 - first), 0) // BLOCK_N * BLOCK_N
                acc, top, total = _attend_keys(
                    acc, top, total, q, k_ptr, v_ptr, position, first, 0, masked_from, scale * LOG2E, window, column,
                    head_dim, BLOCK_N, False, HAS_WINDOW, PADDED, PRECISION,
                )  # fmt: skip
            acc, top, total = _attend_keys(
                acc, top, total, q, k_ptr, v_ptr, position, first, masked_from, end, scale * LOG2E, window, column,
                head_dim, BLOCK_N, True, HAS_WINDOW, PADDED, PRECISION,
            )  # fmt: skip
            acc *= tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))[:, None]
            # A row that sees none of the block keeps its LSE to the bit, which a way through log2 would not.
            sees = position >= first
            if HAS_WINDOW:
                sees = sees & (position - window < first + end - 1)
            new_lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN2
            lse = tl.where(sees, new_lse, lse)
    # Read again, so that no register holds an address of the output through the loops.
    row = tl.load(span, volatile=True).to(tl.int64) + token
    out_at = out_ptr + head * out_head_stride + row[:, None] * out_token_stride + column[None, :]
    tl.store(out_at, acc, mask=row_mask[:, None] & (column < head_dim)[None, :])
    tl.store(lse_ptr + head * lse_head_stride + row * lse_token_stride, lse, mask=row_mask)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes and pipeline of one launch."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_config(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Tiles that fit the device's shared memory and registers; none was chosen by timing yet."""
    wide = head_dim > 128
    if dtype == torch.float32:  # here for exactness: it spills registers, and is slow
        return PrefillConfig(16, 16, 8, 1) if wide else PrefillConfig(32, 32, 4 if head_dim <= 64 else 8, 1)
    if capability[0] in (9, 10):  # 227 KiB of shared memory; most others have 99
        return PrefillConfig(128, 32, 8, 2) if wide else PrefillConfig(128, 64, 8, 3)
    return PrefillConfig(64, 16, 8, 2) if wide else PrefillConfig(128, 32, 8, 3)


def prefill_(
    q: Tensor,
    pool: Tensor,
    table: DeviceTable,
    state: AttentionState,
    scale: float,
    window: int | None,
    config: PrefillConfig | None = None,
) -> None:
    """Carry `state` on over the table's segments with many query rows, in place.

    q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous.
    """
    group, (_, heads, head_dim) = table.many, q.shape
    if not len(group):
        return
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    config = config or prefill_config(head_dim, q.dtype, capability)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    _prefill_kernel[(triton.cdiv(group.max_rows, config.rows), heads, len(group))](
        q, pool, group.spans, table.blocks, state.out, state.lse, heads // pool.shape[2], head_dim, pool.shape[3],
        scale, window or 0, *q.stride()[:2], *pool.stride()[:3], *state.out.stride()[:2], *state.lse.stride(),
        BLOCK_M=config.rows, BLOCK_N=config.keys, BLOCK_D=padded_dim, HAS_WINDOW=window is not None,
        PADDED=padded_dim != head_dim, PRECISION=dot_precision(q.dtype),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
