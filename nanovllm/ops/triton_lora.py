"""Low-rank products of LoRA adapters in Triton: all adapters of a batch in two launches.

The matrices of all adapters are in one tensor, their memory. A table on the device says for each slot of the memory and
each part of a linear layer (q, k and v, for example) where A and B are. Rows are sorted by slot. The first launch
multiplies with A (shrink), the second with B and adds to y (expand). Tiles are the same for any number of rows, so that
the bits of a row do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.triton_decode import dot_precision
from nanovllm.ops.triton_groups import group_of_tile, most_tiles

A_OFFSET, RANK, B_OFFSET, FIRST_COLUMN, END_COLUMN = range(5)  # of a part in the table
FIELDS = 5
# of a tile
ROWS = 32
COLUMNS = 64
MOST_RANKS = 64  # of a tile
SPLITS = 4  # parts of the inputs that programs of their own multiply with A, so that few rows use the bandwidth
FEATURES_PER_SPLIT = 256  # at least


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "ends_ptr"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    low_ptr,
    x_ptr,
    memory_ptr,
    table_ptr,
    rows_ptr,
    ends_ptr,
    num_slots,
    entries,
    in_features,
    x_stride,
    low_columns,
    slot_fields,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of ranks and split, tile of rows, part): x A^T over one split of the inputs.

    ALIGNED: A begins at a multiple of 16 elements.
    """
    slot, begin, end = group_of_tile(ends_ptr, num_slots, tl.program_id(1), SLOTS, BLOCK_M)
    if slot >= num_slots:
        return
    split = tl.program_id(0) % SPLITS
    part = tl.program_id(2)
    fields = table_ptr + slot * slot_fields + part * 5
    rank = tl.load(fields + 1).to(tl.int32)
    first_rank = tl.program_id(0) // SPLITS * BLOCK_R
    if first_rank >= rank:
        return
    entry = begin + tl.arange(0, BLOCK_M)
    has_entry = entry < end
    row = tl.load(rows_ptr + entry, mask=has_entry, other=0)
    r = first_rank + tl.arange(0, BLOCK_R)
    a_offset = tl.load(fields)
    if ALIGNED:
        a_offset = tl.multiple_of(a_offset, 16)
    feature = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * x_stride + feature[None, :]
    a_at = memory_ptr + a_offset + r[None, :] * in_features + feature[:, None]
    steps = tl.cdiv(in_features, BLOCK_K)
    steps_per_split = tl.cdiv(steps, SPLITS)
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(split * steps_per_split, tl.minimum(steps, (split + 1) * steps_per_split)):
        start = step * BLOCK_K
        inside = feature < in_features - start
        x = tl.load(x_at + start, mask=has_entry[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_at + start, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        low = tl.dot(x, a, low, input_precision=PRECISION)
    low_row = (split * tl.num_programs(2) + part) * entries + entry
    low_at = low_ptr + low_row.to(tl.int64)[:, None] * low_columns + r[None, :]
    tl.store(low_at, low, mask=has_entry[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "ends_ptr"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    low_ptr,
    memory_ptr,
    table_ptr,
    rows_ptr,
    ends_ptr,
    num_slots,
    entries,
    y_stride,
    low_columns,
    slot_fields,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of a part's columns, tile of rows, part): y += low B^T, where low is summed over the splits."""
    slot, begin, end = group_of_tile(ends_ptr, num_slots, tl.program_id(1), SLOTS, BLOCK_M)
    if slot >= num_slots:
        return
    part = tl.program_id(2)
    fields = table_ptr + slot * slot_fields + part * 5
    rank = tl.load(fields + 1).to(tl.int32)
    b_offset = tl.load(fields + 2)
    first_column = tl.load(fields + 3).to(tl.int32)
    end_column = tl.load(fields + 4).to(tl.int32)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # of the part
    if (rank == 0) | (tl.program_id(0) * BLOCK_N >= end_column - first_column):
        return
    is_column = column < end_column - first_column
    entry = begin + tl.arange(0, BLOCK_M)
    has_entry = entry < end
    row = tl.load(rows_ptr + entry, mask=has_entry, other=0)
    added = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        is_rank = r < rank
        low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLITS):
            low_row = (split * tl.num_programs(2) + part) * entries + entry
            low_at = low_ptr + low_row.to(tl.int64)[:, None] * low_columns + r[None, :]
            low += tl.load(low_at, mask=has_entry[:, None] & is_rank[None, :], other=0.0)
        b_at = memory_ptr + b_offset + column[None, :] * rank + r[:, None]
        b = tl.load(b_at, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        added = tl.dot(low.to(b.dtype), b, added, input_precision=PRECISION)
    y_at = y_ptr + row[:, None] * y_stride + (first_column + column)[None, :]
    mask = has_entry[:, None] & is_column[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + added
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def add_low_rank_(
    y: Tensor, x: Tensor, memory: Tensor, table: Tensor, rows: Tensor, ends: Tensor, max_rank: int
) -> None:
    """Add B A x to rows of y [rows, out]; x is [rows, in], and the elements of a row are contiguous in both.

    memory: the adapters' matrices, contiguous, in the dtype of x; table: int64 [slots, parts, FIELDS], of each part
    where A [rank, in] begins, the rank, where B [out, rank] begins, and its columns of y; rank 0 if the adapter leaves
    the part as it is. rows: int64 [entries], sorted by slot, no row twice; ends: int64 [slots], where each slot's
    end. x A^T is rounded to the dtype of x, the sum with y once.
    """
    assert x.stride(1) == 1 and y.stride(1) == 1 and table.stride(1) == FIELDS, "rows must be contiguous"
    (slots, parts, _) = table.shape
    entries = len(rows)
    in_features = x.shape[1]
    if not entries:
        return
    ranks = max(16, min(MOST_RANKS, triton.next_power_of_2(max_rank)))
    splits = max(1, min(SPLITS, in_features // FEATURES_PER_SPLIT))
    low = torch.empty(splits, parts, entries, max_rank, dtype=torch.float32, device=x.device)
    tiles = most_tiles(entries, slots, ROWS)
    slots_padded = triton.next_power_of_2(slots)
    precision = dot_precision(x.dtype)
    _shrink_kernel[(splits * triton.cdiv(max_rank, ranks), tiles, parts)](
        low, x, memory, table, rows, ends, slots, entries, in_features, x.stride(0), max_rank, table.stride(0),
        SLOTS=slots_padded, SPLITS=splits, ALIGNED=in_features % 16 == 0, BLOCK_M=ROWS, BLOCK_R=ranks,
        BLOCK_K=32 if x.dtype == torch.float32 else 128, PRECISION=precision,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    _expand_kernel[(triton.cdiv(y.shape[1], COLUMNS), tiles, parts)](
        y, low, memory, table, rows, ends, slots, entries, y.stride(0), max_rank, table.stride(0),
        SLOTS=slots_padded, SPLITS=splits, BLOCK_M=ROWS, BLOCK_N=COLUMNS,
        BLOCK_R=max(16, ranks // 2), PRECISION=precision,  # larger tiles spill registers
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
