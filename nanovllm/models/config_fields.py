"""Every field that is read of config.json and generation_config.json: its type and its range."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.model_files import FLAG, NULL, OBJECT, TEXT, Field, integer, list_of, number

MAX_LAYERS = 1024  # more than any network has; a layer takes memory even without weights
MAX_HEAD_DIM = 1 << 16  # RoPE allocates a frequency per pair
_LAYERS = list_of(TEXT, MAX_LAYERS)
_THETA = number(1, 1e15, above=True)
_POSITIVE = number(1e-6, 1e6) | NULL  # powers and logarithms of these, and of theta, are finite
_TOKEN_IDS = integer(0) | list_of(integer(0), 1024) | NULL

# Fields of the network, which Transformers' config class reads.
NETWORK_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "vocab_size": integer(1),
        "hidden_size": integer(1),
        "intermediate_size": integer(1),
        "num_hidden_layers": integer(1, MAX_LAYERS),
        "num_attention_heads": integer(1),
        "num_key_value_heads": integer(1) | NULL,
        "head_dim": integer(1, MAX_HEAD_DIM) | NULL,
        "max_position_embeddings": integer(1),
        "hidden_act": TEXT,
        "rms_norm_eps": number(0, 1),
        "tie_word_embeddings": FLAG,
        "attention_bias": FLAG,
        "mlp_bias": FLAG,
        "use_sliding_window": FLAG,
        "sliding_window": integer(0) | NULL,  # 0 is allowed if no layer has a window
        "max_window_layers": integer(0),
        "layer_types": _LAYERS | NULL,
        "dtype": TEXT | NULL,
        "torch_dtype": TEXT | NULL,
        "eos_token_id": _TOKEN_IDS,
    }
)

# The family, and RoPE in both of the forms that configs use.
OTHER_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "architectures": list_of(TEXT, 16) | NULL,
        "model_type": TEXT,
        "quantization_config": OBJECT | NULL,
        "rope_parameters": OBJECT | NULL,
        "rope_scaling": OBJECT | NULL,
        "rope_theta": _THETA | NULL,
        "partial_rotary_factor": number(0, 1) | NULL,
        "original_max_position_embeddings": integer(1) | NULL,
    }
)

ROPE_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "rope_type": TEXT,
        "type": TEXT,
        "rope_theta": _THETA | NULL,
        "factor": _POSITIVE,
        "low_freq_factor": _POSITIVE,
        "high_freq_factor": _POSITIVE,
        "original_max_position_embeddings": integer(1) | NULL,
        "attention_factor": _POSITIVE,
        "beta_fast": _POSITIVE,
        "beta_slow": _POSITIVE,
        "mscale": number(0, 1e6) | NULL,
        "mscale_all_dim": number(0, 1e6) | NULL,
        "truncate": FLAG | NULL,
        "partial_rotary_factor": number(0, 1) | NULL,
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
