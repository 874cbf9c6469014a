"""What the kernels of recurrent layers read: rows as runs of sequences, and the inputs of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """Rows as runs: a run is neighbouring rows of one sequence, in the order of its tokens. Int64, on the device."""

    slots: Tensor  # [runs]: the state slot of each, none twice
    starts: Tensor  # [runs + 1]: the first row of each, and the end of the last
    run_of_row: Tensor  # [rows]


class DeltaInputs(NamedTuple):
    """What the recurrence reads of each row."""

    qk: Tensor  # fp32 [rows, 2, key_heads, key_dim]: normalised queries, divided by sqrt(key_dim), and normalised keys
    v: Tensor  # [rows, value_heads, value_dim], in the network's dtype
    decay: Tensor  # fp32 [rows, value_heads]: what the state is multiplied by
    beta: Tensor  # fp32 [rows, value_heads]: the share of a new value that is written


class DecayWeights(NamedTuple):
    """The weights of a layer's decay: fp32 [value_heads] each."""

    rate: Tensor
    bias: Tensor
