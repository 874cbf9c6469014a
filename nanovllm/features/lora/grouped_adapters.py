"""The adapters of a batch on a GPU: all of a layer's products in two launches (`ops.triton_lora`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.features.lora.weights import AdapterWeights, LinearLayout, ranges_of_parts
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.linear import Linear
from nanovllm.ops.triton_lora import A_OFFSET, B_OFFSET, END_COLUMN, FIELDS, FIRST_COLUMN, RANK, add_low_rank_
from nanovllm.ops.upload import refill, upload

DeviceAdapters = Mapping[int, tuple[int, AdapterWeights]]  # by number: the slot of each, and its matrices


@dataclass(frozen=True, slots=True)
class GroupedAdapters:
    """The adapters of a part of a batch. See `layers.dense_weight.RowAdapters`."""

    rows: Tensor  # that have an adapter, sorted by its slot: int64 [entries]
    ends: Tensor  # where the rows of each slot end in `rows`: int64 [slots]
    tables: Mapping[Linear, Tensor]  # of each linear layer that one of these adapters changes
    memory: Tensor  # of all adapters: [slots, elements]
    max_rank: int

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """Add each adapter's product to its rows of y, if one adapts this layer."""
        if linear in self.tables:
            add_low_rank_(y, x, self.memory, self.tables[linear], self.rows, self.ends, self.max_rank)


class AdapterTables:
    """Where the matrices of each slot's adapter are, as tables on the device for `ops.triton_lora.add_low_rank_`."""

    def __init__(self, model: CausalLM, memory: Tensor, max_rank: int) -> None:
        """memory: of the adapters, [slots, elements]."""
        linears = [linear for layer in model.layers for linear in layer.linears]
        parts = max(len(linear.parts) for linear in linears)
        self._memory = memory
        self._max_rank = max_rank
        self._rows = {linear: index for index, linear in enumerate(linears)}
        self._table = torch.zeros(len(linears), len(memory), parts, FIELDS, dtype=torch.int64, device=memory.device)

    def fill(self, slot: int, layouts: Sequence[LinearLayout]) -> None:
        """The matrices in `slot` have these layouts from now on."""
        table = torch.zeros(len(self._rows), *self._table.shape[2:], dtype=torch.int64)
        begin = slot * self._memory.stride(0)
        for layout in layouts:
            for part, fields in zip(layout.parts, table[self._rows[layout.linear]], strict=False):
                fields[A_OFFSET] = begin + layout.a_offset + part.ranks.start * layout.linear.in_features
                fields[RANK] = part.adapter.rank
                fields[B_OFFSET] = begin + part.b_offset
                fields[FIRST_COLUMN], fields[END_COLUMN] = part.columns.start, part.columns.stop
        self._table[:, slot].copy_(upload(table, self._table.device))

    def batch_parts(
        self, sequences: Sequence[tuple[int | None, int]], slots: DeviceAdapters, part_rows: int
    ) -> list[GroupedAdapters | None]:
        """As `lora.weights.batch_parts`. slots: the adapters on the device, by their numbers."""
        return [self._grouped(part, slots) for part in ranges_of_parts(sequences, slots, part_rows)]

    def recorded(self, most_rows: int) -> RecordedAdapters:
        """The adapters of steps of at most `most_rows` rows that are recorded before these rows are known."""
        tables = {linear: self._table[index, :, : len(linear.parts)] for linear, index in self._rows.items()}
        return RecordedAdapters(tables, self._memory, self._max_rank, most_rows)

    def _grouped(self, part: Mapping[int, Sequence[range]], slots: DeviceAdapters) -> GroupedAdapters | None:
        if not part:
            return None
        packed = _packed({slots[number][0]: ranges for number, ranges in part.items()}, len(self._memory))
        ends, on_device = upload(packed, self._memory.device).tensor_split([len(self._memory)])
        adapted = {linear for number in part for linear in slots[number][1]}
        tables = {linear: self._table[self._rows[linear], :, : len(linear.parts)] for linear in adapted}
        return GroupedAdapters(on_device, ends, tables, self._memory, self._max_rank)


class RecordedAdapters:
    """The rows of each adapter at fixed addresses of the device, where a graph reads them at every replay.

    A graph multiplies in every layer that adapters may change. Where an adapter does not change a layer, the layer's
    table has rank 0, and nothing is added.
    """

    def __init__(self, tables: Mapping[Linear, Tensor], memory: Tensor, max_rank: int, most_rows: int) -> None:
        self._tables = tables
        self._memory = memory
        self._max_rank = max_rank
        self._packed = torch.zeros(len(memory) + most_rows, dtype=torch.int64, device=memory.device)

    def of_rows(self, rows: int) -> GroupedAdapters:
        """The adapters of a recorded step of `rows` rows, with the content of the latest `fill`."""
        ends, entries = self._packed[: len(self._memory) + rows].tensor_split([len(self._memory)])
        return GroupedAdapters(entries, ends, self._tables, self._memory, self._max_rank)

    def fill(self, sequences: Sequence[tuple[int | None, int]], slots: DeviceAdapters) -> None:
        """As `AdapterTables.batch_parts`, for a batch of one part."""
        parts = ranges_of_parts(sequences, slots, part_rows=max(1, sum(rows for _, rows in sequences)))
        ranges = {slots[number][0]: of_number for number, of_number in parts[0].items()} if parts else {}
        refill(self._packed, _packed(ranges, len(self._memory)))


def _packed(ranges: Mapping[int, Sequence[range]], num_slots: int) -> Tensor:
    """Where the rows of each slot end, then these rows, sorted by slot: int64, on the host."""
    by_slot = sorted(ranges.items())
    counts = torch.zeros(num_slots, dtype=torch.int64)
    for slot, of_slot in by_slot:
        counts[slot] = sum(map(len, of_slot))
    rows = [torch.arange(span.start, span.stop) for _, of_slot in by_slot for span in of_slot]
    return torch.cat([counts.cumsum(0), *rows])
