"""Gemma 3: a window in most layers, norms before and after attention and MLP, scaled embeddings.

Beside Transformers' modeling_gemma3.py. Checkpoints have the weights of norms minus 1. Layers with a window have a
rotary embedding of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import ZeroCenteredRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, head_dim_of, kv_heads_of, layer_windows
from nanovllm.models.rope_config import rotary_embeddings


class Gemma3Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
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
            window=window,
            scale=config.query_pre_attn_scalar**-0.5,
        )


class Gemma3MLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        activation = activation_of(config, "hidden_activation")
        super().__init__(config.hidden_size, config.intermediate_size, activation, build)


class Gemma3DecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(ZeroCenteredRMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            Gemma3Attention(config, rope, window, build.at("self_attn")),
            Gemma3MLP(config, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            after_mixer=norm(build.at("post_attention_layernorm")),
            before_mlp=norm(build.at("pre_feedforward_layernorm")),
            after_mlp=norm(build.at("post_feedforward_layernorm")),
        )


class Gemma3ForCausalLM(CausalLM):
    model_types = ("gemma3_text",)
    wholes = ("Gemma3ForConditionalGeneration",)
    activation_field = "hidden_activation"
    computed = {  # noqa: RUF012
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    }

    def __init__(self, config: Any, build: BuildContext) -> None:
        full_rope, local_rope = rotary_embeddings(config, build, ("default", "linear"))
        layers = []
        for index, window in enumerate(layer_windows(config)):
            rope = full_rope if window is None else local_rope
            layers.append(Gemma3DecoderLayer(config, rope, window, build.at(f"model.layers.{index}")))
        norm = ZeroCenteredRMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, full_rope, build, embedding_scale=config.hidden_size**0.5)
