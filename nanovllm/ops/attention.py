"""Attention metadata, and the interface of attention backends, with one convention for all of them.

LSE is the natural-log sum of exp of the scaled scores, fp32, `[heads, tokens]`. Causal masks are aligned bottom-right:
a query at position p sees the keys at positions up to p, and with a sliding window w only those after p - w. A row that
sees no key has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from nanovllm.data.kv_groups import first_visible_block
from nanovllm.ops.row_kernels import filled
from nanovllm.ops.upload import upload

Made = TypeVar("Made")

METADATA_FIELDS = 8  # of a sequence in a GPU's memory
MAX_DECODE_ROWS = 64  # GPU kernels treat a sequence with up to this many query rows as decode, with more as prefill


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """The query rows of one sequence in a flat batch, and the KV blocks that they attend to.

    Rows `[query_start, query_start + query_len)` of the batch are the tokens at positions
    `[context_len, context_len + query_len)` of the sequence. The blocks of `block_table` follow each other in the
    sequence and hold its keys at positions `[first_position, kv_end)`; memory beyond `kv_end` is undefined and must not
    influence the result. The engine describes a sequence by its full block tables, one for each KV group, whose ids are
    physical block ids. A call to a kernel takes a part of one of them, with ids that index the kernel's pool
    `[blocks, 2, kv_heads, block_size, head_dim]` (K, then V).
    """

    query_start: int
    query_len: int
    context_len: int  # tokens of the sequence before the first query row
    first_position: int  # of the first block
    kv_end: int
    block_table: Sequence[int]
    other_tables: Sequence[Sequence[int]] = ()  # full block tables of the KV groups after the first

    @classmethod
    def full(
        cls, query_start: int, query_len: int, context_len: int, block_table: Sequence[int], *others: Sequence[int]
    ) -> SequenceMetadata:
        """Attention to all keys of the sequence, up to its last query row. others: tables of further KV groups."""
        return cls(query_start, query_len, context_len, 0, context_len + query_len, block_table, others)

    def of_group(self, group: int) -> SequenceMetadata:
        """The same rows with the full block table of one KV group alone."""
        if not self.other_tables:
            return self
        table = self.other_tables[group - 1] if group else self.block_table
        return replace(self, block_table=table, other_tables=())

    @property
    def total_len(self) -> int:
        """Tokens of the sequence up to its last query row."""
        return self.context_len + self.query_len

    def positions(self) -> Tensor:
        """Positions of the rows, int64 [query_len], on the host."""
        return torch.arange(self.context_len, self.total_len, dtype=torch.int64)

    def visible(self, window: int | None, block_size: int) -> SequenceMetadata:
        """The same rows of a full block table, without the blocks that a sliding window hides from all of them."""
        first = first_visible_block(self.context_len, window, block_size)
        return replace(self, first_position=first * block_size, block_table=self.block_table[first:])


class AttentionMetadata:
    """What one call to a kernel attends to: sequences with disjoint query rows, and their index tensors.

    rows: int64 [sequences, 7]: query_start, query_len, block_start, block_count, first_position, kv_end, context_len;
    blocks: int64, the block tables one after the other, which `block_start` indexes. Built once a step for all layers.
    """

    def __init__(self, sequences: Sequence[SequenceMetadata]) -> None:
        self.sequences = tuple(sequences)
        self.blocks = torch.tensor([block for s in sequences for block in s.block_table], dtype=torch.int64)
        rows: list[tuple[int, ...]] = []
        start = 0
        for s in sequences:
            count = len(s.block_table)
            rows.append((s.query_start, s.query_len, start, count, s.first_position, s.kv_end, s.context_len))
            start += count
        self.rows = torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
        self._made: dict[Hashable, Any] = {}

    def on(self, device: torch.device) -> DeviceMetadata:
        """The metadata in a GPU's memory, copied at the first call."""
        return self.once(device, lambda: DeviceMetadata.of(self, device))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` derives from the table: made by the first call with this key, for all layers of a step."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


@dataclass(frozen=True, slots=True)
class MetadataGroup:
    """The sequences of one kernel launch, and the sizes that its grid depends on."""

    # int32 [sequences, METADATA_FIELDS]: the columns of `AttentionMetadata.rows`, then the number of query rows of all
    # sequences before this one
    rows: Tensor
    max_rows: int  # of one sequence
    max_blocks: int
    total_rows: int

    @classmethod
    def of(cls, rows: Tensor, on_device: Tensor) -> MetadataGroup:
        """rows: on the host; on_device: their copy, of one dimension."""
        most_rows, _, most_blocks = rows[:, 1:4].amax(0).tolist() if len(rows) else (0, 0, 0)
        return cls(on_device.view(-1, METADATA_FIELDS), most_rows, most_blocks, int(rows[:, 1].sum()))

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """`AttentionMetadata` in a GPU's memory, in two groups: decode and prefill use different kernels."""

    blocks: Tensor  # int32
    few: MetadataGroup  # up to MAX_DECODE_ROWS query rows
    many: MetadataGroup

    @classmethod
    def of(cls, table: AttentionMetadata, device: torch.device) -> DeviceMetadata:
        """Upload the metadata in one copy on the current stream."""
        is_few = table.rows[:, 1] <= MAX_DECODE_ROWS
        groups = []
        for rows in (table.rows[is_few], table.rows[~is_few]):
            counts = rows[:, 1:2]
            groups.append(torch.cat((rows, counts.cumsum(0) - counts), dim=1))
        packed = torch.cat([*(rows.flatten() for rows in groups), table.blocks]).int()
        few, many, blocks = upload(packed, device).split([*(rows.numel() for rows in groups), len(table.blocks)])
        return cls(blocks, MetadataGroup.of(groups[0], few), MetadataGroup.of(groups[1], many))

    @classmethod
    def of_rows(
        cls, sequences: Tensor, blocks: Tensor, max_blocks: int, max_rows: int, total_rows: int
    ) -> DeviceMetadata:
        """Sequences of few query rows, in memory that may be refilled after a kernel was recorded or launched.

        sequences: int32 [sequences, METADATA_FIELDS], all zero for one without rows; blocks: int32. No sequence ever
        has more than `max_blocks` blocks and `max_rows` rows, and all together no more than `total_rows`.
        """
        none = MetadataGroup(sequences[:0], 0, 0, 0)
        return cls(blocks, MetadataGroup(sequences, max_rows, max_blocks, total_rows), none)


@dataclass(slots=True)
class AttentionState:
    """Partial attention over the keys seen so far: normalised output and LSE, both fp32."""

    out: Tensor  # [tokens, heads, head_dim]
    lse: Tensor  # [heads, tokens]
    pending: dict[int, Any] = field(default_factory=dict)  # work that a later call finishes, by first row

    @classmethod
    def empty(cls, q: Tensor, sinks: Tensor | None = None) -> AttentionState:
        """The state of queries q `[tokens, heads, head_dim]` before any key: output 0, LSE -inf.

        sinks: fp32 [heads], one more score for every row of the head, whose value is 0: the LSE begins with it.
        Whatever is merged into the state is scaled by exp(lse - logaddexp(lse, sink)). Source:
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023).
        """
        if sinks is not None:
            return cls(filled(q.shape, 0.0, q.device), sinks.unsqueeze(1).repeat(1, q.shape[0]))
        lse = filled((q.shape[1], q.shape[0]), float("-inf"), q.device)
        return cls(filled(q.shape, 0.0, q.device), lse)


class AttentionBackend(Protocol):
    """Attention over KV blocks.

    A row's result depends on its own query and keys only: not on the rest of the batch, not on the physical block ids,
    and not on how the blocks are grouped into calls.
    """

    name: str

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        """Merge attention over the blocks of `table` into `state`, in place.

        q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous.
        """
        ...


@runtime_checkable
class RowAttention(Protocol):
    """Attention of few query rows over all of their keys, which a CUDA graph can record.

    The launches of `attend_rows` depend on shapes only; the kernels read everything else from device memory when they
    run.
    """

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
        """Write the output of the rows of `table.few` to `out`, which is like q and may be q. Other rows stay.

        The bits are those of `AttentionBackend.attend` into `AttentionState.empty(q, sinks)`, in the dtype of `out`.
        """
        ...
