"""Prefill by whole segments through a library's dense attention; another backend attends everything else.

Positions are cut into segments of `segment` tokens, at multiples of it. The query rows of one segment attend to the
keys of each segment up to their own in one call of the library: to their own with a causal mask, to the earlier ones
without a mask, and the results are merged in the order of the segments, in fp32. So a library that plans for every
shape, as cuDNN does, sees only two shapes. A library that takes any number of rows also gets shorter pieces.

The keys of a segment are gathered from their blocks into memory of one shape, and 8-bit ones are widened. It does not
matter on which tier the blocks are or how calls group them, because unfinished work waits in the `AttentionState` for
the next call. The library, its shapes and strides and the order of the merges depend on positions alone: the memory
budget changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.merge import MAX_PARTS
from nanovllm.ops.upload import upload

SEGMENT = 8192  # tokens
LEAST_ROWS = 1024  # of a piece that is no whole segment, for libraries that take any number of rows
PART_BYTES = 512 << 20  # of results that wait to be merged


class DenseAttention(Protocol):
    """A library's attention over contiguous keys."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """q: [rows, heads, head_dim], strided; k, v: [heads, keys, head_dim]. Returns the output like q, and the
        natural-log LSE, fp32 [heads, rows]. causal: with a mask aligned bottom-right, else without one.
        """
        ...


Entry = tuple[int, int, int, int]  # of a block: segment, its id, its first token's place in the segment, its tokens


@dataclass(frozen=True, slots=True)
class Library:
    """A dense attention, and what it takes."""

    name: str
    attend: DenseAttention
    any_rows: bool = False  # else only whole segments, in two shapes
    groups: bool = True  # whether K and V may have fewer heads than the queries


@dataclass(frozen=True, slots=True)
class QueryPiece:
    """Rows of one sequence in one segment, for the library."""

    segment: int  # its index
    rows: slice  # of the batch
    end: int  # position behind the last row


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """The keys of one segment that a call brings."""

    segment: int
    entries: Tensor  # int32 [blocks, 3], see `triton_segments.gather_`; rows count from the segment's first key
    is_last: bool  # whether the segment is complete with them


@dataclass(frozen=True, slots=True)
class SequencePlan:
    queries: tuple[QueryPiece, ...]  # one after the other, without gaps
    keys: tuple[KeyPiece, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call attends to: `others` by the other backend, the rest by the library."""

    others: AttentionMetadata | None
    sequences: tuple[SequencePlan, ...]


@dataclass(slots=True)
class Unfinished:
    """The unfinished work of a sequence between two calls."""

    keys: Tensor  # of a segment: [1, 2, heads, segment, head_dim]
    # results that are not merged yet, by segment of the queries
    parts: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


class SegmentAttention:
    """Attends whole segments without a window through `library`, everything else through `other`."""

    def __init__(
        self,
        library: Library,
        other: AttentionBackend,
        shapes: Sequence[tuple[int, int, int]],
        rows: int,
        segment: int = SEGMENT,
    ) -> None:
        """shapes: (heads, kv_heads, head_dim) for which the library is right; rows: the most in a step."""
        self.name = f"{library.name} on segments of {segment:,} tokens, else {other.name}"
        self.other = other
        self.segment = segment
        self._library = library
        self._shapes = frozenset(shapes)
        widest = max(heads * head_dim for heads, _, head_dim in shapes)
        self.most_parts = max(1, min(MAX_PARTS, PART_BYTES // (2 * rows * widest)))  # of one merge; changes no bit

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        block_size = pool.shape[3]
        kv_heads = pool.shape[2]
        takes = (q.shape[1], kv_heads, q.shape[2]) in self._shapes and self.segment % block_size == 0
        if window is not None or not takes or q.dtype == torch.float32:
            self.other.attend(q, pool, table, state, scale, window)
            return
        plan = table.once((self, block_size), lambda: self._plan(table, block_size, q.device))
        if plan.others is not None:
            self.other.attend(q, pool, plan.others, state, scale, window)
        for sequence in plan.sequences:
            self._attend_sequence(q, pool, sequence, state, scale)

    # ---- what goes where

    def _plan(self, table: AttentionMetadata, block_size: int, device: torch.device) -> Plan:
        others: list[SequenceMetadata] = []
        taken: list[tuple[tuple[QueryPiece, ...], list[Entry]]] = []
        for seq in table.sequences:
            queries = tuple(self.query_pieces(seq))
            if not queries:
                others.append(seq)
                continue
            begin = seq.context_len + queries[0].rows.start - seq.query_start
            end = queries[-1].end
            others.extend(_rows_of(seq, seq.context_len, begin, block_size))
            others.extend(_rows_of(seq, end, seq.total_len, block_size))
            if entries := self._entries(seq, end, block_size):
                taken.append((queries, entries))
        flat = [entry[1:] for _, entries in taken for entry in entries]
        uploaded = iter(upload(torch.tensor(flat, dtype=torch.int32).reshape(-1, 3), device).split(
            [len(list(of_one)) for _, entries in taken for _, of_one in groupby(entries, _segment_of)]
        ))  # fmt: skip
        plans = []
        for queries, entries in taken:
            keys = []
            for segment, of_one in groupby(entries, _segment_of):
                *_, (_, _, offset, tokens) = of_one
                is_last = offset + tokens == min(self.segment, queries[-1].end - segment * self.segment)
                keys.append(KeyPiece(segment, next(uploaded), is_last))
            plans.append(SequencePlan(queries, tuple(keys)))
        return Plan(AttentionMetadata(others) if others else None, tuple(plans))

    def query_pieces(self, seq: SequenceMetadata) -> Iterator[QueryPiece]:
        """The rows of a sequence that the library attends; they depend on positions alone."""
        offset = seq.query_start - seq.context_len
        for segment in range(seq.context_len // self.segment, -(-seq.total_len // self.segment)):
            begin = max(seq.context_len, segment * self.segment)
            end = min(seq.total_len, (segment + 1) * self.segment)
            is_whole = end - begin == self.segment
            if is_whole or (self._library.any_rows and end - begin >= LEAST_ROWS):
                yield QueryPiece(segment, slice(begin + offset, end + offset), end)

    def _entries(self, seq: SequenceMetadata, end: int, block_size: int) -> list[Entry]:
        """The sequence's keys up to position `end`, block by block."""
        entries = []
        for index, block in enumerate(seq.block_table):
            first = seq.first_position + index * block_size
            if first >= end:
                break
            segment, offset = divmod(first, self.segment)
            entries.append((segment, block, offset, min(block_size, end - first)))
        return entries

    # ---- a call

    def _attend_sequence(
        self, q: Tensor, pool: Tensor, plan: SequencePlan, state: AttentionState, scale: float
    ) -> None:
        from nanovllm.ops.triton_segments import gather_

        first = plan.queries[0].rows.start
        last = plan.queries[-1]
        if first not in state.pending:
            heads = pool.shape[2] if self._library.groups else q.shape[1]
            state.pending[first] = Unfinished(q.new_empty(1, 2, heads, self.segment, q.shape[2]))
        held: Unfinished = state.pending[first]
        for piece in plan.keys:
            gather_(pool, piece.entries, held.keys)
            if piece.is_last:
                for query in plan.queries:
                    if query.segment >= piece.segment:
                        self._attend_segment(q, query, piece.segment, held, state, scale)
        if plan.keys[-1].segment == last.segment and plan.keys[-1].is_last:
            del state.pending[first]

    def _attend_segment(
        self, q: Tensor, query: QueryPiece, segment: int, held: Unfinished, state: AttentionState, scale: float
    ) -> None:
        causal = query.segment == segment
        k, v = held.keys[0, :, :, : query.end - segment * self.segment if causal else self.segment]
        parts = held.parts.setdefault(query.segment, [])
        parts.append(self._library.attend(q[query.rows], k, v, scale, causal))
        if causal or len(parts) == self.most_parts:
            from nanovllm.ops.triton_segments import merge_segments_

            merge_segments_(state.out[query.rows], state.lse[:, query.rows], parts)
            del held.parts[query.segment]


def _segment_of(entry: Entry) -> int:
    return entry[0]


def _rows_of(seq: SequenceMetadata, begin: int, end: int, block_size: int) -> Iterator[SequenceMetadata]:
    """The rows at positions [begin, end) of a sequence, with the blocks up to the last of them; nothing without any."""
    blocks = -(-(end - seq.first_position) // block_size)
    if begin < end and blocks > 0:
        yield replace(
            seq,
            query_start=seq.query_start + begin - seq.context_len,
            query_len=end - begin,
            context_len=begin,
            kv_end=min(seq.kv_end, end),
            block_table=seq.block_table[:blocks],
        )
