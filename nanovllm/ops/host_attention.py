"""CPU attention of a step as tasks of C++: prepared before the step, run by any thread, without Python and the GIL.

Beside a GPU such a task runs on a thread of CUDA's, which holds locks of CUDA's meanwhile. Another thread may wait for
those locks while it has the GIL; a task that waited for the GIL would then never end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.ops import _cpu_attention, cpu_isa
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.cpu_attention import supports_head_dim

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

Meter = _cpu_attention.Meter


class HostAttention:
    """Attention of the same queries over the same blocks in any layer of a step, from an empty state.

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
        block contiguous, of which a layer's lies at an offset. All memory stays where it is until the tasks have run.

        read_bytes: of KV, that a task reads. Raises ValueError for a head size that the kernel does not take, or tables
        that reach outside of q.
        """
        if not supports_head_dim(q.shape[2]):
            raise ValueError(f"head_dim must be a positive multiple of 16, got {q.shape[2]}.")
        block_bytes = pool.stride(0) * pool.element_size()
        # C++ copies the tables; `addresses` keeps them until then.
        addresses = [(pool.data_ptr() + table.blocks * block_bytes, table.rows) for table in tables]
        self._prepared = _cpu_attention.HostAttention(
            isa=cpu_isa.choose(),
            dtype=_DTYPES[q.dtype],
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
        """Attention over the blocks `layer_offset` bytes behind those of `pool`."""
        return self._prepared.task(layer_offset)


def empty_task() -> _cpu_attention.HostTask:
    """A task that does nothing: to measure what launching one takes."""
    q, pool = torch.zeros(0, 1, 16), torch.zeros(1, 2, 1, 1, 16)
    attention = HostAttention(
        q, pool, [], AttentionState.empty(q), 1.0, None, num_threads=1, read_bytes=0, meter=Meter()
    )
    return attention.task(0)
