"""K and V gathered from blocks into memory of another shape, and the merge of several parts, in Triton.

Blocks in 8 bits are widened on the way: once for all query rows, not again in every tile of a kernel's inner loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kv_quantization import head_dim_of
from nanovllm.ops.merge import MAX_PARTS
from nanovllm.ops.triton_kv import as_bytes, load_scales, scales_of, stored_format, widen_elements
from nanovllm.ops.triton_merge import merge_rows

TILE_ROWS = 64  # of a program of the gather
MERGED_ROWS = 16  # of a program of the merge


@triton.jit(do_not_specialize_on_alignment=["entries_ptr"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    pool_ptr,
    scales_ptr,
    entries_ptr,
    out_ptr,
    heads,
    repeats,
    head_dim,
    row_size,
    block_stride,
    kv_stride,
    kv_head_stride,
    out_kv_stride,
    out_head_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Program (tile of tokens, K or V of an output head, entry)."""
    if FORMAT:
        row_size = row_size // 4 * 4  # the same, but now the compiler knows that it can load four elements at once
    entry = entries_ptr + tl.program_id(2) * 3
    tokens = tl.load(entry + 2)
    if tl.program_id(0) * BLOCK_T >= tokens:
        return
    is_value = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    held = token < tokens
    mask = held[:, None] & (column < head_dim)[None, :]
    start = tl.load(entry).to(tl.int64) * block_stride + is_value * kv_stride + head // repeats * kv_head_stride
    x = tl.load(pool_ptr + start + token[:, None] * row_size + column[None, :], mask=mask, other=0)
    if FORMAT:
        scales = load_scales(scales_ptr + (start + token * row_size + head_dim) // 4, held, tl.float32, FORMAT)
        x = widen_elements(x, tl.float32, FORMAT) * scales[:, None]
    out = out_ptr + tl.load(entry + 1).to(tl.int64) * head_dim + is_value * out_kv_stride + head * out_head_stride
    tl.store(out + token[:, None] * head_dim + column[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def gather_(pool: Tensor, entries: Tensor, out: Tensor) -> None:
    """Copy tokens of blocks into `out`, in its dtype; 8-bit rows times their scale, each element rounded once.

    pool: [blocks, 2, kv_heads, block_size, row], each block contiguous; out: contiguous
    [blocks, 2, heads, tokens of a block, head_dim], with a whole number of heads for each KV head. entries: int32
    [n, 3]: block of the pool, the row of `out` `[rows, head_dim]` where its first key goes, its number of tokens.
    """
    heads = out.shape[2]
    head_dim = head_dim_of(pool)
    if not len(entries):
        return
    _gather_kernel[(triton.cdiv(pool.shape[3], TILE_ROWS), 2 * heads, len(entries))](
        as_bytes(pool), scales_of(pool), entries, out, heads, heads // pool.shape[2], head_dim, pool.shape[4],
        *pool.stride()[:3], *out.stride()[1:3], BLOCK_T=TILE_ROWS, BLOCK_D=triton.next_power_of_2(head_dim),
        FORMAT=stored_format(pool.dtype), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _merge_part(out, lse, part_ptr, lse_ptr, at, lse_at, mask, row_mask):  # type: ignore[no-untyped-def]
    part = tl.load(part_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return merge_rows(out, lse, part, tl.load(lse_ptr + lse_at, mask=row_mask, other=0.0))


# Strides that grow with the batch would compile the kernel anew in the middle of a request.
@triton.jit(
    do_not_specialize=["tokens", "lse_head_stride", "part_lse_head_stride"],
    do_not_specialize_on_alignment=["lse_ptr", "l0", "l1", "l2", "l3", "l4", "l5", "l6", "l7"],
)
def _merge_segments_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, p0, p1, p2, p3, p4, p5, p6, p7, l0, l1, l2, l3, l4, l5, l6, l7,
    tokens,
    head_dim,
    out_token_stride,
    out_head_stride,
    lse_head_stride,
    part_token_stride,
    part_head_stride,
    part_lse_head_stride,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token tile, head)."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    row_mask = token < tokens
    mask = row_mask[:, None] & (column < head_dim)[None, :]
    out_at = out_ptr + head * out_head_stride + token[:, None] * out_token_stride + column[None, :]
    lse_at = lse_ptr + head * lse_head_stride + token
    at = head * part_head_stride + token[:, None] * part_token_stride + column[None, :]
    part_lse_at = head * part_lse_head_stride + token
    out = tl.load(out_at, mask=mask, other=0.0)
    lse = tl.load(lse_at, mask=row_mask, other=0.0)
    out, lse = _merge_part(out, lse, p0, l0, at, part_lse_at, mask, row_mask)
    if PARTS > 1:
        out, lse = _merge_part(out, lse, p1, l1, at, part_lse_at, mask, row_mask)
    if PARTS > 2:
        out, lse = _merge_part(out, lse, p2, l2, at, part_lse_at, mask, row_mask)
    if PARTS > 3:
        out, lse = _merge_part(out, lse, p3, l3, at, part_lse_at, mask, row_mask)
    if PARTS > 4:
        out, lse = _merge_part(out, lse, p4, l4, at, part_lse_at, mask, row_mask)
    if PARTS > 5:
        out, lse = _merge_part(out, lse, p5, l5, at, part_lse_at, mask, row_mask)
    if PARTS > 6:
        out, lse = _merge_part(out, lse, p6, l6, at, part_lse_at, mask, row_mask)
    if PARTS > 7:
        out, lse = _merge_part(out, lse, p7, l7, at, part_lse_at, mask, row_mask)
    tl.store(out_at, out, mask=mask)
    tl.store(lse_at, lse, mask=row_mask)


def merge_segments_(out: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Merge up to MAX_PARTS parts (output, LSE) into (out, lse), in their order and in place, in one launch.

    out: fp32 [tokens, heads, head_dim]; outputs of parts: the same shape in any floating dtype, all with the same
    strides; LSEs: fp32 [heads, tokens], contiguous along tokens. The bits are those of one merge after the other.
    """
    tokens, heads, head_dim = out.shape
    (first, first_lse) = parts[0]
    outs = [out for out, _ in parts]
    lses = [lse for _, lse in parts]
    assert len({part.stride() for part in outs}) == len({part.stride() for part in lses}) == 1, "parts must be alike"
    assert out.stride(2) == first.stride(2) == lse.stride(1) == first_lse.stride(1) == 1, "rows must be contiguous"
    unused = MAX_PARTS - len(parts)
    width = triton.next_power_of_2(head_dim)
    _merge_segments_kernel[(triton.cdiv(tokens, MERGED_ROWS), heads)](
        out, lse, *outs, *[first] * unused, *lses, *[first_lse] * unused, tokens, head_dim, *out.stride()[:2],
        lse.stride(0), *first.stride()[:2], first_lse.stride(0), PARTS=len(parts), BLOCK_T=MERGED_ROWS, BLOCK_D=width,
        num_warps=8 if width > 128 else 4, enable_fp_fusion=True,
    )  # fmt: skip
