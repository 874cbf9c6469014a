"""Attention on the CPU in C++, over KV blocks in place: exact, resumable and bit-reproducible.

A KV block is a contiguous buffer `[2, kv_heads, block_size, head_dim]`, keys before values, given by its address.
The rows of an 8-bit block end with a scale (`ops.kv_quantization`).
Calls that continue from each other's (out, LSE) give the same bits as one call over all blocks. The bits depend on the
instruction set and the block size, but not on block addresses, chunking, the number of threads or the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels
from nanovllm.ops.attention import AttentionMetadata, AttentionState
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES, choose, dtype_name, misfit
from nanovllm.ops.kv_quantization import head_dim_of

MAX_STEP_ROWS = 24  # of `PagedStep`: with more rows the overhead of Python is negligible
_HEAD_DIM_MULTIPLE = 16
_SEQUENCE_FIELDS = 7


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_dim > 0 and head_dim % _HEAD_DIM_MULTIPLE == 0


def _kernel_of(dtype: torch.dtype, kv_dtype: torch.dtype, isa: str | None = None) -> dict[str, Any]:
    """The kernel for queries over KV of these dtypes; fp8 KV widens to the queries' dtype."""
    work = f"attention.{'int8' if kv_dtype == torch.int8 else KERNEL_DTYPES[dtype]}"
    return {"isa": choose(isa, work), "dtype": KERNEL_DTYPES[dtype], "kv_dtype": dtype_name(kv_dtype)}


def _rows_of(q: Tensor, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """Queries and their state as the kernel takes them. Raises ValueError for tensors that do not fit each other."""
    fits = q.dim() == 3 and q.dtype in KERNEL_DTYPES and supports_head_dim(q.shape[2]) and out.shape == q.shape
    fits = fits and lse.shape == (q.shape[1], q.shape[0]) and out.dtype == lse.dtype == torch.float32
    fits = fits and q.is_cpu and out.is_cpu and lse.is_cpu and (not q.numel() or q.stride(2) == out.stride(2) == 1)
    if not fits:
        rule = (
            f"attention takes q [tokens, heads, head_dim] in bfloat16, float16 or float32, head_dim a multiple of"
            f" {_HEAD_DIM_MULTIPLE} and dense, float32 out like q, and float32 lse [heads, tokens], all on the CPU"
        )
        raise misfit(rule, q=q, out=out, lse=lse)
    return {
        "q": q.data_ptr(), "q_strides": (q.stride(0), q.stride(1)),
        "out": out.data_ptr(), "out_strides": (out.stride(0), out.stride(1)),
        "lse": lse.data_ptr(), "lse_strides": (lse.stride(1), lse.stride(0)),
        "tokens": q.shape[0], "heads": q.shape[1], "head_dim": q.shape[2],
    }  # fmt: skip


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
    kv_dtype: of the blocks, int8 or float8_e4m3fn. None means that of q.
    blocks: int64 [n], addresses of KV blocks of all sequences, which must stay alive.
    rows: int64 [sequences, 7], as `AttentionMetadata.rows`.
    out: fp32 [tokens, heads, head_dim]; lse: fp32 [heads, tokens], natural log. Rows of no sequence are not written;
    no two sequences share a row.
    window: keys in (p - window, p] are visible to position p; 0 means all up to p. The mask is causal.
    carry: (out, lse) hold the state over earlier blocks of the same rows and are updated in place, so that a row that
    sees no key keeps its state. Otherwise they are overwritten, and a row that sees no key gets output 0 and LSE -inf.
    q, out and lse may be strided as long as head_dim is contiguous. The GIL is released.

    Raises ValueError for arguments that do not fit each other.
    """
    arguments = _rows_of(q, out, lse)
    for name, table, shape in (("blocks", blocks, blocks.shape[:1]), ("rows", rows, (len(rows), _SEQUENCE_FIELDS))):
        if table.dtype != torch.int64 or table.shape != shape or not (table.is_contiguous() and table.is_cpu):
            raise misfit("blocks [n] and rows [sequences, 7] are contiguous and int64, on the CPU", **{name: table})
    threads = torch.get_num_threads() if num_threads is None else num_threads
    heads = q.shape[1]
    numbers_fit = min(kv_heads, block_size, threads, heads) > 0 and heads % kv_heads == 0 and window >= 0
    if not (numbers_fit and math.isfinite(scale) and scale > 0):
        raise ValueError(
            "heads must be a multiple of kv_heads, and all numbers positive, the window not negative; got"
            f" {heads=}, {kv_heads=}, {block_size=}, {window=}, {scale=}, num_threads={threads}"
        )
    _cpu_kernels.attend(
        **arguments, **_kernel_of(q.dtype, kv_dtype or q.dtype, isa), blocks=blocks.data_ptr(),
        block_count=len(blocks), sequences=rows.data_ptr(), sequence_count=len(rows), kv_heads=kv_heads,
        block_size=block_size, window=window, scale=scale, carry=carry, threads=threads,
    )  # fmt: skip


class NativeAttention:
    """The attention backend of the CPU: block ids become addresses of `attend_batch`."""

    name = "native CPU attention"

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        addresses = pool.data_ptr() + table.blocks * (pool.stride(0) * pool.element_size())
        attend_batch(
            q, addresses, table.rows, kv_heads=pool.shape[2], block_size=pool.shape[3], scale=scale, out=state.out,
            lse=state.lse, window=window or 0, carry=True, kv_dtype=pool.dtype, num_threads=self.num_threads,
        )  # fmt: skip


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
        _, blocks, _, kv_heads, block_size, _ = pool.shape
        head_dim = head_dim_of(pool)
        self._pool = pool
        self._dtype = dtype
        self._shapes = ((len(slots), heads, head_dim), (len(slots), kv_heads, head_dim))
        self._step = _cpu_kernels.PagedStep(
            **_kernel_of(dtype, pool.dtype), pool=pool.data_ptr(), layer_stride=pool.stride(0) * pool.element_size(),
            block_stride=pool.stride(1) * pool.element_size(), pool_blocks=blocks,
            slots=slots.data_ptr(), tokens=len(slots), blocks=table.blocks.data_ptr(), block_count=len(table.blocks),
            sequences=table.rows.data_ptr(), sequence_count=len(table.rows), heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, block_size=block_size, window=window or 0, scale=scale,
            threads=num_threads or torch.get_num_threads(),
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Store k and v [rows, kv_heads, head_dim], attend, and write the output into q [rows, heads, head_dim].

        All three must be contiguous and of the queries' dtype. sinks: fp32 [heads], see `AttentionState.empty`.
        """
        shapes = (self._shapes[0], self._shapes[1], self._shapes[1])
        dense = all(x.is_contiguous() and x.dtype == self._dtype for x in (q, k, v))
        if (q.shape, k.shape, v.shape) != shapes or not dense:
            raise ValueError(f"q, k and v must be contiguous of shapes {self._shapes} and {self._dtype}.")
        if sinks is not None and (sinks.shape, sinks.dtype) != (self._shapes[0][1:2], torch.float32):
            raise misfit(f"sinks are float32 {list(self._shapes[0][1:2])}", sinks=sinks)
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        self._step.attend(layer, q.data_ptr(), k.data_ptr(), v.data_ptr(), sinks_at)
        return q


class HostAttention:
    """Attention of queries over the same block ids in each layer of a step, from an empty state, as C++ tasks.

    The bits are those of `NativeAttention.attend`, table by table, into an empty state. Tasks are prepared before the
    step and run on any thread without Python. With a GPU, a thread of the CUDA driver runs them and holds locks
    meanwhile. Another thread may hold the GIL and wait for these locks: a task that waited for the GIL would deadlock.
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
    ) -> None:
        """q: [tokens, heads, head_dim]; pool: [blocks, 2, kv_heads, block_size, head_dim], each
        block contiguous; each layer has an offset in it. All memory must stay valid until the tasks have run.

        Raises ValueError for an unsupported head size, and for metadata outside of q.
        """
        block_bytes = pool.stride(0) * pool.element_size()
        # C++ copies the tables; `addresses` keeps them until then.
        addresses = [(pool.data_ptr() + table.blocks * block_bytes, table.rows) for table in tables]
        self._prepared = _cpu_kernels.HostAttention(
            **_rows_of(q, state.out, state.lse), **_kernel_of(q.dtype, pool.dtype),
            calls=[(b.data_ptr(), len(b), rows.data_ptr(), len(rows)) for b, rows in addresses],
            kv_heads=pool.shape[2], block_size=pool.shape[3], window=window or 0, scale=scale, threads=num_threads,
        )  # fmt: skip

    def task(self, layer_offset: int) -> _cpu_kernels.HostTask:
        """Attention over the blocks `layer_offset` bytes after those of `pool`."""
        return self._prepared.task(layer_offset)


def empty_task() -> _cpu_kernels.HostTask:
    """A task that does nothing, to measure the time of a launch."""
    q = torch.zeros(0, 1, 16)
    pool = torch.zeros(1, 2, 1, 1, 16)
    return HostAttention(q, pool, [], AttentionState.empty(q), 1.0, None, num_threads=1).task(0)
