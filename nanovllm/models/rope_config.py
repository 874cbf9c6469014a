"""From a Hugging Face config's RoPE parameters to a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nanovllm.data.json_fields import NULL, OBJECT, checked_fields
from nanovllm.data.network import RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import ROPE_FIELDS
from nanovllm.models.family import Family

_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_specs(family: Family, config: Any, fields: Mapping[str, Any]) -> tuple[RopeSpec, RopeSpec | None]:
    """The RoPE of a network, and that of its layers with a sliding window if they have one of their own.

    config: complete; fields: of config.json, checked by `OTHER_FIELDS`. Raises ModelError on what is not supported.
    """
    positions = config.max_position_embeddings
    kinds = family.rope_kinds
    rotates_part = family.rotates_part

    if family.rope and not (fields.get("rope_scaling") or fields.get("rope_parameters")):
        fields = {**fields, "rope_parameters": family.rope}

    def spec(fields: Mapping[str, Any], theta: float, head_dim: int = config.head_dim) -> RopeSpec:
        trained = getattr(config, "original_max_position_embeddings", None)
        found = rope_parameters(fields, positions, theta, trained)
        if (share := family.rotated_share(config)) is not None:
            found.setdefault("partial_rotary_factor", share)
        if not family.scales_queries:
            found.pop("llama_4_scaling_beta", None)
        elif "llama_4_scaling_beta" not in found:
            raise ModelError(f"rope_parameters: llama_4_scaling_beta is missing, which a {family.architecture} needs.")
        return rope_spec(found, positions, head_dim, kinds, rotates_part)

    if family.local_theta is None:
        return spec(fields, family.theta), None
    full, local = _by_layer_type(fields)
    full_head_dim = getattr(config, "full_head_dim", config.head_dim)
    ropes = spec(full, family.theta, full_head_dim), spec(local, family.local_theta)
    return _scaled_before(ropes[0], positions), _scaled_before(ropes[1], positions)


def _scaled_before(spec: RopeSpec, positions: int) -> RopeSpec:
    """The trained length of Gemma 3, whose max_position_embeddings counts the positions after linear scaling."""
    trained = max(1, int(positions / spec.factor))
    return replace(spec, original_max_position=trained) if spec.kind == "linear" else spec


def rope_parameters(
    fields: Mapping[str, Any], max_position: int, default_theta: float, trained: int | None = None
) -> dict[str, Any]:
    """The checked RoPE parameters of config.json: its `rope_parameters`, or the fields of older configs.

    They are read as Transformers reads them. `rope_theta` and other fields outside of the mapping apply if the mapping
    lacks them. For yarn, llama3 and longrope, the trained length is `trained`, the family's, unless the config has one
    outside of the mapping; without either it defaults to max_position_embeddings. Raises ModelError.
    """
    where = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    mapping = fields.get(where) or {}
    nested = [name for name, value in mapping.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"{where}: {quoted(nested[0])} has a mapping of its own; one rope_theta for all is supported.")
    found = {name: value for name, value in checked_fields(where, mapping, ROPE_FIELDS).items() if value is not None}
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] == "su" or (found["rope_type"] == "yarn" and "short_factor" in found):
        found["rope_type"] = "longrope"  # as older checkpoints call it
    theta = fields.get("rope_theta")
    found.setdefault("rope_theta", default_theta if theta is None else theta)
    if fields.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    if found["rope_type"] == "yarn" and "factor" not in mapping:  # null means the ratio of the lengths
        raise ModelError(f"{where}: factor is missing, which yarn needs.")
    if found["rope_type"] in ("llama3", "yarn", "longrope"):
        trained = fields.get("original_max_position_embeddings") or trained
        if trained is not None:
            found["original_max_position_embeddings"] = trained
        found.setdefault("original_max_position_embeddings", max_position)
    return found


def _by_layer_type(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The fields as `rope_parameters` reads them for layers with full attention, and for those with a sliding window.

    Newer configs have a mapping for each layer type, older ones rope_theta and rope_scaling, and rope_local_base_freq
    for the layers with a window. Raises ModelError.
    """
    mapping = fields.get("rope_parameters") or {}
    unknown = sorted(set(mapping) - set(_LAYER_TYPES))
    if unknown:
        raise ModelError(f"rope_parameters: {quoted(unknown[0])} is no layer type; known: {', '.join(_LAYER_TYPES)}.")
    both = checked_fields("rope_parameters", mapping, dict.fromkeys(_LAYER_TYPES, OBJECT | NULL))
    full, local = (both.get(name) for name in _LAYER_TYPES)
    if full and fields.get("rope_scaling"):
        full = {**full, **fields["rope_scaling"]}
        fields = {**fields, "rope_scaling": None}
    return {**fields, "rope_parameters": full}, {
        "rope_parameters": local,
        "rope_theta": fields.get("rope_local_base_freq"),
    }


def rope_spec(
    parameters: Mapping[str, Any],
    max_position: int,
    head_dim: int,
    kinds: Collection[str] = ("default", "linear", "dynamic", "llama3", "yarn"),
    rotates_part: bool = False,
) -> RopeSpec:
    """What `rope_parameters` has found, for a family that has these kinds.

    rotates_part: whether the family may rotate only the first features of a head. Raises ModelError on what is missing
    or not supported.
    """

    def needed(name: str) -> float:
        if parameters.get(name) is None:
            raise ModelError(f"rope_parameters: {name} is missing, which {kind} RoPE needs.")
        return float(parameters[name])

    kind = parameters["rope_type"]
    theta = float(parameters["rope_theta"])
    if kind not in kinds:
        raise ModelError(f"RoPE kind {quoted(kind)} is not supported; supported: {', '.join(kinds)}.")
    if kind == "proportional":
        share = parameters.get("partial_rotary_factor", 1.0)
        factor = parameters.get("factor") or 1.0
        return RopeSpec(kind, theta, float(factor), rotated_pairs=int(share * head_dim // 2))
    rotated = _rotated_features(parameters.get("partial_rotary_factor"), head_dim, rotates_part)
    spec = RopeSpec(kind, theta, rotary_dim=None if rotated == head_dim else rotated)
    if kind == "default":
        if parameters.get("factor", 1) != 1:
            raise ModelError(f"rope_parameters: factor={parameters['factor']} needs a rope_type, such as linear.")
        return spec
    if kind == "linear":
        return replace(spec, factor=needed("factor"))
    if kind == "dynamic":
        if rotated <= 2:
            raise ModelError(f"Dynamic RoPE needs a head_dim above 2, but the config has {rotated}.")
        return replace(spec, factor=needed("factor"), original_max_position=max_position)
    trained = parameters.get("original_max_position_embeddings") or max_position
    if kind == "llama3":
        low = needed("low_freq_factor")
        high = needed("high_freq_factor")
        if low >= high:
            raise ModelError(f"rope_parameters: low_freq_factor={low} must be below high_freq_factor={high}.")
        spec = replace(spec, low_freq_factor=low, high_freq_factor=high)
        return replace(spec, factor=needed("factor"), original_max_position=trained)
    factor = float(parameters.get("factor") or max_position / trained)
    spec = replace(spec, factor=factor, original_max_position=trained)
    return _yarn(spec, parameters) if kind == "yarn" else _longrope(spec, parameters, rotated // 2)


def _rotated_features(share: float | None, head_dim: int, rotates_part: bool) -> int:
    """The features of a head that are rotated, of which a config may give the share."""
    if share in (None, 1):
        return head_dim
    if not rotates_part:
        raise ModelError(
            f"rope_parameters: partial_rotary_factor={share} is not supported; "
            "these families rotate all features of a head."
        )
    rotated = int(head_dim * share)
    if rotated % 2 or not rotated:
        raise ModelError(
            f"rope_parameters: partial_rotary_factor={share} rotates {rotated} of {head_dim} features of a head; it "
            "must be an even number above 0."
        )
    return rotated


def _yarn(spec: RopeSpec, parameters: Mapping[str, Any]) -> RopeSpec:
    """attention_factor: the config's, else DeepSeek's ratio of mscales, else 0.1 ln(factor) + 1 (YaRN paper)."""

    def scaled(mscale: float) -> float:
        return 0.1 * mscale * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

    mscale = parameters.get("mscale")
    of_all = parameters.get("mscale_all_dim")
    attention_factor = scaled(mscale) / scaled(of_all) if mscale and of_all else scaled(1.0)
    names = [name for name in ("beta_fast", "beta_slow", "truncate") if parameters.get(name) is not None]
    given = {name: parameters[name] for name in names}
    beta = parameters.get("llama_4_scaling_beta", 0.0)
    attention_factor = parameters.get("attention_factor") or attention_factor
    return replace(spec, attention_factor=attention_factor, query_beta=beta, **given)


def _longrope(spec: RopeSpec, parameters: Mapping[str, Any], pairs: int) -> RopeSpec:
    trained = spec.original_max_position
    factor = spec.factor
    if trained < 2:
        raise ModelError(f"rope_parameters: original_max_position_embeddings must be above 1, but it is {trained}.")
    for name in ("short_factor", "long_factor"):
        if len(parameters.get(name) or ()) != pairs:
            raise ModelError(
                f"rope_parameters: {name} must be a list of {pairs} numbers, one for each rotated pair of features, "
                f"but it is {quoted(parameters.get(name))}."
            )
    scaling = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return replace(
        spec,
        attention_factor=parameters.get("attention_factor") or scaling,
        frequency_factors=tuple(parameters["short_factor"]),
        long_factors=tuple(parameters["long_factor"]),
    )
