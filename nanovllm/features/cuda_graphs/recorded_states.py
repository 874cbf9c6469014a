"""Which rows of a step advance which recurrent states, at fixed device addresses, from which a graph reads it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from nanovllm.data.batch import ScheduledSequence
from nanovllm.features.cuda_graphs.shapes import Shape
from nanovllm.kvcache.states import StatePool
from nanovllm.layers.forward_context import StepStates
from nanovllm.ops.delta_inputs import KeptRows, StatePart, StateRows
from nanovllm.ops.upload import refill


class RecordedStates:
    """The state slots of a step, and its rows as runs of sequences.

    A padded row is a run of its own where each sequence has one row, and else in a run behind the others. Such runs
    have no slot (-1).
    """

    def __init__(self, pool: StatePool, shapes: Sequence[Shape], device: torch.device) -> None:
        """shapes: of the graphs."""
        self._pool = pool
        rows = max(shape.rows for shape in shapes)
        runs = max(_num_runs(shape) for shape in shapes)
        # Slots, starts and the run of each row, see `StateRows`, of the largest shape.
        self._parts = (runs, runs + 1, rows)
        self._nothing = torch.cat((torch.full((runs,), -1), torch.zeros(runs + 1 + rows, dtype=torch.int64)))
        self._memory = self._nothing.to(device, copy=True)
        self._rows = torch.arange(rows, device=device)

    def of_shape(self, shape: Shape) -> tuple[StepStates, Sequence[StatePart]]:
        """`ForwardContext.states` and `state_parts` of a recording, whose content is that of the latest `fill`.

        Of a shape for drafts each row keeps what a replay of states needs, at its own index.
        """
        slots, starts, run_of_row = self._memory.split(self._parts)
        runs = _num_runs(shape)
        rows = self._rows[: shape.rows]
        of_rows = StateRows(slots[:runs], starts[: runs + 1], run_of_row[: shape.rows])
        kept = KeptRows(rows, rows) if shape.keeps_rows else None
        states = self._pool.of_recorded(slots[:runs], shape.rows if shape.keeps_rows else 0)
        return states, [StatePart(of_rows, kept)]

    def fill(self, sequences: Sequence[ScheduledSequence], shape: Shape) -> None:
        """Take the sequences of a step before a graph of this shape is replayed."""
        ids = [seq.state_slot for seq in sequences if seq.state_slot is not None]
        lengths = [len(seq.token_ids) for seq in sequences]
        ends = [*accumulate(lengths)]
        packed = self._nothing.clone()
        slots, starts, run_of_row = packed.split(self._parts)
        slots[: len(ids)] = torch.tensor(ids)
        if shape.keeps_rows:
            starts[1:] = shape.rows
            starts[1 : len(ids) + 1] = torch.tensor(ends)
            run_of_row[:] = len(ids)
            run_of_row[: ends[-1]] = torch.tensor([run for run, length in enumerate(lengths) for _ in range(length)])
        else:
            starts[:] = torch.arange(len(starts))
            run_of_row[:] = torch.arange(len(run_of_row))
        refill(self._memory, packed)
        rows = [range(begin, end) for begin, end in pairwise([0, *ends])]
        self._pool.begin_replay(ids, rows if shape.keeps_rows else [])


def _num_runs(shape: Shape) -> int:
    """Kernels take as many runs as rows for runs of one row each."""
    if not shape.keeps_rows:
        return shape.rows
    return shape.sequences + (1 if shape.sequences + 1 != shape.rows else 2)
