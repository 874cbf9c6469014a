"""Llama 2 and 3: optional biases on attention and MLP, no window."""

from __future__ import annotations

from typing import Any

from nanovllm.models.family import Family, FamilyFacts


def _facts(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        sliding_windows=(None,) * config.num_hidden_layers,
    )


LLAMA = Family("LlamaForCausalLM", "llama", _facts)
