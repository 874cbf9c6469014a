"""gpt-oss: experts in all layers, attention sinks, and a window in some layers.

Beside Transformers' modeling_gpt_oss.py.
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
from nanovllm.layers.norm import WideRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import check_experts, head_dim_of, kv_heads_of, layer_windows
from nanovllm.models.rope_config import rotary_embedding


class GptOssAttention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            bias=config.attention_bias,
            window=window,
            sinks=True,
        )


class GptOssMLP(Experts):
    """The checkpoint has gate and up of all experts as one tensor, in which they alternate."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        count, chosen = config.num_local_experts, config.num_experts_per_tok
        check_experts(count, chosen, "num_local_experts", "GptOssForCausalLM")
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            "clamped_swiglu",
            ExpertSpec(count, chosen, scoring="softmax_of_chosen"),
            build,
            router="router",
            biases=True,
            interleaved=True,
        )


class GptOssDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(WideRMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            GptOssAttention(config, rope, window, build.at("self_attn")),
            GptOssMLP(config, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class GptOssForCausalLM(CausalLM):
    model_types = ("gpt_oss",)
    computed = {"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}  # noqa: RUF012
    default_dtype = "bfloat16"

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build)
        layers = [
            GptOssDecoderLayer(config, rope, window, build.at(f"model.layers.{index}"))
            for index, window in enumerate(layer_windows(config))
        ]
        norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)
