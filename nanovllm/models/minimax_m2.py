"""MiniMax-M2: experts in all layers, chosen by the sigmoids of their scores, and norms over all heads of q and of k.

Beside Transformers' modeling_minimax_m2.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.data.network import ExpertSpec
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.experts import Experts
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, check_experts, head_dim_of, kv_heads_of
from nanovllm.models.rope_config import rotary_embedding


class MiniMaxM2Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            qk_norm=RMSNorm,
            joint_qk_norm=True,
            eps=config.rms_norm_eps,
        )


class MiniMaxM2SparseMoeBlock(Experts):
    """w1 is the gate of an expert, w3 is up and w2 down. Checkpoints with fused experts call the block mlp."""

    def __init__(self, config: Any, build: BuildContext, *, fused_prefix: str) -> None:
        count, chosen = config.num_local_experts, config.num_experts_per_tok
        check_experts(count, chosen, "num_local_experts", "MiniMaxM2ForCausalLM")
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            activation_of(config),
            ExpertSpec(count, chosen, scoring="sigmoid"),
            build,
            projections=("w1", "w3", "w2"),
            correction_bias="e_score_correction_bias",
            fused_prefix=fused_prefix,
        )


class MiniMaxM2DecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            MiniMaxM2Attention(config, rope, build.at("self_attn")),
            MiniMaxM2SparseMoeBlock(config, build.at("block_sparse_moe"), fused_prefix=build.at("mlp").prefix),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class MiniMaxM2ForCausalLM(CausalLM):
    model_types = ("minimax_m2", "minimax")  # the latter is the type of an earlier model, too
    default_dtype = "bfloat16"

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build, rotates_part=True)
        layers = [
            MiniMaxM2DecoderLayer(config, rope, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
        self.num_mtp_layers = getattr(config, "num_mtp_modules", None) or 0  # of published configs
