"""The ranges of what is read of config.json and generation_config.json, which are not trusted.

Transformers' config classes know the fields, their types and their defaults. They have no bounds: these numbers bound
memory and time before a config class sees them, and keep all arithmetic finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.data.json_fields import FLAG, NULL, OBJECT, TEXT, Field, integer, list_of, number

MAX_LAYERS = 1024  # more than any network has; a layer takes memory even without weights
MAX_EXPERTS = 1024  # of a layer; each takes memory even without weights
MAX_HEAD_DIM = 1 << 16  # RoPE allocates a frequency per pair
MAX_CONV_KERNEL = 64  # tokens that a short convolution sees
EXPERT_COUNT = integer(0, MAX_EXPERTS)
THETA = number(1, 1e15, above=True) | NULL
_POSITIVE = number(1e-6, 1e6) | NULL  # powers and logarithms of these, and of theta, are finite
_COUNT = integer(1) | NULL
_ANY_COUNT = integer(0) | NULL
_LAYER_COUNT = integer(0, MAX_LAYERS) | NULL
_HEAD_DIM = integer(1, MAX_HEAD_DIM) | NULL
_SHARE = number(0, 1) | NULL
_FACTORS = list_of(number(1e-6, 1e6), MAX_HEAD_DIM) | NULL
_TOKEN_IDS = integer(0) | list_of(integer(0), 1024) | NULL

NETWORK_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        # what it is
        "architectures": list_of(TEXT, 16) | NULL,
        "model_type": TEXT,
        "text_config": OBJECT | NULL,
        "quantization_config": OBJECT | NULL,
        "dtype": TEXT | NULL,
        "torch_dtype": TEXT | NULL,
        "eos_token_id": _TOKEN_IDS,
        "tie_word_embeddings": FLAG,
        # sizes
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), integer(1)),
        "num_hidden_layers": integer(1, MAX_LAYERS),
        "max_position_embeddings": integer(1),
        "num_key_value_heads": _COUNT,
        "num_global_key_value_heads": _COUNT,
        "head_dim": _HEAD_DIM,
        "global_head_dim": _HEAD_DIM,
        "rms_norm_eps": number(0, 1),
        "query_pre_attn_scalar": _COUNT,
        "final_logit_softcapping": number(0, above=True) | NULL,
        "vocab_size_per_layer_input": _COUNT,
        "hidden_size_per_layer_input": _ANY_COUNT,
        # kinds of layers
        "layer_types": list_of(TEXT, MAX_LAYERS) | NULL,
        "sliding_window": _ANY_COUNT,
        "sliding_window_pattern": integer(1, MAX_LAYERS) | NULL,
        "max_window_layers": _ANY_COUNT,
        "num_kv_shared_layers": _LAYER_COUNT,
        "num_mtp_modules": _LAYER_COUNT,
        "num_nextn_predict_layers": _LAYER_COUNT,
        # experts
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERT_COUNT | NULL),
        **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), _COUNT),
        **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), integer(1, MAX_EXPERTS)),
        **dict.fromkeys(("moe_intermediate_size", "decoder_sparse_step"), _COUNT),
        "shared_expert_intermediate_size": _ANY_COUNT,
        "routed_scaling_factor": number(1e-6, 1e6),
        "first_k_dense_replace": _LAYER_COUNT,
        "mlp_only_layers": list_of(integer(0), MAX_LAYERS) | NULL,
        # recurrent layers
        "full_attention_interval": integer(1, MAX_LAYERS) | NULL,
        "linear_conv_kernel_dim": integer(1, MAX_CONV_KERNEL),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), integer(1, MAX_HEAD_DIM)),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), integer(1)),
        # RoPE, in the form of newer and of older configs
        "rope_parameters": OBJECT | NULL,
        "rope_scaling": OBJECT | NULL,
        "rope_theta": THETA,
        "rope_local_base_freq": THETA,
        "partial_rotary_factor": _SHARE,
        "rotary_dim": integer(2, MAX_HEAD_DIM) | NULL,
        "original_max_position_embeddings": _COUNT,
    }
)

ROPE_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "rope_type": TEXT,
        "type": TEXT,
        "rope_theta": THETA,
        "factor": _POSITIVE,
        "low_freq_factor": _POSITIVE,
        "high_freq_factor": _POSITIVE,
        "original_max_position_embeddings": _COUNT,
        "attention_factor": _POSITIVE,
        "beta_fast": _POSITIVE,
        "beta_slow": _POSITIVE,
        "mscale": number(0, 1e6) | NULL,
        "mscale_all_dim": number(0, 1e6) | NULL,
        "truncate": FLAG | NULL,
        "partial_rotary_factor": _SHARE,
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        "llama_4_scaling_beta": number(0, 1e3) | NULL,
    }
)

GENERATION_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "eos_token_id": _TOKEN_IDS,
        "temperature": number(0) | NULL,
        "top_p": number(0, 1, above=True) | NULL,
        "top_k": integer(-1) | NULL,
        "min_p": number(0, 1) | NULL,
        "repetition_penalty": number(0, above=True) | NULL,
        "max_new_tokens": integer(1) | NULL,
    }
)
