"""The CPU backend in C++: attention straight from the KV pools, bit-identical however blocks and rows are grouped."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import _cpu_attention, cpu_attention, cpu_isa
from nanovllm.ops.attention import AttentionMetadata, AttentionState

MAX_STEP_ROWS = 24  # with more, attention takes far longer than the way to it


class NativeAttention:
    """Adapts `cpu_attention` to the seam: block indices become addresses."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self.name = f"native CPU attention ({cpu_isa.choose()})"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        cpu_attention.attend_batch(
            q,
            pool.data_ptr() + table.blocks * (pool.stride(0) * pool.element_size()),
            table.rows,
            kv_heads=pool.shape[2],
            block_size=pool.shape[3],
            scale=scale,
            out=state.out,
            lse=state.lse,
            window=window or 0,
            carry=True,
            num_threads=self._num_threads,
        )

    def paged_step(
        self, pool: Tensor, slots: Tensor, table: AttentionMetadata, heads: int, scale: float, window: int | None
    ) -> PagedStep | None:
        """What attends in each layer of a step of so few rows that the way there counts; None if there are more.

        pool: [layers, blocks, 2, kv_heads, block_size, head_dim], each block contiguous; slots: int64 [rows], where the
        new K/V go, none of them -1; heads: of the queries.
        """
        if len(slots) > MAX_STEP_ROWS:
            return None
        return PagedStep(pool, slots, table, heads, scale, window, self._num_threads or torch.get_num_threads())


class PagedStep:
    """Attention of a few rows in any layer: one call where store, state, attention and output take six."""

    def __init__(
        self,
        pool: Tensor,
        slots: Tensor,
        table: AttentionMetadata,
        heads: int,
        scale: float,
        window: int | None,
        num_threads: int,
    ) -> None:
        layers, blocks, _, kv_heads, block_size, head_dim = pool.shape
        self._pool, self._rows = pool, len(slots)
        self._shapes = ((self._rows, heads, head_dim), (self._rows, kv_heads, head_dim))
        self._step = _cpu_attention.PagedStep(
            isa=cpu_isa.choose(),
            dtype=cpu_isa.KERNEL_DTYPES[pool.dtype],
            pool=pool.data_ptr(),
            layer_stride=pool.stride(0) * pool.element_size(),
            block_stride=pool.stride(1) * pool.element_size(),
            layers=layers,
            pool_blocks=blocks,
            slots=slots.data_ptr(),
            tokens=self._rows,
            blocks=table.blocks.data_ptr(),
            block_count=table.blocks.numel(),
            sequences=table.rows.data_ptr(),
            sequence_count=table.rows.shape[0],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            window=window or 0,
            scale=scale,
            threads=num_threads,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [rows, kv_heads, head_dim], attend, and return the output [rows, heads, head_dim] in q's
        memory.

        All three are contiguous and of the pool's dtype.
        """
        if (q.shape, k.shape, v.shape) != (self._shapes[0], self._shapes[1], self._shapes[1]) or not (
            q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and q.dtype == k.dtype == self._pool.dtype
        ):
            raise ValueError(f"q, k and v must be contiguous of shapes {self._shapes} and {self._pool.dtype}.")
        self._step.attend(layer, q.data_ptr(), k.data_ptr(), v.data_ptr())
        return q
