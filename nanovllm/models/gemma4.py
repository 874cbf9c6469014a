"""Gemma 4. Layers with full attention have heads of another size than those with a window, and the last layers may
read the keys and values of an earlier one.

Beside Transformers' modeling_gemma4.py. Layers may have experts beside their MLP, and an input of their own.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.data.network import ExpertSpec, Kept, SharedKV
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.layer_inputs import LayerInputs, row_parts
from nanovllm.layers.linear import ReplicatedLinear, RowAdapters
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.module import Module, Parameter
from nanovllm.layers.norm import WideRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of
from nanovllm.models.gemma4_config import Gemma4Layer, check_ranks, gemma4_layers, has_experts, own_input_size
from nanovllm.models.rope_config import rotary_embeddings
from nanovllm.ops.row_kernels import GATED_UNITS, sigmoid

UNUSED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


class Gemma4TextAttention(Attention):
    """Values are normalized without a weight. Layers with full attention may have their keys as values, as they are
    before the norm of keys."""

    def __init__(self, config: Any, layer: Gemma4Layer, rope: RotaryEmbedding, build: BuildContext) -> None:
        self._layer = layer
        shares_keys = layer.window is None and config.attention_k_eq_v
        kv_parts = ("k_proj",) if shares_keys else ("k_proj", "v_proj")
        self._value_norm = torch.ones(layer.head_dim, dtype=torch.float32, device=build.device)
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            layer.kv_heads,
            layer.head_dim,
            rope,
            build,
            qk_norm=WideRMSNorm,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            window=layer.window,
            scale=1.0,
            kv_parts=kv_parts if layer.has_keys else (),
        )

    @property
    def kept(self) -> Kept:
        owner = self._layer.kv_owner
        return super().kept if owner is None or self._layer.has_keys else SharedKV(owner)

    def _memory(self, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        return inputs.heads(self.heads.size, self.kv_heads.size, self.head_dim, self._layer.kv_owner)

    def place_heads(self, heads: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        if not self._layer.has_keys:  # k and v hold those of an earlier layer
            super().place_heads(heads, cos, sin, q, k[:, :0], v[:, :0])
            return
        super().place_heads(heads, cos, sin, q, k, v)
        values = v.view(-1, self.head_dim)
        self._kernels.copy_(values, self._kernels.rms_norm(values, self._value_norm, self._eps))


class Gemma4TextMLP(GatedMLP):
    def __init__(self, config: Any, layer: Gemma4Layer, build: BuildContext) -> None:
        is_wide = config.use_double_wide_mlp and not layer.has_keys
        inner = config.intermediate_size * (2 if is_wide else 1)
        super().__init__(config.hidden_size, inner, activation_of(config, "hidden_activation"), build)


class Gemma4RouterNorm(WideRMSNorm):
    """The norm before a router. Its weight in the checkpoint is divided by the root of the width."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__(size, eps, build)
        self.name = f"{build.prefix}scale"
        self._convert = lambda weight: weight.float() * size**-0.5


class Gemma4TextExperts(Experts):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.moe_intermediate_size,
            activation_of(config, "hidden_activation"),
            ExpertSpec(config.num_experts, config.top_k_experts),
            build,
            router="router.proj",
            expert_scale="router.per_expert_scale",
        )


class Gemma4PerLayerInput(Module):
    """What a layer adds to the residual stream, from that and from the layer's own input."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        hidden = config.hidden_size
        size = own_input_size(config)
        self.gate = ReplicatedLinear(hidden, {"per_layer_input_gate": size}, build)
        self.projection = ReplicatedLinear(size, {"per_layer_projection": hidden}, build)
        self.norm = WideRMSNorm(hidden, config.rms_norm_eps, build.at("post_per_layer_input_norm"))
        self._gated_unit = GATED_UNITS[activation_of(config, "hidden_activation")]

    def __call__(self, x: Tensor, own_input: Tensor) -> Tensor:
        """x: [rows, hidden], own_input: [rows, size] -> [rows, hidden]."""
        return self.norm(self.projection(self._gated_unit(torch.cat((self.gate(x), own_input), dim=1))))


class Gemma4TextDecoderLayer(DecoderLayer):
    """Layers with experts add what these make of the residual stream to the output of the MLP."""

    def __init__(self, config: Any, layer: Gemma4Layer, rope: RotaryEmbedding, build: BuildContext) -> None:
        hidden = config.hidden_size
        norm = partial(WideRMSNorm, hidden, config.rms_norm_eps)
        super().__init__(
            Gemma4TextAttention(config, layer, rope, build.at("self_attn")),
            Gemma4TextMLP(config, layer, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            after_mixer=norm(build.at("post_attention_layernorm")),
            before_mlp=norm(build.at("pre_feedforward_layernorm")),
            after_mlp=norm(build.at("post_feedforward_layernorm")),
        )
        self._index = layer.index
        self.layer_scalar = Parameter(
            f"{build.prefix}layer_scalar", torch.empty(1, dtype=build.dtype, device=build.device)
        )
        self.per_layer_input = Gemma4PerLayerInput(config, build) if own_input_size(config) else None
        self.experts: Gemma4TextExperts | None = None
        if has_experts(config):
            self.experts = Gemma4TextExperts(config, build)
            self.before_router = Gemma4RouterNorm(hidden, config.rms_norm_eps, build.at("router"))
            self.before_experts = norm(build.at("pre_feedforward_layernorm_2"))
            self.after_dense = norm(build.at("post_feedforward_layernorm_1"))
            self.after_experts = norm(build.at("post_feedforward_layernorm_2"))

    def forward_(self, x: Tensor, inputs: LayerInputs) -> None:
        super().forward_(x, inputs)
        own_inputs = () if inputs.own is None else (inputs.own[:, self._index],)
        for rows, *own_input in row_parts(inputs.parts, x, *own_inputs):
            if self.per_layer_input is not None:
                self._kernels.add_(rows, self.per_layer_input(rows, *own_input))
            rows.mul_(self.layer_scalar.data)

    def _mlp_output(self, x: Tensor, normed: Tensor, adapters: RowAdapters | None) -> Tensor:
        output = super()._mlp_output(x, normed, adapters)
        if self.experts is None:
            return output
        routing = self.experts.route(self.before_router(x))
        mixed = self._summed(self.experts.mixed(self.before_experts(x), routing))
        return self._kernels.add_(self.after_dense(output), self.after_experts(mixed))

    @property
    def is_recordable(self) -> bool:
        return self.experts is None or self.experts.is_recordable


class Gemma4PerLayerInputs(Module):
    """The inputs that layers have of their own: from a second embedding of the token and a projection of the first."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        size = own_input_size(config)
        width = config.num_hidden_layers * size
        tokens = config.vocab_size_per_layer_input
        self.embedding = ReplicatedLinear(width, {"embed_tokens_per_layer": tokens}, build)
        self.projection = ReplicatedLinear(config.hidden_size, {"per_layer_model_projection": width}, build)
        self.norm = WideRMSNorm(size, config.rms_norm_eps, build.at("per_layer_projection_norm"))
        self._size = size
        self._embedding_scale = torch.tensor(size**0.5).to(build.dtype).item()
        self._projection_scale = config.hidden_size**-0.5

    def rows(self, input_ids: Tensor, x: Tensor, chunk_rows: int) -> Tensor:
        """int64 [tokens], embeddings [tokens, hidden] -> [tokens, layers, size]."""
        inputs = x.new_empty(x.shape[0], self.embedding.in_features)
        for ids, embedded, rows in row_parts(chunk_rows, input_ids, x, inputs):
            context = self.projection(embedded).mul_(self._projection_scale)
            normed = self.norm(context.view(-1, self._size)).view_as(context)
            rows.copy_(normed.add_(self.embedding.weight.rows(ids).mul_(self._embedding_scale)).mul_(2.0**-0.5))
        return inputs.view(x.shape[0], -1, self._size)


class Gemma4ForCausalLM(CausalLM):
    model_types = ("gemma4_text", "gemma4_unified_text")  # the latter with other towers
    wholes = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    activation_field = "hidden_activation"
    computed = {"use_bidirectional_attention": (None, "vision")}  # noqa: RUF012 # "vision" is of images
    has_heads_by_layer = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        sizes = gemma4_layers(config)
        check_ranks(config, sizes, build)
        full_head_dim = next(layer.head_dim for layer in sizes if layer.window is None)
        full_rope, local_rope = rotary_embeddings(config, build, ("default", "proportional"), full_head_dim)
        layers = []
        for layer in sizes:
            rope = full_rope if layer.window is None else local_rope
            layers.append(Gemma4TextDecoderLayer(config, layer, rope, build.at(f"model.layers.{layer.index}")))
        norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, full_rope, build, embedding_scale=config.hidden_size**0.5)
        self._readers = [layer.index for layer in sizes if not layer.has_keys]
        self._logit_cap: float | None = config.final_logit_softcapping
        self.has_layer_inputs = own_input_size(config) > 0
        self.per_layer_inputs = Gemma4PerLayerInputs(config, build.at("model")) if self.has_layer_inputs else None

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        x = self.embed(input_ids)
        inputs = self.inputs(x, ctx)
        if self.per_layer_inputs is not None:
            inputs.own = self.per_layer_inputs.rows(input_ids, x, self.chunk_rows)
        self.forward_layers_(range(len(self.layers)), x, inputs)
        return self.normalize_(x)

    def ignores(self, name: str) -> bool:
        """Published checkpoints have projections to keys and values also of layers that read those of others."""
        unused = UNUSED_KV.fullmatch(name)
        return unused is not None and int(unused[1]) in self._readers

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        cap = self._logit_cap
        if cap is None:
            return logits
        return sigmoid(logits.mul_(2.0 / cap)).mul_(2.0 * cap).sub_(cap)  # tanh(x) = 2 * sigmoid(2x) - 1
