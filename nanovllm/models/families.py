"""The model families that the engine runs: what each says in its config, and the registry of them by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.errors import ModelError
from nanovllm.models.family import Family, FamilyFacts, windows_by_layer_type


def _qwen3(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=False,
        sliding_windows=windows_by_layer_type(config),
    )


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _qwen3)


def _qwen2(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        sliding_windows=windows_by_layer_type(config),
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _qwen2)


def _llama(config: Any) -> FamilyFacts:
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        sliding_windows=(None,) * config.num_hidden_layers,
    )


LLAMA = Family("LlamaForCausalLM", "llama", _llama)


def _mistral(config: Any) -> FamilyFacts:
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise ModelError("Several layer_types are not supported: a MistralForCausalLM has one window for all.")
    return FamilyFacts(
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sliding_windows=(config.sliding_window,) * config.num_hidden_layers,
    )


MISTRAL = Family("MistralForCausalLM", "mistral", _mistral)


FAMILIES: Mapping[str, Family] = MappingProxyType({f.architecture: f for f in (QWEN3, QWEN2, LLAMA, MISTRAL)})
