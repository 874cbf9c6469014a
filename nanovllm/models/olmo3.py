"""Olmo 3: norms of what attention and MLP add to the residual stream, and of all heads of q and of k together.

Beside Transformers' modeling_olmo3.py. Layers with a window have a rotary embedding of their own. Olmo 2 is the same
without windows, and with one rotary embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import WideRMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, head_dim_of, kv_heads_of, layer_windows
from nanovllm.models.rope_config import rotary_embedding, rotary_embeddings


class Olmo3Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            qk_norm=WideRMSNorm,
            joint_qk_norm=True,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            window=window,
        )


class Olmo3MLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build)


class Olmo3DecoderLayer(DecoderLayer):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        norm = partial(WideRMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            Olmo3Attention(config, rope, window, build.at("self_attn")),
            Olmo3MLP(config, build.at("mlp")),
            build,
            after_mixer=norm(build.at("post_attention_layernorm")),
            after_mlp=norm(build.at("post_feedforward_layernorm")),
        )


class Olmo3ForCausalLM(CausalLM):
    model_types = ("olmo3",)

    def __init__(self, config: Any, build: BuildContext) -> None:
        full_rope, local_rope = self._rotary_embeddings(config, build)
        layers = []
        for index, window in enumerate(layer_windows(config)):
            rope = full_rope if window is None else local_rope
            layers.append(Olmo3DecoderLayer(config, rope, window, build.at(f"model.layers.{index}")))
        norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, full_rope, build)

    def _rotary_embeddings(self, config: Any, build: BuildContext) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        """Of layers with full attention, and of those with a window."""
        return rotary_embeddings(config, build)


class Olmo2ForCausalLM(Olmo3ForCausalLM):
    model_types = ("olmo2",)

    def _rotary_embeddings(self, config: Any, build: BuildContext) -> tuple[RotaryEmbedding, RotaryEmbedding]:
        rope = rotary_embedding(config, build)
        return rope, rope
