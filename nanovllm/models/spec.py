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
