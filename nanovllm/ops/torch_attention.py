"""Attention over KV blocks with torch's CPU flash attention: one call per block and kind of mask, merged in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.merge import merge_states_

_MASK_ELEMENTS = 1 << 21  # bound on the elements of an explicit mask: rows are cut to stay below it


class TorchAttention:
    """The backend that needs nothing but torch.

    torch's operator aligns causal masks top-left, gives LSE 0 for a row without keys and dies on empty inputs, so every
    call is cut such that its mask is all-visible, square causal or explicit, with a key for every row.
    """

    name = "torch CPU flash attention"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        block_size = pool.shape[3]
        for segment in table.segments:
            for index, block in enumerate(segment.blocks):
                first = segment.first_position + index * block_size
                keys = min(block_size, segment.kv_end - first)
                if keys > 0:
                    _attend_block(q, segment, pool[block, :, :, :keys], first, state, scale, window)


def _attend_block(
    q: Tensor, segment: KVMetadata, block: Tensor, first: int, state: AttentionState, scale: float, window: int | None
) -> None:
    """Attend over one block `[2, kv_heads, keys, head_dim]` whose first key stands at position `first`."""
    keys = block.shape[2]
    begin, end = segment.query_position, segment.query_position + segment.query_len
    begin = max(begin, first)  # rows before the block see none of it
    if window is not None:
        end = min(end, first + keys - 1 + window)  # rows after this see none of it any more
    if begin >= end:
        return

    def rows(a: int, b: int) -> slice:
        offset = segment.query_start - segment.query_position
        return slice(a + offset, b + offset)

    if window is not None and end - 1 - window >= first:
        step = max(1, _MASK_ELEMENTS // keys)
        for a in range(begin, end, step):
            b = min(a + step, end)
            _merge_masked(q, block, rows(a, b), a, first, state, scale, window)
        return
    diagonal_end = min(end, first + keys - 1)  # rows from here on see the whole block
    if begin < diagonal_end:
        seen = begin - first  # keys that every diagonal row sees, and on which none of them stands
        if seen:
            _merge_partial(q, block[:, :, :seen], rows(begin, diagonal_end), False, state, scale)
        square = block[:, :, seen : seen + diagonal_end - begin]
        _merge_partial(q, square, rows(begin, diagonal_end), True, state, scale)
    full_begin = max(begin, diagonal_end)
    if full_begin < end:
        _merge_partial(q, block, rows(full_begin, end), False, state, scale)


def _merge_partial(q: Tensor, block: Tensor, rows: slice, causal: bool, state: AttentionState, scale: float) -> None:
    q = q[rows]
    tokens, heads, head_dim = q.shape
    kv_heads = block.shape[1]
    query = q.transpose(0, 1).unsqueeze(0)
    # Few rows: the query heads that share a KV head become rows of one head, so that its keys are read once.
    pack = not causal and tokens * (heads // kv_heads) <= 32
    if pack:
        query = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    out, lse = _flash(query, block, causal, None, scale)
    if pack:
        out = out.view(kv_heads, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, heads, head_dim)
        lse = lse.reshape(kv_heads, tokens, -1).transpose(1, 2).reshape(heads, tokens)
    else:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    merge_states_(state.out[rows], state.lse[:, rows], out, lse)


def _merge_masked(
    q: Tensor, block: Tensor, rows: slice, position: int, first: int, state: AttentionState, scale: float, window: int
) -> None:
    """Rows at `position`, +1, ... of which each sees a part of the block, given by an explicit mask."""
    count, keys = rows.stop - rows.start, block.shape[2]
    distance = torch.arange(position, position + count).unsqueeze(1) - torch.arange(first, first + keys)
    visible = (distance >= 0) & (distance < window)
    mask = torch.zeros(count, keys, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    out, lse = _flash(q[rows].transpose(0, 1).unsqueeze(0), block, False, mask, scale)
    merge_states_(state.out[rows], state.lse[:, rows], out.squeeze(0).transpose(0, 1), lse.squeeze(0))


def _flash(query: Tensor, block: Tensor, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """torch's operator: (output [1, heads, rows, head_dim] in query's dtype, LSE fp32 [1, heads, rows])."""
    k, v = block[0].unsqueeze(0), block[1].unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
