"""Qwen3-MoE: a Qwen3 with experts in some layers or all. Beside Transformers' modeling_qwen3_moe.py."""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.data.network import ExpertSpec
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.experts import Experts
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, check_experts, one_window
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3MLP
from nanovllm.models.rope_config import rotary_embedding


def is_sparse(config: Any, index: int) -> bool:
    """Whether a layer has experts and not one MLP."""
    is_dense = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step != 0
    return bool(config.num_experts) and not is_dense


def expert_spec(config: Any, architecture: str) -> ExpertSpec:
    check_experts(config.num_experts, config.num_experts_per_tok, "num_experts", architecture)
    return ExpertSpec(config.num_experts, config.num_experts_per_tok, norm_topk_prob=config.norm_topk_prob)


class Qwen3MoeSparseMoeBlock(Experts):
    def __init__(self, config: Any, build: BuildContext) -> None:
        spec = expert_spec(config, "Qwen3MoeForCausalLM")
        super().__init__(config.hidden_size, config.moe_intermediate_size, activation_of(config), spec, build)


class Qwen3MoeDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, index: int, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        at_mlp = build.at("mlp")
        super().__init__(
            Qwen3Attention(config, rope, window, build.at("self_attn")),
            Qwen3MoeSparseMoeBlock(config, at_mlp) if is_sparse(config, index) else Qwen3MLP(config, at_mlp),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class Qwen3MoeForCausalLM(CausalLM):
    model_types = ("qwen3_moe",)
    extends_by_yarn = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build)
        window = one_window(config, "Qwen3MoeForCausalLM")  # unlike Qwen3's, of all layers or of none
        layers = [
            Qwen3MoeDecoderLayer(config, index, rope, window, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
