"""Attention by its definition in fp64, for checks and tests. Needs quadratic memory."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    query_position: int,
    first_position: int = 0,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output fp64 [tokens, heads, head_dim] and natural-log LSE fp64 [heads, tokens].

    q: [tokens, heads, head_dim] at positions query_position, +1, ...; k, v: [keys, kv_heads, head_dim] at positions
    first_position, +1, ... Row i sees the keys at positions up to its own, with `window` only the last `window` of
    those.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    query_positions = torch.arange(q.shape[0], device=q.device).unsqueeze(1) + query_position
    key_positions = torch.arange(k.shape[0], device=q.device).unsqueeze(0) + first_position
    hidden = key_positions > query_positions
    if window is not None:
        hidden |= key_positions <= query_positions - window
    scores.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # a row without keys: -inf minus -inf
    return torch.einsum("hts,shd->thd", weights, values), lse
