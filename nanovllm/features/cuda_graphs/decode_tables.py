"""Attention metadata of a decode step at fixed device addresses, from which a graph reads it at every replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.data.kv_groups import KVGroup
from nanovllm.device import Device
from nanovllm.features.cuda_graphs.shapes import Shape
from nanovllm.kvcache.base import AttendedPool
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.ops.attention import (
    METADATA_FIELDS,
    DeviceMetadata,
    RowAttention,
    SequenceMetadata,
)
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.upload import refill


class DecodeTables:
    """Slot mapping and block tables of a step of few rows, and attention over a pool through them.

    A padded row, behind those of the sequences, has no slot, and a padded sequence no rows: nothing is written for
    them, and they attend to nothing.
    """

    def __init__(self, attended: AttendedPool, attention: RowAttention, shapes: Sequence[Shape], max_len: int) -> None:
        """shapes: of the graphs; max_len: tokens of the longest sequence."""
        self._pools = attended.pools
        self.groups = attended.groups
        self._geometry = attended.geometry
        self._attention = attention
        rows, sequences, width = (max(values) for values in zip(*(shape.sizes for shape in shapes), strict=True))
        self._max_blocks = [group.most_blocks(max_len, width) for group in self.groups]  # that a sequence can see
        device = self._pools[0].device
        self._slots = [torch.full((rows,), -1, dtype=torch.int64, device=device) for _ in self.groups]
        # For each group: the metadata of all sequences, then their blocks.
        self._tables = [
            torch.zeros(sequences * (METADATA_FIELDS + blocks), dtype=torch.int32, device=device)
            for blocks in self._max_blocks
        ]

    def fill(self, sequences: Sequence[SequenceMetadata], shape: Shape) -> None:
        """Take the sequences of a step before a graph of this shape is replayed."""
        for index, group in enumerate(self.groups):
            of_group = [seq.of_group(index) for seq in sequences]
            slots = [slot for seq in of_group for slot in _slots(seq, group.block_size)]
            refill(self._slots[index], torch.tensor(slots + [-1] * (shape.rows - len(slots)), dtype=torch.int64))
            refill(self._tables[index], _packed(of_group, shape.sequences, group))

    def declare(self, device: Device, sequences: Sequence[SequenceMetadata]) -> None:
        """Declare the blocks that the next replay, over these sequences, reads and writes in all layers."""
        written = self._blocks(sequences, written=True)
        device.declare_kernel("decode graph", reads=self._blocks(sequences), writes=written)

    def _blocks(self, sequences: Sequence[SequenceMetadata], *, written: bool = False) -> Iterator[Tensor]:
        """The blocks that the next replay reads, or only those that it writes, in all layers, once each."""
        for index, group in enumerate(self.groups):
            blocks: set[int] = set()
            for seq in (seq.of_group(index).visible(group.window, group.block_size) for seq in sequences):
                first = (seq.context_len - seq.first_position) // group.block_size if written else 0
                blocks.update(seq.block_table[first : group.num_blocks(seq.total_len - seq.first_position)])
            yield from (self._pools[index][plane, block] for plane in range(len(group.layers)) for block in blocks)

    def of_shape(self, shape: Shape) -> AttentionOfShape:
        """The KV cache of graphs of this shape."""
        return AttentionOfShape(self, shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
        """As `KVCache.attend`, over the sequences that were filled in last when the kernels run."""
        group, plane = self.groups.of_layer[layer]
        window = self.groups[group].window
        pool = self._pools[group][plane]
        packed = self._tables[group]
        store_kv(pool, k, v, self._slots[group][: shape.rows])
        metadata, blocks = packed.tensor_split([shape.sequences * METADATA_FIELDS])
        of_sequences = metadata.view(shape.sequences, METADATA_FIELDS)
        table = DeviceMetadata.of_rows(of_sequences, blocks, self._max_blocks[group], shape.width, shape.rows)
        sinks = self._geometry.sinks_of(layer)
        self._attention.attend_rows(q, pool, table, q, self._geometry.scale, window, sinks)
        return q


@dataclass(frozen=True, slots=True)
class AttentionOfShape:
    """Implements `layers.forward_context.KVCache`."""

    tables: DecodeTables
    shape: Shape

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `KVCache`."""
        return self.tables.attend(layer, q, k, v, self.shape)


def _slots(seq: SequenceMetadata, size: int) -> list[int]:
    """The slot mapping of a sequence's rows."""
    return [seq.block_table[at // size] * size + at % size for at in range(seq.context_len, seq.total_len)]


def _packed(sequences: Sequence[SequenceMetadata], count: int, group: KVGroup) -> Tensor:
    """The metadata of `count` sequences and their blocks, as `DeviceMetadata.of_rows` takes them, int32."""
    metadata = [0] * (count * METADATA_FIELDS)
    blocks = list[int]()
    for index, seq in enumerate(sequences):
        first = group.first_visible(seq.context_len)
        row = seq.query_start
        here = seq.block_table[first : group.num_blocks(seq.total_len)]
        position = first * group.block_size
        fields = (row, seq.query_len, len(blocks), len(here), position, seq.total_len, seq.context_len, row)
        metadata[index * METADATA_FIELDS : (index + 1) * METADATA_FIELDS] = fields
        blocks += here
    return torch.tensor(metadata + blocks, dtype=torch.int32)
