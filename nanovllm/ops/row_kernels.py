"""Row-wise operations of the network: norm, RoPE, SiLU, softmax, draws and writes to the KV cache.

Three modules implement them with the same signatures: `cpu_kernels` in C++, `triton_rows` on CUDA and `torch_rows` in
plain torch. A network chooses its implementation once, with `kernels_on`; the functions here choose it by the tensor.
An implementation rounds where the others do; results of two implementations differ by the order of sums and by the
exponential function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops import cpu_kernels, torch_rows
from nanovllm.ops.kv_quantization import has_scales, quantize_rows
from nanovllm.ops.triton_support import triton_runs, use_triton


class RowKernels(Protocol):
    """What each implementation provides. The functions of this module document the other operations."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight of each row: [rows, size], weight [size].

        The mean and the division run in fp32. The quotient is rounded to x's dtype before the multiplication by a
        weight of that dtype, as in Transformers; a weight in fp32 multiplies before the rounding, as in its Gemma 3.
        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
        """
        ...

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place and rounded to its dtype; returns `rms_norm` of the sum. Both [rows, size]."""
        ...

    def add_(self, x: Tensor, addend: Tensor) -> Tensor:
        """Add to x in place and return it: both [rows, size] of one dtype."""
        ...

    def copy_(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy the source to the target and return it: both [rows, size] of one dtype."""
        ...

    def place_heads(
        self,
        heads: Tensor,
        weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Split the merged projection into q, k and v; normalise q and k if there is a weight, and apply RoPE to them.

        heads: [tokens, num_heads + 2 * num_kv_heads, head_dim], q before k before v; weight: [num_heads + num_kv_heads,
        head_dim], in the dtype of the heads or in fp32, as for `rms_norm`; cos, sin: `RotaryEmbedding.cos_sin` of the
        tokens; q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim].
        """
        ...

    def cos_sin(self, angles: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """cos [tokens, 2 * pairs], each value twice, and sin [tokens, pairs] of fp32 angles [tokens, pairs], scaled."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...
    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor: ...
    def clamped_swiglu(self, gate_up: Tensor) -> Tensor: ...
    def softmax(self, x: Tensor, *, log: bool = False) -> Tensor: ...
    def sigmoid(self, x: Tensor) -> Tensor: ...
    def draw(self, scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor: ...
    def store_kv(self, pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None: ...


def kernels_on(device: torch.device, dtype: torch.dtype) -> RowKernels:
    """The implementation for a network, whose tensors have this dtype and dense rows."""
    if device.type == "cuda":
        return _cuda_kernels()
    return cpu_kernels if device.type == "cpu" and dtype in cpu_kernels.KERNEL_DTYPES else torch_rows


def kernels_for(x: Tensor, dims: int) -> RowKernels:
    """The implementation for `x`, which has `dims` dimensions in the C++ kernels (2 or 3)."""
    if x.is_cuda:
        return _cuda_kernels()
    return cpu_kernels if cpu_kernels.takes(x, dims) else torch_rows


@cache
def _cuda_kernels() -> RowKernels:
    if not triton_runs():
        return torch_rows
    from nanovllm.ops import triton_rows

    return triton_rows


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where each row holds the gate and then up: [rows, 2 * size] -> [rows, size]."""
    return kernels_for(gate_up, 2).silu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in the same way, with the approximation by tanh: gelu(x) = x * sigmoid(2u) for
    u = sqrt(2 / pi) * (x + 0.044715 x^3). Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016)."""
    return kernels_for(gate_up, 2).gelu_tanh_and_mul(gate_up)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) in the same way, with the gate at most 7 and up from -7 to 7. Source:
    OpenAI, gpt-oss, gpt_oss/torch/model.py."""
    return kernels_for(gate_up, 2).clamped_swiglu(gate_up)


# The activations of an MLP's gate.
GATED_UNITS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "clamped_swiglu": clamped_swiglu}
)


def softmax(x: Tensor, *, log: bool = False) -> Tensor:
    """The softmax of each row of fp32 x [rows, size], or its natural logarithm."""
    return kernels_for(x, 2).softmax(x, log=log)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of fp32 x [rows, size]. On the CPU torch's bits depend on where in a tensor a number stands."""
    return kernels_for(x, 2).sigmoid(x)


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest logit in each row, the first of equal ones, or -1 if the row holds NaN or infinity.

    logits: floating [rows, vocab] -> int64 [rows]. One pass on the CPU, where torch's three reductions take longer, and
    would wake threads of their own in each step.
    """
    return (cpu_kernels if cpu_kernels.takes(logits, 2) else torch_rows).likeliest(logits)


def draw(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """The column with the largest score plus Gumbel noise in each row, the first of equal ones: int64 [rows].

    scores: fp32 [rows, width]; tokens: int64 [width] or [rows, width]; starts: int64 [rows] on the device of the
    scores. `torch_rows.gumbel_noise` gives the formula of the noise.
    """
    return kernels_for(scores, 2).draw(scores, tokens, starts)


def narrow_(target: Tensor, wide: Tensor) -> Tensor:
    """Write fp32 elements into a target of another dtype, both [tokens, heads, head_dim], and return the target."""
    on_cpu = cpu_kernels.takes(target, 3) and cpu_kernels.takes(wide, 3)
    return (cpu_kernels if on_cpu else torch_rows).narrow_(target, wide)


def widened(x: Tensor) -> Tensor:
    """x [rows, size] in fp32: x itself if that is its dtype."""
    if x.dtype == torch.float32 or not cpu_kernels.takes(x, 2):
        return x.float()
    return cpu_kernels.widened(x)


def filled(shape: Sequence[int], value: float, device: torch.device) -> Tensor:
    """An fp32 tensor with the same value everywhere."""
    if device.type == "cpu":
        return cpu_kernels.filled(shape, value)
    return torch.full(tuple(shape), value, dtype=torch.float32, device=device)


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """K or V `[tokens, kv_heads, head_dim]` as rows of KV blocks of `dtype`: x itself, or in 8 bits with scales."""
    if not has_scales(dtype):
        return x
    if use_triton(x):
        from nanovllm.ops.triton_kv import quantize_rows_triton

        return quantize_rows_triton(x, dtype)
    return quantize_rows(x, dtype)


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write K and V of each token to its slot of the pool; tokens with slot -1 are skipped.

    pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous, in 8 bits with rows of head_dim elements
    and a scale; k, v: [tokens, kv_heads, head_dim], rows and heads may be strided; slots: int64 [tokens], the slot
    mapping block * block_size + offset, no slot twice.
    """
    if has_scales(pool.dtype):  # from here on bytes
        k, v = (as_stored(x, pool.dtype).view(torch.uint8) for x in (k, v))
        pool = pool.view(torch.uint8)
    kernels: RowKernels = cpu_kernels if pool.is_cpu else kernels_for(pool, 5)  # on the CPU: any dtype
    kernels.store_kv(pool, k, v, slots)
