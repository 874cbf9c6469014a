"""From a Hugging Face config's RoPE parameters to a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from nanovllm.errors import ModelError
from nanovllm.layers.rope_spec import ROPE_KINDS, RopeKind, RopeSpec


def rope_spec(parameters: Mapping[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    """Read Transformers' standardized `rope_parameters`. Raises ModelError on what is not supported."""
    kind = _kind(parameters)
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(
            f"rope_parameters: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported; "
            "these families rotate the whole head."
        )
    theta = _positive(parameters, "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "llama3":
        return _llama3(parameters, theta)
    if kind == "yarn":
        return _yarn(parameters, theta, max_position)
    factor = _positive(parameters, "factor")
    if kind == "linear":
        return RopeSpec(kind, theta, factor)
    if head_dim <= 2:
        raise ModelError(f"Dynamic RoPE needs a head_dim above 2, but the config has {head_dim}.")
    return RopeSpec(kind, theta, factor, original_max_position=max_position)


def _kind(parameters: Mapping[str, Any]) -> RopeKind:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    for known in get_args(RopeKind):
        if kind == known:
            return known
    raise ModelError(f"RoPE kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}.")


def _positive(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"rope_parameters: {key} must be a number above 0, but it is {value!r}.")
    return float(value)


def _llama3(parameters: Mapping[str, Any], theta: float) -> RopeSpec:
    low, high = _positive(parameters, "low_freq_factor"), _positive(parameters, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope_parameters: low_freq_factor={low} must be below high_freq_factor={high}.")
    return RopeSpec(
        "llama3",
        theta,
        _positive(parameters, "factor"),
        int(_positive(parameters, "original_max_position_embeddings")),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(parameters: Mapping[str, Any], theta: float, max_position: int) -> RopeSpec:
    trained = int(_positive(parameters, "original_max_position_embeddings", max_position))
    factor = _positive(parameters, "factor", max_position / trained)
    return RopeSpec(
        "yarn",
        theta,
        factor,
        trained,
        attention_factor=_attention_factor(parameters, factor),
        beta_fast=_positive(parameters, "beta_fast", 32.0),
        beta_slow=_positive(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
    )


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1, from the YaRN paper, unless the config names it, or both of DeepSeek's mscales."""
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor")

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return grown(_positive(parameters, "mscale")) / grown(_positive(parameters, "mscale_all_dim"))
    return grown(1.0)
