"""Parts of a network as plain data: rotary embeddings, mixtures of experts, recurrent layers, and Gemma 4's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

# The norms of a layer of Gemma 4 with experts besides its other ones: of the router, which reads RMS-normalized rows
# times this weight over the root of their width, before the experts, after the MLP, and after the experts.
EXPERT_NORMS = (
    "router.scale",
    "pre_feedforward_layernorm_2.weight",
    "post_feedforward_layernorm_1.weight",
    "post_feedforward_layernorm_2.weight",
)
RECURRENT_CHUNK = 64  # tokens at whose multiples a GPU's kernels of recurrent layers begin to compute in another form
STATE_ITEMSIZE = 4  # bytes of an element of a recurrent state, which is fp32

PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer"
PER_LAYER_PROJECTION = "model.per_layer_model_projection"

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


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
class SharedExpert:
    """A gated MLP beside the experts of a layer, through which every token passes."""

    intermediate_size: int
    module: str = "shared_experts"  # its name within the block of the experts
    gate: str | None = None  # the name there of a matrix [1, hidden]; the output is multiplied by the product's sigmoid


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Layers that have several MLPs ("experts"), of which a router chooses a few for each token. Names are those of the
    checkpoint.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the weights of a token's experts are scaled to the sum 1
    layers: tuple[bool, ...]  # per layer: whether it has experts and not one MLP
    block: str = "mlp"  # the module of a layer that holds its router and experts; "": the layer itself
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert: gate, up, down
    scoring: Scoring = "softmax"  # what makes scores of the router's logits, of all of them or of the chosen ones
    correction_bias: str | None = None  # a tensor [num_experts] of the block, added to the scores that choose
    num_groups: int = 1  # equal parts of neighbouring experts
    chosen_groups: int = 1  # of which a token's experts come: those whose two best scores have the largest sums
    weight_scale: float = 1.0  # multiplies the weights of a token's experts
    expert_scale: str | None = None  # a tensor [num_experts] of the block, which multiplies an expert's weights too
    fp32_router: bool = False  # whether the router multiplies in fp32, whatever the dtype
    shared: SharedExpert | None = None
    router_name: str = "gate"
    biases: bool = False  # of router, gate, up and down
    interleaved: bool = False  # the checkpoint has gate and up of all experts as one tensor, in which they alternate
    beside_mlp: bool = False  # a layer with experts has its MLP as well
    root: str = "model"  # what the names of all modules begin with

    def prefix(self, layer: int) -> str:
        """What the names of a layer's router and experts begin with."""
        return f"{self.root}.layers.{layer}.{self.block}." if self.block else f"{self.root}.layers.{layer}."

    def router(self, layer: int) -> str:
        """The router's module, a matrix [num_experts, hidden] that is never quantized."""
        return f"{self.prefix(layer)}{self.router_name}"

    def expert(self, layer: int, index: int) -> tuple[str, str, str]:
        """The modules of an expert: its gate, up and down projections."""
        prefix = f"{self.prefix(layer)}experts.{index}."
        gate, up, down = self.projections
        return f"{prefix}{gate}", f"{prefix}{up}", f"{prefix}{down}"

    def routing_tensors(self, layer: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Name and shape of each tensor that decides about a layer's experts, and whether it is fp32 in any case."""
        yield f"{self.router(layer)}.weight", (self.num_experts, hidden), self.fp32_router
        if self.biases:
            yield f"{self.router(layer)}.bias", (self.num_experts,), self.fp32_router
        prefix = self.prefix(layer)
        if self.correction_bias is not None:
            yield f"{prefix}{self.correction_bias}", (self.num_experts,), True
        if self.expert_scale is not None:
            yield f"{prefix}{self.expert_scale}", (self.num_experts,), False
        if self.shared is not None and self.shared.gate is not None:
            yield f"{prefix}{self.shared.gate}.weight", (1, hidden), False

    def num_routing_weights(self, hidden: int, *, wide: bool = False) -> int:
        """Number of weights in a layer's `routing_tensors`; wide: of those that are fp32 in any case."""
        return sum(prod(shape) for _, shape, is_wide in self.routing_tensors(0, hidden) if is_wide or not wide)

    def shared_matrices(self, layer: int, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Module, output features and input features of each matrix of a layer's shared expert, if there is one."""
        if self.shared is not None:
            prefix = self.shared_prefix(layer)
            inner = self.shared.intermediate_size
            yield f"{prefix}gate_proj", inner, hidden
            yield f"{prefix}up_proj", inner, hidden
            yield f"{prefix}down_proj", hidden, inner

    def shared_prefix(self, layer: int) -> str:
        """What the names of the shared expert's projections begin with."""
        assert self.shared is not None, "these layers have no shared expert"
        return f"{self.prefix(layer)}{self.shared.module}."

    def matrices(self, layer: int, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Module, output features and input features of each matrix of a layer's experts."""
        for index in range(self.num_experts):
            gate, up, down = self.expert(layer, index)
            yield gate, self.intermediate_size, hidden
            yield up, self.intermediate_size, hidden
            yield down, hidden, self.intermediate_size

    def num_biases(self, hidden: int, adds_down: bool) -> int:
        """Number of biases of a layer's experts; adds_down: with those of the down projections."""
        return self.biases * self.num_experts * (2 * self.intermediate_size + adds_down * hidden)

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

    layers: tuple[bool, ...]  # per layer: whether it is recurrent and has no attention
    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_kernel: int  # tokens that the convolution sees, the token's own included
    merged_projections: bool = False  # whether the checkpoint has one matrix for q, k, v and z, and one for b and a

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
    def input_parts(self) -> Mapping[str, int]:
        """The modules of the checkpoint that read the layer's input, and their output features.

        q, k, v and the output's gate z, and for each value head b, of the share that is written, and a, of the decay.
        Merged projections have them key head by key head.
        """
        heads = self.num_value_heads
        if self.merged_projections:
            return {"in_proj_qkvz": self.channels + self.value_size, "in_proj_ba": 2 * heads}
        return {"in_proj_qkv": self.channels, "in_proj_z": self.value_size, "in_proj_b": heads, "in_proj_a": heads}

    @property
    def projected_size(self) -> int:
        """Width of what a layer's input projection gives of a token."""
        return sum(self.input_parts.values())

    @property
    def num_wide_vectors(self) -> int:
        """Number of a layer's weights that are fp32 in memory: what gives the decay of each value head."""
        return 2 * self.num_value_heads

    @property
    def num_vectors(self) -> int:
        """Number of a layer's weights beyond its projections: decay, convolution, norm of a head."""
        return self.num_wide_vectors + self.channels * self.conv_kernel + self.value_dim

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


@dataclass(frozen=True, slots=True)
class Gemma4Spec:
    """What sets the layers of a Gemma 4 apart, from each other and from those of other families.

    Layers with full attention have heads of a size of their own. The last `num_shared` layers have no keys and values:
    each reads those of the last layer before them with the same kind of attention. With `per_layer_size`, each layer
    adds an input of its own to the residual stream, from a second embedding of the token and from the first one.
    """

    full: tuple[bool, ...]  # per layer: whether its attention is full
    full_kv_heads: int  # of a layer with full attention
    full_head_dim: int
    key_is_value: bool  # the values of layers with full attention are their keys, before the norm of the keys
    num_shared: int  # fewer than all layers
    shared_intermediate_size: int  # of the MLP of a layer without keys and values
    per_layer_size: int = 0  # width of a layer's own input; 0: there is none
    per_layer_vocab: int = 0  # tokens of the second embedding
    packed_layers: int = 0  # layers whose inputs are side by side in the second embedding
    logit_cap: float | None = None  # c: logits are c * tanh(logits / c)

    @property
    def num_owners(self) -> int:
        """Layers that have keys and values, the first ones."""
        return len(self.full) - self.num_shared

    @property
    def owners(self) -> tuple[int, ...]:
        """For each layer without keys and values: the layer whose keys and values it reads."""
        last = {self.full[layer]: layer for layer in range(self.num_owners)}
        return tuple(last[is_full] for is_full in self.full[self.num_owners :])

    def of_layers(self, indices: Sequence[int]) -> Gemma4Spec:
        """Those of a network of some of the layers, in their order."""
        shared = sum(index >= self.num_owners for index in indices)
        return replace(self, full=tuple(self.full[index] for index in indices), num_shared=shared)

    def layer_matrices(self, layer: int, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Module, output features and input features of the matrices with which a layer adds its own input."""
        if self.per_layer_size:
            yield f"model.layers.{layer}.per_layer_input_gate", self.per_layer_size, hidden
            yield f"model.layers.{layer}.per_layer_projection", hidden, self.per_layer_size

    def tables(self, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Module, output features and input features of what gives the inputs of all layers."""
        if self.per_layer_size:
            width = self.packed_layers * self.per_layer_size
            yield PER_LAYER_EMBEDDING, self.per_layer_vocab, width
            yield PER_LAYER_PROJECTION, width, hidden
