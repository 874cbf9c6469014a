"""The CPU arm in a plan: what it takes of a lone sequence's host blocks, by the engine's own arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nanovllm.kvcache.budget import CpuAttentionUse, predict_transfers
from nanovllm.kvcache.decode_shares import Bandwidths, best_share, layer_seconds
from nanovllm.kvcache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class CpuAttentionModel:
    """`weight_bytes`: of a layer; `most_tokens`: see `decode_shares.cpu_attention_query_len`."""

    rates: Bandwidths
    weight_bytes: int
    most_tokens: int

    def use(self, layout: KVLayout, resident_blocks: int, context_len: int, window: int | None) -> CpuAttentionUse:
        """The share that makes a layer with `context_len` stored tokens shortest, in whole blocks.

        A layer's time is convex in the arm's blocks, so the best count is next to the best share of all bytes, or none.
        """
        one = replace(layout, num_layers=1)
        host = predict_transfers(one, resident_blocks, context_len, 1, window).h2d_bytes
        seen = 0 if window is None else max(0, context_len - window + 1) // one.block_size * one.block_size
        resident = max(0, min(context_len, resident_blocks * one.block_size) - seen) * one.token_bytes
        whole = host // one.block_bytes
        if not whole:
            return CpuAttentionUse(0.0, self.most_tokens)

        def seconds(blocks: int) -> float:
            cpu_attention = blocks * one.block_bytes
            return layer_seconds(
                host - cpu_attention, cpu_attention, resident + host - cpu_attention, self.weight_bytes, self.rates
            )

        best = best_share(host, resident, self.weight_bytes, self.rates) * host / one.block_bytes
        blocks = min((0, min(whole, math.floor(best)), min(whole, math.ceil(best))), key=seconds)
        return CpuAttentionUse(blocks / whole, self.most_tokens)
