"""One decoder for all families. It computes on flat batches; the KV cache computes attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.joint_norms import JointNorms
from nanovllm.layers.linear import GatedMLP, Linear, RowAdapters, create_weight
from nanovllm.layers.linear_method import NamedSlots, StoredWeight, WeightSlot, slot_of
from nanovllm.layers.parallel import RankGroup, embedding
from nanovllm.layers.rotary import RotaryEmbedding, rotated_order
from nanovllm.layers.row_limits import CPU_CHUNK_ROWS, DEVICE_CHUNK_ROWS
from nanovllm.models.spec import EMBEDDING_MODULE, HEAD_MODULE, DecoderSpec
from nanovllm.ops.cpu_kernels import FewRowLayer, LayerNorms, few_row_layer
from nanovllm.ops.row_kernels import kernels_on, widened


def row_parts(size: int, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors cut into parts of at most `size` rows; one part holds the tensors themselves if they are short."""
    if tensors[0].shape[0] <= size:
        return iter((tensors,))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


class DecoderLayer:
    """Attention, and a gated MLP or experts.

    Each reads RMS-normalized input, and its output, in some families normalized too, is added to the residual stream.
    In some families only the output is normalized.
    """

    def __init__(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device, group: RankGroup | None
    ) -> None:
        self.spec = spec
        self.group = group
        self.index = index
        self.kv_layer = spec.kv_layer(index)
        self.dtype = dtype
        self._kernels = kernels_on(device, dtype)
        hidden, prefix = spec.hidden_size, f"model.layers.{index}."
        linear = partial(Linear, method=spec.quantization, dtype=dtype, device=device)
        weight = partial(torch.empty, dtype=_norm_dtype(spec, dtype), device=device)
        norms: list[Tensor | None] = [weight(hidden) for _ in spec.layer_norms]
        norms = (norms if spec.input_norms else [None, None, *norms]) + [None, None]
        self.input_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm = norms[:4]
        self.qkv = linear(hidden, spec.qkv_parts, prefix=f"{prefix}self_attn.", bias=spec.qkv_bias)
        # One row per head, so that a single call normalizes q and k.
        qk_norm_shape = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self.qk_norm = weight(qk_norm_shape) if spec.qk_norm and not spec.joint_qk_norm else None
        self.joint_norms = _joint_norms(spec, dtype, device, group) if spec.joint_qk_norm else None
        o_bias = spec.o_bias and spec.adds_biases
        self.o = linear(spec.q_size, {"o_proj": hidden}, prefix=f"{prefix}self_attn.", bias=o_bias)
        self.sinks = torch.empty(spec.num_heads, dtype=torch.float32, device=device) if spec.attention_sinks else None
        self.rope = spec.rope_of(index)
        rotary_dim = spec.ropes[self.rope].rotary_dim
        self.rotated = None if rotary_dim is None else rotated_order(rotary_dim, spec.head_dim, device)
        self.mlp = _mlp(spec, index, dtype, device)
        self.few_rows = self._few_rows()

    def _few_rows(self) -> FewRowLayer | None:
        """The kernels of the whole layer for few rows, if they support it."""
        if isinstance(self.mlp, Experts) or self.input_norm is None or self.mlp_norm is None:
            return None
        output_norms = (self.attention_output_norm, self.mlp_output_norm)
        norms = LayerNorms(self.input_norm, self.qk_norm, self.mlp_norm, *output_norms, self.spec.rms_norm_eps)
        products = [(each.weight.kernel_parts(), each.bias) for each in self.linears]
        return few_row_layer(norms, products, self.dtype, self.spec.head_dim, self.spec.activation)

    def finish_loading(self) -> None:
        """Called when the weights have the form in which their kernels read them."""
        self.few_rows = self._few_rows()

    def forward_(
        self, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, ctx: ForwardContext, chunk: int
    ) -> None:
        """Advance the residual stream x [tokens, hidden] in place; row-wise work takes `chunk` rows at a time.

        qkv: memory for q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim], which layers share.
        """
        q, k, v = qkv
        parts = row_parts(chunk, x, cos, sin, q, k, v)
        for adapters, (x_rows, *angles, q_rows, k_rows, v_rows) in zip(ctx.adapters_of_parts, parts, strict=False):
            self.project(x_rows, angles[0], angles[1], q_rows, k_rows, v_rows, adapters)
        attended = ctx.kv_cache.attend(self.kv_layer, q, k, v, ctx).reshape(x.shape[0], self.spec.q_size)
        parts = row_parts(chunk, x, attended)
        for adapters, (x_rows, attended_rows) in zip(ctx.adapters_of_parts, parts, strict=False):
            self.finish_(x_rows, attended_rows, adapters)

    def finish_(self, x: Tensor, attended: Tensor, adapters: RowAdapters | None = None) -> None:
        """Add the output projection of attention, then the MLP, to rows x of the residual stream, in place."""
        if self.group is None and adapters is None and self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.finish_(x, attended)
        else:
            attended = self._normed(self._summed(self.o(attended, adapters)), self.attention_output_norm)
            if self.mlp_norm is None:
                normed = self._kernels.add_(x, attended)
            else:
                normed = self._kernels.add_rms_norm_(x, attended, self.mlp_norm, self.spec.rms_norm_eps)
            self._kernels.add_(x, self._normed(self._summed(self.mlp(normed, adapters)), self.mlp_output_norm))

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, each of which has multiplied with its columns of o or down."""
        return x if self.group is None else self.group.all_reduce(x)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._kernels.rms_norm(x, weight, self.spec.rms_norm_eps)

    def project(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Write q, k and v of the rows of x, with RoPE, and normalized if the family has q and k norms."""
        as_usual = adapters is None and self.rotated is None and self.joint_norms is None
        if as_usual and self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.project(x, cos, sin, q, k, v)
            return
        eps = self.spec.rms_norm_eps
        qkv = self.qkv(self._normed(x, self.input_norm), adapters)
        if self.joint_norms is not None:
            self.joint_norms.normalize_(qkv[:, : self.spec.q_size + self.spec.kv_size])
        heads = qkv.unflatten(-1, (-1, self.spec.head_dim))
        if self.rotated is not None:  # an order of features that q and k share does not change their products
            q_and_k = heads[:, : self.spec.num_heads + self.spec.num_kv_heads]
            q_and_k.copy_(q_and_k[..., self.rotated])
        self._kernels.place_heads(heads, self.qk_norm, eps, cos, sin, q, k, v)

    @property
    def linears(self) -> Sequence[Linear]:
        """Those that adapters may add to: without the router and the experts that it chooses."""
        mlp = self.mlp.shared if isinstance(self.mlp, Experts) else self.mlp
        return (self.qkv, self.o) if mlp is None else (self.qkv, self.o, mlp.gate_up, mlp.down)

    def slots(self) -> NamedSlots:
        """The parameter view of each of this layer's checkpoint tensors, by name."""
        prefix = f"model.layers.{self.index}."
        for name, norm in zip(self.spec.layer_norms, self._norms(), strict=True):
            yield f"{prefix}{name}.weight", _norm_slot(self.spec, norm, norm.shape)
        for each in (self.qkv, self.o, self.mlp):
            yield from each.slots()
        if self.sinks is not None:
            yield f"{prefix}self_attn.sinks", slot_of(self.sinks)
        if self.spec.qk_norm:
            order = None if self.spec.joint_qk_norm else self.rotated  # the heads come to their norms in this order
            for (name, size), view in zip(self.spec.qk_norms, self._qk_norms(), strict=True):
                yield f"{prefix}self_attn.{name}.weight", _norm_slot(self.spec, view, (size,), order)

    def _qk_norms(self) -> Sequence[Tensor]:
        """The weights of the norms of q and of k."""
        if self.joint_norms is not None:
            return self.joint_norms.weight.split((self.spec.q_size, self.spec.kv_size))
        assert self.qk_norm is not None, "this family has no norms of q and k"
        return self.qk_norm.split((self.spec.num_heads, self.spec.num_kv_heads))

    def _norms(self) -> Iterator[Tensor]:
        """The norms of hidden states, in the order of `DecoderSpec.layer_norms`."""
        norms = (self.input_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm)
        return (norm for norm in norms if norm is not None)


def _norm_dtype(spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    """1 plus a weight of 16 bits takes more than 16."""
    return torch.float32 if spec.norms_in_fp32 else dtype


def _joint_norms(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, group: RankGroup | None
) -> JointNorms:
    sizes = (spec.q_size, spec.kv_size)
    weight = torch.empty(sum(sizes), dtype=_norm_dtype(spec, dtype), device=device)
    norms = JointNorms(weight, sizes, spec.rms_norm_eps, dtype)
    if spec.sharding is not None and group is not None:
        norms.divide(spec.sharding, group)
    return norms


def _norm_slot(spec: DecoderSpec, view: Tensor, shape: Sequence[int], order: Tensor | None = None) -> WeightSlot:
    """The slot of a norm's weight of `shape`. The view may have a row for each head, in another order of features."""

    def convert(weight: Tensor) -> Tensor:
        weight = weight.float() + 1.0 if spec.zero_centered_norms else weight
        return weight if order is None else weight[order.to(weight.device)]

    return WeightSlot(view, tuple(shape), convert if spec.zero_centered_norms or order is not None else None)


def _mlp(spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device) -> GatedMLP | Experts:
    stored = (spec.activation, spec.quantization, dtype, device)
    if spec.experts is not None and spec.experts.layers[index]:
        return Experts(spec.experts, index, spec.hidden_size, *stored, spec.adds_biases)
    biases, prefix = (spec.mlp_bias, spec.mlp_bias and spec.adds_biases), f"model.layers.{index}.mlp."
    return GatedMLP(spec.hidden_size, spec.intermediate_size, spec.gate_up_parts, prefix, biases, *stored)


class Decoder:
    """Embedding, layers, final norm and output projection. Parameters are allocated and not initialized."""

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, group: RankGroup | None = None
    ) -> None:
        """group: the ranks whose part `spec` is, if it has a sharding."""
        self.spec = spec
        self.group = group
        self.dtype = dtype
        self.device = device
        self._kernels = kernels_on(device, dtype)
        self.chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS
        table = {EMBEDDING_MODULE: spec.vocab_rows}
        self.embedding = create_weight(spec.quantization, table, spec.hidden_size, dtype, device)
        self.lm_head = self.embedding
        if not spec.tie_word_embeddings:
            head = {HEAD_MODULE: spec.vocab_rows}
            self.lm_head = create_weight(spec.quantization, head, spec.hidden_size, dtype, device)
        self.layers = [DecoderLayer(spec, i, dtype, device, group) for i in range(spec.num_layers)]
        self.norm = torch.empty(spec.hidden_size, dtype=_norm_dtype(spec, dtype), device=device)
        # A layer's index is its `rope`.
        self.rotaries = [RotaryEmbedding(rope, spec.head_dim, device) for rope in spec.ropes]
        self.embedding_scale = torch.tensor(spec.embedding_scale).to(dtype).item()

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm: int64 [tokens] -> [tokens, hidden] in the decoder's dtype.

        The KV cache gets contiguous q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. Apart from
        attention, a row depends only on its own token.
        """
        x = self.embed(input_ids)
        angles = [rotary.cos_sin(ctx.positions, ctx.rope_lengths) for rotary in self.rotaries]
        q = x.new_empty(x.shape[0], self.spec.num_heads, self.spec.head_dim)
        k, v = x.new_empty(2, x.shape[0], self.spec.num_kv_heads, self.spec.head_dim)
        for layer in self.layers:
            layer.forward_(x, (q, k, v), *angles[layer.rope], ctx, self.chunk_rows)
        return self.normalize_(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The residual stream before the first layer: int64 [tokens] -> [tokens, hidden]."""
        if self.group is None or self.spec.sharding is None:
            x = self.embedding.rows(input_ids)
        else:
            x = embedding(input_ids, self.embedding, self.spec.sharding.vocab, self.group)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def forward_layer_(self, index: int, x: Tensor, ctx: ForwardContext) -> None:
        """Take the residual stream x [tokens, hidden] through one layer, in place."""
        layer = self.layers[index]
        cos, sin = self.rotaries[layer.rope].cos_sin(ctx.positions, ctx.rope_lengths)
        q = x.new_empty(x.shape[0], self.spec.num_heads, self.spec.head_dim)
        k, v = x.new_empty(2, x.shape[0], self.spec.num_kv_heads, self.spec.head_dim)
        layer.forward_(x, (q, k, v), cos, sin, ctx, self.chunk_rows)

    def normalize_(self, x: Tensor) -> Tensor:
        """The final norm, in place: [tokens, hidden]."""
        for (rows,) in row_parts(self.chunk_rows, x):
            self._kernels.copy_(rows, self._kernels.rms_norm(rows, self.norm, self.spec.rms_norm_eps))
        return x

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
        return tuple(layer.sinks for layer in self.layers if layer.sinks is not None)

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
        yield "model.norm.weight", _norm_slot(self.spec, self.norm, self.norm.shape)
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
