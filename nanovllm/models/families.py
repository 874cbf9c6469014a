"""The model families: how each one's config becomes a `DecoderSpec`, and the registry of them by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from nanovllm.data.expert_spec import ExpertSpec
from nanovllm.data.rope_spec import RopeSpec
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import COMMON_FIELDS
from nanovllm.models.rope_config import gemma3_rope_spec, phi3_rope_spec, rope_spec
from nanovllm.models.spec import DTYPE_NAMES, DecoderSpec

# Transformers' names of the activations, and the network's.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"},
)


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family's code decides from its config; see the fields of `DecoderSpec`."""

    sliding_windows: tuple[int | None, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertSpec | None = None
    merged_projections: bool = False
    rope: Callable[[Mapping[str, Any], int, int], RopeSpec] = rope_spec
    query_pre_attn_scalar: float | None = None
    embedding_scale: float = 1.0
    output_norms: bool = False
    zero_centered_norms: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name in config.json, Transformers' model type, and how to read its facts.

    own_fields: the fields of config.json that it reads besides COMMON_FIELDS; activation: the field with the MLP's
    activation; local_rope: whether the layers with a sliding window have a rotary embedding of their own.
    """

    architecture: str
    model_type: str
    facts: Callable[[Any], FamilyFacts]
    own_fields: frozenset[str]
    activation: str = "hidden_act"
    local_rope: bool = False

    def reads(self, field: str) -> bool:
        return field in COMMON_FIELDS or field in self.own_fields or field == self.activation


# ---- the families


def _qwen3(config: Any) -> FamilyFacts:
    bias = config.attention_bias
    return FamilyFacts(_windows_by_layer_type(config), qk_norm=True, qkv_bias=bias, o_bias=bias)


def _qwen2(config: Any) -> FamilyFacts:
    return FamilyFacts(_windows_by_layer_type(config), qkv_bias=True)


def _llama(config: Any) -> FamilyFacts:
    bias = config.attention_bias
    return FamilyFacts((None,) * config.num_hidden_layers, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config: Any) -> FamilyFacts:
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise ModelError("Several layer_types are not supported: a MistralForCausalLM has one window for all.")
    return FamilyFacts((config.sliding_window,) * config.num_hidden_layers)


def _qwen3_moe(config: Any) -> FamilyFacts:
    """Its window, unlike that of Qwen3, applies to all layers or to none: Transformers reads no max_window_layers."""
    bias, num_layers = config.attention_bias, config.num_hidden_layers
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
    experts = _experts(config, config.moe_intermediate_size, config.norm_topk_prob, sparse)
    windows = (config.sliding_window,) * num_layers
    return FamilyFacts(windows, qk_norm=True, qkv_bias=bias, o_bias=bias, experts=experts)


def _mixtral(config: Any) -> FamilyFacts:
    num_layers = config.num_hidden_layers
    experts = _experts(config, config.intermediate_size, True, (True,) * num_layers)
    if experts is None:
        raise ModelError("num_local_experts is 0; a MixtralForCausalLM needs at least 1 expert.")
    experts = replace(experts, block="block_sparse_moe", projections=("w1", "w3", "w2"))
    return FamilyFacts((config.sliding_window,) * num_layers, experts=experts)


def _phi3(config: Any) -> FamilyFacts:
    windows = (config.sliding_window,) * config.num_hidden_layers
    return FamilyFacts(windows, merged_projections=True, rope=phi3_rope_spec)


def _gemma3(config: Any) -> FamilyFacts:
    return FamilyFacts(
        _windows_by_layer_type(config),
        qk_norm=True,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        rope=gemma3_rope_spec,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
        embedding_scale=config.hidden_size**0.5,
        output_norms=True,
        zero_centered_norms=True,
    )


_WINDOWS_BY_LAYER = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})  # two names of one field
_QWEN3_MOE = (
    _EXPERTS
    | {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "attention_bias"}
    | {"use_sliding_window", "sliding_window", "max_window_layers"}
)
_GEMMA3 = frozenset(
    {"attention_bias", "sliding_window", "sliding_window_pattern", "layer_types", "query_pre_attn_scalar"}
    | {"rope_local_base_freq"}
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family("Qwen3ForCausalLM", "qwen3", _qwen3, _WINDOWS_BY_LAYER | {"attention_bias"}),
            Family("Qwen2ForCausalLM", "qwen2", _qwen2, _WINDOWS_BY_LAYER),
            Family("LlamaForCausalLM", "llama", _llama, frozenset({"attention_bias", "mlp_bias"})),
            Family("MistralForCausalLM", "mistral", _mistral, frozenset({"sliding_window", "layer_types"})),
            Family("Phi3ForCausalLM", "phi3", _phi3, frozenset({"sliding_window"})),
            Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, _QWEN3_MOE),
            Family("MixtralForCausalLM", "mixtral", _mixtral, _EXPERTS | {"sliding_window"}),
            Family("Gemma3ForCausalLM", "gemma3_text", _gemma3, _GEMMA3, "hidden_activation", local_rope=True),
        )
    }
)


def _windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """One entry per layer, from `layer_types`, which a config may leave out."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise ModelError(f"layer_types holds {quoted(', '.join(unknown))}; supported: {', '.join(windows)}.")
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ModelError("layer_types asks for sliding_attention, but sliding_window or use_sliding_window is not set.")
    return tuple(windows[kind] for kind in config.layer_types)


def _experts(config: Any, intermediate_size: int, norm_topk_prob: bool, layers: tuple[bool, ...]) -> ExpertSpec | None:
    """The experts of a config; None if no layer has any."""
    count, chosen = config.num_experts, config.num_experts_per_tok
    if not (count and any(layers)):
        return None
    if chosen > count:
        raise ModelError(f"num_experts_per_tok={chosen} is above the number of experts, which is {count}.")
    return ExpertSpec(count, chosen, intermediate_size, norm_topk_prob, layers)


# ---- the fields that all families share


def decoder_spec(family: Family, config: Any) -> DecoderSpec:
    """The network that a config with its defaults describes. Raises ModelError, which names the field."""
    activation = getattr(config, family.activation)
    if activation not in ACTIVATIONS:
        raise ModelError(f"Activation {quoted(activation)} is not supported; supported: {', '.join(ACTIVATIONS)}.")
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
        rope=facts.rope(config.rope_parameters, config.max_position_embeddings, head_dim),
        local_rope=_local_rope(family, config, facts, head_dim),
        sliding_windows=facts.sliding_windows,
        max_position_embeddings=config.max_position_embeddings,
        dtype=_dtype_name(config),
        experts=facts.experts,
        merged_projections=facts.merged_projections,
        activation=ACTIVATIONS[activation],
        query_pre_attn_scalar=facts.query_pre_attn_scalar,
        embedding_scale=facts.embedding_scale,
        output_norms=facts.output_norms,
        zero_centered_norms=facts.zero_centered_norms,
    )
    _check_spec(spec)
    return spec


def _local_rope(family: Family, config: Any, facts: FamilyFacts, head_dim: int) -> RopeSpec | None:
    if not family.local_rope:
        return None
    return facts.rope(config.local_rope_parameters, config.max_position_embeddings, head_dim)


def _dtype_name(config: Any) -> str:
    """The checkpoint's dtype. float32 if the config names none, as in Transformers."""
    name = "float32" if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ModelError(f"The dtype {quoted(name)} is not supported; supported: {', '.join(DTYPE_NAMES)}.")
    return name


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
