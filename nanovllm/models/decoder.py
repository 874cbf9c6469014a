"""One decoder for all dense families. It computes on flat batches and leaves attention to the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.forward_context import ForwardContext
from nanovllm.layers.linear import Linear, NamedSlots, WeightSlot, fastest_linear, linear, slot_of
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops.cpu_layer import few_row_layer
from nanovllm.ops.row_kernels import place_heads, silu_and_mul

CPU_CHUNK_ROWS = 1024  # 256 to 4,096 are as fast; temporaries grow with it
DEVICE_CHUNK_ROWS = 8192


def row_chunks(rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover [0, rows)."""
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def row_parts(size: int, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    """The tensors cut into parts of at most `size` rows, side by side; as they are where one part holds them."""
    if tensors[0].shape[0] <= size:
        return iter((tensors,))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


class DecoderLayer:
    """Attention and gated MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.index = index
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        qkv = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        gate_up = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.input_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.qkv = Linear(hidden, qkv, bias=spec.qkv_bias, dtype=dtype, device=device)
        # A row per head, so that q and k are normalized by one call.
        qk_norm_shape = (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self.qk_norm = torch.empty(qk_norm_shape, dtype=dtype, device=device) if spec.qk_norm else None
        self.o = Linear(spec.q_size, {"o_proj": hidden}, bias=spec.o_bias, dtype=dtype, device=device)
        self.post_norm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.gate_up = Linear(hidden, gate_up, bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(
            spec.intermediate_size, {"down_proj": hidden}, bias=spec.mlp_bias, dtype=dtype, device=device
        )
        norms = (self.input_norm.weight, self.qk_norm, self.post_norm.weight)
        products = [(each.weight, each.bias) for each in (self.qkv, self.o, self.gate_up, self.down)]
        self.few_rows = few_row_layer(norms, products, eps, spec.head_dim)

    def forward_(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, chunk: int) -> None:
        """Advance the residual stream x [tokens, hidden] in place; row-wise work goes by `chunk` rows."""
        attended = self._attend(x, cos, sin, ctx, chunk)
        for part, attended_part in row_parts(chunk, x, attended):
            self.finish_(part, attended_part)

    def finish_(self, x: Tensor, attended: Tensor) -> None:
        """All that follows attention over rows of x, in place: its projection and the MLP, each added to x."""
        if self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.finish_(x, attended)
        else:
            x += self._mlp(x, self.o(attended))

    def _mlp(self, x: Tensor, attended: Tensor) -> Tensor:
        """The gated MLP's share of the residual stream, after adding attention's to it in place."""
        return self.down(silu_and_mul(self.gate_up(self.post_norm.add_(x, attended))))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, chunk: int) -> Tensor:
        """Attention over x and what the KV cache holds: [tokens, heads * head_dim], before its projection."""
        tokens, spec = x.shape[0], self.spec
        q = x.new_empty(tokens, spec.num_heads, spec.head_dim)
        k, v = x.new_empty(2, tokens, spec.num_kv_heads, spec.head_dim)
        for part in row_parts(chunk, x, cos, sin, q, k, v):
            self.project(*part)
        return ctx.kv_cache.attend(self.index, q, k, v, ctx).reshape(tokens, spec.q_size)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write q, k and v of the rows of x: normalized where the family does, turned to their positions."""
        if self.few_rows is not None and self.few_rows.takes(x):
            self.few_rows.project(x, cos, sin, q, k, v)
            return
        heads = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.spec.head_dim))
        place_heads(heads, self.qk_norm, self.spec.rms_norm_eps, cos, sin, q, k, v)

    def slots(self) -> NamedSlots:
        """Where each of this layer's checkpoint tensors lands, by name."""
        prefix = f"model.layers.{self.index}."
        yield f"{prefix}input_layernorm.weight", slot_of(self.input_norm.weight)
        yield f"{prefix}post_attention_layernorm.weight", slot_of(self.post_norm.weight)
        yield from self.qkv.slots(f"{prefix}self_attn.")
        yield from self.o.slots(f"{prefix}self_attn.")
        yield from self.gate_up.slots(f"{prefix}mlp.")
        yield from self.down.slots(f"{prefix}mlp.")
        if self.qk_norm is not None:
            shape, heads = (self.spec.head_dim,), self.spec.num_heads
            yield f"{prefix}self_attn.q_norm.weight", WeightSlot(self.qk_norm[:heads], shape)
            yield f"{prefix}self_attn.k_norm.weight", WeightSlot(self.qk_norm[heads:], shape)


class Decoder:
    """Embedding, layers, final norm and output projection. Parameters are allocated and not initialized."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.product = linear
        self.chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.embedding if spec.tie_word_embeddings else torch.empty_like(self.embedding)
        self.layers = [DecoderLayer(spec, i, dtype, device) for i in range(spec.num_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, device)

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the final norm: int64 [tokens] -> [tokens, hidden] in the decoder's dtype.

        The KV cache gets contiguous q [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]. Apart
        from attention a row depends on its own token alone.
        """
        x = self.embed(input_ids)
        cos, sin = self.rotary.cos_sin(ctx.positions, ctx.rope_lengths)
        for layer in self.layers:
            layer.forward_(x, cos, sin, ctx, self.chunk_rows)
        return self.normalize_(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The residual stream before the first layer: int64 [tokens] -> [tokens, hidden]."""
        return F.embedding(input_ids, self.embedding)

    def forward_layer_(self, index: int, x: Tensor, ctx: ForwardContext) -> None:
        """Take the residual stream x [tokens, hidden] through one layer, in place."""
        cos, sin = self.rotary.cos_sin(ctx.positions, ctx.rope_lengths)
        self.layers[index].forward_(x, cos, sin, ctx, self.chunk_rows)

    def normalize_(self, x: Tensor) -> Tensor:
        """The final norm, in place: [tokens, hidden]."""
        for rows in row_chunks(x.shape[0], self.chunk_rows):
            x[rows] = self.norm(x[rows])
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab]; for rows that sample a token, never for all."""
        return self.product(hidden, self.lm_head).float()

    def use_torch_products(self) -> None:
        """Let torch compute the products of many rows, whose last bits then depend on the number of rows."""
        self.product = fastest_linear
        for layer in self.layers:
            for each in (layer.qkv, layer.o, layer.gate_up, layer.down):
                each.product = fastest_linear

    def slots(self) -> NamedSlots:
        """Where each checkpoint tensor lands, by its name in the checkpoint. Tied weights appear once."""
        yield "model.embed_tokens.weight", slot_of(self.embedding)
        for layer in self.layers:
            yield from layer.slots()
        yield "model.norm.weight", slot_of(self.norm.weight)
        if not self.spec.tie_word_embeddings:
            yield "lm_head.weight", slot_of(self.lm_head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters on the device."""
        return sum(slot.view.nbytes for _, slot in self.slots())

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of the parameters of one layer; all have the same shapes."""
        return sum(slot.view.nbytes for _, slot in self.layers[0].slots())
