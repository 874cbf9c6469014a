"""What the kernels of recurrent layers read: rows as runs of sequences, and the inputs of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec


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

    @classmethod
    def empty_for(cls, spec: RecurrentSpec, x: Tensor) -> DeltaInputs:
        """Memory for the inputs of the rows of x."""
        rows, heads = x.shape[0], spec.num_value_heads

        def wide(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=torch.float32, device=x.device)

        keys = (spec.num_key_heads, spec.key_dim)
        return cls(wide(2, *keys), x.new_empty(rows, heads, spec.value_dim), wide(heads), wide(heads))


class DecayWeights(NamedTuple):
    """The weights of a layer's decay: fp32 [value_heads] each."""

    rate: Tensor
    bias: Tensor
