"""Attention of few query rows over KV blocks in Triton: by partitions of the context, which a second kernel reduces.

A partition never crosses a block, and its size depends on the block size alone. The partitions of a block are summed in
their order, those of many blocks at once, and then the blocks are merged one after the other into the running state.
So the bits of a row depend neither on the batch nor on the grouping of blocks into calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.attention import AttentionState, DeviceMetadata
from nanovllm.ops.kernel_config import DecodeConfig, decode_config_on, padded
from nanovllm.ops.triton_kv import as_bytes, load_scales, scales_of, stored_format, widen_elements
from nanovllm.ops.triton_merge import LN2, merge_rows

MAX_PARTS = 8  # partitions of one block
MAX_PROGRAMS = 8192  # of one launch, more than a GPU runs at once; with more partitions each program takes several
MAX_WORKSPACE = 256 << 20  # bytes of partition results at a time
SUMMED_BY_WARP = 512  # elements of blocks' outputs that each warp of a program sums at once
ROWS_PER_PROGRAM = 16  # query rows of one KV head: the smallest tile of the matrix units
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_partition(  # type: ignore[no-untyped-def]
    q,
    keys,
    scales,
    begin,
    end,
    first,
    position,
    slope,
    column,
    column_mask,
    row_size,
    kv_stride,
    scale_log2,
    window,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Online softmax over keys [begin, end) of a block, whose first key has position `first`.

    keys, scales: of one KV head in the block. Returns the weighted sum of values, the maximum (of log2) and the sum of
    weights.
    """
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = n[:, None] * row_size + column[None, :]
        mask = (n < end)[:, None] & column_mask[None, :]
        k = widen_elements(tl.load(keys + at, mask=mask, other=0), q.dtype, FORMAT)
        v = widen_elements(tl.load(keys + kv_stride + at, mask=mask, other=0), q.dtype, FORMAT)
        distance = position[:, None] - (first + n)[None, :]
        visible = (distance >= 0) & (n < end)[None, :]
        if HAS_WINDOW:
            visible = visible & (distance < window)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if FORMAT:
            scales_at = scales + n * (row_size // 4)
            scores *= load_scales(scales_at, n < end, q.dtype, FORMAT)[None, :]
        if HAS_SLOPES:
            scores -= slope[:, None] * distance
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        if FORMAT:
            weights *= load_scales(scales_at + kv_stride // 4, n < end, q.dtype, FORMAT)[None, :]
        acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _mass_and_lse(top, total):  # type: ignore[no-untyped-def]
    """What sums of this maximum (of log2) and sum of weights are divided by, and their LSE; 1 and -inf without keys."""
    mass = tl.where(total > 0.0, total, 1.0)
    return mass, tl.where(total > 0.0, (top + tl.log2(mass)) * LN2, float("-inf"))


# Not specialised: counts that change from step to step would compile the kernel again in the middle of a request.
@triton.jit(
    do_not_specialize=["first_part", "parts_here", "parts", "workers", "total_rows"],
    do_not_specialize_on_alignment=["rows_ptr", "blocks_ptr", "slopes_ptr", "top_ptr", "total_ptr"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pool_ptr,
    rows_ptr,
    blocks_ptr,
    slopes_ptr,
    acc_ptr,
    top_ptr,
    total_ptr,
    first_part,
    parts_here,
    parts,
    workers,
    total_rows,
    heads,
    group,
    head_dim,
    block_size,
    scale,
    window,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_stride,
    head_stride,
    scales_ptr,
    row_size,
    PARTITION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Program (worker and row tile, KV head, sequence): softmax sums of up to BLOCK_R rows, one partition at a time,
    from the worker's own on in steps of `workers`.

    Row r of a sequence is query row r // group, head r % group of the KV head's. Stores the weighted sum of values, the
    maximum (of log2) and the sum of weights at [part, row, head].
    """
    if FORMAT:
        row_size = row_size // 4 * 4  # the same, but now the compiler knows that it can load four elements at once
    worker = tl.program_id(0) % workers
    tile = tl.program_id(0) // workers
    kv_head = tl.program_id(1)
    sequence = rows_ptr + tl.program_id(2) * 8
    query_start = tl.load(sequence).to(tl.int64)
    query_len = tl.load(sequence + 1)
    first_position = tl.load(sequence + 4)
    kv_end = tl.load(sequence + 5)
    query_position = tl.load(sequence + 6)
    rows_before = tl.load(sequence + 7).to(tl.int64)
    end_part = tl.minimum(first_part + parts_here, tl.load(sequence + 3) * parts)
    if (first_part + worker >= end_part) | (tile * BLOCK_R >= query_len * group):
        return
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    token = row // group
    head = kv_head * group + row % group
    row_mask = token < query_len
    position = query_position + token
    column = tl.arange(0, BLOCK_D)
    column_mask = column < head_dim
    q_at = (query_start + token) * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + column[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    slope = tl.zeros([BLOCK_R], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head, mask=row_mask, other=0.0) * LOG2E
    # The last position that some row of the tile sees.
    last = query_position + tl.minimum(tile * BLOCK_R + BLOCK_R - 1, query_len * group - 1) // group
    for part in range(first_part + worker, end_part, workers):
        index = part // parts
        first = first_position + index * block_size  # position of the block's first key
        # Keys of this partition that some row of the tile sees.
        begin = (part % parts) * PARTITION
        end = tl.minimum(tl.minimum(begin + PARTITION, block_size), tl.minimum(kv_end, last + 1) - first)
        if HAS_WINDOW:
            oldest = query_position + (tile * BLOCK_R) // group - window + 1
            begin += tl.maximum(oldest - first - begin, 0) // BLOCK_N * BLOCK_N
        block = tl.load(blocks_ptr + tl.load(sequence + 2) + index).to(tl.int64)
        keys_at = block * block_stride + kv_head * head_stride
        acc, top, total = _attend_partition(
            q, pool_ptr + keys_at, scales_ptr + (keys_at + head_dim) // 4, begin, end, first, position, slope, column,
            column_mask, row_size, kv_stride, scale * LOG2E, window,
            BLOCK_R, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_SLOPES, PRECISION, FORMAT,
        )  # fmt: skip
        at = ((part - first_part) * total_rows + rows_before + token) * heads + head
        tl.store(acc_ptr + at[:, None] * BLOCK_D + column[None, :], acc, mask=row_mask[:, None])
        tl.store(top_ptr + at, top, mask=row_mask)
        tl.store(total_ptr + at, total, mask=row_mask)


@triton.jit(
    do_not_specialize=["first_block", "blocks_here", "total_rows", "lse_head_stride"],
    do_not_specialize_on_alignment=["state_lse_ptr", "lse_ptr", "rows_ptr", "top_ptr", "total_ptr", "lses_ptr"],
)
def _reduce_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    state_lse_ptr,
    out_ptr,
    lse_ptr,
    rows_ptr,
    acc_ptr,
    top_ptr,
    total_ptr,
    outs_ptr,
    lses_ptr,
    first_block,
    blocks_here,
    total_rows,
    heads,
    head_dim,
    state_token_stride,
    state_head_stride,
    out_token_stride,
    out_head_stride,
    lse_head_stride,
    lse_token_stride,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUMMED: tl.constexpr,
    MERGED: tl.constexpr,
    START: tl.constexpr,
    KEEP_LSE: tl.constexpr,
):
    """Program (query row, head, sequence): the partitions of each block into its output and LSE, SUMMED blocks at once;
    then the blocks into (out, lse), one after the other, of which MERGED are loaded at once.

    START: what is merged into: "state", "empty", or "sinks", where state_lse_ptr is their scores. No sum goes over
    lanes, and what a lane carries on, it computes as every other does: bits do not depend on the number of warps.
    Products are rounded before they are added, so that it does not matter either which of two the compiler would fuse.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = rows_ptr + tl.program_id(2) * 8
    if token >= tl.load(sequence + 1):
        return
    count = tl.minimum(tl.load(sequence + 3) - first_block, blocks_here)
    query_row = tl.load(sequence).to(tl.int64) + token
    column = tl.arange(0, BLOCK_D)
    at = (tl.load(sequence + 7).to(tl.int64) + token) * heads + head  # of the row and head in a partition or block
    size = total_rows.to(tl.int64) * heads  # rows and heads of one
    if PARTS > 1:
        for begin in range(0, count, SUMMED):
            block = begin + tl.arange(0, SUMMED).to(tl.int64)
            inside = block < count
            part_at = block * PARTS * size + at
            highest = tl.full([SUMMED], float("-inf"), tl.float32)
            for part in tl.static_range(PARTS):
                top = tl.load(top_ptr + part_at + part * size, mask=inside, other=float("-inf"))
                highest = tl.maximum(highest, top)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            mass = tl.zeros([SUMMED], tl.float32)
            sums = tl.zeros([SUMMED, BLOCK_D], tl.float32)
            for part in tl.static_range(PARTS):
                top = tl.load(top_ptr + part_at + part * size, mask=inside, other=float("-inf"))
                weight = tl.exp2(top - base)
                mass += weight * tl.load(total_ptr + part_at + part * size, mask=inside, other=0.0)
                acc_at = acc_ptr + (part_at + part * size)[:, None] * BLOCK_D + column[None, :]
                sums += weight[:, None] * tl.load(acc_at, mask=inside[:, None], other=0.0)
            mass, block_lse = _mass_and_lse(highest, mass)
            outs_at = outs_ptr + (block * size + at)[:, None] * BLOCK_D + column[None, :]
            tl.store(outs_at, sums / mass[:, None], mask=inside[:, None])
            tl.store(lses_ptr + block * size + at, block_lse, mask=inside)
        tl.debug_barrier()  # all warps read what each wrote
    lse_at = head * lse_head_stride + query_row * lse_token_stride + tl.arange(0, 1)
    out = tl.zeros([1, BLOCK_D], tl.float32)
    lse = tl.full([1], float("-inf"), tl.float32)
    if START == "state":
        state_at = query_row * state_token_stride + head * state_head_stride + column
        out = tl.load(state_ptr + state_at, mask=column < head_dim, other=0.0)[None, :]
        lse = tl.load(state_lse_ptr + lse_at)
    if START == "sinks":
        lse = tl.load(state_lse_ptr + head + tl.arange(0, 1))
    one = tl.arange(0, 1)  # the compiler fetches elements of tensors beforehand, and no scalars
    for begin in tl.range(0, count, MERGED, num_stages=3):
        for step in tl.static_range(MERGED):
            # Beyond the last block: what has no keys.
            mask = begin + step + one < count
            block_at = (begin + step) * size + at + one
            other_at = outs_ptr + block_at[:, None] * BLOCK_D + column[None, :]
            other = tl.load(other_at, mask=mask[:, None], other=0.0)
            other_lse = tl.load(lses_ptr + block_at, mask=mask, other=float("-inf"))
            if PARTS == 1:  # that was the maximum, and these are the sums of its only partition
                total = tl.load(total_ptr + block_at, mask=mask, other=0.0)
                mass, other_lse = _mass_and_lse(other_lse, total)
                other = other / mass[:, None]
            out, lse = merge_rows(out, lse, other, other_lse)
    out_at = out_ptr + query_row * out_token_stride + head * out_head_stride + column
    tl.store(out_at, tl.sum(out, 0).to(out_ptr.dtype.element_ty), mask=column < head_dim)
    if KEEP_LSE:
        tl.store(lse_ptr + lse_at, lse)


def decode_(
    q: Tensor,
    pool: Tensor,
    table: DeviceMetadata,
    state: AttentionState,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Merge attention of the table's sequences with few query rows into `state`, in place.

    q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous; in 8 bits
    its rows end with a scale, by which a key's score or a value's weight is multiplied.
    alibi_slopes: fp32 [heads]; a key at distance d from its query loses slope * d of its score (Press, Smith and Lewis,
    "Train Short, Test Long", 2022).
    """
    _decode(q, pool, table, state, state.out, None, scale, window, alibi_slopes, config)


def decode_whole(
    q: Tensor,
    pool: Tensor,
    table: DeviceMetadata,
    out: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Write attention of the table's sequences with few query rows to their rows of `out`, which may be q.

    The bits are those of `decode_` into an empty state, narrowed to the dtype of `out`; without the memory of a state,
    unless partition results take more than MAX_WORKSPACE. sinks: see `AttentionState.empty`.
    """
    _decode(q, pool, table, None, out, sinks, scale, window, None, config)


def _decode(
    q: Tensor,
    pool: Tensor,
    table: DeviceMetadata,
    state: AttentionState | None,
    out: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    config: DecodeConfig | None,
) -> None:
    """`decode_` where there is a state, whose output `out` then is; else `decode_whole`."""
    group = table.few
    (tokens, heads, head_dim) = q.shape
    block_size = pool.shape[3]
    if not len(group):
        return
    config = config or decode_config_on(q.device, head_dim, q.dtype)
    format = stored_format(pool.dtype)
    partition, parts = partitions_of(block_size, config.partition)
    padded_dim = padded(head_dim)
    kv_heads = pool.shape[2]
    keys = config.keys // 2 if format else config.keys  # tiles of 8 bits are widened in registers
    bytes_per_part = group.total_rows * heads * (padded_dim + 2) * 4
    bytes_per_block = bytes_per_part * (parts if parts == 1 else parts + 1)
    blocks_at_once = max(1, min(group.max_blocks, MAX_WORKSPACE // bytes_per_block))
    sums, tops, totals = _workspace(q, blocks_at_once * parts, group.total_rows, padded_dim)
    outs, lses, _ = (sums, tops, totals) if parts == 1 else _workspace(q, blocks_at_once, group.total_rows, padded_dim)
    running = state
    if running is None and blocks_at_once < group.max_blocks:
        running = AttentionState(torch.empty_like(q, dtype=torch.float32), lses.new_empty(heads, tokens))
    row_tiles = triton.cdiv(group.max_rows * (heads // kv_heads), ROWS_PER_PROGRAM)
    for first in range(0, max(1, group.max_blocks), blocks_at_once):
        count = min(blocks_at_once, group.max_blocks - first)
        workers = max(1, min(count * parts, MAX_PROGRAMS // (row_tiles * kv_heads * len(group))))
        _decode_kernel[(workers * row_tiles, kv_heads, len(group))](
            q, as_bytes(pool), group.rows, table.blocks, q if alibi_slopes is None else alibi_slopes, sums, tops,
            totals, first * parts, count * parts, parts, workers, group.total_rows, heads, heads // kv_heads, head_dim,
            block_size, scale, window or 0, *q.stride()[:2], *pool.stride()[:3], scales_of(pool), pool.shape[4],
            PARTITION=partition, BLOCK_R=ROWS_PER_PROGRAM,
            BLOCK_N=min(keys, partition), BLOCK_D=padded_dim, HAS_WINDOW=window is not None,
            HAS_SLOPES=alibi_slopes is not None, PRECISION=dot_precision(q.dtype), FORMAT=format,
            num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
        )  # fmt: skip
        is_whole = state is None and first + blocks_at_once >= group.max_blocks  # and `out` gets the result
        start = "state" if state is not None or first > 0 else "empty" if sinks is None else "sinks"
        kept = AttentionState(out, lses) if running is None else running  # unused where there is none
        target = out if is_whole else kept.out
        _reduce_kernel[(group.max_rows, heads, len(group))](
            kept.out, sinks if start == "sinks" else kept.lse, target, kept.lse, group.rows,
            sums, tops, totals, outs, lses, first, count, group.total_rows, heads, head_dim,
            *kept.out.stride()[:2], *target.stride()[:2], *kept.lse.stride()[:2],
            PARTS=parts, BLOCK_D=padded_dim, SUMMED=max(1, SUMMED_BY_WARP * config.reduce_warps // padded_dim),
            MERGED=config.reduce_blocks, START=start, KEEP_LSE=not is_whole,
            num_warps=config.reduce_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _workspace(q: Tensor, parts: int, rows: int, padded_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [parts, rows, heads, padded_dim] of partitions or blocks, their maxima or LSEs and totals, fp32."""
    heads = q.shape[1]
    tops, totals = q.new_empty(2, parts, rows, heads, dtype=torch.float32)
    return q.new_empty(parts, rows, heads, padded_dim, dtype=torch.float32), tops, totals


def partitions_of(block_size: int, most: int) -> tuple[int, int]:
    """Keys in a partition and partitions in a block of this size.

    A power of 2 from 16 to `most` keys; more, where a block would have more than MAX_PARTS partitions.
    """
    partition = min(most, max(16, triton.next_power_of_2(block_size)))
    while triton.cdiv(block_size, partition) > MAX_PARTS:
        partition *= 2
    return partition, triton.cdiv(block_size, partition)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 in three parts of tf32 keeps fp32's accuracy and the matrix units; the narrow types do not heed it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
