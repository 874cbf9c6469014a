"""CPU attention of a step as C++ tasks: prepared before the step, run on any thread without Python and the GIL.

With a GPU, a task runs on a thread of the CUDA driver, which holds locks during the task. Another thread may hold the
GIL and wait for these locks, so that a task that waited for the GIL would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.ops import _cpu_attention, cpu_isa
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.cpu_attention import supports_head_dim

Meter = _cpu_attention.Meter


class HostAttention:
    """Attention of queries over the same block ids in each layer of a step, from an empty state.

    The bits are those of `NativeAttention.attend`, table by table, into an empty state.
    """

    def __init__(
        self,
        q: Tensor,
        pool: Tensor,
        tables: Sequence[AttentionMetadata],
        state: AttentionState,
        scale: float,
        window: int | None,
        *,
        num_threads: int,
        read_bytes: int,
        meter: Meter,
    ) -> None:
        """q: [tokens, heads, head_dim] in the dtype of pool; pool: [blocks, 2, kv_heads, block_size, head_dim], each
        block contiguous; each layer has an offset in it. All memory must stay valid until the tasks have run.

        read_bytes: KV bytes that a task reads. Raises ValueError for an unsupported head size, and for metadata outside
        of q.
        """
        if not supports_head_dim(q.shape[2]):
            raise ValueError(f"head_dim must be a positive multiple of 16, got {q.shape[2]}.")
        block_bytes = pool.stride(0) * pool.element_size()
        # C++ copies the tables; `addresses` keeps them until then.
        addresses = [(pool.data_ptr() + table.blocks * block_bytes, table.rows) for table in tables]
        self._prepared = _cpu_attention.HostAttention(
            isa=cpu_isa.choose(),
            dtype=cpu_isa.KERNEL_DTYPES[q.dtype],
            q=q.data_ptr(),
            q_strides=(q.stride(0), q.stride(1)),
            out=state.out.data_ptr(),
            out_strides=(state.out.stride(0), state.out.stride(1)),
            lse=state.lse.data_ptr(),
            lse_strides=(state.lse.stride(1), state.lse.stride(0)),
            calls=[(b.data_ptr(), b.numel(), rows.data_ptr(), rows.shape[0]) for b, rows in addresses],
            tokens=q.shape[0],
            heads=q.shape[1],
            kv_heads=pool.shape[2],
            head_dim=q.shape[2],
            block_size=pool.shape[3],
            window=window or 0,
            scale=scale,
            threads=num_threads,
            read_bytes=read_bytes,
            meter=meter,
        )

    def task(self, layer_offset: int) -> _cpu_attention.HostTask:
        """Attention over the blocks `layer_offset` bytes after those of `pool`."""
        return self._prepared.task(layer_offset)


def empty_task() -> _cpu_attention.HostTask:
    """A task that does nothing, to measure the time of a launch."""
    q, pool = torch.zeros(0, 1, 16), torch.zeros(1, 2, 1, 1, 16)
    attention = HostAttention(
        q, pool, [], AttentionState.empty(q), 1.0, None, num_threads=1, read_bytes=0, meter=Meter()
    )
    return attention.task(0)
