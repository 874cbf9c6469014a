"""The project's own attention kernels behind the seam: any head size, fp32 as well, on any GPU that Triton drives."""

from __future__ import annotations

from torch import Tensor

from nanovllm.ops.attention import AttentionMetadata, AttentionState, DeviceMetadata
from nanovllm.ops.triton_decode import decode_
from nanovllm.ops.triton_prefill import prefill_


class TritonAttention:
    """Few query rows by partitions of the context, many by row tiles; launches do not grow with the batch."""

    name = "Triton paged attention"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        on_device = table.on(q.device)
        decode_(q, pool, on_device, state, scale, window)
        prefill_(q, pool, on_device, state, scale, window)

    def attend_rows(
        self, q: Tensor, pool: Tensor, table: DeviceMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        """See `RowAttention`."""
        decode_(q, pool, table, state, scale, window)
