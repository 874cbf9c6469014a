"""The model families: one entry says how an architecture differs from the plainest decoder.

Transformers' config classes have the fields, their types and their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.models import family_facts as facts
from nanovllm.models.family import Family

MTP = "mtp."  # weights of heads for multi-token prediction
_BIAS = ("attention_bias",)
_BIASES = ("attention_bias", "mlp_bias")
_WINDOWED = ("full_attention", "sliding_attention")
_RECURRENT = ("full_attention", "linear_attention")

_ENTRIES = (
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        lambda config: {"qk_norm": True},
        other_types=("qwen3_vl_text",),  # which takes images between its layers, too
        wholes=("Qwen3VLForConditionalGeneration",),
        biases=_BIAS,
        layer_types=_WINDOWED,
    ),
    Family("Qwen2ForCausalLM", "qwen2", lambda config: {"qkv_bias": True}, layer_types=_WINDOWED),
    Family("LlamaForCausalLM", "llama", lambda config: {}, biases=_BIASES),
    Family(
        "MistralForCausalLM",
        "mistral",
        lambda config: {},
        wholes=("Mistral3ForConditionalGeneration",),
        has_window=True,
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        lambda config: {},
        wholes=("Mistral3ForConditionalGeneration",),
        has_window=True,
        scales_queries=True,
        rope_kinds=("yarn",),
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        lambda config: {"merged_projections": True},
        has_window=True,
        rope_kinds=("default", "longrope"),
        rotates_part=True,
    ),
    Family(  # its window, unlike Qwen3's, is of all layers or of none
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        lambda config: {"qk_norm": True, "experts": facts.qwen3_moe_experts(config)},
        biases=_BIAS,
        has_window=True,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        lambda config: {"experts": facts.mixtral_experts(config)},
        has_window=True,
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        lambda config: {"o_bias": config.attention_out_bias},
        biases=_BIASES,
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        facts.gpt_oss,
        biases=_BIAS,
        layer_types=_WINDOWED,
        only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        dtype="bfloat16",
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        lambda config: {
            "qk_norm": True,
            "joint_qk_norm": True,
            "input_norms": False,
            "output_norms": True,
            "wide_norms": True,
        },
        biases=_BIAS,
        layer_types=_WINDOWED,
        has_local_rope=True,
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        lambda config: {
            "o_bias": False,
            "qk_norm": config.use_qk_norm,
            "experts": facts.glm_experts(config),
            "num_mtp_layers": config.num_nextn_predict_layers,
        },
        biases=_BIAS,
        rotates_part=True,
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        lambda config: {
            "qk_norm": True,
            "joint_qk_norm": True,
            "experts": facts.minimax_experts(config),
            "num_mtp_layers": getattr(config, "num_mtp_modules", None) or 0,  # of published configs
        },
        other_types=("minimax",),  # which is the type of an earlier model, too
        dtype="bfloat16",
        rotates_part=True,
    ),
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        lambda config: {
            **facts.gated_delta(config, merged_projections=True),
            "experts": facts.with_shared_expert(facts.qwen3_moe_experts(config), config),
        },
        biases=_BIAS,
        layer_types=_RECURRENT,
        rotates_part=True,
        left_out=(MTP,),
    ),
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        facts.gated_delta,
        wholes=("Qwen3_5ForConditionalGeneration",),
        biases=_BIAS,
        layer_types=_RECURRENT,
        rotates_part=True,
        left_out=(MTP,),
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        lambda config: {
            **facts.gated_delta(config),
            "experts": facts.with_shared_expert(facts.qwen3_5_experts(config), config),
        },
        wholes=("Qwen3_5MoeForConditionalGeneration",),
        biases=_BIAS,
        layer_types=_RECURRENT,
        rotates_part=True,
        left_out=(MTP,),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        lambda config: {
            "qk_norm": True,
            "query_pre_attn_scalar": config.query_pre_attn_scalar,
            "embedding_scale": config.hidden_size**0.5,
            "output_norms": True,
            "zero_centered_norms": True,
        },
        wholes=("Gemma3ForConditionalGeneration",),
        biases=_BIAS,
        layer_types=_WINDOWED,
        activation="hidden_activation",
        only={
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
        rope_kinds=("default", "linear"),
        has_local_rope=True,
    ),
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        lambda config: {
            "qk_norm": True,
            "query_pre_attn_scalar": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            "output_norms": True,
            "wide_norms": True,
            "gemma4": facts.gemma4(config),
            "experts": facts.gemma4_experts(config),
        },
        other_types=("gemma4_unified_text",),  # with other towers
        wholes=("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        biases=_BIAS,
        layer_types=_WINDOWED,
        activation="hidden_activation",
        only={"use_bidirectional_attention": (None, "vision")},  # "vision" is of images
        rope_kinds=("default", "proportional"),
        has_local_rope=True,
        full_head_dim=lambda config: facts.gemma4_full_heads(config)[1],
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _ENTRIES})
