"""Everything that distinguishes one decoder from another, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from nanovllm.data.network import EXPERT_NORMS, ExpertSpec, Gemma4Spec, RecurrentSpec, RopeSpec
from nanovllm.errors import ConfigError
from nanovllm.layers.linear_method import ROWS, Axis, CheckpointTensor, LinearMethod, NamedTensors, dense_tensors
from nanovllm.layers.sharding import DividedMatrix, Heads, Sharding, Sizes, kind_of_mlp, shard

ITEMSIZES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})  # bytes of a weight
DTYPE_NAMES = tuple(ITEMSIZES)
WIDE_BYTES = 4  # of a weight in fp32 whatever the dtype, such as a norm of Gemma 3 or a sink
# names in a checkpoint
EMBEDDING_MODULE = "model.embed_tokens"
HEAD_MODULE = "lm_head"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"
EMBEDDING = f"{EMBEDDING_MODULE}.weight"
LM_HEAD = f"{HEAD_MODULE}.weight"

Matrix = tuple[str, int, int]  # module, output features, input features


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only network. Sizes count elements; heads are per layer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]  # per layer: keys that a query sees, its own included; None: all
    max_position_embeddings: int
    dtype: str  # of the checkpoint, one of DTYPE_NAMES
    qk_norm: bool = False  # RMS norm over each head of q and k, before RoPE
    joint_qk_norm: bool = False  # that norm is over all heads of q together, and over all of k
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    quantization: LinearMethod | None = None  # how the matrices are stored; None: as numbers of the dtype
    merged_projections: bool = False  # whether the checkpoint has one matrix for q, k and v, and for gate and up
    experts: ExpertSpec | None = None  # in some layers or all; the others have one MLP
    recurrent: RecurrentSpec | None = None  # in some layers; the others have attention
    attention_gate: bool = False  # attention's output times the sigmoid of a gate, which q_proj has beside each query
    sharding: Sharding | None = None  # of a tensor-parallel rank, whose heads and inner features the sizes count
    activation: str = "silu"  # of the gate of an MLP, one of ops.row_kernels.GATED_UNITS
    local_rope: RopeSpec | None = None  # of the layers with a sliding window; None: `rope`, as of the others
    query_pre_attn_scalar: float | None = None  # attention scores are divided by its root; None: by that of head_dim
    embedding_scale: float = 1.0  # rounded to the dtype, multiplies the embedding; not the tied output projection
    input_norms: bool = True  # RMS norms of what attention and MLP read
    output_norms: bool = False  # RMS norms of what attention and MLP add to the residual stream
    zero_centered_norms: bool = False  # norm weights are stored minus 1, and multiply in fp32, before the rounding
    wide_norms: bool = False  # norm weights are as they are, and multiply in fp32 too
    attention_sinks: bool = False  # every query head has a learned score beside those of its keys, with a value of 0
    kv_parts: tuple[str, ...] = ("k_proj", "v_proj")  # the projections of a layer that give its keys and values
    gemma4: Gemma4Spec | None = None  # layers that differ from each other; `for_layer` gives the sizes of one
    num_mtp_layers: int = 0  # layers behind the last in a checkpoint, for multi-token prediction, which are not read
    root: str = "model"  # what the names of layers and final norm begin with in a checkpoint
    whole: DecoderSpec | None = None  # of a tensor-parallel rank: the decoder that it is a part of
    layer_shardings: tuple[Sharding, ...] = ()  # of a rank's layers, where they differ

    @property
    def q_size(self) -> int:
        """Width of the queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def gated_q_size(self) -> int:
        """Output features of the query projection: of each head the query, and then its gate if there are gates."""
        return self.q_size * (1 + self.attention_gate)

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def of_rank(self, rank: int, num_ranks: int) -> DecoderSpec:
        """The decoder that one of `num_ranks` tensor-parallel ranks computes; see `of_ranks`."""
        return self.of_ranks(num_ranks)[rank]

    def of_ranks(self, num_ranks: int) -> Sequence[DecoderSpec]:
        """What each tensor-parallel rank computes: its heads, inner features and vocabulary.

        Raises ConfigError if there is too little for all ranks, or matrices cannot be divided as they are stored.
        """
        if self.gemma4 is not None:
            return self._gemma4_ranks(num_ranks, self.gemma4)
        return [self._part(sharding) for sharding in self._shardings(num_ranks, range(self.num_layers))]

    def _gemma4_ranks(self, num_ranks: int, gemma: Gemma4Spec) -> Sequence[DecoderSpec]:
        """`of_ranks` of layers with heads of several sizes. What adds their own inputs is whole on every rank."""
        kinds = [(is_full, layer >= gemma.num_owners) for layer, is_full in enumerate(gemma.full)]
        held: dict[tuple[bool, bool], Sequence[Sharding]] = {}
        for kind in dict.fromkeys(kinds):
            layers = [layer for layer, its_kind in enumerate(kinds) if its_kind == kind]
            kv_heads = gemma.full_kv_heads if kind[0] else self.num_kv_heads
            held[kind] = replace(self.for_layer(layers[0]), num_kv_heads=kv_heads)._shardings(num_ranks, layers, self)
        sizes = {len(sharding.heads) for shardings in held.values() for sharding in shardings}
        kv_sizes = [{len(sharding.kv_heads) for sharding in shardings} for shardings in held.values()]
        if len(sizes) > 1 or any(len(of_kind) > 1 for of_kind in kv_sizes):
            raise ConfigError(
                f"tensor_parallel_size={num_ranks}: every rank must have as many of a layer's {self.num_heads} heads, "
                f"and of its KV heads, {self.num_kv_heads} or {gemma.full_kv_heads}; take another number of ranks"
            )
        ranks = []
        for rank in range(num_ranks):
            of_kinds = {kind: shardings[rank] for kind, shardings in held.items()}
            own = self._part(of_kinds.get((False, False)) or self._shardings(num_ranks, ())[rank])
            wide = [len(sharding.intermediate) for (_, is_shared), sharding in of_kinds.items() if is_shared]
            full_kv_heads = len(of_kinds[True, False].kv_heads)
            part = replace(gemma, full_kv_heads=full_kv_heads, shared_intermediate_size=max(wide, default=0))
            ranks.append(replace(own, gemma4=part, layer_shardings=tuple(of_kinds[kind] for kind in kinds)))
        return ranks

    def sharding_of(self, module: str) -> Sharding | None:
        """How a tensor-parallel rank's module is divided; None if there is one rank."""
        if not self.layer_shardings or not module.startswith("model.layers."):
            return self.sharding
        return self.layer_shardings[int(module.split(".", 3)[2])]

    def _shardings(
        self, num_ranks: int, layers: Sequence[int], network: DecoderSpec | None = None
    ) -> Sequence[Sharding]:
        """What each rank holds of some layers, which have this network's sizes. network: whose layers they are."""
        inner = 0 if self.experts is None else self.experts.intermediate_size
        shared = 0 if self.experts is None or self.experts.shared is None else self.experts.shared.intermediate_size
        attention = (self.num_heads, self.num_kv_heads, self.head_dim)
        recurrent = self.recurrent
        states = Heads()
        if recurrent is not None:
            heads = (recurrent.num_key_heads, recurrent.num_value_heads)
            states = Heads(*heads, recurrent.key_dim, recurrent.value_dim)
        inner_sizes = (self.intermediate_size, self.vocab_size, inner, shared)
        sizes = Sizes(*attention, *inner_sizes, self.attention_gate, states)
        form = "" if self.quantization is None else self.quantization.name
        return shard(sizes, num_ranks, (network or self)._divided_matrices(layers), form)

    def _part(self, sharding: Sharding) -> DecoderSpec:
        experts = self.experts
        if experts is not None:
            inner = len(sharding.shared_intermediate)
            shared = None if experts.shared is None else replace(experts.shared, intermediate_size=inner)
            experts = replace(experts, intermediate_size=len(sharding.expert_intermediate), shared=shared)
        recurrent = self.recurrent
        if recurrent is not None:
            keys = len(sharding.key_heads)
            values = keys * recurrent.num_value_heads // recurrent.num_key_heads
            recurrent = replace(recurrent, num_key_heads=keys, num_value_heads=values)
        return replace(
            self,
            recurrent=recurrent,
            num_heads=len(sharding.heads),
            num_kv_heads=len(sharding.kv_heads),
            intermediate_size=len(sharding.intermediate),
            experts=experts,
            sharding=sharding,
            whole=self,
        )

    def _divided_matrices(self, layers: Sequence[int]) -> Collection[DividedMatrix]:
        """The matrices of some layers, and of none, whose storage cannot be divided everywhere, one for all that are
        alike."""
        if self.quantization is None:
            return ()
        divided: dict[tuple[object, ...], DividedMatrix] = {}
        matrices = [*self._tables(), *(matrix for index in layers for matrix in self._layer_matrices(index))]
        for module, rows, columns in matrices:
            matrix = DividedMatrix(module, (rows, columns), self.quantization.units(module, rows, columns))
            divided[kind_of_mlp(module), module.rpartition(".")[2], matrix.units] = matrix
        return divided.values()

    @property
    def most_kv_heads(self) -> int:
        """KV heads of the rank that has most of them, whose KV cache is the largest."""
        return self.num_kv_heads if self.sharding is None else self.sharding.most_kv_heads

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer is recurrent and has no attention."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that own keys and values: those with attention, but for those that read another's."""
        return self.num_layers - self.num_recurrent_layers - len(self.kv_shared)

    @property
    def kv_shared(self) -> tuple[int, ...]:
        """Of each layer that has no keys and values of its own, after the others, the `kv_layer` whose it reads."""
        return () if self.gemma4 is None else self.gemma4.owners

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """KV heads and head_dim of each layer that owns keys and values; () if they are alike."""
        if self.gemma4 is None:
            return ()
        layers = map(self.for_layer, range(self.num_kv_layers))
        return tuple((layer.num_kv_heads, layer.head_dim) for layer in layers)

    @property
    def hardest_head_dim(self) -> int:
        """The size of heads that the fewest kernels take: one that is no multiple of 16, or the largest."""
        sizes = {self.head_dim, *(head_dim for _, head_dim in self.kv_heads)}
        return max(sizes, key=lambda size: (size % 16 > 0, size))

    @property
    def unwindowed_heads(self) -> frozenset[tuple[int, int, int]]:
        """(heads, KV heads, head_dim) of the layers that attend to all earlier tokens."""
        sizes = self.kv_heads or ((self.num_kv_heads, self.head_dim),) * self.num_kv_layers
        pairs = zip(sizes, self.kv_windows, strict=True)
        return frozenset((self.num_heads, *size) for size, window in pairs if window is None)

    def for_layer(self, layer: int) -> DecoderSpec:
        """The network if all its layers were like this one, for their sizes."""
        gemma = self.gemma4
        if gemma is None:
            return self
        num_kv_heads = self.num_kv_heads
        head_dim = self.head_dim
        inner = self.intermediate_size
        parts = self.kv_parts
        if gemma.full[layer]:
            num_kv_heads = gemma.full_kv_heads
            head_dim = gemma.full_head_dim
        if layer >= gemma.num_owners:
            num_kv_heads = 0
            inner = gemma.shared_intermediate_size
            parts = ()
        elif gemma.full[layer] and gemma.key_is_value:
            parts = ("k_proj",)
        sizes = replace(self, num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=inner)
        return replace(sizes, gemma4=None, kv_parts=parts)

    @property
    def num_recurrent_layers(self) -> int:
        return 0 if self.recurrent is None else sum(self.recurrent.layers[: self.num_layers])

    def kv_layer(self, layer: int) -> int:
        """The index by which the KV cache knows a layer with attention: its place among those."""
        return layer if self.recurrent is None else layer - sum(self.recurrent.layers[:layer])

    @property
    def kv_spans(self) -> tuple[range, ...]:
        """By `kv_layer`, the layers from the one after the last that owns keys and values up to this one.

        The last span goes on to the last layer.
        """
        owners = [layer for layer in range(self.num_layers) if not self.is_recurrent(layer)][: self.num_kv_layers]
        edges = [0, *(layer + 1 for layer in owners[:-1]), self.num_layers]
        return tuple(range(begin, end) for begin, end in pairwise(edges))

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """`sliding_windows` of the layers that own keys and values, by `kv_layer`."""
        windows = tuple(window for layer, window in enumerate(self.sliding_windows) if not self.is_recurrent(layer))
        return windows[: self.num_kv_layers]

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence's states in all recurrent layers; itemsize: of an element of the network's dtype."""
        return 0 if self.recurrent is None else self.num_recurrent_layers * self.recurrent.state_bytes(itemsize)

    def draft_row_bytes(self, itemsize: int) -> int:
        """Bytes that all recurrent layers keep of a row with drafts; itemsize: of an element of the network's dtype."""
        return 0 if self.recurrent is None else self.num_recurrent_layers * self.recurrent.projected_size * itemsize

    @property
    def vocab_rows(self) -> int:
        """Tokens whose rows of the embedding and of the output projection are held; `vocab_size` is the whole."""
        return self.vocab_size if self.sharding is None else len(self.sharding.vocab)

    @property
    def adds_biases(self) -> bool:
        """Whether o and down add their biases: of the ranks whose products are summed, the first one does."""
        return self.sharding is None or self.sharding.rank == 0

    @property
    def qkv_parts(self) -> dict[str, int]:
        """The modules of the checkpoint for q, k and v, and their output features."""
        if self.merged_projections:
            return {"qkv_proj": self.q_size + 2 * self.kv_size}
        return {"q_proj": self.gated_q_size, **dict.fromkeys(self.kv_parts, self.kv_size)}

    @property
    def gate_up_parts(self) -> dict[str, int]:
        """The modules of the checkpoint for gate and up of an MLP, and their output features."""
        if self.merged_projections:
            return {"gate_up_proj": 2 * self.intermediate_size}
        return {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size}

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The checkpoint's modules of a layer's norms: before attention, before the MLP, and then after each."""
        if not self.input_norms:
            return "post_attention_layernorm", "post_feedforward_layernorm"
        if not self.output_norms:
            return "input_layernorm", "post_attention_layernorm"
        return "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"

    @property
    def _gemma4_norms(self) -> tuple[str, ...]:
        """The tensors of a layer's norms of hidden states that only Gemma 4 has."""
        own_input = ("post_per_layer_input_norm.weight",) if self.gemma4 and self.gemma4.per_layer_size else ()
        return (*own_input, *EXPERT_NORMS) if self.experts and self.experts.beside_mlp else own_input

    @property
    def qk_norms(self) -> tuple[tuple[str, int], ...]:
        """The checkpoint's modules of the norms of q and k, if there are keys, and their weights."""
        sizes = (self.q_size, self.kv_size) if self.joint_qk_norm else (self.head_dim, self.head_dim)
        return (("q_norm", sizes[0]), ("k_norm", sizes[1]))[: 2 if self.kv_parts else 1]

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Every rotary embedding of the network; `rope_of` gives a layer's index into them."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> int:
        return int(self.local_rope is not None and self.sliding_windows[layer] is not None)

    @property
    def attention_scale(self) -> float:
        """What multiplies the product of a query and a key."""
        scalar: float = self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar
        return scalar**-0.5

    @property
    def num_expert_layers(self) -> int:
        """Number of layers that have experts."""
        return 0 if self.experts is None else sum(self.experts.layers[: self.num_layers])

    @property
    def num_layer_matrices(self) -> int:
        """Number of weights in the matrices of all layers: q, k, v, o, and gate, up and down or router and experts.

        With the correction biases of the routers. A recurrent layer has its input and output projections in the place
        of q, k, v and o.
        """
        matrices = [*self.projections(), *self._own_input_matrices()]
        return sum(rows * columns for _, rows, columns in matrices) + self._routing_weights() + self._expert_weights

    def _routing_weights(self, *, wide: bool = False) -> int:
        """Number of weights that decide about experts in all layers; wide: of those that are fp32 in any case."""
        of_layer = 0 if self.experts is None else self.experts.num_routing_weights(self.hidden_size, wide=wide)
        return self.num_expert_layers * of_layer

    @property
    def _expert_weights(self) -> int:
        """Number of weights in the experts of all layers."""
        if self.experts is None:
            return 0
        one = 3 * self.hidden_size * self.experts.intermediate_size
        return self.num_expert_layers * self.experts.num_experts * one

    @property
    def multiplied_weights(self) -> int:
        """Number of weights in the matrices of all layers that one row is multiplied with."""
        unread = 0.0 if self.experts is None else 1.0 - self.experts.share_read(1)
        return self.num_layer_matrices - round(unread * self._expert_weights)

    def _norms(self, layer: int) -> int:
        """Number of norm weights of a layer in memory. Every head has its own row of the q and k norms."""
        own = self.for_layer(layer)
        heads = 0 if self.is_recurrent(layer) else self.qk_norm * (own.num_heads + own.num_kv_heads)
        return (len(self.layer_norms) + len(self._gemma4_norms)) * self.hidden_size + heads * own.head_dim

    def _vectors(self, layer: int) -> int:
        """Number of weights of a layer in memory beyond its matrices, such as norms, biases and sinks."""
        recurrent = self.recurrent if self.is_recurrent(layer) else None
        own = self._sinks if recurrent is None else recurrent.num_vectors
        own += self.gemma4 is not None  # the factor of its output
        biases = sum(rows for _, rows, _, bias in self._projections(layer) if bias) + self._expert_biases(layer)
        return self._norms(layer) + biases + own

    def _vector_bytes(self, layer: int, itemsize: int) -> int:
        """Bytes of `_vectors`. Norms may be wider than the dtype; sinks and a recurrent layer's decay always are."""
        recurrent = self.recurrent if self.is_recurrent(layer) else None
        wide = self._sinks if recurrent is None else recurrent.num_wide_vectors
        wide += self._norms(layer) * self.norms_in_fp32
        return self._vectors(layer) * itemsize + wide * (WIDE_BYTES - itemsize)

    @property
    def norms_in_fp32(self) -> bool:
        """Whether norm weights are in fp32 in memory."""
        return self.zero_centered_norms or self.wide_norms

    def _expert_biases(self, layer: int) -> int:
        """Number of biases of a layer's experts."""
        if self.experts is None or not self.experts.layers[layer]:
            return 0
        return self.experts.num_biases(self.hidden_size, self.adds_biases)

    @property
    def _sinks(self) -> int:
        """Number of sinks of one layer with attention."""
        return self.attention_sinks * self.num_heads

    @property
    def num_weights(self) -> int:
        """Number of all weights in memory. Tied embeddings count once."""
        layers = self.num_layer_matrices + sum(map(self._vectors, range(self.num_layers)))
        return layers + self._num_table_weights + self._num_final_norms

    @property
    def _num_table_weights(self) -> int:
        """Number of weights in the matrices that belong to no layer. Tied embeddings count once."""
        return sum(rows * columns for _, rows, columns in self._tables())

    def _tables(self) -> Iterator[Matrix]:
        yield EMBEDDING_MODULE, self.vocab_rows, self.hidden_size
        if not self.tie_word_embeddings:
            yield HEAD_MODULE, self.vocab_rows, self.hidden_size
        if self.gemma4 is not None:
            yield from self.gemma4.tables(self.hidden_size)

    @property
    def _num_final_norms(self) -> int:
        """Number of weights of the norms that belong to no layer."""
        return self.hidden_size + (0 if self.gemma4 is None else self.gemma4.per_layer_size)

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all weights in memory, where an element of the network's dtype takes `itemsize`."""
        layers = sum(self._vector_bytes(layer, itemsize) for layer in range(self.num_layers))
        final_norm = self._num_final_norms * (WIDE_BYTES if self.norms_in_fp32 else itemsize)
        matrices = self.num_layer_matrices * itemsize + self._wide_routing(itemsize)
        saved = self._saved_bytes(self.matrices(), itemsize)
        return matrices - saved + self._num_table_weights * itemsize + layers + final_norm

    def layer_matrix_bytes(self, itemsize: int, rows: int | None = None) -> int:
        """Bytes of the matrices of one layer in memory, the mean of all layers if they differ.

        rows: count only what so many rows read, which may be few of the experts; None: everything.
        """
        return self._layer_matrices_bytes(itemsize, rows) // self.num_layers

    def _layer_matrices_bytes(self, itemsize: int, rows: int | None) -> int:
        """Bytes of the matrices of all layers."""
        layers = (matrix for index in range(self.num_layers) for matrix in self._layer_matrices(index))
        total = self.num_layer_matrices * itemsize + self._wide_routing(itemsize) - self._saved_bytes(layers, itemsize)
        if self.experts is not None and rows is not None:
            experts = (matrix for index in range(self.num_layers) for matrix in self._expert_matrices(index))
            of_experts = self._expert_weights * itemsize - self._saved_bytes(experts, itemsize)
            total -= round((1.0 - self.experts.share_read(rows)) * of_experts)
        return total

    def _wide_routing(self, itemsize: int) -> int:
        """Bytes that routers in fp32 take beyond those that `itemsize` gives."""
        return self._routing_weights(wide=True) * (ITEMSIZES["float32"] - itemsize)

    def layer_weight_bytes(self, itemsize: int, rows: int | None = None) -> int:
        """`layer_matrix_bytes` with everything else of the layer."""
        others = sum(self._vector_bytes(layer, itemsize) for layer in range(self.num_layers))
        return (self._layer_matrices_bytes(itemsize, rows) + others) // self.num_layers

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
        yield from self._tables()
        for index in range(self.num_layers):
            yield from self._layer_matrices(index)

    def tensors(self) -> NamedTensors:
        """Name and form of every checkpoint tensor, known before anything is allocated.

        `Decoder.slots` gives the same names but for tensors that are only checked. The output projection appears only
        if it is not tied.
        """
        for matrix in self.matrices():
            yield from dense_tensors(*matrix) if self.quantization is None else self.quantization.tensors(*matrix)
        for index in range(self.num_layers):
            prefix = f"{self.root}.layers.{index}."
            for norm in self.layer_norms:
                yield f"{prefix}{norm}.weight", CheckpointTensor((self.hidden_size,))
            if self.experts is not None and self.experts.layers[index]:
                for name, shape, _ in self.experts.routing_tensors(index, self.hidden_size):
                    yield name, CheckpointTensor(shape)
            for module, rows in self._biased(index):
                yield f"{module}.bias", CheckpointTensor((rows,))
            if self.recurrent is not None and self.recurrent.layers[index]:
                yield from self._recurrent_tensors(index, self.recurrent)
                continue
            if self.attention_sinks:
                yield f"{prefix}self_attn.sinks", CheckpointTensor((self.num_heads,), axes=(Axis(ROWS),))
            if self.qk_norm:
                axes = (Axis(ROWS),) if self.joint_qk_norm else ()
                for name, size in self.for_layer(index).qk_norms:
                    yield f"{prefix}self_attn.{name}.weight", CheckpointTensor((size,), axes=axes)
            if self.gemma4 is not None:
                yield f"{prefix}layer_scalar", CheckpointTensor((1,))
                for norm in self._gemma4_norms:
                    yield f"{prefix}{norm}", CheckpointTensor((self.hidden_size,))
        yield f"{self.root}.norm.weight", CheckpointTensor((self.hidden_size,))
        if self.gemma4 is not None and self.gemma4.per_layer_size:
            yield PER_LAYER_NORM, CheckpointTensor((self.gemma4.per_layer_size,))

    @staticmethod
    def _recurrent_tensors(layer: int, recurrent: RecurrentSpec) -> NamedTensors:
        """What a recurrent layer has besides its projections: the convolution, what gives its decay, its norm."""
        prefix = f"model.layers.{layer}.linear_attn."
        heads = (recurrent.num_value_heads,)
        conv = (recurrent.channels, 1, recurrent.conv_kernel)
        yield f"{prefix}conv1d.weight", CheckpointTensor(conv, axes=(Axis(ROWS),))
        yield f"{prefix}dt_bias", CheckpointTensor(heads, axes=(Axis(ROWS),))
        yield f"{prefix}A_log", CheckpointTensor(heads, axes=(Axis(ROWS),))
        yield f"{prefix}norm.weight", CheckpointTensor((recurrent.value_dim,), axes=())

    def of_layers(self, indices: Sequence[int]) -> DecoderSpec:
        """A network of some of the layers."""
        windows = tuple(self.sliding_windows[index] for index in indices)
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=tuple(experts.layers[index] for index in indices))
        recurrent = self.recurrent
        if recurrent is not None:
            recurrent = replace(recurrent, layers=tuple(recurrent.layers[index] for index in indices))
        whole = None if self.whole is None else self.whole.of_layers(indices)
        return replace(
            self,
            num_layers=len(indices),
            sliding_windows=windows,
            experts=experts,
            recurrent=recurrent,
            gemma4=None if self.gemma4 is None else self.gemma4.of_layers(indices),
            layer_shardings=tuple(self.layer_shardings[index] for index in indices) if self.layer_shardings else (),
            whole=whole,
        )

    def one_of_each_kind(self) -> DecoderSpec:
        """A network of the first layer of each kind, which take different memory: with one MLP or experts, with
        attention or recurrent."""
        has_experts = (False,) * self.num_layers if self.experts is None else self.experts.layers
        sizes = [(layer.kv_parts, layer.head_dim) for layer in map(self.for_layer, range(self.num_layers))]
        kinds = [(has_experts[layer], self.is_recurrent(layer), sizes[layer]) for layer in range(self.num_layers)]
        return self.of_layers([kinds.index(kind) for kind in dict.fromkeys(kinds)])

    def projections(self) -> Iterator[Matrix]:
        """The matrices of all layers without routers and the experts that they choose."""
        for index in range(self.num_layers):
            for module, rows, columns, _ in self._projections(index):
                yield module, rows, columns

    def _own_input_matrices(self) -> Iterator[Matrix]:
        """Of the layers that add an input of their own."""
        if self.gemma4 is not None:
            for index in range(self.num_layers):
                yield from self.gemma4.layer_matrices(index, self.hidden_size)

    def _layer_matrices(self, index: int) -> Iterator[Matrix]:
        for module, rows, columns, _ in self._projections(index):
            yield module, rows, columns
        yield from self._expert_matrices(index)
        if self.gemma4 is not None:
            yield from self.gemma4.layer_matrices(index, self.hidden_size)

    def _biased(self, index: int) -> Iterator[tuple[str, int]]:
        """Module and output features of each projection of a layer that has a bias."""
        yield from ((module, rows) for module, rows, _, bias in self._projections(index) if bias)
        if self.experts is not None and self.experts.biases and self.experts.layers[index]:
            yield from ((module, rows) for module, rows, _ in self._expert_matrices(index))

    def _expert_matrices(self, index: int) -> Iterator[Matrix]:
        if self.experts is not None and self.experts.layers[index]:
            yield from self.experts.matrices(index, self.hidden_size)

    def _projections(self, index: int) -> Iterator[tuple[str, int, int, bool]]:
        """Module, output features, input features and whether there is a bias, of each projection of a layer.

        Without the experts that a router chooses.
        """
        own = self.for_layer(index)
        hidden = self.hidden_size
        inner = own.intermediate_size
        prefix = f"{self.root}.layers.{index}."
        if self.recurrent is not None and self.recurrent.layers[index]:
            for name, size in self.recurrent.input_parts.items():
                yield f"{prefix}linear_attn.{name}", size, hidden, False
            yield f"{prefix}linear_attn.out_proj", hidden, self.recurrent.value_size, False
        else:
            for name, size in own.qkv_parts.items():
                yield f"{prefix}self_attn.{name}", size, hidden, self.qkv_bias
            yield f"{prefix}self_attn.o_proj", hidden, own.q_size, self.o_bias and self.adds_biases
        experts = self.experts if self.experts is not None and self.experts.layers[index] else None
        if experts is None or experts.beside_mlp:
            for name, size in own.gate_up_parts.items():
                yield f"{prefix}mlp.{name}", size, hidden, self.mlp_bias
            yield f"{prefix}mlp.down_proj", hidden, inner, self.mlp_bias and self.adds_biases
        if experts is not None:
            for module, rows, columns in experts.shared_matrices(index, hidden):
                yield module, rows, columns, False

    @property
    def yarn_positions(self) -> int | None:
        """The trained length in tokens, which YaRN extends fourfold; None where the authors document no YaRN.

        Qwen's model cards give factor 4 of 32,768. Qwen3's 40,960 positions are those and 8,192 for the output. Longer
        models of Qwen's, and other families, have no such recipe; Llama 3.1 is trained with a scaling of its own.
        """
        if self.rope.kind == "yarn":
            return self.rope.original_max_position
        if self.rope.kind != "default" or not self.architecture.startswith(("Qwen2For", "Qwen3For", "Qwen3MoeFor")):
            return None
        return min(self.max_position_embeddings, 32_768) if self.max_position_embeddings <= 40_960 else None

    def for_length(self, longest: int) -> DecoderSpec:
        """The network of an engine whose longest sequence has `longest` tokens: see `RopeSpec.for_length`."""
        local = None if self.local_rope is None else self.local_rope.for_length(longest, self.head_dim)
        return replace(self, rope=self.rope.for_length(longest, self.head_dim), local_rope=local)

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the checkpoint's positions support.

        linear and dynamic RoPE: `factor` times max_position_embeddings, as Transformers documents `factor`. yarn:
        `factor` times the trained length, as in Qwen's model cards, or max_position_embeddings if that is more.
        default, llama3 and longrope, and Gemma 3's linear RoPE: max_position_embeddings.
        """
        trained = self.rope.original_max_position or self.max_position_embeddings
        if self.rope.kind in ("linear", "dynamic", "yarn"):
            return max(self.max_position_embeddings, int(trained * self.rope.factor))
        return self.max_position_embeddings
