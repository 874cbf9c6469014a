"""Attention over KV blocks with torch's CPU flash attention: one call per block and kind of mask, merged in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.kv_quantization import dequantize_rows, has_scales
from nanovllm.ops.merge import merge_states_

_MASK_ELEMENTS = 1 << 21  # limit on the elements of an explicit mask; rows are split to stay below it


class TorchAttention:
    """The backend in plain torch.

    torch's operator aligns causal masks top-left, gives LSE 0 for a row without keys and crashes on empty inputs. So
    every call has no mask, a square causal mask or an explicit mask, and at least one key per row.
    """

    name = "torch CPU flash attention"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        block_size = pool.shape[3]
        for seq in table.sequences:
            for index, block in enumerate(seq.block_table):
                first = seq.first_position + index * block_size
                keys = min(block_size, seq.kv_end - first)
                if keys > 0:
                    held = pool[block, :, :, :keys]
                    held = dequantize_rows(held, q.dtype) if has_scales(pool.dtype) else held
                    _attend_block(q, seq, held, first, state, scale, window)


def _attend_block(
    q: Tensor,
    seq: SequenceMetadata,
    block: Tensor,
    first: int,
    state: AttentionState,
    scale: float,
    window: int | None,
) -> None:
    """Attend over one block `[2, kv_heads, keys, head_dim]` whose first key is at position `first`."""
    keys = block.shape[2]
    begin, end = seq.context_len, seq.context_len + seq.query_len
    begin = max(begin, first)  # earlier rows see no key of the block
    if window is not None:
        end = min(end, first + keys - 1 + window)  # later rows see no key of the block
    if begin >= end:
        return

    def rows(a: int, b: int) -> slice:
        offset = seq.query_start - seq.context_len
        return slice(a + offset, b + offset)

    if window is not None and end - 1 - window >= first:
        step = max(1, _MASK_ELEMENTS // keys)
        for a in range(begin, end, step):
            b = min(a + step, end)
            _merge_masked(q, block, rows(a, b), a, first, state, scale, window)
        return
    diagonal_end = min(end, first + keys - 1)  # rows from here on see all keys of the block
    if begin < diagonal_end:
        seen = begin - first  # keys before all diagonal rows
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
    """Attend rows at `position`, +1, ... that each see a part of the block, with an explicit mask."""
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
