"""What a dense decoder weighs and computes, from its config alone. A multiply-add counts as two operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nanovllm.config import DTYPES
from nanovllm.errors import ConfigError
from nanovllm.kvcache.budget import TransferCount, predict_transfers
from nanovllm.kvcache.layout import KVLayout
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec
from nanovllm.planner.cpu_attention import CpuAttentionModel

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder in the dtype that it runs in, one of DTYPE_NAMES."""

    spec: DecoderSpec
    dtype: str

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str) -> Network:
        """`dtype` as the engine takes it: a name, or "auto" for the checkpoint's."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
        name = spec.dtype if dtype == "auto" else dtype
        assert name in DTYPE_NAMES
        return cls(spec, name)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of an element of K and V."""
        return ITEMSIZES[self.dtype]

    def layout(self, block_size: int) -> KVLayout:
        spec = self.spec
        return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, self.itemsize)

    # ---- weights

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer that every token is multiplied by."""
        return self.spec.layer_matrices

    @property
    def layer_weight_bytes(self) -> int:
        """One layer with its norms and biases."""
        return self.spec.layer_weights * self.itemsize

    @property
    def head_bytes(self) -> int:
        """The output projection, which a step reads once for the rows that sample a token."""
        return self.spec.vocab_size * self.spec.hidden_size * self.itemsize

    @property
    def weight_bytes(self) -> int:
        """All weights as they lie on the device; tied embeddings once."""
        return self.spec.num_weights * self.itemsize

    # ---- a step of one sequence: `query_len` new tokens after `context_len` stored ones

    def matrix_operations(self, tokens: int) -> int:
        """Projections and MLPs of all layers."""
        return 2 * self.layer_matrices * self.spec.num_layers * tokens

    def visible_keys(self, context_len: int, query_len: int) -> int:
        """Keys that the new rows see, summed over rows and layers: position p sees min(p + 1, window) of them."""
        return sum(_keys(context_len, query_len, window) for window in self.spec.sliding_windows)

    def attention_operations(self, context_len: int, query_len: int) -> int:
        """Two products over head_dim for every query head and visible key."""
        return 4 * self.spec.q_size * self.visible_keys(context_len, query_len)

    def attended_bytes(self, context_len: int, query_len: int) -> int:
        """K and V that the new rows see, each counted once per layer."""
        total = context_len + query_len
        tokens = sum(min(total, (window or total) + query_len - 1) for window in self.spec.sliding_windows)
        return tokens * 2 * self.spec.kv_size * self.itemsize

    def transfers(
        self,
        block_size: int,
        resident_blocks: int,
        context_len: int,
        query_len: int,
        cpu_attention: CpuAttentionModel | None = None,
    ) -> TransferCount:
        """`predict_transfers`, each layer with its own window, and with the share of the arm that it makes best."""
        total = TransferCount()
        for window, num_layers in Counter(self.spec.sliding_windows).items():
            layout = KVLayout(num_layers, self.spec.num_kv_heads, self.spec.head_dim, block_size, self.itemsize)
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
    full = max(context_len, min(end, window or end))  # positions below it see everything before them
    return (full * (full + 1) - context_len * (context_len + 1)) // 2 + (end - full) * (window or 0)
