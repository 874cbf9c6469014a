"""Mistral: no biases, one sliding window for all layers or none."""

from __future__ import annotations

from typing import Any

from nanovllm.errors import ModelError
from nanovllm.models.family import Family, FamilyFacts


def _facts(config: Any) -> FamilyFacts:
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise ModelError("Several layer_types are not supported: a MistralForCausalLM has one window for all.")
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sliding_windows=(config.sliding_window,) * config.num_hidden_layers,
    )


MISTRAL = Family("MistralForCausalLM", "mistral", _facts)
