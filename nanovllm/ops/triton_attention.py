"""The Triton attention kernels as a backend: any head size, fp16, bf16 and fp32, on any GPU that Triton supports.

Sequences of many rows over 8-bit blocks attend to copies in the queries' dtype, which are made a part of the blocks at
a time: widening them in the kernel's inner loop, once for every tile of rows and head, took a third of its rate on an
H200. A block is attended in the same way whatever part it is in, so calls may group blocks as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, DeviceMetadata, SequenceMetadata
from nanovllm.ops.kv_quantization import has_scales
from nanovllm.ops.triton_decode import decode_, decode_whole
from nanovllm.ops.triton_prefill import prefill_
from nanovllm.ops.triton_segments import gather_
from nanovllm.ops.upload import upload

WIDENED_ROWS = 256  # of a sequence, from which on writing the copies and reading them costs less than it saves
WIDENED_TOKENS = 16384  # of the copies at a time


@dataclass(frozen=True, slots=True)
class WidenedPart:
    """Blocks that are copied at once, and what attends to the copies."""

    entries: Tensor  # see `triton_segments.gather_`
    table: DeviceMetadata


class TritonAttention:
    """Attends few query rows by partitions of the context, many by row tiles; launches do not grow with the batch."""

    name = "Triton paged attention"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        if has_scales(pool.dtype):
            kv_heads, block_size = pool.shape[2:4]
            whole = table
            table, parts = whole.once(
                ("widened", kv_heads, block_size), lambda: _widened_parts(whole, q.device, kv_heads, block_size)
            )
            if parts:
                copies = q.new_empty(_blocks_at_once(block_size), 2, kv_heads, block_size, q.shape[2])
                for part in parts:
                    gather_(pool, part.entries, copies)
                    prefill_(q, copies, part.table, state, scale, window)
        on_device = table.on(q.device)
        decode_(q, pool, on_device, state, scale, window)
        prefill_(q, pool, on_device, state, scale, window)

    def attend_rows(
        self,
        q: Tensor,
        pool: Tensor,
        table: DeviceMetadata,
        out: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """See `RowAttention`."""
        decode_whole(q, pool, table, out, scale, window, sinks)


def _blocks_at_once(block_size: int) -> int:
    return max(1, WIDENED_TOKENS // block_size)


def _widened_parts(
    table: AttentionMetadata, device: torch.device, kv_heads: int, block_size: int
) -> tuple[AttentionMetadata, Sequence[WidenedPart]]:
    """The sequences that read blocks as they are, and the parts that the others attend to, one after the other."""
    many = [seq for seq in table.sequences if seq.query_len > WIDENED_ROWS]
    if not many:
        return table, ()
    room = _blocks_at_once(block_size)
    block_rows = 2 * kv_heads * block_size
    parts: list[tuple[list[tuple[int, int, int]], list[SequenceMetadata]]] = [([], [])]
    for seq in many:
        at = 0
        while at < len(seq.block_table):
            if len(parts[-1][0]) == room:
                parts.append(([], []))
            entries, sequences = parts[-1]
            used = len(entries)
            count = min(room - used, len(seq.block_table) - at)
            first = seq.first_position + at * block_size
            end = seq.first_position + (at + count) * block_size
            copied = replace(
                seq, first_position=first, kv_end=min(seq.kv_end, end), block_table=range(used, used + count)
            )
            sequences.append(copied)
            for index, block in enumerate(seq.block_table[at : at + count]):
                held = min(block_size, seq.kv_end - first - index * block_size)
                entries.append((block, (used + index) * block_rows, held))
            at += count
    rest = AttentionMetadata([seq for seq in table.sequences if seq.query_len <= WIDENED_ROWS])
    return rest, [
        WidenedPart(upload(torch.tensor(entries, dtype=torch.int32), device), AttentionMetadata(sequences).on(device))
        for entries, sequences in parts
    ]
