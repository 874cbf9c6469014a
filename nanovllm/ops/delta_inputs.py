"""What the kernels of recurrent layers read: rows as runs of sequences, and the inputs of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec


class ChunkRows(NamedTuple):
    """The rows of runs that form whole chunks. Int64, on the device.

    A chunk is RECURRENT_CHUNK tokens of a sequence that begin at a multiple of RECURRENT_CHUNK. The whole chunks of a
    run follow each other, with fewer rows than a chunk has before and after them.
    """

    first_rows: Tensor  # [chunks]: in the order of the rows
    starts: Tensor  # [runs + 1]: the index of each run's first chunk, then the number of chunks
    begins: Tensor  # [runs]: the first row of the first chunk; the end of the run if it has none
    ends: Tensor  # [runs]: the row after the last chunk; the end of the run if it has none
    any_before: bool  # whether a run has rows before its chunks
    any_after: bool


class StateRows(NamedTuple):
    """Rows as runs: a run is neighbouring rows of one sequence, in the order of its tokens. Int64, on the device.

    If there are as many runs as rows, every run is one row, and the Triton kernels read only the slots. A run with slot
    -1 is padding of a recorded step. It begins with an empty state and leaves none, and its results are not read; they
    are finite if its inputs are.
    """

    slots: Tensor  # [runs]: the state slot of each run, no slot twice
    starts: Tensor  # [runs + 1]: the first row of each run, then the number of rows
    run_of_row: Tensor  # [rows]
    chunks: ChunkRows | None = None  # for the Triton kernels; None: no chunk is whole, or nobody knows the positions


class KeptRows(NamedTuple):
    """Rows of a part of a step whose input projections are kept: int64 [rows] each, on the device."""

    source: Tensor  # rows of the part
    target: Tensor  # rows of the memory of `layers.forward_context.KeptInputs`


class StatePart(NamedTuple):
    """The states that the rows of a part of a step read and write."""

    rows: StateRows
    kept: KeptRows | None


class DeltaInputs(NamedTuple):
    """What the recurrence reads of each row."""

    qk: Tensor  # fp32 [rows, 2, key_heads, key_dim]: normalised queries, divided by sqrt(key_dim), and normalised keys
    v: Tensor  # [rows, value_heads, value_dim], in the network's dtype
    decay: Tensor  # fp32 [rows, value_heads]: what the state is multiplied by
    beta: Tensor  # fp32 [rows, value_heads]: the share of a new value that is written
    # fp32 [rows, 2, key_heads], of the Triton kernels alone: factors by which qk is still to be multiplied. qk is then
    # in the network's dtype, in which products of matrices are exact. None: qk is as above.
    scale: Tensor | None = None

    @classmethod
    def empty_for(cls, spec: RecurrentSpec, x: Tensor) -> DeltaInputs:
        """Memory for the inputs of the rows of x."""
        rows = x.shape[0]
        heads = spec.num_value_heads

        def wide(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=torch.float32, device=x.device)

        keys = (spec.num_key_heads, spec.key_dim)
        return cls(wide(2, *keys), x.new_empty(rows, heads, spec.value_dim), wide(heads), wide(heads))


class DecayWeights(NamedTuple):
    """The weights of a layer's decay: fp32 [value_heads] each."""

    rate: Tensor
    bias: Tensor
