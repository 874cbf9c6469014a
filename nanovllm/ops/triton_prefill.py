"""Attention of many query rows over KV blocks, in Triton. It continues from (output, LSE) of earlier blocks.

The state is normalised after every block, inside the kernel as between two calls. So a row's bits do not depend on how
blocks are grouped into calls. A tile that a row does not see changes none of its bits, so they do not depend on the
other rows of the batch either.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.attention import AttentionState, DeviceMetadata
from nanovllm.ops.kernel_config import PrefillConfig, padded, prefill_config_on
from nanovllm.ops.triton_decode import dot_precision
from nanovllm.ops.triton_kv import as_bytes, load_scales, scales_of, stored_format, widen_elements

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _end_of_block(top, total, lse, position, first, keys, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """(factor that normalises the accumulator, LSE) after a block of `keys` keys from position `first` on."""
    mass = tl.where(total == 0.0, 1.0, total)
    # A row that sees none of the block keeps its LSE to the bit, which a way through log2 would not.
    sees = position >= first
    if HAS_WINDOW:
        sees = sees & (position - window < first + keys - 1)
    return tl.div_rn(1.0, mass), tl.where(sees, (top + tl.log2(mass)) * LN2, lse)


@triton.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
    acc,
    top,
    total,
    lse,
    q,
    head_ptr,
    scales_ptr,
    block_at,
    block,
    index,
    begin,
    first,
    new_block,
    tiles,
    limit,
    position,
    scale_log2,
    window,
    column,
    head_dim,
    row_size,
    block_size,
    block_stride,
    kv_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    BRANCH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Online softmax over `tiles` tiles of keys from key `begin` of block `index` on; returns the state and where it
    ended. Unless MASKED, every row sees all of the keys.

    One loop over all blocks, so that the pipeline of loads never runs empty between two. The state is normalised in the
    first tile of the next block: with BRANCH only there, else by a factor that is 1 in all other tiles. A branch that
    holds the accumulator makes Triton wait for every product on Hopper; the factor costs a multiplication an element.
    """
    for _ in range(tiles):
        n = begin + tl.arange(0, BLOCK_N)
        start = block.to(tl.int64) * block_stride
        k_at = head_ptr + start + n[:, None] * row_size + column[None, :]
        inside = (n < tl.minimum(block_size, limit - first))[:, None]
        if MASKED:
            k = tl.load(k_at, mask=inside & (column < head_dim)[None, :], other=0)
        elif PADDED:
            k = tl.load(k_at, mask=(column < head_dim)[None, :], other=0)
        else:
            k = tl.load(k_at)
        k = widen_elements(k, q.dtype, FORMAT)
        factor = tl.full([BLOCK_M], 1.0, tl.float32)
        if new_block:
            factor, lse = _end_of_block(top, total, lse, position, first - block_size, block_size, window, HAS_WINDOW)
            top = lse * LOG2E
            total = tl.where(lse == float("-inf"), 0.0, 1.0)
            if BRANCH:
                acc *= factor[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if FORMAT:
            scales = scales_ptr + (start + n * row_size + head_dim) // 4
            scores *= load_scales(scales, n < tl.minimum(block_size, limit - first), q.dtype, FORMAT)[None, :]
        if not BRANCH:
            acc *= factor[:, None]
        if MASKED:
            distance = position[:, None] - (first + n)[None, :]
            visible = (distance >= 0) & tl.trans(inside)
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(k_at + kv_stride, mask=inside & (column < head_dim)[None, :], other=0)
        elif PADDED:
            v = tl.load(k_at + kv_stride, mask=(column < head_dim)[None, :], other=0)
        else:
            v = tl.load(k_at + kv_stride)
        v = widen_elements(v, q.dtype, FORMAT)
        if FORMAT:
            held = n < tl.minimum(block_size, limit - first)
            weights *= load_scales(scales + kv_stride // 4, held, q.dtype, FORMAT)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        top = new_top
        begin += BLOCK_N
        new_block = begin >= block_size
        if new_block:
            begin = 0
            first += block_size
            index += 1
        # Loaded one tile ahead, so that its use does not wait. After the last block, the last one is loaded again.
        block = tl.load(block_at + tl.where(first < limit, index, index - 1))
    return acc, top, total, lse, block, index, begin, first, new_block


@triton.jit(do_not_specialize=["lse_head_stride"], do_not_specialize_on_alignment=["rows_ptr", "blocks_ptr", "lse_ptr"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pool_ptr,
    rows_ptr,
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
    scales_ptr,
    row_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
    PADDED: tl.constexpr,
    BRANCH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Program (row tile, head, sequence): BLOCK_M query rows of one head over all blocks of their sequence.

    EVEN: a block is a whole number of tiles.
    """
    if FORMAT:
        row_size = row_size // 4 * 4  # the same, but now the compiler knows that it can load four elements at once
    sequence = rows_ptr + tl.program_id(2) * 8
    query_len = tl.load(sequence + 1)
    tile = tl.cdiv(query_len, BLOCK_M) - 1 - tl.program_id(0)  # rows that see the most first
    if tile < 0:
        return
    head = tl.program_id(1)
    first = tl.load(sequence + 4)
    query_position = tl.load(sequence + 6)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position = query_position + token
    lowest = query_position + tile * BLOCK_M
    highest = query_position + tl.minimum(tile * BLOCK_M + BLOCK_M, query_len) - 1
    limit = tl.minimum(tl.load(sequence + 5), highest + 1)  # behind the last position that any row sees
    column = tl.arange(0, BLOCK_D)
    mask = (token < query_len)[:, None] & (column < head_dim)[None, :]
    row = tl.load(sequence).to(tl.int64) + token
    q = tl.load(q_ptr + head * q_head_stride + row[:, None] * q_token_stride + column[None, :], mask=mask, other=0.0)
    out_at = out_ptr + head * out_head_stride + row[:, None] * out_token_stride + column[None, :]
    acc = tl.load(out_at, mask=mask, other=0.0)
    lse_at = lse_ptr + head * lse_head_stride + row * lse_token_stride
    lse = tl.load(lse_at, mask=token < query_len, other=float("-inf"))
    top = lse * LOG2E
    total = tl.where(lse == float("-inf"), 0.0, 1.0)
    head_ptr = pool_ptr + head // group * kv_head_stride
    head_scales = scales_ptr
    if FORMAT:
        head_scales += head // group * kv_head_stride // 4
    block_at = blocks_ptr + tl.load(sequence + 2)
    index = 0
    begin = 0
    if HAS_WINDOW:  # tiles that lie before every row's window are left out
        skipped = tl.maximum(lowest - window + 1 - first, 0)
        index = skipped // block_size
        begin = skipped % block_size // BLOCK_N * BLOCK_N
        first += index * block_size
    if first + begin < limit:
        block = tl.load(block_at + index)
        new_block = first + begin >= limit  # false, but of the type that it has in the loop
        tiles_per_block = tl.cdiv(block_size, BLOCK_N)
        keys = limit - first
        tiles = keys // block_size * tiles_per_block + tl.cdiv(keys % block_size, BLOCK_N) - begin // BLOCK_N
        if EVEN and not HAS_WINDOW:  # up to here every row sees every key
            seen_by_all = tl.maximum(tl.minimum(limit, lowest + 1) - first, 0) // BLOCK_N
            tiles -= seen_by_all
            acc, top, total, lse, block, index, begin, first, new_block = _attend_tiles(
                acc, top, total, lse, q, head_ptr, head_scales, block_at, block, index, begin, first, new_block,
                seen_by_all, limit, position, scale * LOG2E, window, column, head_dim, row_size, block_size,
                block_stride, kv_stride, BLOCK_M, BLOCK_N, False, HAS_WINDOW, PADDED, BRANCH, PRECISION, FORMAT,
            )  # fmt: skip
        acc, top, total, lse, block, index, begin, first, new_block = _attend_tiles(
            acc, top, total, lse, q, head_ptr, head_scales, block_at, block, index, begin, first, new_block, tiles,
            limit, position, scale * LOG2E, window, column, head_dim, row_size, block_size, block_stride,
            kv_stride, BLOCK_M, BLOCK_N, True, HAS_WINDOW, PADDED, BRANCH, PRECISION, FORMAT,
        )  # fmt: skip
        last = tl.where(new_block, first - block_size, first)
        factor, lse = _end_of_block(
            top, total, lse, position, last, tl.minimum(block_size, limit - last), window, HAS_WINDOW
        )
        acc *= factor[:, None]
    # Read again, so that no register holds an address of the output through the loops.
    row = tl.load(sequence, volatile=True).to(tl.int64) + token
    out_at = out_ptr + head * out_head_stride + row[:, None] * out_token_stride + column[None, :]
    tl.store(out_at, acc, mask=mask)
    tl.store(lse_ptr + head * lse_head_stride + row * lse_token_stride, lse, mask=token < query_len)


def prefill_(
    q: Tensor,
    pool: Tensor,
    table: DeviceMetadata,
    state: AttentionState,
    scale: float,
    window: int | None,
    config: PrefillConfig | None = None,
) -> None:
    """Carry `state` on over the table's sequences with many query rows, in place.

    q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous; in 8 bits
    its rows end with a scale.
    """
    group = table.many
    (_, heads, head_dim) = q.shape
    if not len(group):
        return
    config = config or prefill_config_on(q.device, head_dim, q.dtype)
    padded_dim = padded(head_dim)
    _prefill_kernel[(triton.cdiv(group.max_rows, config.rows), heads, len(group))](
        q, as_bytes(pool), group.rows, table.blocks, state.out, state.lse, heads // pool.shape[2], head_dim,
        pool.shape[3], scale, window or 0, *q.stride()[:2], *pool.stride()[:3], *state.out.stride()[:2],
        *state.lse.stride(), scales_of(pool), pool.shape[4],
        BLOCK_M=config.rows, BLOCK_N=config.keys, BLOCK_D=padded_dim, HAS_WINDOW=window is not None,
        EVEN=pool.shape[3] % config.keys == 0, PADDED=padded_dim != head_dim, BRANCH=config.branch,
        PRECISION=dot_precision(q.dtype), FORMAT=stored_format(pool.dtype),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
