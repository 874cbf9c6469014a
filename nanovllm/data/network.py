"""A network as plain data: what its layers keep and what its weights take, rotary embeddings, experts, recurrences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

RECURRENT_CHUNK = 64  # tokens at whose multiples a GPU's kernels of recurrent layers begin to compute in another form
STATE_ITEMSIZE = 4  # bytes of an element of a recurrent state, which is fp32

ITEMSIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})  # bytes of a weight
DTYPE_NAMES = tuple(ITEMSIZES)

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """A layer that keeps the keys and values of its tokens."""

    heads: int  # KV heads, of several ranks those of this one
    head_dim: int
    window: int | None = None  # keys that a query sees, its own included; None: all
    most_heads: int = 0  # of the rank that has most of them; 0: `heads`


@dataclass(frozen=True, slots=True)
class SharedKV:
    """A layer that reads the keys and values of an earlier one."""

    layer: int  # the index of that one among all layers


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A layer that keeps one state of fixed size of a sequence."""

    spec: RecurrentSpec


Kept = KVLayer | SharedKV | RecurrentState  # what a sequence keeps in a layer between two steps


class MatrixShape(NamedTuple):
    """Output and input features of a matrix."""

    whole: tuple[int, int]  # over all ranks
    held: tuple[int, int]  # on this one


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """What the weights of a network, or of a rank's part, take in memory in the form in which they are stored."""

    num_weights: int  # of all; tied embeddings count once
    num_bytes: int
    layer_bytes: int  # of all layers together
    layer_matrix_weights: int  # the weights of all layers with which rows are multiplied
    expert_weights: int  # those of them that are in experts of which a row reads a few
    expert_bytes: int
    head_bytes: int  # of the output projection
    stored_bytes: tuple[int, ...]  # of each layer's matrices, without routers: what may be in host memory
    stored_expert_bytes: tuple[int, ...]  # of these, what is in experts of which a row reads a few
    num_experts: int = 0  # of a layer with experts
    experts_per_token: int = 0

    def streamed_bytes(self, layer: int) -> int:
        """Of a layer, what streams if it does: see `memory.weights`."""
        return self.stored_expert_bytes[layer] or self.stored_bytes[layer]


@dataclass(frozen=True, slots=True)
class Network:
    """What the engine needs to know of a network besides how it computes, or of a tensor-parallel rank's part of it.

    A network built on the meta device tells it (`CausalLM.network`). Plain data, which can be pickled.
    """

    architecture: str
    dtype: str  # in which it runs
    vocab_size: int
    hidden_size: int
    num_heads: int  # query heads of a layer with attention
    attention_scale: float  # what multiplies the product of a query and a key
    layers: tuple[Kept, ...]
    weights: WeightSizes
    modules: Mapping[str, MatrixShape]  # the matrices that adapters may change, all but routers and chosen experts
    max_model_len: int  # the longest sequence, in tokens, that the checkpoint's positions support
    yarn_positions: int | None = None  # the trained length in tokens, where the authors document YaRN
    experts: ExpertSpec | None = None
    num_expert_layers: int = 0
    quantization: str | None = None  # the name of the form in which matrices are stored
    num_ranks: int = 1
    sums_per_layer: int = 2  # of hidden states over the ranks
    sums_of_squares: int = 0  # over the ranks, in all layers
    ropes: tuple[RopeSpec, ...] = ()  # the rotary embeddings of the layers, each once
    has_layer_inputs: bool = False  # whether layers read more of a pass than the residual stream

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    # ---- keys and values. The KV cache counts the layers that attend: first those with keys and values of their own.

    @property
    def _kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kept for kept in self.layers if isinstance(kept, KVLayer))

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that own keys and values."""
        return len(self._kv_layers)

    @property
    def kv_shared(self) -> tuple[int, ...]:
        """Of each layer without keys and values of its own, the number of the layer among the owners whose it reads."""
        owners = [index for index, kept in enumerate(self.layers) if isinstance(kept, KVLayer)]
        return tuple(owners.index(kept.layer) for kept in self.layers if isinstance(kept, SharedKV))

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that own keys and values."""
        return tuple(kept.window for kept in self._kv_layers)

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head_dim of each layer that owns keys and values, on the rank that has most heads."""
        return tuple((kept.most_heads or kept.heads, kept.head_dim) for kept in self._kv_layers)

    @property
    def own_kv_heads(self) -> tuple[tuple[int, int], ...]:
        """The same of this rank."""
        return tuple((kept.heads, kept.head_dim) for kept in self._kv_layers)

    @property
    def token_features(self) -> int:
        """Width of the queries, keys and values of a token in a layer, of those that have the fewest."""
        return min((self.num_heads + 2 * kept.heads) * kept.head_dim for kept in self._kv_layers)

    @property
    def hardest_head_dim(self) -> int:
        """The size of heads that the fewest kernels take: one that is no multiple of 16, or the largest."""
        return max((kept.head_dim for kept in self._kv_layers), key=lambda size: (size % 16 > 0, size))

    @property
    def unwindowed_heads(self) -> frozenset[tuple[int, int, int]]:
        """(heads, KV heads, head_dim) of the layers that attend to all earlier tokens."""
        return frozenset((self.num_heads, kept.heads, kept.head_dim) for kept in self._kv_layers if kept.window is None)

    @property
    def kv_spans(self) -> tuple[range, ...]:
        """Of each owner of keys and values, the layers from the one after the owner before it up to this one.

        The last span goes on to the last layer.
        """
        owners = [index for index, kept in enumerate(self.layers) if isinstance(kept, KVLayer)]
        edges = [0, *(layer + 1 for layer in owners[:-1]), self.num_layers]
        return tuple(range(begin, end) for begin, end in pairwise(edges))

    # ---- states

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(index for index, kept in enumerate(self.layers) if isinstance(kept, RecurrentState))

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The sizes of recurrent layers, which are alike."""
        return next((kept.spec for kept in self.layers if isinstance(kept, RecurrentState)), None)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all recurrent layers."""
        one = 0 if self.recurrent is None else self.recurrent.state_bytes(self.itemsize)
        return len(self.recurrent_layers) * one

    @property
    def draft_row_bytes(self) -> int:
        """Bytes that all recurrent layers keep of a row with drafts."""
        one = 0 if self.recurrent is None else self.recurrent.projected_size * self.itemsize
        return len(self.recurrent_layers) * one

    # ---- weights

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the dtype."""
        return ITEMSIZES[self.dtype]

    @property
    def num_weights(self) -> int:
        return self.weights.num_weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory. Tied embeddings count once."""
        return self.weights.num_bytes

    @property
    def head_bytes(self) -> int:
        return self.weights.head_bytes

    def layer_weight_bytes(self, rows: int | None = None) -> int:
        """Bytes of the weights of one layer, the mean of all layers if they differ.

        rows: count only what so many rows read, which may be few of the experts; None: everything.
        """
        total = self.weights.layer_bytes
        if self.experts is not None and rows is not None:
            total -= round((1.0 - self.experts.share_read(rows)) * self.weights.expert_bytes)
        return total // self.num_layers

    @property
    def multiplied_weights(self) -> int:
        """Number of weights in the matrices of all layers that one row is multiplied with."""
        unread = 0.0 if self.experts is None else 1.0 - self.experts.share_read(1)
        return self.weights.layer_matrix_weights - round(unread * self.weights.expert_weights)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one RoPE kind, named as in Transformers; fields that a kind does not use keep their default."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # how many times longer the context is than the trained one; default: unused
    original_max_position: int = 0  # positions of the training; 0: max_position_embeddings, or unused
    attention_factor: float = 1.0  # multiplies cos and sin: yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    query_beta: float = 0.0  # yarn: queries times 1 + query_beta * ln(1 + position // original_max_position)
    frequency_factors: tuple[float, ...] = ()  # what each frequency is divided by; default: they stay as they are
    long_factors: tuple[float, ...] = ()  # longrope: the `frequency_factors` for sequences beyond the trained length
    theta_growth: float = 1.0  # dynamic: multiplies theta
    rotary_dim: int | None = None  # features of a head that are rotated, the first ones; None: all
    rotated_pairs: int = 0  # proportional: pairs of a head that are rotated, the fastest ones

    def for_length(self, longest: int, head_dim: int) -> RopeSpec:
        """The RoPE of an engine whose longest sequence has `longest` tokens. All its sequences have the same angles.

        Up to the trained length it is as it is. Beyond it, longrope takes its long factors, as vLLM does, and dynamic
        RoPE grows theta by (factor * longest / trained - (factor - 1)) ^ (d / (d - 2)), where d is the number of
        rotated features. Source: `_compute_dynamic_ntk_parameters` of Transformers, for a sequence of `longest` tokens;
        vLLM has the same for factor * trained tokens.
        """
        if longest <= self.original_max_position:
            return self
        if self.kind == "longrope":
            return replace(self, frequency_factors=self.long_factors)
        if self.kind == "dynamic":
            rotated = self.rotary_dim or head_dim
            growth = self.factor * longest / self.original_max_position - (self.factor - 1)
            return replace(self, theta_growth=growth ** (rotated / (rotated - 2)))
        return self


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """How a router chooses a few of a layer's MLPs ("experts") for each token."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True  # whether the weights of a token's experts are scaled to the sum 1
    scoring: Scoring = "softmax"  # what makes scores of the router's logits, of all of them or of the chosen ones
    num_groups: int = 1  # equal parts of neighbouring experts
    chosen_groups: int = 1  # of which a token's experts come: those whose two best scores have the largest sums
    weight_scale: float = 1.0  # multiplies the weights of a token's experts
    has_shared: bool = False  # whether there is one more, through which every token passes

    def share_read(self, rows: int) -> float:
        """The share of a layer's experts that `rows` rows read, if each row chooses evenly and alone."""
        return 1.0 - (1.0 - self.num_experts_per_tok / self.num_experts) ** rows


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Layers whose memory of a sequence is a state of fixed size and not a KV cache: the gated delta rule.

    Each value head has a state [key_dim, value_dim], which a key addresses; value heads of equal number share a key
    head. A short causal convolution runs over the last `conv_kernel` tokens of q, k and v. Source: Yang et al., "Gated
    Delta Networks" (2024).
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_kernel: int  # tokens that the convolution sees, the token's own included

    @property
    def key_size(self) -> int:
        """Width of the keys of a token, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of the values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values side by side."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_size(self) -> int:
        """Width of what a layer's input projection gives of a token.

        q, k, v and the output's gate z, and for each value head b, of the share that is written, and a, of the decay.
        """
        return self.channels + self.value_size + 2 * self.num_value_heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        """A sequence's state of the convolution in one layer, in the network's dtype: the last inputs, oldest first."""
        return self.channels, self.conv_kernel - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A sequence's recurrent state in one layer, in fp32."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of both states of one sequence in one layer; itemsize: of an element of the network's dtype."""
        (channels, kept) = self.conv_shape
        (heads, key_dim, value_dim) = self.state_shape
        return channels * kept * itemsize + heads * key_dim * value_dim * STATE_ITEMSIZE
