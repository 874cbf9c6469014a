"""Qwen2 and Qwen2.5: a bias on q, k and v and nowhere else; a window on layers from max_window_layers up."""

from __future__ import annotations

from typing import Any

from nanovllm.models.family import Family, FamilyFacts, windows_by_layer_type


def _facts(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        sliding_windows=windows_by_layer_type(config),
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _facts)
