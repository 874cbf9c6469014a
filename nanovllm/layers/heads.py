"""From the merged q/k/v projection to the tensors that attention takes."""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.norm import rms_norm
from nanovllm.layers.rotary import rotate
from nanovllm.ops import cpu_rows
from nanovllm.ops.triton_support import use_triton


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Write q, k and v of some tokens: q and k normalised where there is a weight, and turned to their positions.

    heads: [tokens, num_heads + 2 * num_kv_heads, head_dim], q before k before v; weight: [num_heads + num_kv_heads,
    head_dim]; cos, sin: `RotaryEmbedding.cos_sin` of the tokens; q: [tokens, num_heads, head_dim]; k, v: [tokens,
    num_kv_heads, head_dim].
    """
    if use_triton(heads):
        from nanovllm.ops.triton_rows import place_heads_triton

        place_heads_triton(heads, weight, eps, cos, sin, q, k, v)
        return
    if cpu_rows.takes(heads, 3):
        cpu_rows.place_heads(heads, weight, eps, cos, sin, q, k, v)
        return
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    to_rotate, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if weight is not None:
        to_rotate = rms_norm(to_rotate, weight, eps)
    rotated = rotate(to_rotate, cos, sin)
    q.copy_(rotated[:, :num_heads])
    k.copy_(rotated[:, num_heads:])
    v.copy_(values)
