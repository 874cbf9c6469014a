"""Activations of gated MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops import cpu_rows
from nanovllm.ops.triton_support import use_triton


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side: [rows, 2 * size] -> [rows, size]."""
    if use_triton(gate_up):
        from nanovllm.ops.triton_rows import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    if cpu_rows.takes(gate_up, 2):
        return cpu_rows.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
