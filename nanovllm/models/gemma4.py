"""What Gemma 4 has beside the decoder of all families.

Layers with full attention have heads of another size than those with a window, and may take their keys as values. The
last layers may have no keys and values: they read those of an earlier layer. Values are normalized without a weight.
Layers may have experts beside their MLP, add an input of their own to the residual stream, and multiply it by a factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanovllm.data.network import EXPERT_NORMS, Gemma4Spec
from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.linear import Linear, RowAdapters, create_weight
from nanovllm.layers.linear_method import NamedSlots, StoredWeight, WeightSlot, slot_of
from nanovllm.layers.parallel import RankGroup
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.decoder import AttentionLayer, Decoder, LayerInputs, norm_dtype, norm_slot, row_parts
from nanovllm.models.spec import PER_LAYER_NORM, DecoderSpec
from nanovllm.ops.cpu_kernels import FewRowLayer
from nanovllm.ops.row_kernels import GATED_UNITS, sigmoid

Buffers = tuple[Tensor, Tensor, Tensor]  # q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]


class Gemma4Layer(AttentionLayer):
    """A layer that normalizes its values, may add an input of its own, and multiplies its output by a factor."""

    def __init__(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, device: torch.device, group: RankGroup | None
    ) -> None:
        super().__init__(spec, index, dtype, device, group)
        assert spec.gemma4 is not None
        size = spec.gemma4.per_layer_size
        hidden = spec.hidden_size
        prefix = f"model.layers.{index}."
        linear = partial(Linear, prefix=prefix, method=spec.quantization, dtype=dtype, device=device, bias=False)
        self.factor = torch.empty(1, dtype=dtype, device=device)
        self._value_norm = torch.ones(self.spec.head_dim, dtype=torch.float32, device=device)
        norm = partial(torch.empty, hidden, dtype=norm_dtype(spec, dtype), device=device)
        self._own_input: tuple[Linear, Linear, Tensor] | None = None  # gate, projection, norm
        if size:
            gate = linear(hidden, {"per_layer_input_gate": size})
            projection = linear(size, {"per_layer_projection": hidden})
            self._own_input = gate, projection, norm()
        self._experts: Experts | None = None
        if spec.experts is not None:
            self._experts = Experts(spec.experts, index, hidden, spec.activation, spec.quantization, dtype, device)
            self._expert_norms = [norm() for _ in EXPERT_NORMS]

    def _few_rows(self) -> FewRowLayer | None:
        return None

    @property
    def is_recordable(self) -> bool:
        return self._experts is None or self._experts.is_recordable

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
        """See `AttentionLayer`, but for gates, which no Gemma 4 has.

        A layer without keys and values of its own leaves k and v as they are.
        """
        spec = self.spec
        eps = self.spec.rms_norm_eps
        kernels = self._kernels
        heads = self.qkv(self._normed(x, self.input_norm), adapters).unflatten(-1, (-1, spec.head_dim))
        if not spec.kv_parts:
            k = k[:, :0]
            v = v[:, :0]
        elif len(spec.kv_parts) == 1:  # the values are the keys
            heads = torch.cat((heads, heads[:, spec.num_heads :]), dim=1)
        kernels.place_heads(heads, self.qk_norm, eps, cos, sin, q, k, v)
        if spec.kv_parts:
            values = v.view(-1, spec.head_dim)
            kernels.copy_(values, kernels.rms_norm(values, self._value_norm, eps))

    def _mlp_output(self, x: Tensor, normed: Tensor, adapters: RowAdapters | None) -> Tensor:
        output = super()._mlp_output(x, normed, adapters)
        if self._experts is None:
            return output
        of_router, before, after_mlp, after = self._expert_norms
        routed = self._experts.route(self._normed(x, of_router))
        mixed = self._summed(self._experts.mixed(self._normed(x, before), routed))
        return self._kernels.add_(self._normed(output, after_mlp), self._normed(mixed, after))

    def finish_layer_(self, x: Tensor, own_input: Tensor | None) -> None:
        """Add the layer's own input [rows, per_layer_size] to rows x of the residual stream, and multiply them."""
        if self._own_input is not None:
            assert own_input is not None
            gate, projection, norm = self._own_input
            gated = GATED_UNITS[self.spec.activation](torch.cat((gate(x), own_input), dim=1))
            self._kernels.add_(x, self._kernels.rms_norm(projection(gated), norm, self.spec.rms_norm_eps))
        x.mul_(self.factor)

    def slots(self) -> NamedSlots:
        yield from super().slots()
        prefix = f"model.layers.{self.index}."
        yield f"{prefix}layer_scalar", slot_of(self.factor)
        if self._own_input is not None:
            gate, projection, norm = self._own_input
            yield from gate.slots()
            yield from projection.slots()
            yield f"{prefix}post_per_layer_input_norm.weight", slot_of(norm)
        if self._experts is not None:
            yield from self._experts.slots()
            (scale, of_router), *norms = zip(EXPERT_NORMS, self._expert_norms, strict=True)
            over_root = len(of_router) ** -0.5
            yield f"{prefix}{scale}", WeightSlot(of_router, of_router.shape, lambda weight: weight.float() * over_root)
            yield from ((f"{prefix}{name}", slot_of(norm)) for name, norm in norms)

    def _qk_norms(self) -> Sequence[Tensor]:
        return super()._qk_norms()[: len(self.spec.qk_norms)]

    def own_weights(self) -> Iterator[StoredWeight]:
        """The matrices with which the layer adds its own input, and those of its experts."""
        if self._own_input is not None:
            gate, projection, _ = self._own_input
            yield from (gate.weight, projection.weight)
        if self._experts is not None:
            yield from self._experts.weights()


class Gemma4Decoder(Decoder):
    """A decoder of `Gemma4Layer`s. See `Decoder`."""

    layers: Sequence[Gemma4Layer]

    def __init__(
        self,
        spec: DecoderSpec,
        gemma: Gemma4Spec,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__(spec, dtype, device, group)
        self._gemma = gemma
        head_dims = (gemma.full_head_dim, spec.head_dim)  # as in `DecoderSpec.ropes`
        self.rotaries = [RotaryEmbedding(*of_kind, device) for of_kind in zip(spec.ropes, head_dims, strict=True)]
        # The layers whose keys and values later ones read keep them to the end of the step.
        self._kept = set(gemma.owners)
        self._tables: Sequence[StoredWeight] = ()  # of the layers' own inputs: embedding, projection
        if gemma.per_layer_size:
            self._tables = [
                create_weight(spec.quantization, {module: rows}, columns, dtype, device)
                for module, rows, columns in gemma.tables(spec.hidden_size)
            ]
            self._own_norm = torch.empty(gemma.per_layer_size, dtype=norm_dtype(spec, dtype), device=device)
            self._own_scale = torch.tensor(gemma.per_layer_size**0.5).to(dtype).item()

    def _layers(self) -> Sequence[Gemma4Layer]:
        spec = self.spec
        of_all = (self.dtype, self.device, self.group)
        return [Gemma4Layer(spec, index, *of_all) for index in range(spec.num_layers)]

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        x = self.embed(input_ids)
        own_inputs = self._own_inputs(input_ids, x) if self._tables else None
        inputs = self._inputs(x, ctx, range(len(self.rotaries)))
        # By kind of layer, memory that layers use after each other. Those with a window have the heads of the network.
        shared: dict[bool, Buffers] = {False: (inputs.q, inputs.k, inputs.v)}
        kept: dict[int, Buffers] = {}  # by layer
        for layer in self.layers:
            is_full = self._gemma.full[layer.index]
            if layer.index >= self._gemma.num_owners:
                buffers = kept[self._gemma.owners[layer.index - self._gemma.num_owners]]
            elif layer.index in self._kept:
                buffers = kept[layer.index] = self._buffers(layer, x)
            else:
                buffers = shared[is_full] = shared.get(is_full) or self._buffers(layer, x)
            own_input = None if own_inputs is None else own_inputs[:, layer.index]
            self._run_layer_(layer, x, buffers, inputs, own_input)
        return self.normalize_(x)

    def forward_layers_(self, indices: range, x: Tensor, ctx: ForwardContext) -> None:
        layers = [self.layers[index] for index in indices]
        inputs = self._inputs(x, ctx, {layer.rope for layer in layers})
        for layer in layers:
            self._run_layer_(layer, x, self._buffers(layer, x), inputs, None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        cap = self._gemma.logit_cap
        if cap is None:
            return logits
        return sigmoid(logits.mul_(2.0 / cap)).mul_(2.0 * cap).sub_(cap)  # tanh(x) = 2 * sigmoid(2x) - 1

    def _buffers(self, layer: Gemma4Layer, x: Tensor) -> Buffers:
        spec = layer.spec
        tokens = x.shape[0]
        k, v = x.new_empty(2, tokens, spec.num_kv_heads, spec.head_dim)
        return x.new_empty(tokens, spec.num_heads, spec.head_dim), k, v

    def _run_layer_(
        self,
        layer: Gemma4Layer,
        x: Tensor,
        buffers: Buffers,
        inputs: LayerInputs,
        own_input: Tensor | None,
    ) -> None:
        q, k, v = buffers
        layer.forward_(x, replace(inputs, q=q, k=k, v=v))
        for rows, *own in row_parts(self.chunk_rows, x, *([] if own_input is None else [own_input])):
            layer.finish_layer_(rows, own[0] if own else None)

    def _own_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """The layers' own inputs: int64 [tokens], embeddings [tokens, hidden] -> [tokens, layers, per_layer_size].

        From a second embedding of the token, and a projection of the first one, each scaled.
        """
        embedding, projection = self._tables
        size = self._gemma.per_layer_size
        eps = self.spec.rms_norm_eps
        inputs = x.new_empty(x.shape[0], self._gemma.packed_layers * size)
        for ids, embedded, rows in row_parts(self.chunk_rows, input_ids, x, inputs):
            context = projection.apply(embedded, None).mul_(self.spec.hidden_size**-0.5)
            normed = self._kernels.rms_norm(context.view(-1, size), self._own_norm, eps).view_as(context)
            rows.copy_(normed.add_(embedding.rows(ids).mul_(self._own_scale)).mul_(2.0**-0.5))
        return inputs.view(x.shape[0], -1, size)

    def _weights(self) -> Iterator[StoredWeight]:
        yield from super()._weights()
        yield from self._tables
        for layer in self.layers:
            yield from layer.own_weights()

    def slots(self) -> NamedSlots:
        yield from super().slots()
        for table in self._tables:
            yield from table.slots()
        if self._tables:
            yield PER_LAYER_NORM, norm_slot(self.spec, self._own_norm, self._own_norm.shape)
