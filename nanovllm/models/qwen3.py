"""Qwen3, and Qwen2, which has biases of q, k and v in the place of norms of q and k.

Read it beside Transformers' modeling_qwen3.py. Constructors say of which modules of `layers/` a layer is made; what
these compute is there. With rows x of the residual stream, a layer here is (`DecoderLayer.forward_` and `_finish_`,
`Attention.mix`):

    q, k, v = qkv_proj(input_layernorm(x))
    q, k = rotary_emb(q_norm(q), k_norm(k))
    x += o_proj(kv_cache.attend(q, k, v))
    h = post_attention_layernorm(x)
    x += down_proj(silu(gate_proj(h)) * up_proj(h))
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import activation_of, head_dim_of, kv_heads_of, layer_windows
from nanovllm.models.rope_config import rotary_embedding


class Qwen3Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            qk_norm=RMSNorm,
            eps=config.rms_norm_eps,
            bias=config.attention_bias,
            window=window,
        )


class Qwen2Attention(Attention):
    def __init__(self, config: Any, rope: RotaryEmbedding, window: int | None, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            head_dim_of(config),
            rope,
            build,
            bias=True,
            output_bias=False,
            window=window,
        )


class Qwen3MLP(GatedMLP):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, activation_of(config), build)


class Qwen3DecoderLayer(DecoderLayer):
    def __init__(self, config: Any, attention: Attention, build: BuildContext) -> None:
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        super().__init__(
            attention,
            Qwen3MLP(config, build.at("mlp")),
            build,
            before_mixer=norm(build.at("input_layernorm")),
            before_mlp=norm(build.at("post_attention_layernorm")),
        )


class Qwen3ForCausalLM(CausalLM):
    # Of the second type, which takes images between its layers too, only the text is computed.
    model_types: ClassVar[tuple[str, ...]] = ("qwen3", "qwen3_vl_text")
    wholes: ClassVar[tuple[str, ...]] = ("Qwen3VLForConditionalGeneration",)
    extends_by_yarn = True
    attention: ClassVar[type[Qwen3Attention | Qwen2Attention]] = Qwen3Attention

    def __init__(self, config: Any, build: BuildContext) -> None:
        rope = rotary_embedding(config, build)
        layers = []
        for index, window in enumerate(layer_windows(config)):
            at_layer = build.at(f"model.layers.{index}")
            attention = self.attention(config, rope, window, at_layer.at("self_attn"))
            layers.append(Qwen3DecoderLayer(config, attention, at_layer))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.at("model.norm"))
        super().__init__(config, layers, norm, rope, build)


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    model_types = ("qwen2",)
    wholes = ()
    attention = Qwen2Attention
