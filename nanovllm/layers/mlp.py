"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nanovllm.layers.linear import Linear, RowAdapters
from nanovllm.layers.linear_method import LinearMethod, NamedSlots, StoredWeight
from nanovllm.ops.row_kernels import GATED_UNITS


class GatedMLP:
    """down(activation(gate(x)) * up(x)). Gate and up are one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gate_up: Mapping[str, int],
        *,
        prefix: str,
        bias: bool,
        down_bias: bool,
        activation: str,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """gate_up: the modules of the gate and up projections in the checkpoint, and their output features.

        prefix: of the names of its modules in the checkpoint; activation: one of GATED_UNITS; method: how the weights
        are stored.
        """
        self._gated_unit = GATED_UNITS[activation]
        self.gate_up = Linear(hidden_size, gate_up, prefix=prefix, bias=bias, method=method, dtype=dtype, device=device)
        self.down = Linear(
            intermediate_size,
            {"down_proj": hidden_size},
            prefix=prefix,
            bias=down_bias,
            method=method,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return self.down(self._gated_unit(self.gate_up(x, adapters)), adapters)

    def slots(self) -> NamedSlots:
        yield from self.gate_up.slots()
        yield from self.down.slots()

    def weights(self) -> Iterator[StoredWeight]:
        yield self.gate_up.weight
        yield self.down.weight
