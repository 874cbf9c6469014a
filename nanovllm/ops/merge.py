"""Merging attention over disjoint sets of keys into attention over their union."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.triton_support import use_triton

MAX_PARTS = 8  # of one launch of `triton_segments.merge_segments_`


def merge_attention_outputs(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> None:
    """Merge attention over some keys, (o2, lse2), into attention over others, (o1, lse1), in place.

    o1: fp32 [tokens, heads, head_dim]; o2: the same shape in any floating dtype; lse1, lse2: fp32 [heads, tokens],
    natural log. With m = max(lse1, lse2): o = sum(exp(lse_i - m) * o_i) / sum(exp(lse_i - m)), lse = m + log(sum).
    A side with LSE -inf has seen no keys and has weight 0. If both sides are empty, so is the result (0, -inf).
    A side with LSE +inf outweighs any finite one. On a GPU with Triton this is one launch.
    """
    if use_triton(o1):
        from nanovllm.ops.triton_merge import merge_parts_triton

        merge_parts_triton(o1, lse1, o1, lse1, o2.unsqueeze(0), lse2.unsqueeze(0))
    else:
        merge_attention_outputs_torch(o1, lse1, o2, lse2)


def merge_attention_outputs_torch(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> None:
    """`merge_attention_outputs` in torch: an operator, and on a GPU a launch, for every step of the formula."""
    top = torch.maximum(lse1, lse2)
    # inf - inf is NaN where it should be 0: the side that sets the maximum weighs exp(0).
    weight1 = torch.exp(torch.where(lse1 == top, 0.0, lse1 - top))
    weight2 = torch.exp(torch.where(lse2 == top, 0.0, lse2 - top))
    total = weight1 + weight2
    o1.mul_((weight1 / total).T.unsqueeze(-1))
    o1.addcmul_(o2.to(o1.dtype), (weight2 / total).T.unsqueeze(-1))
    lse1.copy_(top + torch.log(total))
