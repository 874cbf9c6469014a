"""GLM-4.5 and later mixtures of GLM: experts in groups after some dense layers, with one that all tokens pass through.

Beside Transformers' modeling_glm4_moe.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.data.network import ExpertSpec
from nanovllm.errors import ModelError
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.experts import Experts
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, check_experts, head_dim_of, kv_heads_of
from nanovllm.models.rope_config import rotary_embedding


class Glm4MoeAttention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            qk_norm=RMSNorm if config.use_qk_norm else None,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            output_bias=False,
        )


class Glm4MoeMLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build)


class Glm4MoeMoE(Experts):
    """The router chooses among the experts of the best groups, with a correction of the scores that choose."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        inner = config.moe_intermediate_size
        activation = activation_of(config)
        shared_inner = inner * config.n_shared_experts
        at_shared = build.at("shared_experts")
        super().__init__(
            config.hidden_size,
            inner,
            activation,
            _expert_spec(config),
            build,
            correction_bias="gate.e_score_correction_bias",
            fp32_router=True,
            shared=GatedMLP(config.hidden_size, shared_inner, activation, at_shared, what="shared_intermediate"),
        )


def _expert_spec(config: Any) -> ExpertSpec:
    count = config.n_routed_experts
    chosen = config.num_experts_per_tok
    groups = config.n_group
    chosen_groups = config.topk_group
    check_experts(count, chosen, "n_routed_experts", "Glm4MoeForCausalLM")
    if groups > 1 and (count % groups or count < 2 * groups):
        raise ModelError(f"n_group={groups} must divide n_routed_experts={count} into groups of at least 2.")
    if chosen_groups > groups:
        raise ModelError(f"topk_group={chosen_groups} is above the number of groups, which is n_group={groups}.")
    if chosen > chosen_groups * (count // groups):
        what = f"num_experts_per_tok={chosen}"
        raise ModelError(f"{what} is above the number of experts in topk_group={chosen_groups} of n_group={groups}.")
    return ExpertSpec(
        count,
        chosen,
        norm_topk_prob=config.norm_topk_prob,
        scoring="sigmoid",
        num_groups=groups,
        chosen_groups=chosen_groups,
        weight_scale=config.routed_scaling_factor,
    )


class Glm4MoeDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, index: int, rope: RotaryEmbedding, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        is_sparse = config.n_routed_experts and index >= config.first_k_dense_replace
        at_mlp = build.at("mlp")
        super().__init__(
            Glm4MoeAttention(config, rope, build.at("self_attn")),
            Glm4MoeMoE(config, at_mlp) if is_sparse else Glm4MoeMLP(config, at_mlp),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class Glm4MoeForCausalLM(CausalLM):
    model_types = ("glm4_moe",)

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build, rotates_part=True)
        layers = [
            Glm4MoeDecoderLayer(config, index, rope, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
        self.num_mtp_layers = config.num_nextn_predict_layers
