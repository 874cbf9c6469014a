"""Phi-3. Its checkpoints have one matrix for q, k and v, and one for gate and up.

Beside Transformers' modeling_phi3.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, head_dim_of, kv_heads_of, one_window
from nanovllm.models.rope_config import rotary_embedding


class Phi3Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            window=window,
            merged=True,
        )


class Phi3MLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build, merged=True)


class Phi3DecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            Phi3Attention(config, rope, window, build.at("self_attn")),
            Phi3MLP(config, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class Phi3ForCausalLM(CausalLM):
    model_types = ("phi3",)

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build, ("default", "longrope"), rotates_part=True)
        window = one_window(config, "Phi3ForCausalLM")
        layers = [
            Phi3DecoderLayer(config, rope, window, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
