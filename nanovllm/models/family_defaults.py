"""The defaults of each family's config: what Transformers' config class takes for a field that a config.json lacks.

A table instead of those classes, whose import takes over a second. `tests/test_start_up.py` compares it with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nanovllm.errors import ModelError, quoted

_ALL: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "default_theta": 10_000.0,
    }
)
_SILU: Mapping[str, Any] = MappingProxyType({**_ALL, "hidden_act": "silu"})
_QWEN: Mapping[str, Any] = MappingProxyType(
    {
        **_SILU,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }
)
_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **_SILU,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "sliding_window": 4096,
    }
)
# By Transformers' model type. None is for what follows from other fields.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
        "qwen2": _QWEN,
        "llama": {
            **_SILU,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
            "attention_bias": False,
            "mlp_bias": False,
        },
        "mistral": _MISTRAL,
        "phi3": {
            **_SILU,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_key_value_heads": None,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
        "qwen3_moe": {
            **_SILU,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        "mixtral": {
            **_MISTRAL,
            "default_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_experts": 8,
        },
        "gemma3_text": {
            **_ALL,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
            "default_theta": MappingProxyType({"global": 1_000_000.0, "local": 10_000.0}),
        },
    }
)
# Where null is not a value: Transformers has a number there, and refuses null too.
_NEEDS_NUMBER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_key_value_heads": ("mistral", "qwen3_moe", "mixtral", "gemma3_text"),
        "head_dim": ("qwen3", "gemma3_text"),
    }
)
_DIVIDES_HIDDEN_SIZE = ("llama", "gemma3_text")  # the number of heads must


def complete_config(model_type: str, fields: Mapping[str, Any]) -> SimpleNamespace:
    """The checked `fields` of a config with the family's defaults, and with what follows from other fields.

    Transformers' config class has the same attributes, apart from RoPE and the dtype. Raises ModelError for values that
    contradict each other.
    """
    config = SimpleNamespace(**{**DEFAULTS[model_type], **fields})
    for name, families in _NEEDS_NUMBER.items():
        if model_type in families and getattr(config, name) is None:
            raise ModelError(f"{name} must be a whole number for a {model_type}, but it is null.")
    if model_type in _DIVIDES_HIDDEN_SIZE and config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"hidden_size={config.hidden_size} must be a multiple of num_attention_heads={config.num_attention_heads}."
        )
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if "num_local_experts" in fields:
        config.num_experts = fields["num_local_experts"]
    if getattr(config, "use_sliding_window", True) is False:
        config.sliding_window = None
    if getattr(config, "mlp_only_layers", 0) is None:
        config.mlp_only_layers = []
    if "layer_types" in DEFAULTS[model_type] and config.layer_types is None:
        config.layer_types = _layer_types(config)
    _check_layer_types(config)
    return config


def _layer_types(config: SimpleNamespace) -> list[str]:
    """The kind of each layer: with Gemma's pattern each n-th layer is full; with Qwen's number the first layers are."""
    layers = range(config.num_hidden_layers)
    pattern = getattr(config, "sliding_window_pattern", None)
    if pattern is not None:
        is_sliding = [bool((index + 1) % pattern) for index in layers]
    else:
        num_full = getattr(config, "max_window_layers", 0)
        is_sliding = [config.sliding_window is not None and index >= num_full for index in layers]
    return ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]


def _check_layer_types(config: SimpleNamespace) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) != config.num_hidden_layers:
        raise ModelError(f"layer_types={quoted(kinds)} names {len(kinds)} layers of {config.num_hidden_layers}.")
