"""Attention kernels, and the choice between them."""

from __future__ import annotations

from nanovllm.ops.backends import select_backend, select_cpu_backend

__all__ = ["select_backend", "select_cpu_backend"]
