"""The CPU backend in C++: attention straight from the KV pools, bit-identical however blocks and rows are grouped."""

from __future__ import annotations

from torch import Tensor

from nanovllm.ops import cpu_attention, cpu_isa
from nanovllm.ops.attention import AttentionState, SegmentTable


class NativeAttention:
    """Adapts `cpu_attention` to the seam: block indices become addresses."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self.name = f"native CPU attention ({cpu_isa.choose()})"

    def attend(
        self, q: Tensor, pool: Tensor, table: SegmentTable, state: AttentionState, scale: float, window: int | None
    ) -> None:
        cpu_attention.attend_batch(
            q,
            pool.data_ptr() + table.blocks * (pool.stride(0) * pool.element_size()),
            table.spans,
            kv_heads=pool.shape[2],
            block_size=pool.shape[3],
            scale=scale,
            out=state.out,
            lse=state.lse,
            window=window or 0,
            carry=True,
            num_threads=self._num_threads,
        )
