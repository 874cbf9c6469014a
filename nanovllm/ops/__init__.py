"""Attention kernels, and the choice between them."""

from __future__ import annotations

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_attention import supports_head_dim
from nanovllm.ops.native_attention import NativeAttention
from nanovllm.ops.torch_attention import TorchAttention


def select_backend(torch_device: torch.device, head_dim: int) -> AttentionBackend:
    """The backend for a device. Raises ConfigError where there is none."""
    if torch_device.type == "cpu":
        return select_cpu_backend(head_dim)
    raise ConfigError(
        f"device={str(torch_device)!r}: no attention backend works for heads of {head_dim}; use device='cpu'"
    )


def select_cpu_backend(head_dim: int) -> AttentionBackend:
    """The C++ kernel where it can be used, torch's operator for the head sizes that it does not take."""
    return NativeAttention() if supports_head_dim(head_dim) else TorchAttention()
