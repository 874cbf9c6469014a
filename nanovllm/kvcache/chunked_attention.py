"""Attention over a long context in chunks: what each chunk gives, merged into attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops.merge import merge_states_
from nanovllm.ops.triton_support import use_triton


def merge_attention_outputs(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys as one: (output in o1's dtype, LSE fp32), both new.

    o1, o2: [tokens, heads, head_dim], any floating dtype; lse1, lse2: natural log, fp32 [heads, tokens], -inf where no
    key was seen. Computed in fp32 and rounded once; the running output of many merges is best kept in fp32, so that the
    error does not grow with their number. Formula and edges are those of `ops.merge.merge_states_`. On a GPU with
    Triton it is one launch. Raises ValueError for shapes that do not fit each other.
    """
    if not o1.shape == o2.shape or not lse1.shape == lse2.shape == (o1.shape[1], o1.shape[0]):
        raise ValueError(
            f"outputs must be [tokens, heads, head_dim] and LSEs [heads, tokens], alike on both sides; got outputs "
            f"{tuple(o1.shape)} and {tuple(o2.shape)}, LSEs {tuple(lse1.shape)} and {tuple(lse2.shape)}"
        )
    if use_triton(o1):
        from nanovllm.ops.triton_merge import merge_parts_triton

        out, lse = torch.empty_like(o1), torch.empty_like(lse1)
        merge_parts_triton(out, lse, o1, lse1, o2.unsqueeze(0), lse2.unsqueeze(0))
        return out, lse
    out, lse = o1.to(torch.float32, copy=True), lse1.clone()
    merge_states_(out, lse, o2, lse2)
    return out.to(o1.dtype), lse
