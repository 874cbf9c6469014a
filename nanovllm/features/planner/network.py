"""The bytes and operations of a decoder, from its config alone. A multiply-add counts as two operations."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from nanovllm.config import DTYPES, KV_CACHE_DTYPES
from nanovllm.errors import ConfigError
from nanovllm.features.cpu_attention.shares import Bandwidths, best_share, layer_seconds
from nanovllm.layers.sharding import all_reduce_bytes
from nanovllm.memory.budget import CpuAttentionUse, TransferCount, predict_transfers
from nanovllm.memory.layout import KVLayout
from nanovllm.models.spec import DTYPE_NAMES, ITEMSIZES, DecoderSpec


@dataclass(frozen=True, slots=True)
class CpuAttentionModel:
    """Chooses the CPU's share of attention as the engine does.

    weight_bytes: of a layer. most_tokens: see `cpu_attention.shares.cpu_attention_query_len`.
    """

    rates: Bandwidths
    weight_bytes: int
    most_tokens: int

    def use(self, layout: KVLayout, resident_blocks: int, context_len: int, window: int | None) -> CpuAttentionUse:
        """The number of blocks, as a share, that makes a layer with `context_len` stored tokens shortest.

        A layer's time is convex in the number of blocks, so the best number is one of the two next to the best share of
        the bytes, or 0.
        """
        one = replace(layout, num_layers=1)
        host = predict_transfers(one, resident_blocks, context_len, 1, window).h2d_bytes
        seen = 0 if window is None else max(0, context_len - window + 1) // one.block_size * one.block_size
        resident = max(0, min(context_len, resident_blocks * one.block_size) - seen) * one.token_bytes
        num_blocks = host // one.block_bytes
        if not num_blocks:
            return CpuAttentionUse(0.0, self.most_tokens)

        def seconds(blocks: int) -> float:
            cpu_attention = blocks * one.block_bytes
            return layer_seconds(
                host - cpu_attention, cpu_attention, resident + host - cpu_attention, self.weight_bytes, self.rates
            )

        best = best_share(host, resident, self.weight_bytes, self.rates) * host / one.block_bytes
        blocks = min((0, min(num_blocks, math.floor(best)), min(num_blocks, math.ceil(best))), key=seconds)
        return CpuAttentionUse(blocks / num_blocks, self.most_tokens)


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder in the dtype that it runs in, one of DTYPE_NAMES."""

    spec: DecoderSpec
    dtype: str
    kv_cache_dtype: str = "auto"  # as the engine's argument

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str, kv_cache_dtype: str = "auto") -> Network:
        """`dtype` as the engine takes it: a name, or "auto" for the checkpoint's."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
        name = spec.dtype if dtype == "auto" else dtype
        assert name in DTYPE_NAMES
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r}: must be one of {', '.join(KV_CACHE_DTYPES)}")
        return cls(spec, name, kv_cache_dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of an element of K and V unless they are stored in 8 bits."""
        return ITEMSIZES[self.dtype]

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks, of which this network is one's part."""
        return 1 if self.spec.sharding is None else self.spec.sharding.num_ranks

    def layout(self, block_size: int) -> KVLayout:
        spec = self.spec
        return KVLayout.of(
            self.kv_cache_dtype, spec.num_layers, spec.most_kv_heads, spec.head_dim, block_size, self.itemsize
        )

    # ---- weights

    @property
    def layer_weight_bytes(self) -> int:
        """What one row reads of a layer with its norms and biases, the mean of all layers if they differ."""
        return self.layer_bytes_read(1)

    def layer_bytes_read(self, rows: int) -> int:
        """What `rows` rows read of a layer: of experts, those that some row chooses."""
        return self.spec.layer_weight_bytes(self.itemsize, rows)

    @property
    def head_bytes(self) -> int:
        """The output projection, which a step reads once if it samples tokens."""
        return self.spec.head_bytes(self.itemsize)

    @property
    def weight_bytes(self) -> int:
        """All weights on the device. Tied embeddings count once."""
        return self.spec.weight_bytes(self.itemsize)

    # ---- a step of one sequence: `query_len` new tokens after `context_len` stored ones

    def matrix_operations(self, tokens: int) -> int:
        """Projections and MLPs of all layers."""
        return 2 * self.spec.multiplied_weights * tokens

    @property
    def num_all_reduces(self) -> int:
        """Sums over the ranks in a step: after the embedding, and after attention and MLP of every layer."""
        return 0 if self.num_ranks == 1 else 2 * self.spec.num_layers + 1

    def all_reduce_bytes(self, tokens: int) -> int:
        """Bytes that a rank receives in a step for all sums."""
        return self.num_all_reduces * all_reduce_bytes(tokens * self.spec.hidden_size * self.itemsize, self.num_ranks)

    def visible_keys(self, context_len: int, query_len: int) -> int:
        """Keys that the new rows see, summed over rows and layers: position p sees min(p + 1, window) of them."""
        return sum(_keys(context_len, query_len, window) for window in self.spec.sliding_windows)

    def attention_operations(self, context_len: int, query_len: int) -> int:
        """Two products over head_dim for every query head and visible key."""
        return 4 * self.spec.q_size * self.visible_keys(context_len, query_len)

    def attended_bytes(self, context_len: int, query_len: int) -> int:
        """Bytes of K and V that the new rows see, each counted once per layer."""
        total = context_len + query_len
        tokens = sum(min(total, (window or total) + query_len - 1) for window in self.spec.sliding_windows)
        return tokens * self.layout(1).token_layer_bytes

    def transfers(
        self,
        block_size: int,
        resident_blocks: int,
        context_len: int,
        query_len: int,
        cpu_attention: CpuAttentionModel | None = None,
    ) -> TransferCount:
        """`predict_transfers`, with each layer's own window and its best share of CPU attention."""
        total = TransferCount()
        for window, num_layers in Counter(self.spec.sliding_windows).items():
            layout = replace(self.layout(block_size), num_layers=num_layers)
            use = cpu_attention.use(layout, resident_blocks, context_len, window) if cpu_attention is not None else None
            total += predict_transfers(layout, resident_blocks, context_len, query_len, window, use)
        return total

    def num_block_reads(self, block_size: int, resident_blocks: int, context_len: int, query_len: int) -> int:
        """Blocks that pass through the ring, summed over layers: the visible ones on the host and those written."""
        end = -(-(context_len + query_len) // block_size)
        first = (max(0, context_len - (window or end * block_size) + 1) for window in self.spec.sliding_windows)
        return sum(max(0, end - max(resident_blocks, position // block_size)) for position in first)


def _keys(context_len: int, query_len: int, window: int | None) -> int:
    """Sum of min(p + 1, window) over positions p of [context_len, context_len + query_len)."""
    end = context_len + query_len
    full = max(context_len, min(end, window or end))  # positions below it see all earlier positions
    return (full * (full + 1) - context_len * (context_len + 1)) // 2 + (end - full) * (window or 0)
