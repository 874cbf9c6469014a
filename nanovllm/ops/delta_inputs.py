"""What the kernels of recurrent layers read: rows as runs of sequences, and the inputs of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec


class ChunkRows(NamedTuple):
    """Which rows of runs are whole chunks: of RECURRENT_CHUNK tokens from a multiple of it on, counted from the first
    token of the sequence. Int64, on the device.

    The chunks of a run follow each other. Before and after them are fewer rows than a chunk has, unless none is whole.
    """

    first_rows: Tensor  # [chunks]: in the order of the rows
    starts: Tensor  # [runs + 1]: which chunk is the first of each run, and how many there are
    begins: Tensor  # [runs]: the first row of the first chunk; the end of the run if it has none
    ends: Tensor  # [runs]: the row after the last chunk; the end of the run if it has none
    any_before: bool  # whether a run has rows before its chunks
    any_after: bool


class StateRows(NamedTuple):
    """Rows as runs: a run is neighbouring rows of one sequence, in the order of its tokens. Int64, on the device.

    Where there are as many runs as rows, each is one row, and the Triton kernels read nothing but the slots. A run with
    slot -1 (padding of a recorded step) begins with an empty state and leaves none: its results are finite, if its
    inputs are, and unread.
    """

    slots: Tensor  # [runs]: the state slot of each, none twice
    starts: Tensor  # [runs + 1]: the first row of each, and the end of the last
    run_of_row: Tensor  # [rows]
    chunks: ChunkRows | None = None  # for the Triton kernels; None: no chunk is whole, or nobody knows the positions


class KeptRows(NamedTuple):
    """Rows of a part of a step whose input projections are kept: int64 [rows] each, on the device."""

    source: Tensor  # in the part
    target: Tensor  # in the memory of `layers.forward_context.KeptInputs`


class StatePart(NamedTuple):
    """What rows of a part of a step have to do with states."""

    rows: StateRows
    kept: KeptRows | None


class DeltaInputs(NamedTuple):
    """What the recurrence reads of each row."""

    qk: Tensor  # fp32 [rows, 2, key_heads, key_dim]: normalised queries, divided by sqrt(key_dim), and normalised keys
    v: Tensor  # [rows, value_heads, value_dim], in the network's dtype
    decay: Tensor  # fp32 [rows, value_heads]: what the state is multiplied by
    beta: Tensor  # fp32 [rows, value_heads]: the share of a new value that is written
    # Of the Triton kernels, fp32 [rows, 2, key_heads]: what qk is to be multiplied by. There it is in the network's
    # dtype, in which products of matrices are exact. None: qk is as above.
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
