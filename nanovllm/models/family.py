"""What a model family is, and how Transformers' config object of one becomes a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nanovllm.data.network import RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec

# Transformers' names of the activations, and the network's.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"},
)


def head_dim_of(config: Any) -> int:
    """The size of a head. Some config classes have no field for it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name in config.json, and Transformers' model type.

    facts: the fields of `DecoderSpec` in which the family differs from the plainest one, given Transformers' config
    object of it. What a family does not read of the object has no effect on the logits, or stands in `only`.
    """

    architecture: str
    model_type: str
    facts: Callable[[Any], dict[str, Any]]
    other_types: tuple[str, ...] = ()  # what published configs have as model_type besides
    wholes: tuple[str, ...] = ()  # architectures of larger models, for images too, whose text model it is
    biases: tuple[str, ...] = ()  # of attention_bias and mlp_bias those that the family has
    has_window: bool = False  # whether all layers have the window of the config
    layer_types: tuple[str, ...] = ()  # what layer_types may name; none: all layers are alike
    activation: str = "hidden_act"  # the field that names it
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # fields, and the values that are computed
    dtype: str = "float32"  # of a checkpoint whose config names none
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    has_local_rope: bool = False  # whether layers with a sliding window have a rotary embedding of their own
    full_head_dim: Callable[[Any], int] | None = None  # of layers with full attention, if they have other heads
    rotates_part: bool = False  # whether it may rotate only the first features of a head
    scales_queries: bool = False  # whether queries are scaled by their positions, as its RoPE parameters say
    left_out: tuple[str, ...] = ()  # what the names of tensors begin with that no text needs

    @property
    def model_types(self) -> tuple[str, ...]:
        """What configs have as model_type, Transformers' first."""
        return (self.model_type, *self.other_types)


def decoder_spec(
    family: Family, config: Any, dtype: str | None, ropes: tuple[RopeSpec, RopeSpec | None]
) -> DecoderSpec:
    """The network that a config object describes. Raises ModelError, which names the field.

    dtype: the checkpoint's; None if the config names none. ropes: as of `rope_config.rope_specs`.
    """
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = head_dim_of(config)
    activation = getattr(config, family.activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"Activation {quoted(activation)} is not supported; supported: {', '.join(ACTIVATIONS)}.")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    if head_dim % 2 or head_dim < 2:
        raise ModelError(f"head_dim must be even and above 0, because RoPE turns pairs, but it is {head_dim}.")
    if family.full_head_dim is None and getattr(config, "is_heterogeneous", False):
        raise ModelError(f"per_layer_config is not supported: the layers of a {family.architecture} have equal sizes.")
    for name, computed in family.only.items():
        if (value := getattr(config, name, computed[0])) not in computed:  # older config classes lack some fields
            allowed = " or ".join(map(quoted, computed))
            raise ModelError(f"{name}={quoted(value)}: a {family.architecture} is computed with {allowed} only.")
    has_bias = {name: getattr(config, name) for name in family.biases}
    attention_bias = has_bias.get("attention_bias", False)
    biases = {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": has_bias.get("mlp_bias", False)}
    rope, local_rope = ropes
    return DecoderSpec(
        architecture=family.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 0),  # 0: all layers have experts
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=getattr(config, "tie_word_embeddings", False),
        rope=rope,
        sliding_windows=_sliding_windows(family, config),
        local_rope=local_rope,
        max_position_embeddings=config.max_position_embeddings,
        dtype=_dtype_name(dtype or family.dtype),
        **{"activation": ACTIVATIONS[activation], **biases, **family.facts(config)},
    )


def _dtype_name(dtype: str) -> str:
    """The checkpoint's dtype."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ModelError(f"The dtype {quoted(name)} is not supported; supported: {', '.join(DTYPE_NAMES)}.")
    return name


def _sliding_windows(family: Family, config: Any) -> tuple[int | None, ...]:
    """The window of each layer; None if it has none."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or not family.layer_types:
        if family.has_window and len(set(kinds or ())) > 1:
            raise ModelError(f"Several layer_types are not supported: a {family.architecture} has one window for all.")
        windows: tuple[int | None, ...] = (window if family.has_window else None,) * config.num_hidden_layers
    else:
        unknown = sorted(set(kinds) - set(family.layer_types))
        if unknown:
            known = ", ".join(family.layer_types)
            raise ModelError(f"layer_types holds {quoted(', '.join(unknown))}; supported: {known}.")
        if len(kinds) != config.num_hidden_layers:
            raise ModelError(f"layer_types={quoted(kinds)} names {len(kinds)} layers of {config.num_hidden_layers}.")
        if "sliding_attention" in kinds and window is None:
            raise ModelError(
                "layer_types asks for sliding_attention, but sliding_window or use_sliding_window is unset."
            )
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if 0 in windows:
        raise ModelError("sliding_window must be at least 1, but it is 0.")
    return windows
