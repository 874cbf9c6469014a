"""The gated MLP of a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.layers.linear import Linear
from nanovllm.layers.linear_method import LinearMethod, NamedSlots
from nanovllm.ops.row_kernels import silu_and_mul


class GatedMLP:
    """down(silu(gate(x)) * up(x)). Gate and up are one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        prefix: str,
        bias: bool,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """prefix: of the names of its modules in the checkpoint; method: how the weights are stored."""
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, parts, prefix=prefix, bias=bias, method=method, dtype=dtype, device=device)
        self.down = Linear(
            intermediate_size,
            {"down_proj": hidden_size},
            prefix=prefix,
            bias=bias,
            method=method,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return self.down(silu_and_mul(self.gate_up(x)))

    def slots(self) -> NamedSlots:
        yield from self.gate_up.slots()
        yield from self.down.slots()

    def use_torch_products(self) -> None:
        """See `StoredWeight.use_torch_products`."""
        self.gate_up.weight.use_torch_products()
        self.down.weight.use_torch_products()
