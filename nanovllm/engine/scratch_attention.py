"""Attention for a profiling run: what the backend does for a batch without history, over memory that means nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.forward_context import ForwardContext
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, KVMetadata


class ScratchKVCache:
    """A KV cache of one block, which stands for every block of one sequence of max_num_batched_tokens tokens."""

    def __init__(self, model: Decoder, backend: AttentionBackend, config: EngineConfig) -> None:
        spec, tokens, block_size = model.spec, config.max_num_batched_tokens, config.block_size
        self._backend = backend
        self._scale = spec.head_dim**-0.5
        self._windows = spec.sliding_windows
        shape = (1, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._pool = torch.zeros(shape, dtype=model.dtype, device=model.device)
        blocks = [0] * -(-tokens // block_size)
        self._table = AttentionMetadata([KVMetadata(0, tokens, 0, 0, tokens, blocks)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`; k and v are not stored."""
        state = AttentionState.empty(q)
        self._backend.attend(q, self._pool, self._table, state, self._scale, self._windows[layer])
        return state.output(q)
