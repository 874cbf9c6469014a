"""One decoder for all families. It computes on flat batches; the KV cache computes attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.gated_delta import GatedDelta, part_sizes, parts_of_states
from nanovllm.layers.joint_norms import JointNorms
from nanovllm.layers.linear import GatedMLP, Linear, RowAdapters, create_weight
from nanovllm.layers.linear_method import NamedSlots, StoredWeight, WeightSlot, slot_of
from nanovllm.layers.parallel import RankGroup, embedding
from nanovllm.layers.rotary import RotaryEmbedding, rotated_order
from nanovllm.layers.row_limits import CPU_CHUNK_ROWS, DEVICE_CHUNK_ROWS
from nanovllm.models.spec import EMBEDDING_MODULE, HEAD_MODULE, DecoderSpec
from nanovllm.ops.cpu_kernels import FewRowLayer, HeadLayout, LayerNorms, few_row_layer
from nanovllm.ops.delta_inputs import StatePart, StateRows
from nanovllm.ops.recurrent_kernels import recurrent_kernels_on
from nanovllm.ops.row_kernels import kernels_on, widened


def row_parts(size: int | list[int], *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors cut into parts of at most `size` rows, or of so many; a single part holds the tensors themselves."""
    if len(size) <= 1 if isinstance(size, list) else tensors[0].shape[0] <= size:
        return iter((tensors,))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What all layers of one forward pass share, besides the residual stream."""

    ctx: ForwardContext
    parts: list[int]  # rows that row-wise work takes at a time
    angles: Mapping[int, tuple[Tensor, Tensor]]  # cos and sin of the tokens, by rotary embedding
    q: Tensor  # memory [tokens, heads, head_dim]
    k: Tensor  # memory [tokens, kv_heads, head_dim]
    v: Tensor
    state_parts: Sequence[StatePart]  # of each part; empty if no layer is recurrent
    query_scale: Tensor | None  # [tokens, 1, 1]; see `RotaryEmbedding.query_scale`


class DecoderLayer(ABC):
    """What mixes tokens, attention or a recurrence, and a gated MLP or experts.

    Each reads RMS-normalized input, and its output, in some families normalized too, is added to the residual stream.
    In some families only the output is normalized.
    """

    qk_norm: Tensor | None = None

    def __init__(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device, group: RankGroup | None
    ) -> None:
        self.spec = spec = spec.for_layer(index)
        self.group = group
        self.index = index
        self.rope = spec.rope_of(index)
        self.dtype = dtype
        self._kernels = kernels_on(device, dtype)
        weight = partial(torch.empty, spec.hidden_size, dtype=norm_dtype(spec, dtype), device=device)
        norms: list[Tensor | None] = [weight() for _ in spec.layer_norms]
        norms = (norms if spec.input_norms else [None, None, *norms]) + [None, None]
        self.input_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm = norms[:4]
        self.qkv, self.o = self._projections(dtype, device)
        self.mlp = _mlp(spec, index, dtype, device)
        self.few_rows = self._few_rows()

    @abstractmethod
    def _projections(self, dtype: torch.dtype, device: torch.device) -> tuple[Linear, Linear]:
        """Make what mixes tokens. Returns the projections of its input, q, k and v among them, and of its output."""

    @abstractmethod
    def forward_(self, x: Tensor, inputs: LayerInputs) -> None:
        """Advance the residual stream x [tokens, hidden] in place, row-wise work in the parts of `inputs`."""

    @abstractmethod
    def _mixer_slots(self) -> NamedSlots:
        """The slots of what mixes tokens."""

    def _few_rows(self) -> FewRowLayer | None:
        """The kernels of the whole layer for few rows, if they support it."""
        if isinstance(self.mlp, Experts) or self.input_norm is None or self.mlp_norm is None:
            return None
        output_norms = (self.attention_output_norm, self.mlp_output_norm)
        norms = LayerNorms(self.input_norm, self.qk_norm, self.mlp_norm, *output_norms, self.spec.rms_norm_eps)
        products = [(linear.weight.kernel_parts(), linear.bias) for linear in self.linears]
        head_dim = self.spec.head_dim
        rotary_dim = self.spec.ropes[self.rope].rotary_dim
        heads = HeadLayout(head_dim, rotary_dim or head_dim, self.spec.attention_gate)
        return few_row_layer(norms, products, self.dtype, heads, self.spec.activation)

    def finish_loading(self) -> None:
        """Called when the weights have the form in which their kernels read them."""
        self.few_rows = self._few_rows()

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can record the layer: the host need not know its numbers."""
        return not isinstance(self.mlp, Experts) or self.mlp.is_recordable

    def finish_(self, x: Tensor, mixed: Tensor, adapters: RowAdapters | None = None) -> None:
        """Add the output projection of what was mixed, then the MLP, to rows x of the residual stream, in place."""
        if self.group is None and adapters is None and self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.finish_(x, mixed)
        else:
            mixed = self._normed(self._summed(self.o(mixed, adapters)), self.attention_output_norm)
            if self.mlp_norm is None:
                normed = self._kernels.add_(x, mixed)
            else:
                normed = self._kernels.add_rms_norm_(x, mixed, self.mlp_norm, self.spec.rms_norm_eps)
            self._kernels.add_(x, self._normed(self._mlp_output(x, normed, adapters), self.mlp_output_norm))

    def _mlp_output(self, x: Tensor, normed: Tensor, adapters: RowAdapters | None) -> Tensor:
        """What the MLP makes of rows x of the residual stream; normed: the same with the norm before the MLP."""
        return self._summed(self.mlp(normed, adapters))

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, each of which has multiplied with its columns of o or down."""
        return x if self.group is None else self.group.all_reduce(x)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self.spec.rms_norm_eps)

    @property
    def linears(self) -> Sequence[Linear]:
        """Those that adapters may add to: without the router and the experts that it chooses."""
        mlp = self.mlp.shared if isinstance(self.mlp, Experts) else self.mlp
        return (self.qkv, self.o) if mlp is None else (self.qkv, self.o, mlp.gate_up, mlp.down)

    def slots(self) -> NamedSlots:
        """The parameter view of each of this layer's checkpoint tensors, by name."""
        for name, norm in zip(self.spec.layer_norms, self._norms(), strict=True):
            yield f"{self.spec.root}.layers.{self.index}.{name}.weight", norm_slot(self.spec, norm, norm.shape)
        for part in (self.qkv, self.o, self.mlp):
            yield from part.slots()
        yield from self._mixer_slots()

    def _norms(self) -> Iterator[Tensor]:
        """The norms of hidden states, in the order of `DecoderSpec.layer_norms`."""
        norms = (self.input_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm)
        return (norm for norm in norms if norm is not None)


class AttentionLayer(DecoderLayer):
    """A layer with attention, by way of the KV cache."""

    def _projections(self, dtype: torch.dtype, device: torch.device) -> tuple[Linear, Linear]:
        spec = self.spec
        prefix = f"{self.spec.root}.layers.{self.index}.self_attn."
        linear = partial(Linear, method=spec.quantization, prefix=prefix, dtype=dtype, device=device)
        self.kv_layer = spec.kv_layer(self.index)
        # One row per head, so that a single call normalizes q and k.
        shape = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        weight = partial(torch.empty, shape, dtype=norm_dtype(spec, dtype), device=device)
        self.qk_norm = weight() if spec.qk_norm and not spec.joint_qk_norm else None
        self.joint_norms = _joint_norms(spec, dtype, device, self.group) if spec.joint_qk_norm else None
        self.sinks = torch.empty(spec.num_heads, dtype=torch.float32, device=device) if spec.attention_sinks else None
        rotary_dim = spec.ropes[self.rope].rotary_dim
        self.rotated = None if rotary_dim is None else rotated_order(rotary_dim, spec.head_dim, device)
        self._gate = recurrent_kernels_on(device, dtype).sigmoid_gate_
        qkv = linear(spec.hidden_size, spec.qkv_parts, bias=spec.qkv_bias)
        return qkv, linear(spec.q_size, {"o_proj": spec.hidden_size}, bias=spec.o_bias and spec.adds_biases)

    def forward_(self, x: Tensor, inputs: LayerInputs) -> None:
        ctx = inputs.ctx
        sizes = inputs.parts
        q_size = self.spec.q_size
        gates = (x.new_empty(x.shape[0], q_size),) if self.spec.attention_gate else ()
        parts = row_parts(sizes, x, *inputs.angles[self.rope], inputs.q, inputs.k, inputs.v, *gates)
        for adapters, (x_rows, cos, sin, q, k, v, *gate) in zip(ctx.adapters_of_parts, parts, strict=False):
            self.project(x_rows, cos, sin, q, k, v, adapters, *gate)
        if inputs.query_scale is not None:
            inputs.q.mul_(inputs.query_scale)
        attended = ctx.kv_cache.attend(self.kv_layer, inputs.q, inputs.k, inputs.v, ctx).reshape(x.shape[0], q_size)
        parts = row_parts(sizes, x, attended, *gates)
        for adapters, (x_rows, attended_rows, *gate) in zip(ctx.adapters_of_parts, parts, strict=False):
            if gate:
                self._gate(attended_rows, *gate)
            self.finish_(x_rows, attended_rows, adapters)

    def project(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        adapters: RowAdapters | None = None,
        gate: Tensor | None = None,
    ) -> None:
        """Write q, k and v of the rows of x, with RoPE, and normalized if the family has q and k norms.

        gate: where the gates of the output go [rows, heads * head_dim], if the family has any.
        """
        few_rows = self.few_rows if adapters is None and self.joint_norms is None else None
        if few_rows is not None and few_rows.takes(x):
            few_rows.project(x, cos, sin, q, k, v, gate)
            return
        eps = self.spec.rms_norm_eps
        projected = self.qkv(self._normed(x, self.input_norm), adapters)
        if self.spec.attention_gate:
            assert gate is not None, "a layer with gates needs memory for them"
            projected = self._without_gates(projected, gate)
        if self.joint_norms is not None:
            self.joint_norms.normalize_(projected[:, : self.spec.q_size + self.spec.kv_size])
        heads = projected.unflatten(-1, (-1, self.spec.head_dim))
        if self.rotated is not None:  # an order of features that q and k share does not change their products
            q_and_k = heads[:, : self.spec.num_heads + self.spec.num_kv_heads]
            q_and_k.copy_(q_and_k[..., self.rotated])
        self._kernels.place_heads(heads, self.qk_norm, eps, cos, sin, q, k, v)

    def _without_gates(self, projected: Tensor, gate: Tensor) -> Tensor:
        """q, k and v of a projection in which each head's gate follows its query; the gates are written to `gate`."""
        spec = self.spec
        both, k_and_v = projected.split((spec.gated_q_size, 2 * spec.kv_size), dim=1)
        both = both.unflatten(1, (spec.num_heads, 2, spec.head_dim))
        gate.unflatten(1, (spec.num_heads, spec.head_dim)).copy_(both[:, :, 1])
        return torch.cat((both[:, :, 0].flatten(1), k_and_v), dim=1)

    def _mixer_slots(self) -> NamedSlots:
        prefix = f"{self.spec.root}.layers.{self.index}.self_attn."
        if self.sinks is not None:
            yield f"{prefix}sinks", slot_of(self.sinks)
        if self.spec.qk_norm:
            order = None if self.spec.joint_qk_norm else self.rotated  # the heads come to their norms in this order
            for (name, size), view in zip(self.spec.qk_norms, self._qk_norms(), strict=True):
                yield f"{prefix}{name}.weight", norm_slot(self.spec, view, (size,), order)

    def _qk_norms(self) -> Sequence[Tensor]:
        """The weights of the norms of q and of k."""
        if self.joint_norms is not None:
            return self.joint_norms.weight.split((self.spec.q_size, self.spec.kv_size))
        assert self.qk_norm is not None, "this family has no norms of q and k"
        return self.qk_norm.split((self.spec.num_heads, self.spec.num_kv_heads))


class RecurrentLayer(DecoderLayer):
    """A layer with the gated delta rule, by way of the states of the step's sequences."""

    def _projections(self, dtype: torch.dtype, device: torch.device) -> tuple[Linear, Linear]:
        spec = self.spec
        prefix = f"model.layers.{self.index}.linear_attn."
        assert spec.recurrent is not None, "a recurrent layer needs its sizes"
        stored = (spec.quantization, dtype, device)
        self.delta = GatedDelta(spec.recurrent, spec.hidden_size, prefix, spec.rms_norm_eps, *stored)
        return self.delta.input, self.delta.out

    def forward_(self, x: Tensor, inputs: LayerInputs) -> None:
        ctx = inputs.ctx
        assert ctx.states is not None, "a step of a network with recurrent layers brings their states"
        states = ctx.states.of_layer(self.index)
        parts = zip(ctx.adapters_of_parts, inputs.state_parts, row_parts(inputs.parts, x), strict=False)
        for adapters, (rows, kept), (x_rows,) in parts:
            mixed, projected = self.recur_(x_rows, rows, states, adapters)
            if ctx.states.kept is not None and kept is not None:
                ctx.states.kept.of_layer(self.index).index_copy_(0, kept.target, projected[kept.source])
            self.finish_(x_rows, mixed, adapters)

    def recur_(
        self, x: Tensor, rows: StateRows, states: tuple[Tensor, Tensor], adapters: RowAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the output projection reads of rows x, and what the input projection gives; advances their states. See
        `GatedDelta`.
        """
        of_few = self.delta.few_rows
        layer = self.few_rows
        if adapters is None and of_few is not None and layer is not None and layer.takes(x):
            return of_few(layer, x, rows, states)
        projected = self.delta.input(self._normed(x, self.input_norm), adapters)
        return self.delta(projected, rows, states), projected

    def _mixer_slots(self) -> NamedSlots:
        yield from self.delta.slots()


def norm_dtype(spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    """1 plus a weight of 16 bits takes more than 16."""
    return torch.float32 if spec.norms_in_fp32 else dtype


def _joint_norms(spec: DecoderSpec, dtype: torch.dtype, device: torch.device, group: RankGroup | None) -> JointNorms:
    sizes = (spec.q_size, spec.kv_size)
    weight = torch.empty(sum(sizes), dtype=norm_dtype(spec, dtype), device=device)
    norms = JointNorms(weight, sizes, spec.rms_norm_eps, dtype)
    if spec.sharding is not None and group is not None:
        norms.divide(spec.sharding, group)
    return norms


def norm_slot(spec: DecoderSpec, view: Tensor, shape: Sequence[int], order: Tensor | None = None) -> WeightSlot:
    """The slot of a norm's weight of `shape`. The view may have a row for each head, in another order of features."""

    def convert(weight: Tensor) -> Tensor:
        weight = weight.float() + 1.0 if spec.zero_centered_norms else weight
        return weight if order is None else weight[order.to(weight.device)]

    return WeightSlot(view, tuple(shape), convert if spec.zero_centered_norms or order is not None else None)


def _mlp(spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device) -> GatedMLP | Experts:
    stored = (spec.activation, spec.quantization, dtype, device)
    if spec.experts is not None and spec.experts.layers[index] and not spec.experts.beside_mlp:
        return Experts(spec.experts, index, spec.hidden_size, *stored, spec.adds_biases)
    biases = (spec.mlp_bias, spec.mlp_bias and spec.adds_biases)
    prefix = f"{spec.root}.layers.{index}.mlp."
    return GatedMLP(spec.hidden_size, spec.intermediate_size, spec.gate_up_parts, prefix, biases, *stored)


class Decoder:
    """Embedding, layers, final norm and output projection. Parameters are allocated and not initialized."""

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        shared: Decoder | None = None,
    ) -> None:
        """group: the ranks whose part `spec` is, if it has a sharding. shared: a decoder of the same sizes, whose
        embedding and output projection are those of this one too.
        """
        self.spec = spec
        self.group = group
        self.dtype = dtype
        self.device = device
        self._kernels = kernels_on(device, dtype)
        self.chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS
        tables = self._make_tables() if shared is None else (shared.embedding, shared.lm_head)
        self.embedding: StoredWeight = tables[0]
        self.lm_head: StoredWeight = tables[1]
        self.layers = self._layers()
        self.norm = torch.empty(spec.hidden_size, dtype=norm_dtype(spec, dtype), device=device)
        # A layer's index is its `rope`.
        self.rotaries = [RotaryEmbedding(rope, spec.head_dim, device) for rope in spec.ropes]
        self.embedding_scale = torch.tensor(spec.embedding_scale).to(dtype).item()

    def _make_tables(self) -> tuple[StoredWeight, StoredWeight]:
        """The embedding and the output projection, which are one if they are tied."""
        spec = self.spec
        modules = [EMBEDDING_MODULE, HEAD_MODULE]
        tables = [
            create_weight(spec.quantization, {module: spec.vocab_rows}, spec.hidden_size, self.dtype, self.device)
            for module in (modules[:1] if spec.tie_word_embeddings else modules)
        ]
        return tables[0], tables[-1]

    def _layers(self) -> Sequence[DecoderLayer]:
        spec = self.spec
        of_all = (self.dtype, self.device, self.group)
        kinds = [RecurrentLayer if spec.is_recurrent(index) else AttentionLayer for index in range(spec.num_layers)]
        return [kind(spec, index, *of_all) for index, kind in enumerate(kinds)]

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm: int64 [tokens] -> [tokens, hidden] in the decoder's dtype.

        The KV cache gets contiguous q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. Apart from
        attention and recurrent layers, a row depends only on its own token.
        """
        x = self.embed(input_ids)
        inputs = self._inputs(x, ctx, range(len(self.rotaries)))
        for layer in self.layers:
            layer.forward_(x, inputs)
        return self.normalize_(x)

    def _inputs(self, x: Tensor, ctx: ForwardContext, ropes: Iterable[int]) -> LayerInputs:
        """What layers with these rotary embeddings share in a pass of x [tokens, hidden]."""
        spec = self.spec
        tokens = x.shape[0]
        k, v = x.new_empty(2, tokens, spec.num_kv_heads, spec.head_dim)
        parts = [len(rows) for (rows,) in row_parts(self.chunk_rows, x)]
        if spec.recurrent is not None and not ctx.adapters:  # which come in parts of their own
            parts = part_sizes(ctx, self.chunk_rows)
        return LayerInputs(
            ctx=ctx,
            parts=parts,
            angles={rope: self.rotaries[rope].cos_sin(ctx.positions) for rope in ropes},
            q=x.new_empty(tokens, spec.num_heads, spec.head_dim),
            k=k,
            v=v,
            state_parts=parts_of_states(ctx, parts) if spec.recurrent is not None else (),
            query_scale=self.rotaries[0].query_scale(ctx.positions, x.dtype),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """The residual stream before the first layer: int64 [tokens] -> [tokens, hidden]."""
        if self.group is None or self.spec.sharding is None:
            x = self.embedding.rows(input_ids)
        else:
            x = embedding(input_ids, self.embedding, self.spec.sharding.vocab, self.group)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def forward_layers_(self, indices: range, x: Tensor, ctx: ForwardContext) -> None:
        """Take the residual stream x [tokens, hidden] through some layers, in place."""
        layers = [self.layers[index] for index in indices]
        inputs = self._inputs(x, ctx, {layer.rope for layer in layers})
        for layer in layers:
            layer.forward_(x, inputs)

    def normalize_(self, x: Tensor) -> Tensor:
        """The final norm, in place: [tokens, hidden]."""
        for (rows,) in row_parts(self.chunk_rows, x):
            self._kernels.copy_(rows, self._kernels.rms_norm(rows, self.norm, self.spec.rms_norm_eps))
        return x

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can record a pass of few rows."""
        return all(layer.is_recordable for layer in self.layers)

    @property
    def recurrences(self) -> Sequence[GatedDelta]:
        """Of each recurrent layer, in order."""
        return [layer.delta for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]. Called only for rows that sample a token.

        Ranks other than the first contribute their part of the vocabulary, and get logits of no row.
        """
        logits = self.lm_head.apply(hidden, None)
        if self.group is not None and self.spec.sharding is not None:
            collected = self.group.gather_columns(logits, self.spec.sharding.vocab_widths)
            logits = logits.new_empty(0, self.spec.vocab_size) if collected is None else collected
        return widened(logits)

    @property
    def sinks(self) -> tuple[Tensor, ...]:
        """Of each layer, fp32 [heads]; () if attention has none."""
        layers = (layer for layer in self.layers if isinstance(layer, AttentionLayer))
        return tuple(layer.sinks for layer in layers if layer.sinks is not None)

    @property
    def has_logits(self) -> bool:
        """Whether `compute_logits` gives the logits to this rank, which then samples."""
        return self.group is None or self.group.rank == 0

    def use_torch_products(self) -> None:
        """Let torch multiply many rows at once. The last bits of a result then depend on the number of rows."""
        for weight in self._weights():
            weight.use_torch_products()
        for layer in self.layers:
            layer.finish_loading()

    def finish_loading(self) -> None:
        """Called when all slots are filled: weights may now be rearranged for their kernels."""
        for weight in self._weights():
            weight.finish_loading()
        for layer in self.layers:
            layer.finish_loading()

    def _weights(self) -> Iterator[StoredWeight]:
        yield self.embedding
        if self.lm_head is not self.embedding:
            yield self.lm_head
        for layer in self.layers:
            yield from (layer.qkv.weight, layer.o.weight, *layer.mlp.weights())

    def slots(self) -> NamedSlots:
        """The parameter view of each checkpoint tensor, by name. Tied weights appear once."""
        yield from self.embedding.slots()
        for layer in self.layers:
            yield from layer.slots()
        yield f"{self.spec.root}.norm.weight", norm_slot(self.spec, self.norm, self.norm.shape)
        if not self.spec.tie_word_embeddings:
            yield from self.lm_head.slots()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters. Tied embeddings count once."""
        return self.spec.weight_bytes(self.dtype.itemsize)

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of the parameters of one layer that a single row reads, the mean of all layers if they differ."""
        return self.spec.layer_weight_bytes(self.dtype.itemsize, rows=1)
