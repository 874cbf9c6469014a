"""Attention metadata of a decode step at fixed device addresses, from which a graph reads it at every replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.ops.attention import (
    METADATA_FIELDS,
    DeviceMetadata,
    RowAttention,
    SequenceMetadata,
    first_visible_block,
)
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.upload import refill


class DecodeTables:
    """Slot mapping and block tables of a step with one row per sequence, and attention over a pool through them.

    A padded row, beyond the sequences, has no slot and no keys: its K/V are not written, and it attends to nothing.
    """

    def __init__(
        self, pool: Tensor, geometry: AttentionGeometry, attention: RowAttention, max_rows: int, max_len: int
    ) -> None:
        """pool: `[layers, blocks, 2, kv_heads, block_size, head_dim]`; max_len: tokens of the longest sequence."""
        self._pool = pool
        self._geometry = geometry
        self._attention = attention
        self._block_size = pool.shape[4]
        self._max_blocks = {window: self._most_blocks(window, max_len) for window in set(geometry.windows)}
        self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=pool.device)
        self._tables = {
            window: torch.zeros(max_rows * (METADATA_FIELDS + blocks), dtype=torch.int32, device=pool.device)
            for window, blocks in self._max_blocks.items()
        }  # for each window: the metadata of all rows, then their blocks

    def fill(self, sequences: Sequence[SequenceMetadata], rows: int) -> None:
        """Take the sequences of a step, each of which computes one token, before a graph of `rows` rows is replayed."""
        size = self._block_size
        slots = [seq.block_table[seq.context_len // size] * size + seq.context_len % size for seq in sequences]
        refill(self._slots, torch.tensor(slots + [-1] * (rows - len(slots)), dtype=torch.int64))
        for window, table in self._tables.items():
            refill(table, self._packed(sequences, rows, window))

    def declare(self, device: Device, sequences: Sequence[SequenceMetadata]) -> None:
        """Declare the blocks that the next replay, over these sequences, reads and writes in all layers."""
        read = {block for seq in sequences for block in seq.block_table}
        written = {seq.block_table[seq.context_len // self._block_size] for seq in sequences}
        device.declare_kernel(
            "decode graph",
            reads=(layer[block] for layer in self._pool for block in read),
            writes=(layer[block] for layer in self._pool for block in written),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KVCache.attend`, over the sequences that were filled in last when the kernels run."""
        rows, window, pool = q.shape[0], self._geometry.windows[layer], self._pool[layer]
        store_kv(pool, k, v, self._slots[:rows])
        packed = self._tables[window]
        rows_metadata = packed[: rows * METADATA_FIELDS].view(rows, METADATA_FIELDS)
        table = DeviceMetadata.of_rows(rows_metadata, packed[rows * METADATA_FIELDS :], self._max_blocks[window])
        state = self._geometry.before_keys(layer, q)
        self._attention.attend_rows(q, pool, table, state, self._geometry.scale, window)
        return q.copy_(state.out)

    def _packed(self, sequences: Sequence[SequenceMetadata], rows: int, window: int | None) -> Tensor:
        rows_metadata, blocks, size = [0] * (rows * METADATA_FIELDS), list[int](), self._block_size
        for row, seq in enumerate(sequences):
            first = first_visible_block(seq.context_len, window, size)
            here = seq.block_table[first : -(-seq.total_len // size)]
            row_metadata = (row, 1, len(blocks), len(here), first * size, seq.total_len, seq.context_len, row)
            rows_metadata[row * METADATA_FIELDS : (row + 1) * METADATA_FIELDS] = row_metadata
            blocks += here
        return torch.tensor(rows_metadata + blocks, dtype=torch.int32)

    def _most_blocks(self, window: int | None, max_len: int) -> int:
        """The most blocks that a row can see: those of the longest sequence, or those that a window can overlap."""
        size = self._block_size
        longest = -(-max_len // size)
        return longest if window is None else min(longest, (window + size - 2) // size + 1)
