"""The rows of a step as recurrent layers take them: in parts, and in runs of the sequences that they advance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nanovllm.data.network import RECURRENT_CHUNK
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.ops.delta_inputs import ChunkRows, KeptRows, StatePart, StateRows
from nanovllm.ops.upload import upload


def part_sizes(ctx: ForwardContext, most: int) -> list[int]:
    """The rows of each part of a step, at most `most`. No part ends within a chunk, in rows that have the chunk whole,
    so that what else is in a step has no influence on how a sequence is computed.
    """
    ends = [0]
    total = sum(seq.query_len for seq in ctx.sequences)
    while ends[-1] < total:
        end = min(ends[-1] + most, total)
        cut = next((seq for seq in ctx.sequences if seq.query_start < end < seq.query_start + seq.query_len), None)
        if cut is not None:
            edge = end - (cut.context_len + end - cut.query_start) % RECURRENT_CHUNK
            end = edge if edge >= cut.query_start and edge > ends[-1] else end
        ends.append(end)
    return [stop - start for start, stop in pairwise(ends)]


def parts_of_states(ctx: ForwardContext, sizes: Sequence[int]) -> Sequence[StatePart]:
    """Each part of so many rows of a step, all rows being of sequences that follow each other."""
    if ctx.state_parts:
        return ctx.state_parts
    assert ctx.states is not None, "a step of a network with recurrent layers brings their states"
    slots = ctx.states.slots
    device = ctx.states.slots.device
    parts = list(pairwise(accumulate(sizes, initial=0)))
    return [StatePart(_runs(ctx, *part, slots), _kept_rows(ctx, *part, device)) for part in parts]


def runs_of_rows(lengths: Sequence[int], slots: Tensor, positions: Sequence[int] | None = None) -> StateRows:
    """Runs of so many rows, one after the other.

    positions: of the first token of each in its sequence; None: rows are not computed in chunks.
    """
    starts = [*accumulate(lengths, initial=0)]
    whole = [range(0)] * len(lengths) if positions is None else list(map(_whole_chunks, starts, lengths, positions))
    begins = [rows.start for rows in whole]
    ends = [rows.stop for rows in whole]
    firsts = [row for rows in whole for row in rows]
    parts = [starts, firsts, [*accumulate(map(len, whole), initial=0)], begins, ends]
    uploaded = upload(torch.tensor([number for part in parts for number in part]), slots.device)
    on_device, *of_chunks = uploaded.split([*map(len, parts)])
    rows = StateRows(slots, on_device, upload(torch.repeat_interleave(torch.tensor(lengths)), slots.device))
    if not firsts:
        return rows
    any_before = any(start < begin for start, begin in zip(starts, begins, strict=False))
    any_after = any(end < stop for end, stop in zip(ends, starts[1:], strict=True))
    first_rows, of_runs, first, after = of_chunks
    return rows._replace(chunks=ChunkRows(first_rows, of_runs, first, after, any_before, any_after))


def _whole_chunks(start: int, length: int, position: int) -> range:
    """The first rows of the whole chunks of a run that begins in row `start`; empty and at its end if it has none."""
    begin = start + -position % RECURRENT_CHUNK
    count = max(0, start + length - begin) // RECURRENT_CHUNK
    end = begin + count * RECURRENT_CHUNK
    return range(begin, end, RECURRENT_CHUNK) if count else range(start + length, start + length, RECURRENT_CHUNK)


def _runs(ctx: ForwardContext, begin: int, end: int, slots: Tensor) -> StateRows:
    """The runs of rows [begin, end)."""
    ends = [(index, seq.query_start + seq.query_len) for index, seq in enumerate(ctx.sequences)]
    first = next(index for index, stop in ends if stop > begin)
    last = next(index for index, stop in ends if stop >= end)
    sequences = ctx.sequences[first : last + 1]
    starts = [max(seq.query_start, begin) for seq in sequences] + [end]
    positions = [seq.context_len + start - seq.query_start for seq, start in zip(sequences, starts, strict=False)]
    return runs_of_rows([stop - start for start, stop in pairwise(starts)], slots[first : last + 1], positions)


def _kept_rows(ctx: ForwardContext, begin: int, end: int, device: torch.device) -> KeptRows | None:
    """Those of rows [begin, end)."""
    if ctx.states is None or ctx.states.kept is None:
        return None
    source = list[int]()
    target = list[int]()
    for seq, places in zip(ctx.sequences, ctx.states.kept.rows, strict=True):
        for row, place in enumerate(places, seq.query_start):
            if begin <= row < end:
                source.append(row - begin)
                target.append(place)
    return KeptRows(*(upload(torch.tensor(indices), device) for indices in (source, target))) if source else None
