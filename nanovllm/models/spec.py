"""Everything that distinguishes one dense decoder from another, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from nanovllm.layers.rope_spec import RopeSpec
from nanovllm.models.sharding import Sharding, shard

ITEMSIZES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})  # bytes of a weight
DTYPE_NAMES = tuple(ITEMSIZES)
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names in a checkpoint

NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A dense decoder-only network. Sizes count elements; heads are per layer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm: bool  # RMS norm over each head of q and k, before RoPE
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]  # per layer: keys that a query sees, its own included; None: all
    max_position_embeddings: int
    dtype: str  # of the checkpoint, one of DTYPE_NAMES
    sharding: Sharding | None = None  # of a tensor-parallel rank, whose heads and inner features the sizes count

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def of_rank(self, rank: int, num_ranks: int) -> DecoderSpec:
        """The decoder that one of `num_ranks` tensor-parallel ranks computes: its heads, inner features, vocabulary.

        Raises ConfigError if there are too few heads for all ranks.
        """
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size, self.vocab_size)
        sharding = shard(*sizes, rank, num_ranks)
        return replace(
            self,
            num_heads=len(sharding.heads),
            num_kv_heads=len(sharding.kv_heads),
            intermediate_size=len(sharding.intermediate),
            sharding=sharding,
        )

    @property
    def most_kv_heads(self) -> int:
        """KV heads of the rank that has most of them, whose KV cache is the largest."""
        return self.num_kv_heads if self.sharding is None else self.sharding.most_kv_heads

    @property
    def vocab_rows(self) -> int:
        """Tokens whose rows of the embedding and of the output projection are held; `vocab_size` is the whole."""
        return self.vocab_size if self.sharding is None else len(self.sharding.vocab)

    @property
    def adds_biases(self) -> bool:
        """Whether o and down add their biases: of the ranks whose products are summed, the first one does."""
        return self.sharding is None or self.sharding.rank == 0

    @property
    def layer_matrices(self) -> int:
        """Number of weights in the matrices of one layer: q, k, v, o, gate, up and down."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)

    @property
    def layer_weights(self) -> int:
        """Number of weights of one layer in memory, where every head has its own row of the q and k norms."""
        norm_rows = self.num_heads + self.num_kv_heads
        copies = self.qk_norm * (norm_rows - 2) * self.head_dim
        return sum(math.prod(shape) for _, shape in self._layer_shapes("")) + copies

    @property
    def num_weights(self) -> int:
        """Number of all weights in memory. Tied embeddings count once."""
        tables = self.vocab_rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_weights + tables + self.hidden_size

    def tensor_shapes(self) -> NamedShapes:
        """Name and shape of every checkpoint tensor, known before anything is allocated.

        `Decoder.slots` gives the same names. The output projection appears only if it is not tied.
        """
        yield EMBEDDING, (self.vocab_size, self.hidden_size)
        if not self.tie_word_embeddings:
            yield LM_HEAD, (self.vocab_size, self.hidden_size)
        for index in range(self.num_layers):
            yield from self._layer_shapes(f"model.layers.{index}.")
        yield "model.norm.weight", (self.hidden_size,)

    def _layer_shapes(self, prefix: str) -> NamedShapes:
        hidden, inner = self.hidden_size, self.intermediate_size
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", self.q_size, hidden, self.qkv_bias),
            ("self_attn.k_proj", self.kv_size, hidden, self.qkv_bias),
            ("self_attn.v_proj", self.kv_size, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, self.q_size, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
        if self.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (self.head_dim,)

    @property
    def yarn_positions(self) -> int | None:
        """The trained length in tokens, which YaRN would extend; None if the model has another RoPE scaling."""
        if self.rope.kind == "yarn":
            return self.rope.original_max_position
        return self.max_position_embeddings if self.rope.kind == "default" else None

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the checkpoint's positions support.

        linear and dynamic RoPE: `factor` times max_position_embeddings, as Transformers documents `factor`. yarn:
        `factor` times the trained length, as in Qwen's model cards, or max_position_embeddings if that is more.
        default and llama3: max_position_embeddings.
        """
        trained = self.max_position_embeddings
        if self.rope.kind in ("linear", "dynamic"):
            return max(trained, int(trained * self.rope.factor))
        if self.rope.kind == "yarn":
            return max(trained, int(self.rope.original_max_position * self.rope.factor))
        return trained
