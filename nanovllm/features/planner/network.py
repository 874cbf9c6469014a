"""The bytes and operations of a decoder, from its config alone. A multiply-add counts as two operations."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.layers.sharding import all_reduce_bytes
from nanovllm.memory.layout import KVLayout, kv_layout
from nanovllm.models.spec import ITEMSIZES, DecoderSpec


@dataclass(frozen=True, slots=True)
class Network:
    """A decoder in the dtype that it runs in, one of DTYPE_NAMES."""

    spec: DecoderSpec
    dtype: str
    kv_cache_dtype: str = "auto"  # as the engine's argument

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of an element of K and V unless they are stored in 8 bits."""
        return ITEMSIZES[self.dtype]

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks, of which this network is one's part."""
        return 1 if self.spec.sharding is None else self.spec.sharding.num_ranks

    def layout(self, block_size: int) -> KVLayout:
        return kv_layout(self.spec, self.kv_cache_dtype, self.itemsize).with_block_size(block_size)

    @property
    def weight_bytes(self) -> int:
        """All weights on the device. Tied embeddings count once."""
        return self.spec.weight_bytes(self.itemsize)

    @property
    def state_bytes(self) -> int:
        """The states of one sequence in all recurrent layers."""
        return self.spec.state_bytes(self.itemsize)

    # ---- a step of one sequence: `query_len` new tokens after `context_len` stored ones

    def matrix_operations(self, tokens: int) -> int:
        """Projections and MLPs of all layers."""
        return 2 * self.spec.multiplied_weights * tokens

    @property
    def num_all_reduces(self) -> int:
        """Sums over the ranks in a step: after the embedding, and after attention and MLP of every layer.

        Experts beside an MLP have a sum of their own. Where q and k are normalized over all heads, also of their
        squares.
        """
        beside = self.spec.experts is not None and self.spec.experts.beside_mlp
        return 0 if self.num_ranks == 1 else (2 + beside) * self.spec.num_layers + 1 + self._sums_of_squares

    @property
    def _sums_of_squares(self) -> int:
        return self.spec.num_layers if self.spec.joint_qk_norm else 0

    def all_reduce_bytes(self, tokens: int) -> int:
        """Bytes that a rank receives in a step for all sums."""
        if self.num_ranks == 1:
            return 0
        squares = self._sums_of_squares * all_reduce_bytes(tokens * 2 * ITEMSIZES["float32"], self.num_ranks)
        hidden = all_reduce_bytes(tokens * self.spec.hidden_size * self.itemsize, self.num_ranks)
        return (self.num_all_reduces - self._sums_of_squares) * hidden + squares

    @property
    def _kv_groups(self) -> list[tuple[int | None, KVLayout]]:
        """The window of each KV group, and the layout of its layers."""
        layout = self.layout(1)
        return [(group.window, of_group) for group, of_group in zip(layout.groups, layout.of_groups, strict=True)]

    def attention_operations(self, context_len: int, query_len: int) -> int:
        """Two products over head_dim for every query head and visible key: position p sees min(p + 1, window) keys."""
        return (
            4
            * self.spec.num_heads
            * sum(
                layout.head_dim * layout.num_readers * _keys(context_len, query_len, window)
                for window, layout in self._kv_groups
            )
        )

    def attended_bytes(self, context_len: int, query_len: int) -> int:
        """Bytes of K and V that the new rows see, each counted once per layer."""
        total = context_len + query_len
        return sum(
            layout.num_readers * layout.token_layer_bytes * min(total, (window or total) + query_len - 1)
            for window, layout in self._kv_groups
        )


def _keys(context_len: int, query_len: int, window: int | None) -> int:
    """Sum of min(p + 1, window) over positions p of [context_len, context_len + query_len)."""
    end = context_len + query_len
    full = max(context_len, min(end, window or end))  # positions below it see all earlier positions
    return (full * (full + 1) - context_len * (context_len + 1)) // 2 + (end - full) * (window or 0)
