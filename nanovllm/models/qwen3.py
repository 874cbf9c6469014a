"""Qwen3: q/k norm, attention biases only if asked for, a window on layers from max_window_layers up."""

from __future__ import annotations

from typing import Any

from nanovllm.models.family import Family, FamilyFacts, windows_by_layer_type


def _facts(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=False,
        sliding_windows=windows_by_layer_type(config),
    )


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _facts)
