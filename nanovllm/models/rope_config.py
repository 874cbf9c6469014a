"""From a Hugging Face config's RoPE parameters to a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from nanovllm.data.json_fields import checked_fields
from nanovllm.data.rope_spec import ROPE_KINDS, RopeKind, RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import OTHER_FIELDS, ROPE_FIELDS

_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_parameters(
    config: Mapping[str, Any], max_position: int, default_theta: float, trained: int | None = None
) -> dict[str, Any]:
    """The checked RoPE parameters of a parsed config.json: its `rope_parameters`, or the fields of older configs.

    They are read as Transformers reads them. `rope_theta` and other fields outside of the mapping apply if the mapping
    lacks them. For yarn, llama3 and longrope, the trained length is `trained`, the family's, unless the config has one
    outside of the mapping; without either it defaults to max_position_embeddings. Raises ModelError.
    """
    outer = checked_fields("RoPE", config, OTHER_FIELDS)
    mapping = outer.get("rope_scaling") or outer.get("rope_parameters") or {}
    where = "rope_scaling" if outer.get("rope_scaling") else "rope_parameters"
    nested = [name for name, value in mapping.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"{where}: {quoted(nested[0])} has a mapping of its own; one rope_theta for all is supported.")
    found = {name: value for name, value in checked_fields(where, mapping, ROPE_FIELDS).items() if value is not None}
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] == "su" or (found["rope_type"] == "yarn" and "short_factor" in found):
        found["rope_type"] = "longrope"  # as older checkpoints call it
    theta = outer.get("rope_theta")
    found.setdefault("rope_theta", default_theta if theta is None else theta)
    if outer.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", outer["partial_rotary_factor"])
    if found["rope_type"] == "yarn" and "factor" not in mapping:  # null means the ratio of the lengths
        raise ModelError(f"{where}: factor is missing, which yarn needs.")
    if found["rope_type"] in ("llama3", "yarn", "longrope"):
        if outer.get("original_max_position_embeddings") is not None:
            trained = outer["original_max_position_embeddings"]
        if trained is not None:
            found["original_max_position_embeddings"] = trained
        found.setdefault("original_max_position_embeddings", max_position)
    return found


def rope_by_layer_type(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The config as `rope_parameters` reads it for layers with full attention, and for those with a sliding window.

    Newer configs have a mapping for each layer type, older ones rope_theta and rope_scaling, and rope_local_base_freq
    for the layers with a window. Raises ModelError.
    """
    outer = checked_fields("RoPE", config, OTHER_FIELDS)
    mapping = outer.get("rope_parameters") or {}
    unknown = sorted(set(mapping) - set(_LAYER_TYPES))
    if unknown:
        raise ModelError(f"rope_parameters: {quoted(unknown[0])} is no layer type; known: {', '.join(_LAYER_TYPES)}.")
    full, local = (mapping.get(name) for name in _LAYER_TYPES)
    if isinstance(full, dict) and outer.get("rope_scaling"):
        full = {**full, **outer["rope_scaling"]}
        config = {**config, "rope_scaling": None}
    return {**config, "rope_parameters": full}, {
        "rope_parameters": local,
        "rope_theta": outer.get("rope_local_base_freq"),
    }


def rope_spec(parameters: Mapping[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    """Read Transformers' standardized `rope_parameters`. Raises ModelError on what is not supported."""
    return _spec_of_kind(parameters, max_position, head_dim, tuple(kind for kind in ROPE_KINDS if kind != "longrope"))


def gemma3_rope_spec(parameters: Mapping[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    """The same for Gemma 3, whose max_position_embeddings counts the positions after linear scaling."""
    spec = _spec_of_kind(parameters, max_position, head_dim, ("default", "linear"))
    trained = max(1, int(max_position / spec.factor))
    return spec if spec.kind == "default" else replace(spec, original_max_position=trained)


def phi3_rope_spec(parameters: Mapping[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    """The same for Phi-3, which may rotate only the first features of a head, and has kinds of its own."""
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not rotary_dim:
        raise ModelError(
            f"rope_parameters: partial_rotary_factor={parameters['partial_rotary_factor']} rotates {rotary_dim} of "
            f"{head_dim} features of a head; it must be an even number above 0."
        )
    rotating_all = {**parameters, "partial_rotary_factor": None}
    spec = _spec_of_kind(rotating_all, max_position, rotary_dim, ("default", "longrope"))
    return spec if rotary_dim == head_dim else replace(spec, rotary_dim=rotary_dim)


def _spec_of_kind(
    parameters: Mapping[str, Any], max_position: int, head_dim: int, supported: tuple[str, ...]
) -> RopeSpec:
    kind = _kind(parameters, supported)
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(
            f"rope_parameters: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported; "
            "these families rotate all features of a head."
        )
    theta = _positive(parameters, "rope_theta")
    if kind == "default":
        if parameters.get("factor", 1) != 1:
            raise ModelError(f"rope_parameters: factor={parameters['factor']} needs a rope_type, such as linear.")
        return RopeSpec(theta=theta)
    if kind == "llama3":
        return _llama3(parameters, theta)
    if kind == "yarn":
        return _yarn(parameters, theta, max_position)
    if kind == "longrope":
        return _longrope(parameters, theta, max_position, head_dim // 2)
    factor = _positive(parameters, "factor")
    if kind == "linear":
        return RopeSpec(kind, theta, factor)
    if head_dim <= 2:
        raise ModelError(f"Dynamic RoPE needs a head_dim above 2, but the config has {head_dim}.")
    return RopeSpec(kind, theta, factor, original_max_position=max_position)


def _kind(parameters: Mapping[str, Any], supported: tuple[str, ...]) -> RopeKind:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    for known in get_args(RopeKind):
        if kind == known and known in supported:
            return known
    raise ModelError(f"RoPE kind {quoted(kind)} is not supported; supported: {', '.join(supported)}.")


def _positive(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"rope_parameters: {key} must be a number above 0, but it is {quoted(value)}.")
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


def _longrope(parameters: Mapping[str, Any], theta: float, max_position: int, pairs: int) -> RopeSpec:
    trained = int(_positive(parameters, "original_max_position_embeddings", max_position))
    if trained < 2:
        raise ModelError(f"rope_parameters: original_max_position_embeddings must be above 1, but it is {trained}.")
    for name in ("short_factor", "long_factor"):
        if len(parameters.get(name) or ()) != pairs:
            raise ModelError(
                f"rope_parameters: {name} must be a list of {pairs} numbers, one for each rotated pair of features, "
                f"but it is {quoted(parameters.get(name))}."
            )
    factor = _positive(parameters, "factor", max_position / trained)
    scaling = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return RopeSpec(
        "longrope",
        theta,
        factor,
        trained,
        attention_factor=_positive(parameters, "attention_factor", scaling),
        frequency_factors=tuple(parameters["short_factor"]),
        long_factors=tuple(parameters["long_factor"]),
    )


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """The config's attention_factor, else DeepSeek's ratio of mscales, else 0.1 ln(factor) + 1 (YaRN paper)."""
    if parameters.get("attention_factor") is not None:
        return _positive(parameters, "attention_factor")

    def scaled(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scaled(_positive(parameters, "mscale")) / scaled(_positive(parameters, "mscale_all_dim"))
    return scaled(1.0)
