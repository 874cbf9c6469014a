"""Attention metadata of a decode step at fixed device addresses, from which a graph reads it at every replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.data.kv_groups import KVGroup, KVGroups
from nanovllm.device import Device
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.ops.attention import (
    METADATA_FIELDS,
    DeviceMetadata,
    RowAttention,
    SequenceMetadata,
)
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.upload import refill


class DecodeTables:
    """Slot mapping and block tables of a step with one row per sequence, and attention over a pool through them.

    A padded row, beyond the sequences, has no slot and no keys: its K/V are not written, and it attends to nothing.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        groups: KVGroups,
        geometry: AttentionGeometry,
        attention: RowAttention,
        max_rows: int,
        max_len: int,
    ) -> None:
        """pools: as in `AttendedPool`; max_len: tokens of the longest sequence."""
        self._pools = pools
        self._groups = groups
        self._geometry = geometry
        self._attention = attention
        self._max_blocks = [group.most_blocks(max_len, chunk=1) for group in groups]  # that a row can see
        device = pools[0].device
        self._slots = [torch.full((max_rows,), -1, dtype=torch.int64, device=device) for _ in groups]
        # For each group: the metadata of all rows, then their blocks.
        self._tables = [
            torch.zeros(max_rows * (METADATA_FIELDS + blocks), dtype=torch.int32, device=device)
            for blocks in self._max_blocks
        ]

    def fill(self, sequences: Sequence[SequenceMetadata], rows: int) -> None:
        """Take the sequences of a step, each of which computes one token, before a graph of `rows` rows is replayed."""
        for index, group in enumerate(self._groups):
            of_group, size = [seq.of_group(index) for seq in sequences], group.block_size
            slots = [seq.block_table[seq.context_len // size] * size + seq.context_len % size for seq in of_group]
            refill(self._slots[index], torch.tensor(slots + [-1] * (rows - len(slots)), dtype=torch.int64))
            refill(self._tables[index], _packed(of_group, rows, group))

    def declare(self, device: Device, sequences: Sequence[SequenceMetadata]) -> None:
        """Declare the blocks that the next replay, over these sequences, reads and writes in all layers."""
        read: set[tuple[int, int, int]] = set()  # KV group, plane and block
        written: set[tuple[int, int, int]] = set()
        for index, group in enumerate(self._groups):
            for seq in (seq.of_group(index).visible(group.window, group.block_size) for seq in sequences):
                planes, last = range(len(group.layers)), (seq.total_len - seq.first_position - 1) // group.block_size
                read.update((index, plane, block) for plane in planes for block in seq.block_table[: last + 1])
                written.update((index, plane, seq.block_table[last]) for plane in planes)
        device.declare_kernel(
            "decode graph",
            reads=(self._pools[group][plane, block] for group, plane, block in read),
            writes=(self._pools[group][plane, block] for group, plane, block in written),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KVCache.attend`, over the sequences that were filled in last when the kernels run."""
        group, plane = self._groups.of_layer[layer]
        rows, window, pool = q.shape[0], self._groups[group].window, self._pools[group][plane]
        store_kv(pool, k, v, self._slots[group][:rows])
        packed = self._tables[group]
        rows_metadata = packed[: rows * METADATA_FIELDS].view(rows, METADATA_FIELDS)
        table = DeviceMetadata.of_rows(rows_metadata, packed[rows * METADATA_FIELDS :], self._max_blocks[group])
        sinks = self._geometry.sinks_of(layer)
        self._attention.attend_rows(q, pool, table, q, self._geometry.scale, window, sinks)
        return q


def _packed(sequences: Sequence[SequenceMetadata], rows: int, group: KVGroup) -> Tensor:
    """The metadata of `rows` rows and their blocks, as `DeviceMetadata.of_rows` takes them, int32."""
    rows_metadata, blocks = [0] * (rows * METADATA_FIELDS), list[int]()
    for row, seq in enumerate(sequences):
        first = group.first_visible(seq.context_len)
        here = seq.block_table[first : group.num_blocks(seq.total_len)]
        position = first * group.block_size
        row_metadata = (row, 1, len(blocks), len(here), position, seq.total_len, seq.context_len, row)
        rows_metadata[row * METADATA_FIELDS : (row + 1) * METADATA_FIELDS] = row_metadata
        blocks += here
    return torch.tensor(rows_metadata + blocks, dtype=torch.int32)
