"""Attention kernels, and the choice between them."""

from __future__ import annotations

from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_attention import supports_head_dim
from nanovllm.ops.native_attention import NativeAttention
from nanovllm.ops.torch_attention import TorchAttention


def select_cpu_backend(head_dim: int, num_threads: int | None = None) -> AttentionBackend:
    """The C++ kernel where it can be used, torch's operator for the head sizes that it does not take.

    `num_threads` bounds the kernel's threads; without it, and for the operator, it is torch's number.
    """
    return NativeAttention(num_threads) if supports_head_dim(head_dim) else TorchAttention()
