"""One decoder for all families. It computes on flat batches; the KV cache computes attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nanovllm.forward_context import ForwardContext
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import Linear, create_weight
from nanovllm.layers.linear_method import NamedSlots, WeightSlot, slot_of
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.spec import EMBEDDING_MODULE, HEAD_MODULE, DecoderSpec
from nanovllm.ops.cpu_kernels import FewRowLayer, few_row_layer
from nanovllm.ops.row_kernels import add_rms_norm_, place_heads, rms_norm

CPU_CHUNK_ROWS = 1024  # rows per product; 256 to 4,096 are as fast, and temporaries grow with it
DEVICE_CHUNK_ROWS = 8192


def row_parts(size: int, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors cut into parts of at most `size` rows; one part holds the tensors themselves if they are short."""
    if tensors[0].shape[0] <= size:
        return iter((tensors,))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


class DecoderLayer:
    """Attention, and a gated MLP or experts.

    Each reads RMS-normalized input, and its output is added to the residual stream.
    """

    def __init__(self, spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.index = index
        hidden, prefix = spec.hidden_size, f"model.layers.{index}."
        linear = partial(Linear, method=spec.quantization, dtype=dtype, device=device)
        qkv = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = linear(hidden, qkv, prefix=f"{prefix}self_attn.", bias=spec.qkv_bias)
        # One row per head, so that a single call normalizes q and k.
        qk_norm_shape = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self.qk_norm = torch.empty(qk_norm_shape, dtype=dtype, device=device) if spec.qk_norm else None
        self.o = linear(spec.q_size, {"o_proj": hidden}, prefix=f"{prefix}self_attn.", bias=spec.o_bias)
        self.post_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.mlp = _mlp(spec, index, dtype, device)
        self.few_rows = self._few_rows()

    def _few_rows(self) -> FewRowLayer | None:
        """The kernels of the whole layer for few rows, if they support it."""
        if isinstance(self.mlp, Experts):
            return None
        norms = (self.input_norm, self.qk_norm, self.post_norm)
        products = [(each.weight.dense, each.bias) for each in (self.qkv, self.o, self.mlp.gate_up, self.mlp.down)]
        return few_row_layer(norms, products, self.spec.rms_norm_eps, self.spec.head_dim)

    def forward_(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, chunk: int) -> None:
        """Advance the residual stream x [tokens, hidden] in place; row-wise work takes `chunk` rows at a time."""
        attended = self._attend(x, cos, sin, ctx, chunk)
        for part, attended_part in row_parts(chunk, x, attended):
            self.finish_(part, attended_part)

    def finish_(self, x: Tensor, attended: Tensor) -> None:
        """Add the output projection of attention, then the MLP, to rows x of the residual stream, in place."""
        if self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.finish_(x, attended)
        else:
            x += self.mlp(add_rms_norm_(x, self.o(attended), self.post_norm, self.spec.rms_norm_eps))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, chunk: int) -> Tensor:
        """Attention over x and the KV cache: [tokens, heads * head_dim], before the output projection."""
        tokens, spec = x.shape[0], self.spec
        q = x.new_empty(tokens, spec.num_heads, spec.head_dim)
        k, v = x.new_empty(2, tokens, spec.num_kv_heads, spec.head_dim)
        for part in row_parts(chunk, x, cos, sin, q, k, v):
            self.project(*part)
        return ctx.kv_cache.attend(self.index, q, k, v, ctx).reshape(tokens, spec.q_size)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write q, k and v of the rows of x, with RoPE, and normalized if the family has q and k norms."""
        if self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.project(x, cos, sin, q, k, v)
            return
        eps = self.spec.rms_norm_eps
        heads = self.qkv(rms_norm(x, self.input_norm, eps)).unflatten(-1, (-1, self.spec.head_dim))
        place_heads(heads, self.qk_norm, eps, cos, sin, q, k, v)

    def slots(self) -> NamedSlots:
        """The parameter view of each of this layer's checkpoint tensors, by name."""
        prefix = f"model.layers.{self.index}."
        yield f"{prefix}input_layernorm.weight", slot_of(self.input_norm)
        yield f"{prefix}post_attention_layernorm.weight", slot_of(self.post_norm)
        for each in (self.qkv, self.o, self.mlp):
            yield from each.slots()
        if self.qk_norm is not None:
            shape, heads = (self.spec.head_dim,), self.spec.num_heads
            yield f"{prefix}self_attn.q_norm.weight", WeightSlot(self.qk_norm[:heads], shape)
            yield f"{prefix}self_attn.k_norm.weight", WeightSlot(self.qk_norm[heads:], shape)


def _mlp(spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device) -> GatedMLP | Experts:
    hidden, method = spec.hidden_size, spec.quantization
    if spec.experts is not None and spec.experts.layers[index]:
        return Experts(spec.experts, index, hidden, method=method, dtype=dtype, device=device)
    prefix, bias = f"model.layers.{index}.mlp.", spec.mlp_bias
    return GatedMLP(hidden, spec.intermediate_size, prefix=prefix, bias=bias, method=method, dtype=dtype, device=device)


class Decoder:
    """Embedding, layers, final norm and output projection. Parameters are allocated and not initialized."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS
        table = {EMBEDDING_MODULE: spec.vocab_size}
        self.embedding = create_weight(spec.quantization, table, spec.hidden_size, dtype, device)
        self.lm_head = self.embedding
        if not spec.tie_word_embeddings:
            head = {HEAD_MODULE: spec.vocab_size}
            self.lm_head = create_weight(spec.quantization, head, spec.hidden_size, dtype, device)
        self.layers = [DecoderLayer(spec, i, dtype, device) for i in range(spec.num_layers)]
        self.norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, device)

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm: int64 [tokens] -> [tokens, hidden] in the decoder's dtype.

        The KV cache gets contiguous q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. Apart from
        attention, a row depends only on its own token.
        """
        x = self.embed(input_ids)
        cos, sin = self.rotary.cos_sin(ctx.positions, ctx.rope_lengths)
        for layer in self.layers:
            layer.forward_(x, cos, sin, ctx, self.chunk_rows)
        return self.normalize_(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The residual stream before the first layer: int64 [tokens] -> [tokens, hidden]."""
        return self.embedding.rows(input_ids)

    def forward_layer_(self, index: int, x: Tensor, ctx: ForwardContext) -> None:
        """Take the residual stream x [tokens, hidden] through one layer, in place."""
        cos, sin = self.rotary.cos_sin(ctx.positions, ctx.rope_lengths)
        self.layers[index].forward_(x, cos, sin, ctx, self.chunk_rows)

    def normalize_(self, x: Tensor) -> Tensor:
        """The final norm, in place: [tokens, hidden]."""
        for (rows,) in row_parts(self.chunk_rows, x):
            rows.copy_(rms_norm(rows, self.norm, self.spec.rms_norm_eps))
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]. Called only for rows that sample a token."""
        return self.lm_head.apply(hidden, None).float()

    def use_torch_products(self) -> None:
        """Let torch multiply many rows at once. The last bits of a result then depend on the number of rows."""
        self.lm_head.use_torch_products()
        for layer in self.layers:
            for each in (layer.qkv.weight, layer.o.weight, layer.mlp):
                each.use_torch_products()

    def slots(self) -> NamedSlots:
        """The parameter view of each checkpoint tensor, by name. Tied weights appear once."""
        yield from self.embedding.slots()
        for layer in self.layers:
            yield from layer.slots()
        yield "model.norm.weight", slot_of(self.norm)
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
