"""Qwen3-Next, Qwen3.5 and its mixture: layers with the gated delta rule, and gated attention in every few.

Beside Transformers' modeling_qwen3_next.py and modeling_qwen3_5.py: q, k and v are one product, and so are gate and up,
and all that reads the input of a recurrent layer. Norm weights are stored minus 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from nanovllm.data.network import ExpertSpec, RecurrentSpec
from nanovllm.errors import ModelError
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.experts import Experts
from nanovllm.layers.gated_delta import GatedDelta
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import (
    FULL,
    LINEAR,
    activation_of,
    check_experts,
    head_dim_of,
    kv_heads_of,
    layer_types,
)
from nanovllm.models.qwen3_moe import expert_spec, is_sparse
from nanovllm.models.rope_config import rotary_embedding


class Qwen3NextAttention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            qk_norm=ZeroCenteredRMSNorm,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            gate=True,
        )


class Qwen3NextGatedDeltaNet(GatedDelta):
    def __init__(self, config: Any, layer: int, build: BuildContext, *, merged: bool) -> None:
        spec = RecurrentSpec(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
        )
        super().__init__(config.hidden_size, spec, config.rms_norm_eps, layer, build, merged=merged)


class Qwen3NextMLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build)


class Qwen3NextSparseMoeBlock(Experts):
    """The experts that a router chooses, and one through which all tokens pass, by a gate of its own."""

    def __init__(self, config: Any, spec: ExpertSpec, build: BuildContext) -> None:
        hidden = config.hidden_size
        inner = config.shared_expert_intermediate_size
        activation = activation_of(config)
        super().__init__(
            hidden,
            config.moe_intermediate_size,
            activation,
            spec,
            build,
            shared=GatedMLP(hidden, inner, activation, build.at("shared_expert"), what="shared_intermediate"),
            shared_gate="shared_expert_gate",
        )


class Qwen3NextDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, mixer: Mixer, mlp: GatedMLP | Experts, build: BuildContext) -> None:
        norm = partial(ZeroCenteredRMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            mixer,
            mlp,
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class Qwen3NextForCausalLM(CausalLM):
    model_types = ("qwen3_next",)
    left_out = ("mtp.",)  # the head for multi-token prediction, see `models.mtp`
    has_mtp_head = True
    merged: ClassVar[bool] = True  # whether recurrent layers have merged projections in a checkpoint

    def __init__(self, config: Any, build: BuildContext) -> None:
        _check_heads(config)
        rope = rotary_embedding(config, build, rotates_part=True)
        merged = self.merged and not build.is_gguf  # a GGUF file has the parts
        layers = []
        for index, kind in enumerate(layer_types(config, FULL, LINEAR)):
            at_layer = build.at(f"model.layers.{index}")
            mixer: Mixer
            if kind == LINEAR:
                mixer = Qwen3NextGatedDeltaNet(config, index, at_layer.at("linear_attn"), merged=merged)
            else:
                mixer = Qwen3NextAttention(config, rope, at_layer.at("self_attn"))
            mlp = self.make_mlp(config, index, at_layer.at("mlp"))
            layers.append(Qwen3NextDecoderLayer(config, mixer, mlp, at_layer))
        norm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)

    @staticmethod
    def make_mlp(config: Any, index: int, build: BuildContext) -> GatedMLP | Experts:
        if not is_sparse(config, index):
            return Qwen3NextMLP(config, build)
        return Qwen3NextSparseMoeBlock(config, expert_spec(config, "Qwen3NextForCausalLM"), build)

    def mtp_layer(self, build: BuildContext) -> DecoderLayer:
        """A layer with attention, and with experts if others have them."""
        like = next((index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts)), 0)
        attention = Qwen3NextAttention(self.config, self.rope, build.at("self_attn"))
        return Qwen3NextDecoderLayer(self.config, attention, self.make_mlp(self.config, like, build.at("mlp")), build)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    model_types = ("qwen3_5_text",)
    wholes = ("Qwen3_5ForConditionalGeneration",)
    merged = False

    @staticmethod
    def make_mlp(config: Any, index: int, build: BuildContext) -> GatedMLP | Experts:
        return Qwen3NextMLP(config, build)


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    model_types = ("qwen3_5_moe_text",)
    wholes = ("Qwen3_5MoeForConditionalGeneration",)
    merged = False

    @staticmethod
    def make_mlp(config: Any, index: int, build: BuildContext) -> GatedMLP | Experts:
        check_experts(config.num_experts, config.num_experts_per_tok, "num_experts", "Qwen3_5MoeForCausalLM")
        spec = ExpertSpec(config.num_experts, config.num_experts_per_tok, norm_topk_prob=True)
        return Qwen3NextSparseMoeBlock(config, spec, build)


def _check_heads(config: Any) -> None:
    """Raise ModelError if value heads cannot share the key heads."""
    heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads={heads} must be a multiple of linear_num_key_heads={key_heads}.")
