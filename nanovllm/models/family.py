"""What a model family is, and how a config of one becomes a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nanovllm.data.json_fields import Field
from nanovllm.data.network import RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import READ_BY_ALL
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec

# Transformers' names of the activations, and the network's.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"},
)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name in config.json, and Transformers' model type.

    facts: the fields of `DecoderSpec` in which the family differs from the plainest one, given a complete config, but
    for windows and biases, which every family has as its config says. defaults: the fields of config.json that it
    reads, besides those that all read, and what Transformers' config class takes where one is missing. own_fields: the
    types and ranges of fields that no other family has, or that have no default. theta: the base of RoPE where a config
    names none; local_theta: that of the layers with a sliding window, if they have a rotary embedding of their own.
    rope: the RoPE parameters of a config that has none. window_pattern: n if every n-th layer has full attention, and
    the others a sliding window, where a config does not say which. dtype: of a checkpoint whose config names none.
    scales_queries: whether queries are scaled by their positions, as its RoPE parameters say.
    rotates_part: whether it may rotate only the first features of a head; rotated_share: their share where a config
    names none, None: all. left_out: what the names of a checkpoint's tensors begin with that no text needs.
    other_types: what published configs have as model_type besides Transformers'. complete: sets what else follows from
    other fields.
    """

    architecture: str
    model_type: str
    facts: Callable[[Any], dict[str, Any]]
    defaults: Mapping[str, Any]
    own_fields: Mapping[str, Field] = field(default_factory=dict)
    theta: float = 10_000.0
    local_theta: float | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    window_pattern: int | None = None
    dtype: str = "float32"
    scales_queries: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    rotates_part: bool = False
    rotated_share: Callable[[Any], float | None] = lambda config: None
    left_out: tuple[str, ...] = ()
    other_types: tuple[str, ...] = ()
    complete: Callable[[Any], None] = lambda config: None

    def reads(self, name: str) -> bool:
        """Whether it reads this field of config.json."""
        return name in READ_BY_ALL or name in self.defaults or name in self.own_fields


def complete_config(family: Family, fields: Mapping[str, Any]) -> SimpleNamespace:
    """The checked `fields` of a config with the family's defaults, and with what follows from other fields.

    Transformers' config class has the same attributes, apart from RoPE and the dtype. Raises ModelError for values that
    contradict each other.
    """
    config = SimpleNamespace(**{**family.defaults, **fields})
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.head_dim is None:
        config.head_dim, rest = divmod(config.hidden_size, config.num_attention_heads)
        if rest:
            sizes = f"hidden_size={config.hidden_size} must be a multiple of num_attention_heads"
            raise ModelError(f"{sizes}={config.num_attention_heads}, or head_dim be given.")
    if "num_local_experts" in fields:
        config.num_experts = fields["num_local_experts"]
    if getattr(config, "use_sliding_window", True) is False:
        config.sliding_window = None
    if getattr(config, "mlp_only_layers", 0) is None:
        config.mlp_only_layers = []
    if "layer_types" in vars(config):
        _complete_layer_types(config, family.window_pattern)
    family.complete(config)
    return config


def _complete_layer_types(config: SimpleNamespace, pattern: int | None) -> None:
    """Each layer's kind: with a pattern each n-th layer is full; with Qwen's number the first layers are. With an
    interval each n-th layer has attention, and the others are recurrent."""
    layers = range(config.num_hidden_layers)
    interval = getattr(config, "full_attention_interval", None)
    if config.layer_types is None and interval is not None:
        config.layer_types = ["linear_attention" if (index + 1) % interval else "full_attention" for index in layers]
    if config.layer_types is None:
        pattern = getattr(config, "sliding_window_pattern", pattern)
        num_full = getattr(config, "max_window_layers", 0)
        if pattern is not None:
            is_sliding = [bool((index + 1) % pattern) for index in layers]
        else:
            is_sliding = [config.sliding_window is not None and index >= num_full for index in layers]
        config.layer_types = ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
    if len(config.layer_types) != len(layers):
        kinds = config.layer_types
        raise ModelError(f"layer_types={quoted(kinds)} names {len(kinds)} layers of {len(layers)}.")


def decoder_spec(family: Family, config: Any, rope: RopeSpec, local_rope: RopeSpec | None) -> DecoderSpec:
    """The network that a complete config describes. Raises ModelError, which names the field."""
    activation = vars(config).get("hidden_activation") or config.hidden_act
    if activation not in ACTIVATIONS:
        raise ModelError(f"Activation {quoted(activation)} is not supported; supported: {', '.join(ACTIVATIONS)}.")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        raise ModelError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    if config.head_dim % 2 or config.head_dim < 2:
        raise ModelError(f"head_dim must be even and above 0, because RoPE turns pairs, but it is {config.head_dim}.")
    windows = _sliding_windows(family, config)
    attention_bias = getattr(config, "attention_bias", False)
    biases = {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": getattr(config, "mlp_bias", False)}
    for window in windows:
        if window is not None and window < 1:
            raise ModelError(f"sliding_window must be at least 1, but it is {window}.")
    return DecoderSpec(
        architecture=family.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope=rope,
        sliding_windows=windows,
        local_rope=local_rope,
        max_position_embeddings=config.max_position_embeddings,
        dtype=_dtype_name(config.dtype or family.dtype),
        **{"activation": ACTIVATIONS[activation], **biases, **family.facts(config)},
    )


def _dtype_name(dtype: str) -> str:
    """The checkpoint's dtype."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ModelError(f"The dtype {quoted(name)} is not supported; supported: {', '.join(DTYPE_NAMES)}.")
    return name


def _sliding_windows(family: Family, config: Any) -> tuple[int | None, ...]:
    """One entry per layer: by `layer_types`, which a config may leave out, or the same for all layers."""
    if "layer_types" not in family.defaults:
        if len(set(getattr(config, "layer_types", ()))) > 1:
            raise ModelError(f"Several layer_types are not supported: a {family.architecture} has one window for all.")
        return (getattr(config, "sliding_window", None),) * config.num_hidden_layers
    is_recurrent = "linear_num_value_heads" in family.defaults
    windows = {"full_attention": None, "linear_attention": None} if is_recurrent else _windows_of_kinds(config)
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise ModelError(f"layer_types holds {quoted(', '.join(unknown))}; supported: {', '.join(windows)}.")
    return tuple(windows[kind] for kind in config.layer_types)


def _windows_of_kinds(config: Any) -> dict[str, int | None]:
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ModelError("layer_types asks for sliding_attention, but sliding_window or use_sliding_window is not set.")
    return {"full_attention": None, "sliding_attention": config.sliding_window}
