"""Moving bytes between memories."""

from __future__ import annotations

from nanovllm.comm.sgdma import CopyError, copy_on_host_async, copy_pitched, memcpy_2d_async

__all__ = ["CopyError", "copy_on_host_async", "copy_pitched", "memcpy_2d_async"]
