"""Everything that tells one dense decoder from another, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.layers.rope_spec import RopeSpec

DTYPE_NAMES = ("float32", "float16", "bfloat16")


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
    sliding_windows: tuple[int | None, ...]  # per layer: keys seen, the query's own among them; None: all
    max_position_embeddings: int
    dtype: str  # of the checkpoint, one of DTYPE_NAMES

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer that every token is multiplied by: q, k, v, o, gate, up and down."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)

    @property
    def layer_weights(self) -> int:
        """Weights of one layer with its norms, as they lie in memory, and biases."""
        norms = 2 * self.hidden_size + self.qk_norm * (self.num_heads + self.num_kv_heads) * self.head_dim
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return self.layer_matrices + norms + biases

    @property
    def num_weights(self) -> int:
        """All weights; tied embeddings once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_weights + tables + self.hidden_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the checkpoint's positions are made for, in tokens.

        linear and dynamic: `factor` times max_position_embeddings, which Transformers documents as the
        length that the factor enables. yarn: `factor` times the trained length, as Qwen's model cards have
        it, unless max_position_embeddings says more. default and llama3: max_position_embeddings.
        """
        trained = self.max_position_embeddings
        if self.rope.kind in ("linear", "dynamic"):
            return max(trained, int(trained * self.rope.factor))
        if self.rope.kind == "yarn":
            return max(trained, int(self.rope.original_max_position * self.rope.factor))
        return trained
