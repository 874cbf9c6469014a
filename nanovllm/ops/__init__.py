"""Attention kernels, and the choice between them."""

from __future__ import annotations

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.cpu_attention import supports_head_dim
from nanovllm.ops.native_attention import NativeAttention
from nanovllm.ops.torch_attention import TorchAttention


def has_backend(device_type: str) -> bool:
    """Whether attention can be computed on devices of this type ("cpu", "cuda") at all."""
    return device_type == "cpu"


def select_backend(device: torch.device, head_dim: int) -> AttentionBackend:
    """The best backend on `device` for heads of this size. Raises ConfigError where there is none."""
    if device.type == "cpu":
        return select_cpu_backend(head_dim)
    raise ConfigError(
        f"device={device.type!r}: no attention backend computes heads of size {head_dim} there; use device='cpu'"
    )


def select_cpu_backend(head_dim: int) -> AttentionBackend:
    """The C++ kernel where it can be used, torch's operator for the head sizes that it does not take."""
    return NativeAttention() if supports_head_dim(head_dim) else TorchAttention()
