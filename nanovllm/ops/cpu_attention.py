"""Attention on the CPU over KV blocks that may lie anywhere in memory: exact, resumable, and the same to the bit.

One KV block is one contiguous buffer `[2, kv_heads, block_size, head_dim]`, keys before values, and is given by
its address. Calls that carry on from each other's (out, LSE) give the same bits as one call over all blocks;
neither the place of the blocks, the chunking of the query rows, the number of threads nor the rest of the batch
changes any. Another instruction set or block size does, within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from nanovllm.ops import _cpu_attention, cpu_isa

_DTYPES = cpu_isa.KERNEL_DTYPES
_HEAD_DIM_MULTIPLE = 16
_SEQUENCE_FIELDS = 7


@dataclass(frozen=True, slots=True)
class KVSpan:
    """The query rows of one sequence in a flat batch, and the consecutive blocks that they attend in this call.

    Row `query_start + t` stands at position `query_position + t` and attends keys at positions up to its own. Blocks
    `[block_start, block_start + block_count)` of the call's list hold the keys from `first_position` on; of those, keys
    at positions >= `kv_end` are not written and are not looked at.
    """

    query_start: int
    query_len: int
    block_start: int
    block_count: int
    first_position: int
    kv_end: int
    query_position: int


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_dim > 0 and head_dim % _HEAD_DIM_MULTIPLE == 0


def block_addresses(blocks: Iterable[Tensor]) -> Tensor:
    """int64 [blocks]: the addresses of contiguous CPU block tensors. The caller keeps the tensors alive."""
    blocks = list(blocks)
    for block in blocks:
        if not block.is_contiguous() or block.device.type != "cpu":
            raise ValueError(
                f"A KV block must be contiguous in CPU memory, got shape {tuple(block.shape)} with strides "
                f"{block.stride()} on {block.device}; pass pool[i], not a view across blocks."
            )
    return torch.tensor([block.data_ptr() for block in blocks], dtype=torch.int64)


def metadata_rows(rows: Sequence[KVSpan]) -> Tensor:
    """int64 [sequences, 7]: the spans as `attend_batch` takes them; build it once for all layers of a step."""
    return torch.tensor([astuple(row) for row in rows], dtype=torch.int64).reshape(-1, _SEQUENCE_FIELDS)


def attend(
    q: Tensor,
    blocks: Tensor | Sequence[Tensor],
    *,
    kv_heads: int,
    block_size: int,
    first_position: int,
    kv_end: int,
    query_position: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    carry: bool = False,
    isa: str | None = None,
    num_threads: int | None = None,
) -> None:
    """Attend the rows of one sequence over consecutive blocks; `attend_batch` with a single span.

    q: [tokens, heads, head_dim] in the dtype of the blocks; out: fp32 of the same shape; lse: fp32 [heads, tokens].
    Row t stands at position `query_position + t`. The other arguments are those of `attend_batch` and `KVSpan`.
    """
    addresses = blocks if isinstance(blocks, Tensor) else block_addresses(blocks)
    row = KVSpan(0, q.shape[0], 0, addresses.numel(), first_position, kv_end, query_position)
    attend_batch(
        q, addresses, metadata_rows([row]), kv_heads=kv_heads, block_size=block_size, scale=scale, out=out, lse=lse,
        window=window, carry=carry, isa=isa, num_threads=num_threads,
    )  # fmt: skip


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
    isa: str | None = None,
    num_threads: int | None = None,
) -> None:
    """Attend the rows of many sequences, each over its own blocks, in one call.

    q: [tokens, heads, head_dim] bf16, fp16 or fp32, the dtype of the blocks; head_dim a multiple of 16.
    blocks: int64 [n], addresses of KV blocks of all sequences, which must stay alive; spans: `metadata_rows(...)`.
    out: fp32 [tokens, heads, head_dim]; lse: fp32 [heads, tokens], natural log. Rows of no span are left alone;
    no two spans share a row.
    window: keys in (p - window, p] are visible to position p; 0 means all up to p. The mask is causal.
    carry: (out, lse) hold the state over earlier blocks of the same rows and are updated in place; otherwise they are
    overwritten. A row that sees no key keeps its state, or gets output 0 and LSE -inf.
    q, out and lse may be strided as long as head_dim is contiguous. The GIL is released.

    Raises ValueError for arguments that do not fit each other.
    """
    _check_tensors(q, out, lse)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    _check_sizes(q, kv_heads, block_size, scale, window, threads)
    _check_tables(blocks, rows)
    _cpu_attention.attend(
        isa=cpu_isa.choose(isa),
        dtype=_DTYPES[q.dtype],
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


def _check_tensors(q: Tensor, out: Tensor, lse: Tensor) -> None:
    if q.dim() != 3 or q.dtype not in _DTYPES:
        raise ValueError(
            f"q must be [tokens, heads, head_dim] in bfloat16, float16 or float32, got {q.dtype} {tuple(q.shape)}."
        )
    if out.shape != q.shape or out.dtype != torch.float32:
        raise ValueError(f"out must be float32 {tuple(q.shape)} like q, got {out.dtype} {tuple(out.shape)}.")
    if lse.shape != (q.shape[1], q.shape[0]) or lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32 {(q.shape[1], q.shape[0])}, got {lse.dtype} {tuple(lse.shape)}.")
    if {q.device.type, out.device.type, lse.device.type} != {"cpu"}:
        raise ValueError(f"q, out and lse must be on the CPU, got {q.device}, {out.device} and {lse.device}.")
    if q.numel() > 0 and (q.stride(2) != 1 or out.stride(2) != 1):
        raise ValueError(f"head_dim must be contiguous, got strides {q.stride()} of q and {out.stride()} of out.")


def _check_sizes(q: Tensor, kv_heads: int, block_size: int, scale: float, window: int, threads: int) -> None:
    _, heads, head_dim = q.shape
    if not supports_head_dim(head_dim):
        raise ValueError(
            f"head_dim must be a positive multiple of {_HEAD_DIM_MULTIPLE}, got {head_dim}; pad the heads."
        )
    if kv_heads < 1 or heads == 0 or heads % kv_heads:
        raise ValueError(f"The number of heads must be a positive multiple of kv_heads, got {heads} and {kv_heads}.")
    if block_size < 1 or window < 0:
        raise ValueError(f"block_size must be positive and window not negative, got {block_size} and {window}.")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be positive and finite, got {scale}.")
    if threads < 1:
        raise ValueError(f"num_threads must be positive, got {threads}.")


def _check_tables(blocks: Tensor, rows: Tensor) -> None:
    for name, table, dims in (("blocks", blocks, 1), ("spans", rows, 2)):
        if table.dtype != torch.int64 or table.dim() != dims or not table.is_contiguous() or not table.is_cpu:
            raise ValueError(
                f"{name} must be a contiguous int64 CPU tensor of {dims} dimension(s), "
                f"got {table.dtype} {tuple(table.shape)} on {table.device}."
            )
    if rows.shape[1] != _SEQUENCE_FIELDS:
        raise ValueError(
            f"spans must be [sequences, {_SEQUENCE_FIELDS}], got {tuple(rows.shape)}; use metadata_rows()."
        )
