"""The LSE merge in Triton: any number of partial results into a first one, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 16
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_shares(lse, other_lse):  # type: ignore[no-untyped-def]
    """The shares of two states in their merge, and its LSE, of any shape. `merge_attention_outputs` has the formula.

    The side with the larger LSE weighs exp(0), which is 1, so that one exponential is enough. A step of Newton's method
    makes up for the reciprocal's error. Correctly rounded divisions and the library's logarithm have branches, around
    which a compiler moves no load: in a loop over blocks each would wait for its own.
    """
    # inf - inf is NaN where it should be 0.
    smaller = tl.exp(tl.where(lse == other_lse, 0.0, -tl.abs(lse - other_lse)))
    total = 1.0 + smaller  # from 1 to 2
    inverse = 1.0 / total
    of_larger = tl.fma(inverse, tl.fma(-total, inverse, 1.0), inverse)
    of_smaller = smaller * of_larger
    share = tl.where(lse >= other_lse, of_larger, of_smaller)
    other_share = tl.where(other_lse >= lse, of_larger, of_smaller)
    return share, other_share, tl.maximum(lse, other_lse) + tl.log(total)


@triton.jit
def merge_rows(out, lse, other, other_lse):  # type: ignore[no-untyped-def]
    """Merged (out [rows, width], lse [rows]) of two states.

    A compiler may fuse the sum with either product, in a loop otherwise than without one: here it has no choice.
    """
    share, other_share, lse = merge_shares(lse, other_lse)
    return tl.fma(other, tl.broadcast_to(other_share[:, None], other.shape), out * share[:, None]), lse


# What grows with the batch: specialised on, a new number of tokens would compile anew in the middle of a request.
@triton.jit(
    do_not_specialize=[
        "num_parts", "tokens", "lse_head_stride", "first_lse_head_stride", "part_lse_stride", "part_lse_head_stride"
    ],
    do_not_specialize_on_alignment=["lse_ptr", "first_lse_ptr", "part_lses_ptr"],
)  # fmt: skip
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    first_ptr,
    first_lse_ptr,
    parts_ptr,
    part_lses_ptr,
    num_parts,
    tokens,
    head_dim,
    out_token_stride,
    out_head_stride,
    lse_head_stride,
    lse_token_stride,
    first_token_stride,
    first_head_stride,
    first_lse_head_stride,
    first_lse_token_stride,
    part_stride,
    part_token_stride,
    part_head_stride,
    part_lse_stride,
    part_lse_head_stride,
    part_lse_token_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (token tile, head)."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    row_mask = token < tokens
    mask = row_mask[:, None] & (column < head_dim)[None, :]
    first = first_ptr + head * first_head_stride + token[:, None] * first_token_stride + column[None, :]
    first_lse = first_lse_ptr + head * first_lse_head_stride + token * first_lse_token_stride
    parts = parts_ptr + head * part_head_stride + token[:, None] * part_token_stride + column[None, :]
    part_lses = part_lses_ptr + head * part_lse_head_stride + token * part_lse_token_stride
    out = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(first_lse, mask=row_mask, other=0.0)
    for _ in range(num_parts):
        part = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
        part_lse = tl.load(part_lses, mask=row_mask, other=0.0)
        out, lse = merge_rows(out, lse, part, part_lse)
        parts += part_stride
        part_lses += part_lse_stride
    out_at = out_ptr + head * out_head_stride + token[:, None] * out_token_stride + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head * lse_head_stride + token * lse_token_stride, lse, mask=row_mask)


def merge_parts_triton(
    out: Tensor, lse: Tensor, first: Tensor, first_lse: Tensor, parts: Tensor, part_lses: Tensor
) -> None:
    """Write the merge of (first, first_lse) and the parts, in their order, to (out, lse), which may be the first.

    out, first: [tokens, heads, head_dim]; parts: [n, tokens, heads, head_dim]; lse, first_lse: fp32 [heads, tokens];
    part_lses: fp32 [n, heads, tokens]. Outputs may have any floating dtype, and everything may be strided as long as
    head_dim is contiguous. Computed in fp32; into an fp32 output, n parts give the bits of n calls with one part each.
    """
    tokens, heads, head_dim = out.shape
    if out.numel() == 0:
        return
    assert out.stride(2) == first.stride(2) == parts.stride(3) == 1, "head_dim must be contiguous"
    grid = (triton.cdiv(tokens, TOKENS_PER_PROGRAM), heads)
    _merge_kernel[grid](
        out, lse, first, first_lse, parts, part_lses, parts.shape[0], tokens, head_dim, *out.stride()[:2],
        *lse.stride(), *first.stride()[:2], *first_lse.stride(), *parts.stride()[:3], *part_lses.stride(),
        BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_D=triton.next_power_of_2(head_dim), enable_fp_fusion=True,
    )  # fmt: skip
