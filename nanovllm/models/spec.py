"""Everything that distinguishes one dense decoder from another, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from nanovllm.errors import ConfigError
from nanovllm.layers.linear_method import CheckpointTensor, LinearMethod, NamedTensors, dense_tensors
from nanovllm.layers.rope_spec import RopeSpec
from nanovllm.models.sharding import Sharding, shard

ITEMSIZES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})  # bytes of a weight
DTYPE_NAMES = tuple(ITEMSIZES)
EMBEDDING_MODULE, HEAD_MODULE = "model.embed_tokens", "lm_head"  # names in a checkpoint
EMBEDDING, LM_HEAD = f"{EMBEDDING_MODULE}.weight", f"{HEAD_MODULE}.weight"

Matrix = tuple[str, int, int]  # module, output features, input features


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
    quantization: LinearMethod | None = None  # how the matrices are stored; None: as numbers of the dtype
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

        Raises ConfigError if there are too few heads for all ranks, or if the matrices are quantized.
        """
        if self.quantization is not None:
            raise ConfigError(
                f"tensor_parallel_size={num_ranks}: weights in {self.quantization.name} form are not divided among "
                "ranks; take a checkpoint that is not quantized, or tensor_parallel_size=1"
            )
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
        norms = 2 * self.hidden_size + 2 * self.qk_norm * self.head_dim
        biases = sum(rows for _, rows, _, bias in self._projections("") if bias)
        return self.layer_matrices + norms + biases + copies

    @property
    def num_weights(self) -> int:
        """Number of all weights in memory. Tied embeddings count once."""
        tables = self.vocab_rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self.layer_weights + tables + self.hidden_size

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights in memory, where an element of the network's dtype takes `itemsize`."""
        return self.num_weights * itemsize - self._saved_bytes(self.matrices(), itemsize)

    def layer_matrix_bytes(self, itemsize: int) -> int:
        """Bytes of the matrices of one layer in memory, the mean of all layers if they differ."""
        layers = (matrix for index in range(self.num_layers) for matrix in self._layer_matrices(index))
        return self.layer_matrices * itemsize - self._saved_bytes(layers, itemsize) // self.num_layers

    def layer_weight_bytes(self, itemsize: int) -> int:
        """Bytes of one layer in memory with its norms and biases, the mean of all layers if they differ."""
        return self.layer_matrix_bytes(itemsize) + (self.layer_weights - self.layer_matrices) * itemsize

    def head_bytes(self, itemsize: int) -> int:
        """Bytes of the output projection in memory."""
        head = (EMBEDDING_MODULE if self.tie_word_embeddings else HEAD_MODULE, self.vocab_rows, self.hidden_size)
        return self.vocab_rows * self.hidden_size * itemsize - self._saved_bytes([head], itemsize)

    def _saved_bytes(self, matrices: Iterable[Matrix], itemsize: int) -> int:
        """Bytes by which matrices are smaller in memory than in the plain form."""
        if self.quantization is None:
            return 0
        return sum(
            rows * columns * itemsize - self.quantization.weight_bytes(module, rows, columns, itemsize)
            for module, rows, columns in matrices
        )

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix of the network. The output projection appears only if it is not tied."""
        yield EMBEDDING_MODULE, self.vocab_rows, self.hidden_size
        if not self.tie_word_embeddings:
            yield HEAD_MODULE, self.vocab_rows, self.hidden_size
        for index in range(self.num_layers):
            yield from self._layer_matrices(index)

    def tensors(self) -> NamedTensors:
        """Name and form of every checkpoint tensor, known before anything is allocated.

        `Decoder.slots` gives the same names. The output projection appears only if it is not tied.
        """
        for matrix in self.matrices():
            yield from dense_tensors(*matrix) if self.quantization is None else self.quantization.tensors(*matrix)
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}."
            yield f"{prefix}input_layernorm.weight", CheckpointTensor((self.hidden_size,))
            yield f"{prefix}post_attention_layernorm.weight", CheckpointTensor((self.hidden_size,))
            for module, rows, _, bias in self._projections(prefix):
                if bias:
                    yield f"{module}.bias", CheckpointTensor((rows,))
            if self.qk_norm:
                yield f"{prefix}self_attn.q_norm.weight", CheckpointTensor((self.head_dim,))
                yield f"{prefix}self_attn.k_norm.weight", CheckpointTensor((self.head_dim,))
        yield "model.norm.weight", CheckpointTensor((self.hidden_size,))

    def _layer_matrices(self, index: int) -> Iterator[Matrix]:
        for module, rows, columns, _ in self._projections(f"model.layers.{index}."):
            yield module, rows, columns

    def _projections(self, prefix: str) -> Iterator[tuple[str, int, int, bool]]:
        """Module, output features, input features and whether there is a bias, of each projection of a layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        yield f"{prefix}self_attn.q_proj", self.q_size, hidden, self.qkv_bias
        yield f"{prefix}self_attn.k_proj", self.kv_size, hidden, self.qkv_bias
        yield f"{prefix}self_attn.v_proj", self.kv_size, hidden, self.qkv_bias
        yield f"{prefix}self_attn.o_proj", hidden, self.q_size, self.o_bias
        yield f"{prefix}mlp.gate_proj", inner, hidden, self.mlp_bias
        yield f"{prefix}mlp.up_proj", inner, hidden, self.mlp_bias
        yield f"{prefix}mlp.down_proj", hidden, inner, self.mlp_bias

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
