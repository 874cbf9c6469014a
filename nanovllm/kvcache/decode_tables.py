"""What a decode step attends to, in device memory that stays where it is: a graph reads it anew at every replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.device import Device
from nanovllm.forward_context import SequenceMetadata
from nanovllm.kvcache.base import AttentionGeometry, first_visible_block
from nanovllm.ops.attention import METADATA_FIELDS, AttentionState, DeviceMetadata, RowAttention
from nanovllm.ops.store_kv import store_kv
from nanovllm.ops.upload import refill


class DecodeTables:
    """Slots, spans and blocks of a step of one row for each sequence, and attention over a pool by them.

    A row beyond the sequences has no slot and no keys: nothing is written for it, and it attends to nothing.
    """

    def __init__(
        self, pool: Tensor, geometry: AttentionGeometry, attention: RowAttention, max_rows: int, max_len: int
    ) -> None:
        """pool: [layers, blocks, 2, kv_heads, block_size, head_dim]; max_len: tokens of the longest sequence."""
        self._pool = pool
        self._geometry = geometry
        self._attention = attention
        self._block_size = pool.shape[4]
        self._max_blocks = {window: self._most_blocks(window, max_len) for window in set(geometry.windows)}
        self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=pool.device)
        self._tables = {
            window: torch.zeros(max_rows * (METADATA_FIELDS + blocks), dtype=torch.int32, device=pool.device)
            for window, blocks in self._max_blocks.items()
        }  # of each window: the spans of all rows, then their blocks

    def fill(self, sequences: Sequence[SequenceMetadata], rows: int) -> None:
        """Take the sequences of a step, a token of each, for which graphs of so many rows will run."""
        size = self._block_size
        slots = [seq.block_table[seq.context_len // size] * size + seq.context_len % size for seq in sequences]
        refill(self._slots, torch.tensor(slots + [-1] * (rows - len(slots)), dtype=torch.int64))
        for window, table in self._tables.items():
            refill(table, self._packed(sequences, rows, window))

    def declare(self, device: Device, sequences: Sequence[SequenceMetadata]) -> None:
        """Say what a graph of all layers reads and writes that is replayed next over these sequences."""
        read = {block for seq in sequences for block in seq.block_table}
        written = {seq.block_table[seq.context_len // self._block_size] for seq in sequences}
        device.declare_kernel(
            "decode graph",
            reads=(layer[block] for layer in self._pool for block in read),
            writes=(layer[block] for layer in self._pool for block in written),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As a KV cache's `attend`, of the rows of q, over what was last filled in when the kernels run."""
        rows, window, pool = q.shape[0], self._geometry.windows[layer], self._pool[layer]
        store_kv(pool, k, v, self._slots[:rows])
        packed = self._tables[window]
        rows_metadata = packed[: rows * METADATA_FIELDS].view(rows, METADATA_FIELDS)
        table = DeviceMetadata.of_rows(rows_metadata, packed[rows * METADATA_FIELDS :], self._max_blocks[window])
        state = AttentionState.empty(q)
        self._attention.attend_rows(q, pool, table, state, self._geometry.scale, window)
        return state.output(q)

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
        """Blocks that a row can see: of a whole sequence, or those that a window can touch."""
        size = self._block_size
        whole = -(-max_len // size)
        return whole if window is None else min(whole, (window + size - 2) // size + 1)
