"""What a family file is made of: the facts in which it differs, and the fields that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ModelError, quoted
from nanovllm.models.rope_config import rope_spec
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec

ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family decides by itself, from its config."""

    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name in config.json, Transformers' model type, and how to read its facts."""

    architecture: str
    model_type: str
    facts: Callable[[Any], FamilyFacts]


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """One entry per layer, from `layer_types`: Transformers derives it from use_sliding_window if absent."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise ModelError(f"layer_types holds {', '.join(unknown)}; supported: {', '.join(windows)}.")
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ModelError("layer_types asks for sliding_attention, but sliding_window or use_sliding_window is not set.")
    return tuple(windows[kind] for kind in config.layer_types)


def decoder_spec(family: Family, config: Any) -> DecoderSpec:
    """The fields that every family shares, with the family's facts. Raises ModelError, naming the field."""
    _check_config(config)
    facts = family.facts(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = DecoderSpec(
        architecture=family.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        qk_norm=facts.qk_norm,
        qkv_bias=facts.qkv_bias,
        o_bias=facts.o_bias,
        mlp_bias=facts.mlp_bias,
        tie_word_embeddings=config.tie_word_embeddings,
        rope=rope_spec(config.rope_parameters, config.max_position_embeddings, head_dim),
        sliding_windows=facts.sliding_windows,
        max_position_embeddings=config.max_position_embeddings,
        dtype=_dtype_name(config),
    )
    _check_spec(spec)
    return spec


def _dtype_name(config: Any) -> str:
    """The checkpoint's dtype; float32 where the config names none, as Transformers takes it."""
    name = "float32" if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ModelError(f"The dtype {name} is not supported; supported: {', '.join(DTYPE_NAMES)}.")
    return name


def _check_config(config: Any) -> None:
    if config.hidden_act not in ACTIVATIONS:
        raise ModelError(
            f"Activation {quoted(config.hidden_act)} is not supported; supported: {', '.join(ACTIVATIONS)}."
        )


def _check_spec(spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"num_attention_heads={spec.num_heads} must be a multiple of num_key_value_heads={spec.num_kv_heads}."
        )
    if spec.head_dim % 2 or spec.head_dim < 2:
        raise ModelError(f"head_dim must be even and above 0, because RoPE turns pairs, but it is {spec.head_dim}.")
    if len(spec.sliding_windows) != spec.num_layers:
        raise ModelError(f"layer_types names {len(spec.sliding_windows)} layers of {spec.num_layers}.")
    for window in spec.sliding_windows:
        if window is not None and window < 1:
            raise ModelError(f"sliding_window must be at least 1, but it is {window}.")
