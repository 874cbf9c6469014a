"""Llama, and the models that differ from it by a constructor argument: Mistral, Ministral 3 and Seed-OSS.

Beside Transformers' modeling_llama.py: q, k and v are one product, and so are gate and up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.errors import ModelError
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, head_dim_of, kv_heads_of, one_window
from nanovllm.models.rope_config import rope_parameters, rotary_embedding


class LlamaAttention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        bias = getattr(config, "attention_bias", False)
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            bias=bias,
            output_bias=getattr(config, "attention_out_bias", bias),
            window=window,
        )


class LlamaMLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        bias = getattr(config, "mlp_bias", False)
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build, bias=bias)


class LlamaDecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            LlamaAttention(config, rope, window, build.at("self_attn")),
            LlamaMLP(config, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class LlamaForCausalLM(CausalLM):
    model_types = ("llama",)

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = self._rotary_embedding(config, build)
        window = self._window(config)
        layers = [
            LlamaDecoderLayer(config, rope, window, build.at(f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)

    def _rotary_embedding(self, config: Any, build: BuildContext) -> RotaryEmbedding:
        return rotary_embedding(config, build)

    def _window(self, config: Any) -> int | None:
        """Keys that a query of any layer sees; None: all."""
        return None


class SeedOssForCausalLM(LlamaForCausalLM):
    model_types = ("seed_oss",)


class MistralForCausalLM(LlamaForCausalLM):
    model_types = ("mistral",)
    wholes = ("Mistral3ForConditionalGeneration",)

    def _window(self, config: Any) -> int | None:
        return one_window(config, type(self).__name__)


class Ministral3ForCausalLM(MistralForCausalLM):
    """Queries are scaled by their positions."""

    model_types = ("ministral3",)

    def _rotary_embedding(self, config: Any, build: BuildContext) -> RotaryEmbedding:
        if "llama_4_scaling_beta" not in rope_parameters(config.rope_parameters or {}):
            raise ModelError("rope_parameters: llama_4_scaling_beta is missing, which a Ministral3ForCausalLM needs.")
        return rotary_embedding(config, build, ("yarn",), scales_queries=True)
