"""From a Hugging Face config's RoPE parameters to a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nanovllm.data.json_fields import checked_fields
from nanovllm.data.network import RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import ROPE_FIELDS
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.config_fields import FULL, SLIDING, head_dim_of

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def rotary_embedding(
    config: Any,
    build: BuildContext,
    kinds: Collection[str] = KINDS,
    *,
    rotates_part: bool = False,
    scales_queries: bool = False,
) -> RotaryEmbedding:
    """The rotary embedding of all layers.

    config: Transformers' object, whose `rope_parameters` are in its newest form; kinds: those that the architecture
    has; rotates_part: whether it may rotate only the first features of a head; scales_queries: whether queries are
    scaled by their positions, as the parameters say. Raises ModelError on what is not supported.
    """
    head_dim = head_dim_of(config)
    parameters = rope_parameters(config.rope_parameters or {})
    if not scales_queries:
        parameters.pop("llama_4_scaling_beta", None)
    rope = rope_spec(parameters, config.max_position_embeddings, head_dim, kinds, rotates_part)
    return _made(_with_factors(rope, build, head_dim), head_dim, build)


def rotary_embeddings(
    config: Any, build: BuildContext, kinds: Collection[str] = KINDS, full_head_dim: int | None = None
) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """The rotary embedding of layers with full attention, and that of layers with a window; see `rotary_embedding`.

    full_head_dim: of layers with full attention, if it is another.
    """
    known = (FULL, SLIDING)
    unknown = sorted(set(config.rope_parameters) - set(known))
    if unknown:
        raise ModelError(f"rope_parameters: {quoted(unknown[0])} is no layer type; known: {', '.join(known)}.")
    positions = config.max_position_embeddings
    ropes = []
    for kind, head_dim in zip(known, (full_head_dim or head_dim_of(config), head_dim_of(config)), strict=True):
        parameters = rope_parameters(config.rope_parameters.get(kind) or {})
        parameters.pop("llama_4_scaling_beta", None)
        rope = _scaled_before(rope_spec(parameters, positions, head_dim, kinds), positions)
        rope = _with_factors(rope, build, head_dim) if kind == FULL else rope
        ropes.append(_made(rope, head_dim, build))
    return ropes[0], ropes[1]


def _made(rope: RopeSpec, head_dim: int, build: BuildContext) -> RotaryEmbedding:
    return RotaryEmbedding(rope.for_length(build.longest, head_dim), head_dim, build.device)


def _with_factors(rope: RopeSpec, build: BuildContext, head_dim: int) -> RopeSpec:
    """What a GGUF file says besides: a divisor of each frequency, or by very large ones which pairs are not rotated."""
    factors = build.rope_factors
    if rope.kind == "proportional" and build.is_gguf:
        from nanovllm.formats.gguf.gemma4 import rotated_pairs  # numpy

        return replace(rope, rotated_pairs=rotated_pairs(factors, head_dim))
    if not factors or rope.kind != "default":
        return rope
    if len(factors) != head_dim // 2:
        raise ModelError(f"its {len(factors)} RoPE factors do not fit heads of {head_dim} numbers.")
    return replace(rope, frequency_factors=factors)


def _scaled_before(spec: RopeSpec, positions: int) -> RopeSpec:
    """The trained length of Gemma 3, whose max_position_embeddings counts the positions after linear scaling."""
    trained = max(1, int(positions / spec.factor))
    return replace(spec, original_max_position=trained) if spec.kind == "linear" else spec


def rope_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE parameters that are read, without those that are null. Raises ModelError for values out of range."""
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"rope_parameters: {quoted(nested[0])} has a mapping of its own; one rope_theta for all is supported."
        )
    checked = checked_fields("rope_parameters", given, ROPE_FIELDS)
    parameters = {name: value for name, value in checked.items() if value is not None}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def rope_spec(
    parameters: Mapping[str, Any],
    max_position: int,
    head_dim: int,
    kinds: Collection[str] = KINDS,
    rotates_part: bool = False,
) -> RopeSpec:
    """The RoPE of these `rope_parameters`, for a family that has these kinds.

    rotates_part: whether the family may rotate only the first features of a head. Raises ModelError on what is missing
    or not supported.
    """

    def needed(name: str) -> float:
        if parameters.get(name) is None:
            raise ModelError(f"rope_parameters: {name} is missing, which {kind} RoPE needs.")
        return float(parameters[name])

    kind = parameters["rope_type"]
    if kind not in kinds:
        raise ModelError(f"RoPE kind {quoted(kind)} is not supported; supported: {', '.join(kinds)}.")
    theta = needed("rope_theta")
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
