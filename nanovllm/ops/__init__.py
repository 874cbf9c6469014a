"""Kernels, and the choice of the attention backend."""

from __future__ import annotations

from nanovllm.ops.backends import is_chunk_invariant, row_attention, select_backend, select_cpu_backend

__all__ = ["is_chunk_invariant", "row_attention", "select_backend", "select_cpu_backend"]
