"""The bytes and operations of a step of one sequence. A multiply-add counts as two operations."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.data.network import ITEMSIZES, Network
from nanovllm.layers.parallel import all_reduce_bytes
from nanovllm.memory.layout import KVLayout


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step of one sequence: `query_len` new tokens after `context_len` stored ones."""

    network: Network  # of several ranks one's part
    layout: KVLayout

    def matrix_operations(self, tokens: int) -> int:
        """Projections and MLPs of all layers."""
        return 2 * self.network.multiplied_weights * tokens

    @property
    def num_all_reduces(self) -> int:
        """Sums over the ranks in a step: after the embedding, and in every layer."""
        network = self.network
        return 0 if network.num_ranks == 1 else self._sums_of_rows + network.sums_of_squares

    @property
    def _sums_of_rows(self) -> int:
        return self.network.sums_per_layer * self.network.num_layers + 1

    def all_reduce_bytes(self, tokens: int) -> int:
        """Bytes that a rank receives in a step for all sums."""
        network = self.network
        ranks = network.num_ranks
        if ranks == 1:
            return 0
        squares = network.sums_of_squares * all_reduce_bytes(tokens * 2 * ITEMSIZES["float32"], ranks)
        return self._sums_of_rows * all_reduce_bytes(tokens * network.hidden_size * network.itemsize, ranks) + squares

    @property
    def _kv_groups(self) -> list[tuple[int | None, KVLayout]]:
        """The window of each KV group, and the layout of its layers."""
        groups = zip(self.layout.groups, self.layout.of_groups, strict=True)
        return [(group.window, of_group) for group, of_group in groups]

    def attention_operations(self, context_len: int, query_len: int) -> int:
        """Two products over head_dim for every query head and visible key: position p sees min(p + 1, window) keys."""
        return (
            4
            * self.network.num_heads
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
