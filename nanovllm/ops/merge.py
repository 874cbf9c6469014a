"""Merging attention over disjoint sets of keys into attention over their union."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.triton_support import use_triton

MAX_PARTS = 8  # of one launch of `triton_segments.merge_segments_`


def merge_attention_outputs_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge (other_out, other_lse) into (out, lse), in place.

    out: fp32 [tokens, heads, head_dim], lse: fp32 [heads, tokens]; other_out may have any floating dtype.
    With m = max of the two LSEs: out = sum(exp(lse_i - m) * out_i) / sum(exp(lse_i - m)), lse = m + log(sum).
    A side with LSE -inf has seen no keys and has weight 0; with both sides empty the result is empty (0, -inf).
    A side with LSE +inf outweighs any finite one.
    """
    if use_triton(out):
        from nanovllm.ops.triton_merge import merge_parts_triton

        merge_parts_triton(out, lse, out, lse, other_out.unsqueeze(0), other_lse.unsqueeze(0))
    else:
        merge_attention_outputs_torch_(out, lse, other_out, other_lse)


def merge_attention_outputs_torch_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """`merge_attention_outputs_` in plain torch: an operator, and on a GPU a launch, for every line of the formula."""
    top = torch.maximum(lse, other_lse)
    # inf - inf is NaN where it should be 0: the side that sets the maximum weighs exp(0).
    weight = torch.exp(torch.where(lse == top, 0.0, lse - top))
    other_weight = torch.exp(torch.where(other_lse == top, 0.0, other_lse - top))
    total = weight + other_weight
    out.mul_((weight / total).T.unsqueeze(-1))
    out.addcmul_(other_out.to(out.dtype), (other_weight / total).T.unsqueeze(-1))
    lse.copy_(top + torch.log(total))


def merge_attention_outputs(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys as one: (output in o1's dtype, LSE fp32), both new.

    o1, o2: [tokens, heads, head_dim], any floating dtype; lse1, lse2: natural log, fp32 [heads, tokens], -inf where no
    key was seen. Computed in fp32 and rounded once; on a GPU with Triton it is one launch. Raises ValueError for shapes
    that do not match. The attention backends and CPU attention merge in place, with `merge_attention_outputs_`, which
    has the formula and the edge cases: an output that is merged many times stays in fp32, so that the error does not
    grow with their number.
    """
    if not o1.shape == o2.shape or not lse1.shape == lse2.shape == (o1.shape[1], o1.shape[0]):
        raise ValueError(
            f"outputs must be [tokens, heads, head_dim] and LSEs [heads, tokens], alike on both sides; got outputs "
            f"{tuple(o1.shape)} and {tuple(o2.shape)}, LSEs {tuple(lse1.shape)} and {tuple(lse2.shape)}"
        )
    if use_triton(o1):
        from nanovllm.ops.triton_merge import merge_parts_triton

        out = torch.empty_like(o1)
        lse = torch.empty_like(lse1)
        merge_parts_triton(out, lse, o1, lse1, o2.unsqueeze(0), lse2.unsqueeze(0))
        return out, lse
    out = o1.to(torch.float32, copy=True)
    lse = lse1.clone()
    merge_attention_outputs_(out, lse, o2, lse2)
    return out.to(o1.dtype), lse
