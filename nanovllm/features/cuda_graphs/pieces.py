"""A decode step in pieces between attention calls, over memory at fixed addresses, so that graphs can record them.

Piece 0 computes the first layer's q, k and v from the token ids. Piece i computes the q, k and v of layer i from the
attention output of layer i - 1, which is in the memory of its queries. The last piece ends with the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nanovllm.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The tensors that the pieces of a step exchange, with one row per sequence."""

    x: Tensor  # [rows, hidden]: the residual stream, and at the end the hidden states after the final norm
    cos: Tensor  # [rows, rotary embeddings, head_dim], each as of `RotaryEmbedding.cos_sin`
    sin: Tensor  # [rows, rotary embeddings, head_dim / 2]
    q: Tensor  # [rows, heads, head_dim]: the queries of a layer, then its attention output
    k: Tensor  # [rows, kv_heads, head_dim]
    v: Tensor

    @classmethod
    def of(cls, model: Decoder, rows: int) -> StepMemory:
        """Memory for at most `rows` rows, filled with zeros, so that padded rows never compute on arbitrary content."""
        spec, head_dim = model.spec, model.spec.head_dim

        def zeros(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=model.device)

        return cls(
            x=zeros(spec.hidden_size),
            cos=zeros(len(spec.ropes), head_dim, dtype=torch.float32),
            sin=zeros(len(spec.ropes), head_dim // 2, dtype=torch.float32),
            q=zeros(spec.num_heads, head_dim),
            k=zeros(spec.num_kv_heads, head_dim),
            v=zeros(spec.num_kv_heads, head_dim),
        )

    def first(self, rows: int) -> StepMemory:
        """The first rows of the same memory."""
        return StepMemory(*(getattr(self, field.name)[:rows] for field in fields(self)))


def run_piece(model: Decoder, index: int, step: StepMemory, inputs: Tensor) -> None:
    """Run one of `num_layers + 1` pieces. inputs: int64 [3, rows], token ids, positions and RoPE lengths."""
    if index == 0:
        token_ids, positions, rope_lengths = inputs
        step.x.copy_(model.embed(token_ids))
        for rope, rotary in enumerate(model.rotaries):
            cos, sin = rotary.cos_sin(positions, rope_lengths)
            step.cos[:, rope : rope + 1].copy_(cos)
            step.sin[:, rope : rope + 1].copy_(sin)
    else:
        model.layers[index - 1].finish_(step.x, step.q.flatten(1))
    if index < model.spec.num_layers:
        layer = model.layers[index]
        cos, sin = (angles[:, layer.rope : layer.rope + 1] for angles in (step.cos, step.sin))
        layer.project(step.x, cos, sin, step.q, step.k, step.v)
    else:
        model.normalize_(step.x)
