"""Attention kernels, and the choice between them."""

from __future__ import annotations

from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_attention import supports_head_dim
from nanovllm.ops.native_attention import NativeAttention
from nanovllm.ops.torch_attention import TorchAttention


def is_chunk_invariant(backend: AttentionBackend) -> bool:
    """Whether a row's bits stay the same however a prompt is cut into chunks. torch's operator sums by their shape."""
    return not isinstance(backend, TorchAttention)


def select_cpu_backend(head_dim: int) -> AttentionBackend:
    """The C++ kernel where it can be used, torch's operator for the head sizes that it does not take."""
    return NativeAttention() if supports_head_dim(head_dim) else TorchAttention()
