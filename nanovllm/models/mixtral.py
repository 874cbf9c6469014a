"""Mixtral: a Mistral with experts in all layers. Beside Transformers' modeling_mixtral.py."""

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
from nanovllm.models.llama import LlamaAttention
from nanovllm.models.rope_config import rotary_embedding


class MixtralSparseMoeBlock(Experts):
    """w1 is the gate of an expert, w3 is up and w2 down. Checkpoints with fused experts call the block mlp."""

    def __init__(self, config: Any, build: BuildContext, *, fused_prefix: str) -> None:
        count, chosen = config.num_local_experts, config.num_experts_per_tok
        check_experts(count, chosen, "num_local_experts", "MixtralForCausalLM")
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            activation_of(config),
            ExpertSpec(count, chosen),
            build,
            projections=("w1", "w3", "w2"),
            fused_prefix=fused_prefix,
        )


class MixtralDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            LlamaAttention(config, rope, window, build.at("self_attn")),
            MixtralSparseMoeBlock(config, build.at("block_sparse_moe"), fused_prefix=build.at("mlp").prefix),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class MixtralForCausalLM(CausalLM):
    model_types = ("mixtral",)

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build)
        window = one_window(config, "MixtralForCausalLM")
        layers = [
            MixtralDecoderLayer(config, rope, window, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
