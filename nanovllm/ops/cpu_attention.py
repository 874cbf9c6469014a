"""Attention on the CPU in C++ over KV blocks where they are: exact, resumable and bit-reproducible.

A KV block is a contiguous buffer `[2, kv_heads, block_size, head_dim]`, keys before values, given by its address; in 8
bits its rows end with a scale (`ops.kv_quantization`), and the kernel multiplies the elements themselves.
Calls that continue from each other's (out, LSE) give the same bits as one call over all blocks. The bits depend on the
instruction set and the block size, but not on block addresses, chunking, the number of threads or the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.ops import _cpu_attention
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES, choose, dtype_name
from nanovllm.ops.kv_quantization import head_dim_of

Meter = _cpu_attention.Meter

MAX_STEP_ROWS = 24  # of `PagedStep`: with more rows the overhead of Python is negligible
_HEAD_DIM_MULTIPLE = 16
_SEQUENCE_FIELDS = 7


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_dim > 0 and head_dim % _HEAD_DIM_MULTIPLE == 0


def _work(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """What attention of queries over KV of these dtypes is in `kernel_choice.WORKS`; fp8 KV widens to the queries'."""
    return f"attention.{'int8' if kv_dtype == torch.int8 else KERNEL_DTYPES[dtype]}"


def attend_batch(
    q: Tensor,
    blocks: Tensor,
    rows: Tensor,
    *,
    kv_heads: int,
    block_size: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    carry: bool = False,
    kv_dtype: torch.dtype | None = None,
    isa: str | None = None,
    num_threads: int | None = None,
) -> None:
    """Attend the rows of many sequences, each over its own blocks, in one call.

    q: [tokens, heads, head_dim] bf16, fp16 or fp32; head_dim a multiple of 16.
    kv_dtype: of the blocks: int8 or float8_e4m3fn; None is q's.
    blocks: int64 [n], addresses of KV blocks of all sequences, which must stay alive.
    rows: int64 [sequences, 7], as `AttentionMetadata.rows`.
    out: fp32 [tokens, heads, head_dim]; lse: fp32 [heads, tokens], natural log. Rows of no sequence are not written;
    no two sequences share a row.
    window: keys in (p - window, p] are visible to position p; 0 means all up to p. The mask is causal.
    carry: (out, lse) hold the state over earlier blocks of the same rows and are updated in place; otherwise they are
    overwritten. A row that sees no key keeps its state, or gets output 0 and LSE -inf.
    q, out and lse may be strided as long as head_dim is contiguous. The GIL is released.

    Raises ValueError for arguments that do not fit each other.
    """
    misfit = _misfit(q, blocks, rows, out, lse)
    if misfit is not None:
        raise ValueError(misfit)
    threads, heads = torch.get_num_threads() if num_threads is None else num_threads, q.shape[1]
    if kv_heads < 1 or heads == 0 or heads % kv_heads:
        raise ValueError(f"The number of heads must be a positive multiple of kv_heads, got {heads} and {kv_heads}.")
    if block_size < 1 or window < 0:
        raise ValueError(f"block_size must be positive and window not negative, got {block_size} and {window}.")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}.")
    if threads < 1:
        raise ValueError(f"num_threads must be positive, got {threads}.")
    _cpu_attention.attend(
        isa=choose(isa, _work(q.dtype, kv_dtype or q.dtype)),
        dtype=KERNEL_DTYPES[q.dtype],
        kv_dtype=dtype_name(kv_dtype or q.dtype),
        q=q.data_ptr(),
        q_strides=(q.stride(0), q.stride(1)),
        out=out.data_ptr(),
        out_strides=(out.stride(0), out.stride(1)),
        lse=lse.data_ptr(),
        lse_strides=(lse.stride(1), lse.stride(0)),
        blocks=blocks.data_ptr(),
        block_count=blocks.numel(),
        sequences=rows.data_ptr(),
        sequence_count=rows.shape[0],
        tokens=q.shape[0],
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=q.shape[2],
        block_size=block_size,
        window=window,
        scale=scale,
        carry=carry,
        threads=threads,
    )


def _misfit(q: Tensor, blocks: Tensor, rows: Tensor, out: Tensor, lse: Tensor) -> str | None:
    """The error message for tensors that do not fit `attend_batch`, or None."""
    if q.dim() != 3 or q.dtype not in KERNEL_DTYPES:
        return f"q must be [tokens, heads, head_dim] in bfloat16, float16 or float32, got {q.dtype} {tuple(q.shape)}."
    if out.shape != q.shape or out.dtype != torch.float32:
        return f"out must be float32 {tuple(q.shape)} like q, got {out.dtype} {tuple(out.shape)}."
    if lse.shape != (q.shape[1], q.shape[0]) or lse.dtype != torch.float32:
        return f"lse must be float32 {(q.shape[1], q.shape[0])}, got {lse.dtype} {tuple(lse.shape)}."
    if {q.device.type, out.device.type, lse.device.type} != {"cpu"}:
        return f"q, out and lse must be on the CPU, got {q.device}, {out.device} and {lse.device}."
    if q.numel() > 0 and (q.stride(2) != 1 or out.stride(2) != 1):
        return f"head_dim must be contiguous, got strides {q.stride()} of q and {out.stride()} of out."
    if q.shape[2] == 0 or q.shape[2] % _HEAD_DIM_MULTIPLE:
        return f"head_dim must be a positive multiple of {_HEAD_DIM_MULTIPLE}, got {q.shape[2]}; pad the heads."
    for name, table, dims in (("blocks", blocks, 1), ("rows", rows, 2)):
        if table.dtype != torch.int64 or table.dim() != dims or not table.is_contiguous() or not table.is_cpu:
            return (
                f"{name} must be a contiguous int64 CPU tensor of {dims} dimension(s), "
                f"got {table.dtype} {tuple(table.shape)} on {table.device}."
            )
    if rows.shape[1] != _SEQUENCE_FIELDS:
        return f"rows must be [sequences, {_SEQUENCE_FIELDS}], got {tuple(rows.shape)}; use AttentionMetadata.rows."
    return None


class NativeAttention:
    """The attention backend of the CPU: block ids become addresses of `attend_batch`."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self.name = "native CPU attention"

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        attend_batch(
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
            kv_dtype=pool.dtype,
            num_threads=self.num_threads,
        )


class PagedStep:
    """`NativeAttention` for up to MAX_STEP_ROWS rows: one call per layer for store, state, attention and output."""

    def __init__(
        self,
        pool: Tensor,
        slots: Tensor,
        table: AttentionMetadata,
        dtype: torch.dtype,
        heads: int,
        scale: float,
        window: int | None,
        num_threads: int | None = None,
    ) -> None:
        """pool: [layers, blocks, 2, kv_heads, block_size, head_dim], each block contiguous; slots: int64 [rows], the
        slot mapping of the new K/V without -1; dtype: of the queries; heads: query heads. Raises ValueError for slots
        and blocks outside the pool, and for metadata of other rows.
        """
        layers, blocks, _, kv_heads, block_size, _ = pool.shape
        head_dim = head_dim_of(pool)
        self._pool, self._rows, self._dtype = pool, len(slots), dtype
        self._shapes = ((self._rows, heads, head_dim), (self._rows, kv_heads, head_dim))
        self._step = _cpu_attention.PagedStep(
            isa=choose(None, _work(dtype, pool.dtype)),
            dtype=KERNEL_DTYPES[dtype],
            kv_dtype=dtype_name(pool.dtype),
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
            threads=num_threads or torch.get_num_threads(),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [rows, kv_heads, head_dim], attend, and write the output into q [rows, heads, head_dim].

        All three must be contiguous and of the queries' dtype.
        """
        shapes = (self._shapes[0], self._shapes[1], self._shapes[1])
        dense = all(x.is_contiguous() and x.dtype == self._dtype for x in (q, k, v))
        if (q.shape, k.shape, v.shape) != shapes or not dense:
            raise ValueError(f"q, k and v must be contiguous of shapes {self._shapes} and {self._dtype}.")
        self._step.attend(layer, q.data_ptr(), k.data_ptr(), v.data_ptr())
        return q


class HostAttention:
    """Attention of queries over the same block ids in each layer of a step, from an empty state, as C++ tasks.

    The bits are those of `NativeAttention.attend`, table by table, into an empty state. Tasks are prepared before the
    step and run on any thread without Python. With a GPU, that is a thread of the CUDA driver, which holds locks during
    the task: another thread may hold the GIL and wait for these locks, and would deadlock with a task that waited for
    the GIL.
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
        """q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each
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
            isa=choose(None, _work(q.dtype, pool.dtype)),
            dtype=KERNEL_DTYPES[q.dtype],
            kv_dtype=dtype_name(pool.dtype),
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
