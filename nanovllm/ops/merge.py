"""Merging attention over disjoint sets of keys into attention over their union."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.triton_support import use_triton

MAX_PARTS = 8  # of one launch of `triton_segments.merge_segments_`


def merge_states_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
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
        merge_states_torch_(out, lse, other_out, other_lse)


def merge_states_torch_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """`merge_states_` in plain torch: an operator, and on a GPU a launch, for every line of the formula."""
    top = torch.maximum(lse, other_lse)
    # inf - inf is NaN where it should be 0: the side that sets the maximum weighs exp(0).
    weight = torch.exp(torch.where(lse == top, 0.0, lse - top))
    other_weight = torch.exp(torch.where(other_lse == top, 0.0, other_lse - top))
    total = weight + other_weight
    out.mul_((weight / total).T.unsqueeze(-1))
    out.addcmul_(other_out.to(out.dtype), (other_weight / total).T.unsqueeze(-1))
    lse.copy_(top + torch.log(total))
