"""What the layers of one forward pass share, besides the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.state_rows import part_sizes, parts_of_states

Heads = tuple[Tensor, Tensor, Tensor]  # q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]


def row_parts(size: int | list[int], *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors cut into parts of at most `size` rows, or of so many; a single part holds the tensors themselves."""
    if len(size) <= 1 if isinstance(size, list) else tensors[0].shape[0] <= size:
        return iter((tensors,))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


class LayerInputs:
    """The inputs of a pass, and what layers with the same sizes use after each other: angles, and memory for heads."""

    def __init__(self, x: Tensor, ctx: ForwardContext, chunk_rows: int, *, is_recurrent: bool) -> None:
        """x: the residual stream [tokens, hidden]; chunk_rows: the rows that row-wise work takes at a time."""
        self.ctx = ctx
        self.own: Tensor | None = None  # [tokens, layers, width]: what each layer reads alone, if they do
        self._x = x
        self.parts = [len(rows) for (rows,) in row_parts(chunk_rows, x)]
        if is_recurrent and not ctx.adapters:  # which come in parts of their own
            self.parts = part_sizes(ctx, chunk_rows)
        self.state_parts = parts_of_states(ctx, self.parts) if is_recurrent else ()
        self._angles: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}
        self._scales: dict[RotaryEmbedding, Tensor | None] = {}
        self._heads: dict[tuple[int, int, int, int | None], Heads] = {}

    def angles(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin of the tokens; see `RotaryEmbedding.cos_sin`."""
        if rope not in self._angles:
            self._angles[rope] = rope.cos_sin(self.ctx.positions)
        return self._angles[rope]

    def query_scale(self, rope: RotaryEmbedding) -> Tensor | None:
        """See `RotaryEmbedding.query_scale`."""
        if rope not in self._scales:
            self._scales[rope] = rope.query_scale(self.ctx.positions, self._x.dtype)
        return self._scales[rope]

    def heads(self, heads: int, kv_heads: int, head_dim: int, owner: int | None = None) -> Heads:
        """Memory for q, k and v. owner: of a layer whose k and v later layers read, so that no other writes there."""
        sizes = (heads, kv_heads, head_dim, owner)
        if sizes not in self._heads:
            tokens = self._x.shape[0]
            k, v = self._x.new_empty(2, tokens, kv_heads, head_dim)
            self._heads[sizes] = self._x.new_empty(tokens, heads, head_dim), k, v
        return self._heads[sizes]
