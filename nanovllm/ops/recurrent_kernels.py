"""What a recurrent layer with the gated delta rule computes between its projections, and the gate of attention.

Three modules implement it with the same signatures: `cpu_delta` in C++, `triton_delta` on CUDA and `torch_delta` in
plain torch. A layer chooses its implementation once, with `recurrent_kernels_on`. C++ and torch take the tokens of a
sequence one by one, so that a state does not depend on how a prompt was cut into steps. Triton does the same for rows
outside of whole chunks (docs/design.md). The results of two implementations differ in the order of sums and in the
exponential function.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops import cpu_delta, torch_delta
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows
from nanovllm.ops.triton_support import triton_runs


class RecurrentKernels(Protocol):
    """What each implementation provides."""

    def delta_inputs_(
        self,
        spec: RecurrentSpec,
        rows: StateRows,
        x: Tensor,
        weight: Tensor,
        conv: Tensor,
        b: Tensor,
        a: Tensor,
        decay: DecayWeights,
    ) -> DeltaInputs:
        """The inputs of the recurrence; leaves the last conv_kernel - 1 rows of x of each run in its slot of `conv`.

        q, k and v are SiLU of the causal convolution of x, rounded to the dtype of x. The slot has the rows of x from
        before the run. q and k are divided by sqrt(sum(x^2) + 1e-6), in Triton by way of `DeltaInputs.scale`. decay is
        exp(-rate * softplus(a + bias)), and beta is sigmoid(b), rounded to the dtype of b.

        x: [rows, channels]; weight: [conv_kernel, channels], the newest row last; conv: [slots, channels, conv_kernel -
        1]; b, a: [rows, value_heads]; rows of x, b and a may be strided.
        """
        ...

    def delta_rule_(self, spec: RecurrentSpec, rows: StateRows, inputs: DeltaInputs, states: Tensor) -> Tensor:
        """[rows, value_heads * value_dim] in the dtype of v; leaves the state after each run in its slot of `states`.

        For each token and value head, in fp32: S = decay * S + k (beta * (v - decay * S^T k))^T, and the result S^T q.
        states: fp32 [slots, value_heads, key_dim, value_dim]. Source: Yang et al., "Gated Delta Networks" (2024).
        """
        ...

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` of each head of x times silu(z): [rows, heads * size], weight [size]. Rows of z may be strided."""
        ...

    def sigmoid_gate_(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x [rows, size] by sigmoid(gate), rounded to its dtype, in place, and return it."""
        ...


def recurrent_kernels_on(device: torch.device, dtype: torch.dtype) -> RecurrentKernels:
    """The implementation for a network of this dtype."""
    if device.type == "cuda" and triton_runs():
        from nanovllm.ops import triton_delta

        return triton_delta
    return cpu_delta if device.type == "cpu" and dtype in KERNEL_DTYPES else torch_delta
