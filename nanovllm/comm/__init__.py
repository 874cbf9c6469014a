"""Moving bytes between memories."""

from __future__ import annotations

from nanovllm.comm.sgdma import CopyError, memcpy_2d_async

__all__ = ["CopyError", "memcpy_2d_async"]
