"""Attention over KV blocks with torch's CPU flash attention: one call per block, merged in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.kv_quantization import dequantize_rows, has_scales
from nanovllm.ops.merge import merge_attention_outputs

_MASK_ELEMENTS = 1 << 21  # limit on the elements of a mask; rows are split to stay below it


class TorchAttention:
    """The backend in plain torch, for head sizes that the C++ kernel does not support.

    torch's operator aligns causal masks top-left, gives LSE 0 for a row without keys and crashes on empty inputs. So
    every call has an explicit mask, and at least one key for each row.
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
                if keys <= 0:
                    continue
                held = pool[block, :, :, :keys]
                held = dequantize_rows(held, q.dtype) if has_scales(pool.dtype) else held
                # The rows that see some key of the block.
                begin = max(seq.context_len, first)
                end = seq.total_len if window is None else min(seq.total_len, first + keys - 1 + window)
                step = max(1, _MASK_ELEMENTS // keys)
                for position in range(begin, end, step):
                    count = min(step, end - position)
                    row = seq.query_start + position - seq.context_len
                    part = AttentionState(state.out[row : row + count], state.lse[:, row : row + count])
                    _merge_block(q[row : row + count], held, position - first, part, scale, window)


def _merge_block(
    q: Tensor, block: Tensor, distance: int, state: AttentionState, scale: float, window: int | None
) -> None:
    """Merge the attention of rows q over a block `[2, kv_heads, keys, head_dim]` into their state.

    distance: how many positions the first row is after the first key; that of each further row is one more.
    """
    distances = torch.arange(distance, distance + len(q)).unsqueeze(1) - torch.arange(block.shape[2])
    visible = distances >= 0 if window is None else (distances >= 0) & (distances < window)
    mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    k = block[0].unsqueeze(0)
    v = block[1].unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1).unsqueeze(0), k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    merge_attention_outputs(state.out, state.lse, out.squeeze(0).transpose(0, 1), lse.squeeze(0))
