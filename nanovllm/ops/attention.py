"""The attention seam: what a backend computes, in one convention for all of them.

LSE is the natural-log sum of exp of the scaled scores, fp32, `[heads, tokens]`. Causal masks are aligned bottom-right:
a query at position p sees the keys at positions up to p, and with a sliding window w only those after p - w. A row that
sees no key has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nanovllm.ops.upload import upload

METADATA_FIELDS = 8  # of a segment in a GPU's memory
FEW_ROWS = 64  # a segment with more query rows is prefill to a GPU kernel, one with up to as many decode


@dataclass(frozen=True, slots=True)
class KVMetadata:
    """Consecutive KV blocks of one sequence, and the query rows that attend to them.

    `blocks` index a pool `[blocks, 2, kv_heads, block_size, head_dim]` (K, then V). They hold the keys at positions
    [first_position, kv_end); memory beyond kv_end is undefined and must not matter.
    """

    query_start: int  # first row in the flat batch
    query_len: int
    query_position: int  # position of the first row
    first_position: int
    kv_end: int
    blocks: Sequence[int]


class AttentionMetadata:
    """Segments of disjoint query rows, as objects and as the index tensors that kernels take; made once a step."""

    def __init__(self, segments: Sequence[KVMetadata]) -> None:
        self.segments = tuple(segments)
        self.blocks = torch.tensor([block for s in segments for block in s.blocks], dtype=torch.int64)
        rows: list[tuple[int, ...]] = []
        start = 0
        for s in segments:
            count = len(s.blocks)
            rows.append((s.query_start, s.query_len, start, count, s.first_position, s.kv_end, s.query_position))
            start += count
        # query_start, query_len, block_start, block_count, first_position, kv_end, query_position
        self.rows = torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)
        self._on_device: DeviceMetadata | None = None

    def on(self, device: torch.device) -> DeviceMetadata:
        """The table where a GPU kernel finds it, copied the first time that it is asked for."""
        if self._on_device is None:
            self._on_device = DeviceMetadata.of(self, device)
        return self._on_device


@dataclass(frozen=True, slots=True)
class MetadataGroup:
    """Segments that one kernel launch takes, and what the size of its grid depends on."""

    # int32 [segments, METADATA_FIELDS]: the columns of `AttentionMetadata.rows`, then the query rows of all before
    rows: Tensor
    max_rows: int  # of one segment
    max_blocks: int
    total_rows: int

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """A AttentionMetadata in a GPU's memory, in two groups: few query rows want other kernels than many."""

    blocks: Tensor  # int32
    few: MetadataGroup  # up to FEW_ROWS query rows
    many: MetadataGroup

    @classmethod
    def of(cls, table: AttentionMetadata, device: torch.device) -> DeviceMetadata:
        """One copy, on the current stream."""
        is_few = table.rows[:, 1] <= FEW_ROWS
        groups = [_with_rows_before(table.rows[is_few]), _with_rows_before(table.rows[~is_few])]
        packed = torch.cat([*(rows.flatten() for rows in groups), table.blocks]).int()
        parts = upload(packed, device).split([*(rows.numel() for rows in groups), len(table.blocks)])
        few, many = (_metadata_group(rows, part) for rows, part in zip(groups, parts[:2], strict=True))
        return cls(parts[2], few, many)

    @classmethod
    def of_rows(cls, rows: Tensor, blocks: Tensor, max_blocks: int) -> DeviceMetadata:
        """Segments of one query row each, over memory that may be filled later, also after a kernel was launched.

        spans: int32 [rows, METADATA_FIELDS], all zero for a row without keys; blocks: int32. No row ever has more than
        `max_blocks` blocks.
        """
        none = MetadataGroup(rows[:0], 0, 0, 0)
        return cls(blocks, MetadataGroup(rows, 1, max_blocks, rows.shape[0]), none)


def _with_rows_before(rows: Tensor) -> Tensor:
    rows = rows[:, 1:2]
    return torch.cat((rows, rows.cumsum(0) - rows), dim=1)


def _metadata_group(rows: Tensor, on_device: Tensor) -> MetadataGroup:
    if not len(rows):
        return MetadataGroup(on_device.view(0, METADATA_FIELDS), 0, 0, 0)
    rows, blocks = rows[:, 1], rows[:, 3]
    return MetadataGroup(on_device.view(-1, METADATA_FIELDS), int(rows.max()), int(blocks.max()), int(rows.sum()))


@dataclass(slots=True)
class AttentionState:
    """Attention over the keys seen so far: normalised output and LSE, both fp32."""

    out: Tensor  # [tokens, heads, head_dim]
    lse: Tensor  # [heads, tokens]

    @classmethod
    def empty(cls, q: Tensor) -> AttentionState:
        """The state of queries q `[tokens, heads, head_dim]` before any key was seen."""
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32, device=q.device)
        return cls(torch.zeros(q.shape, dtype=torch.float32, device=q.device), lse)

    def output(self, q: Tensor) -> Tensor:
        """The output in the dtype of the queries and in their memory: they are not needed any more."""
        return q.copy_(self.out)


class AttentionBackend(Protocol):
    """Attention over KV blocks. A row's result depends on its own query and keys only: not on the batch, not on where
    the blocks live, and not on how they were grouped into calls."""

    name: str

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        """Merge attention over the table's segments into `state`, in place.

        q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous.
        """
        ...


@runtime_checkable
class RowAttention(Protocol):
    """Attention that a graph can record: what it does in `attend_rows` depends on nothing that the host knows but
    shapes, and all else is read in device memory when the kernels run."""

    def attend_rows(
        self, q: Tensor, pool: Tensor, table: DeviceMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        """`AttentionBackend.attend` over a table made by `DeviceMetadata.of_rows`, with the same bits."""
        ...
