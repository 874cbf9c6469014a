"""What several model files read of Transformers' config objects, and which values are refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ModelError, quoted

if TYPE_CHECKING:
    from nanovllm.layers.causal_lm import CausalLM

# Transformers' names of the activations, and the network's.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"},
)
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def head_dim_of(config: Any) -> int:
    """The size of a head. Some config classes have no field for it."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads_of(config: Any) -> int:
    return int(config.num_key_value_heads or config.num_attention_heads)


def activation_of(config: Any, field: str = "hidden_act") -> str:
    """The activation, by its name in GATED_UNITS."""
    return ACTIVATIONS[getattr(config, field)]


def check_config(model: type[CausalLM], config: Any) -> None:
    """Raise ModelError, which names the field, for a config that is not computed."""
    heads = config.num_attention_heads
    kv_heads = kv_heads_of(config)
    head_dim = head_dim_of(config)
    activation = getattr(config, model.activation_field)
    if activation not in ACTIVATIONS:
        raise ModelError(f"Activation {quoted(activation)} is not supported; supported: {', '.join(ACTIVATIONS)}.")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    if head_dim % 2 or head_dim < 2:
        raise ModelError(f"head_dim must be even and above 0, because RoPE turns pairs, but it is {head_dim}.")
    if not model.has_heads_by_layer and getattr(config, "is_heterogeneous", False):
        raise ModelError(f"per_layer_config is not supported: the layers of a {model.__name__} have equal sizes.")
    for name, computed in model.computed.items():
        if (value := getattr(config, name, computed[0])) not in computed:  # older config classes lack some fields
            allowed = " or ".join(map(quoted, computed))
            raise ModelError(f"{name}={quoted(value)}: a {model.__name__} is computed with {allowed} only.")


def check_experts(count: int, chosen: int, field: str, architecture: str) -> None:
    """Raise ModelError unless a token can choose so many of the experts. field: that counts them."""
    if not count:
        raise ModelError(f"{field} is 0; a {architecture} needs at least 1 expert.")
    if chosen > count:
        raise ModelError(f"num_experts_per_tok={chosen} is above the number of experts, which is {count}.")


def one_window(config: Any, architecture: str) -> int | None:
    """The window of an architecture whose layers all have the one of the config."""
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise ModelError(f"Several layer_types are not supported: a {architecture} has one window for all.")
    return _checked(getattr(config, "sliding_window", None))


def layer_types(config: Any, *supported: str) -> list[str]:
    """The type of each layer, of those that are supported."""
    types: list[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return [FULL] * int(config.num_hidden_layers)
    unknown = sorted(set(types) - set(supported))
    if unknown:
        raise ModelError(f"layer_types holds {quoted(', '.join(unknown))}; supported: {', '.join(supported)}.")
    if len(types) != config.num_hidden_layers:
        raise ModelError(f"layer_types={quoted(types)} names {len(types)} layers of {config.num_hidden_layers}.")
    if set(types) == {LINEAR}:
        raise ModelError("layer_types names no layer with attention, of which a network needs at least one.")
    return types


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer, which its type says; None if it has full attention."""
    types = layer_types(config, FULL, SLIDING)
    window = getattr(config, "sliding_window", None)
    if SLIDING in types and window is None:
        raise ModelError("layer_types asks for sliding_attention, but sliding_window or use_sliding_window is unset.")
    return [_checked(window) if kind == SLIDING else None for kind in types]


def _checked(window: int | None) -> int | None:
    if window == 0:
        raise ModelError("sliding_window must be at least 1, but it is 0.")
    return window
