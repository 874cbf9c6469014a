"""The model families: one entry says everything that the engine knows of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nanovllm.data.json_fields import FLAG, NULL, OBJECT, TEXT, Field, integer, list_of, number, only
from nanovllm.data.network import ExpertSpec, Gemma4Spec, RecurrentSpec, RopeSpec, SharedExpert
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import (
    EXPERT_COUNT,
    LAYER_TYPES,
    MAX_CONV_KERNEL,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    NETWORK_FIELDS,
    READ_BY_ALL,
    THETA,
)
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
    rotates_part: whether it may rotate only the first features of a head; rotated_share: their share where a config
    names none, None: all. left_out: what the names of a checkpoint's tensors begin with that no text needs.
    complete: sets what else follows from other fields.
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
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    rotates_part: bool = False
    rotated_share: Callable[[Any], float | None] = lambda config: None
    left_out: tuple[str, ...] = ()
    complete: Callable[[Any], None] = lambda config: None

    def reads(self, name: str) -> bool:
        """Whether it reads this field of config.json."""
        return name in READ_BY_ALL or name in self.defaults or name in self.own_fields


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


def _experts(
    config: Any, count: int, intermediate_size: int, norm_topk_prob: bool, layers: tuple[bool, ...]
) -> ExpertSpec | None:
    """The experts of a config; None if no layer has any."""
    chosen = config.num_experts_per_tok
    if not (count and any(layers)):
        return None
    if chosen > count:
        raise ModelError(f"num_experts_per_tok={chosen} is above the number of experts, which is {count}.")
    return ExpertSpec(count, chosen, intermediate_size, norm_topk_prob, layers)


def _qwen3_moe_experts(config: Any) -> ExpertSpec | None:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(config.num_hidden_layers))
    return _experts(config, config.num_experts, config.moe_intermediate_size, config.norm_topk_prob, sparse)


def _mixtral_experts(config: Any, architecture: str = "MixtralForCausalLM") -> ExpertSpec:
    layers = (True,) * config.num_hidden_layers
    experts = _experts(config, config.num_experts, config.intermediate_size, True, layers)
    if experts is None:
        raise ModelError(f"num_local_experts is 0; a {architecture} needs at least 1 expert.")
    return replace(experts, block="block_sparse_moe", projections=("w1", "w3", "w2"))


def _gpt_oss(config: Any) -> dict[str, Any]:
    experts = _experts(
        config, config.num_experts, config.intermediate_size, True, (True,) * config.num_hidden_layers
    )
    if experts is None:
        raise ModelError("num_local_experts is 0; a GptOssForCausalLM needs at least 1 expert.")
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act={quoted(config.hidden_act)}: a GptOssForCausalLM has silu, which it clamps.")
    chosen, other = experts.num_experts_per_tok, getattr(config, "experts_per_token", None)
    if other not in (None, chosen):
        raise ModelError(f"experts_per_token={other} and num_experts_per_tok={chosen} are two names of one field.")
    experts = replace(experts, router_name="router", scoring="softmax_of_chosen", biases=True, interleaved=True)
    return {"experts": experts, "activation": "clamped_swiglu", "attention_sinks": True, "wide_norms": True}


def _glm_experts(config: Any) -> ExpertSpec | None:
    count, groups, chosen_groups = config.n_routed_experts, config.n_group, config.topk_group
    layers = tuple(index >= config.first_k_dense_replace for index in range(config.num_hidden_layers))
    experts = _experts(config, count, config.moe_intermediate_size, config.norm_topk_prob, layers)
    if experts is None:
        return None
    if groups > 1 and (count % groups or count < 2 * groups):
        raise ModelError(f"n_group={groups} must divide n_routed_experts={count} into groups of at least 2.")
    if chosen_groups > groups:
        raise ModelError(f"topk_group={chosen_groups} is above the number of groups, which is n_group={groups}.")
    if experts.num_experts_per_tok > chosen_groups * (count // groups):
        chosen = f"num_experts_per_tok={experts.num_experts_per_tok}"
        raise ModelError(f"{chosen} is above the number of experts in topk_group={chosen_groups} of n_group={groups}.")
    return replace(
        experts,
        scoring="sigmoid",
        correction_bias="gate.e_score_correction_bias",
        num_groups=groups,
        chosen_groups=chosen_groups,
        weight_scale=config.routed_scaling_factor,
        fp32_router=True,
        shared=SharedExpert(config.moe_intermediate_size * config.n_shared_experts),
    )


def _minimax_experts(config: Any) -> ExpertSpec:
    experts = _mixtral_experts(config, "MiniMaxM2ForCausalLM")
    return replace(experts, scoring="sigmoid", correction_bias="e_score_correction_bias")


def _rotated_share_of_minimax(config: Any) -> float | None:
    """Older configs give the number of rotated features instead of their share."""
    rotary_dim = getattr(config, "rotary_dim", None)
    return None if rotary_dim is None else min(1.0, rotary_dim / config.head_dim)


def _recurrent(config: Any, *, merged_projections: bool = False) -> RecurrentSpec | None:
    """The recurrent layers of a config; None if all layers have attention."""
    layers = tuple(kind == "linear_attention" for kind in config.layer_types)
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads={heads} must be a multiple of linear_num_key_heads={key_heads}.")
    sizes = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)
    return RecurrentSpec(layers, key_heads, heads, *sizes, merged_projections) if any(layers) else None


def _with_shared_expert(experts: ExpertSpec | None, config: Any) -> ExpertSpec | None:
    """The experts of a layer with the one that all tokens pass through, and its gate."""
    shared = SharedExpert(config.shared_expert_intermediate_size, "shared_expert", "shared_expert_gate")
    return None if experts is None else replace(experts, shared=shared)


def _gated_delta_facts(config: Any, *, merged_projections: bool = False) -> dict[str, Any]:
    """Of Qwen3-Next and Qwen3.5."""
    recurrent = _recurrent(config, merged_projections=merged_projections)
    return {"qk_norm": True, "zero_centered_norms": True, "attention_gate": True, "recurrent": recurrent}


def _qwen3_5_experts(config: Any) -> ExpertSpec:
    layers = (True,) * config.num_hidden_layers
    experts = _experts(config, config.num_experts, config.moe_intermediate_size, True, layers)
    if experts is None:
        raise ModelError("num_experts is 0; a Qwen3_5MoeForCausalLM needs at least 1 expert.")
    return experts


def _complete_gemma4(config: Any) -> None:
    """The heads of layers with full attention, which a config has by two names or for each of these layers."""
    if config.layer_types[-1] != "full_attention":  # as Transformers does
        config.layer_types = [*config.layer_types[:-1], "full_attention"]
    heads = (config.attention_k_eq_v and config.num_global_key_value_heads) or config.num_key_value_heads
    config.full_kv_heads, config.full_head_dim = heads, config.global_head_dim
    if config.per_layer_config is None:
        return
    known = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    # Transformers writes the layers' indices with as many digits as the last one has.
    given = {int(key) if key.isdecimal() and len(key) < 9 else key: own for key, own in config.per_layer_config.items()}
    found = [given.get(index, {}) for index in full]
    fits = all(isinstance(each, dict) and each == found[0] and set(each) <= set(known) for each in found)
    fits = fits and set(given) <= set(full) and len(given) == len(config.per_layer_config)
    numbers = [] if not fits else [{**known, **found[0]}[name] for name in known]
    if not fits or any(type(number) is not int or number < 1 for number in numbers):
        raise ModelError(
            f"per_layer_config={quoted(config.per_layer_config)} is not supported: it must give the layers with full "
            f"attention the same head_dim and num_key_value_heads, and no other layer anything."
        )
    config.full_head_dim, config.full_kv_heads = numbers


def _gemma4_experts(config: Any) -> ExpertSpec | None:
    if not config.enable_moe_block:
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(config, name):
            raise ModelError(f"enable_moe_block=true needs {name} above 0, but it is {getattr(config, name)}.")
    if config.top_k_experts > config.num_experts:
        raise ModelError(f"top_k_experts={config.top_k_experts} is above num_experts={config.num_experts}.")
    return ExpertSpec(
        config.num_experts,
        config.top_k_experts,
        config.moe_intermediate_size,
        norm_topk_prob=True,
        layers=(True,) * config.num_hidden_layers,
        block="",
        router_name="router.proj",
        expert_scale="router.per_expert_scale",
        beside_mlp=True,
    )


def _gemma4(config: Any) -> Gemma4Spec:
    if config.use_bidirectional_attention not in (None, "vision"):  # "vision" is of images
        raise ModelError(
            f"use_bidirectional_attention={quoted(config.use_bidirectional_attention)} is not supported: attention is "
            "causal."
        )
    full = tuple(kind == "full_attention" for kind in config.layer_types)
    owners = full[: len(full) - config.num_kv_shared_layers]
    if config.num_kv_shared_layers >= len(full) or set(full[len(owners) :]) - set(owners):
        raise ModelError(
            f"num_kv_shared_layers={config.num_kv_shared_layers}: of each kind of layers that have no keys and values, "
            f"one of the others must have them, but these are layers of {quoted(', '.join(config.layer_types))}."
        )
    size = config.hidden_size_per_layer_input or 0
    if size and config.vocab_size_per_layer_input < config.vocab_size:
        raise ModelError(
            f"vocab_size_per_layer_input={config.vocab_size_per_layer_input} must not be below "
            f"vocab_size={config.vocab_size}."
        )
    if config.num_attention_heads % config.full_kv_heads or config.full_head_dim % 2:
        raise ModelError(
            f"Layers with full attention have {config.full_kv_heads} KV heads of {config.full_head_dim}: "
            f"num_attention_heads={config.num_attention_heads} must be a multiple of them, and their size even."
        )
    return Gemma4Spec(
        full=full,
        full_kv_heads=config.full_kv_heads,
        full_head_dim=config.full_head_dim,
        key_is_value=config.attention_k_eq_v,
        num_shared=config.num_kv_shared_layers,
        shared_intermediate_size=config.intermediate_size * (2 if config.use_double_wide_mlp else 1),
        per_layer_size=size,
        per_layer_vocab=config.vocab_size_per_layer_input,
        packed_layers=len(full),
        logit_cap=config.final_logit_softcapping,
    )


# None is for what follows from other fields.
_ALL: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
)
# Types and ranges of the fields of some families.
_EXPERT_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "moe_intermediate_size": integer(1),
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": integer(1),
        "mlp_only_layers": list_of(integer(0), MAX_LAYERS) | NULL,
    }
)
_RECURRENT_FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "attn_output_gate": Field("true; others are not supported", lambda value: value is True),
        "full_attention_interval": integer(1, MAX_LAYERS),
        "linear_conv_kernel_dim": integer(1, MAX_CONV_KERNEL),
        "linear_key_head_dim": integer(1, MAX_HEAD_DIM),
        "linear_value_head_dim": integer(1, MAX_HEAD_DIM),
        "linear_num_key_heads": integer(1),
        "linear_num_value_heads": integer(1),
    }
)
_SILU: Mapping[str, Any] = MappingProxyType({**_ALL, "hidden_act": "silu"})
_QWEN: Mapping[str, Any] = MappingProxyType(
    {
        **_SILU,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }
)
_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {
        **_SILU,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "sliding_window": 4096,
    }
)

_GATED_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        **_SILU,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)
_QWEN3_5: Mapping[str, Any] = MappingProxyType({**_GATED_DELTA, "vocab_size": 248320})
_SHARED_EXPERT: Mapping[str, Any] = MappingProxyType(
    {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
)
MTP = "mtp."  # weights of heads for multi-token prediction

_ENTRIES = (
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        lambda config: {"qk_norm": True},
        {**_QWEN, "head_dim": 128, "attention_bias": False},
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        lambda config: {"qkv_bias": True},
        _QWEN,
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        lambda config: {},
        {
            **_SILU,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        lambda config: {},
        _MISTRAL,
        {"layer_types": LAYER_TYPES},
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        lambda config: {"merged_projections": True},
        {
            **_SILU,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
        rope_kinds=("default", "longrope"),
        rotates_part=True,
    ),
    Family(  # its window, unlike Qwen3's, is of all layers or of none: Transformers reads no max_window_layers
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        lambda config: {"qk_norm": True, "experts": _qwen3_moe_experts(config)},
        {
            **_SILU,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        {
            **_EXPERT_FIELDS,
            "num_local_experts": EXPERT_COUNT,
            "max_window_layers": NETWORK_FIELDS["max_window_layers"],
        },
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        lambda config: {"experts": _mixtral_experts(config)},
        {**_MISTRAL, "rms_norm_eps": 1e-5, "sliding_window": None, "num_experts_per_tok": 2, "num_experts": 8},
        {"num_local_experts": EXPERT_COUNT},
        theta=1_000_000.0,
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        lambda config: {"o_bias": config.attention_out_bias},
        {
            **_SILU,
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "eos_token_id": 2,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        {"attention_out_bias": FLAG},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _gpt_oss,
        {
            **_SILU,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        {
            "num_local_experts": EXPERT_COUNT,
            "experts_per_token": integer(1) | NULL,
            "swiglu_alpha": only(1.702),
            "swiglu_limit": only(7.0, 7),
        },
        theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        window_pattern=2,
        dtype="bfloat16",
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        lambda config: {
            "qk_norm": True,
            "joint_qk_norm": True,
            "input_norms": False,
            "output_norms": True,
            "wide_norms": True,
        },
        {
            **_SILU,
            "vocab_size": 50304,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "attention_bias": False,
            "sliding_window": 4096,
            "layer_types": None,
        },
        theta=500_000.0,
        local_theta=500_000.0,
        window_pattern=4,
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        lambda config: {
            "o_bias": False,
            "qk_norm": config.use_qk_norm,
            "experts": _glm_experts(config),
            "num_mtp_layers": config.num_nextn_predict_layers,
        },
        {
            **_SILU,
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        {
            "use_qk_norm": FLAG,
            "n_shared_experts": integer(1, MAX_EXPERTS),
            "n_routed_experts": EXPERT_COUNT,
            "routed_scaling_factor": number(1e-6, 1e6),
            "n_group": integer(1, MAX_EXPERTS),
            "topk_group": integer(1, MAX_EXPERTS),
            "first_k_dense_replace": integer(0, MAX_LAYERS),
            "num_nextn_predict_layers": integer(0, MAX_LAYERS),
        },
        rotates_part=True,
        rotated_share=lambda config: 0.5,
    ),
    Family(  # the fields of the published checkpoints that Transformers does not have describe what it computes
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        lambda config: {
            "qk_norm": True,
            "joint_qk_norm": True,
            "experts": _minimax_experts(config),
            "num_mtp_layers": getattr(config, "num_mtp_modules", 0),
        },
        {
            **_SILU,
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        {
            "num_local_experts": EXPERT_COUNT,
            "rotary_dim": integer(2) | NULL,
            "num_mtp_modules": integer(0, MAX_LAYERS),
            "attn_type_list": list_of(only(1), MAX_LAYERS),
            **dict.fromkeys(("layernorm_full_attention_beta", "layernorm_mlp_beta"), only(1, 1.0)),
            "qk_norm_type": only("per_layer"),
            "scoring_func": only("sigmoid"),
            "shared_intermediate_size": only(0),
            "use_qk_norm": only(True),
            "use_routing_bias": only(True),
        },
        theta=5_000_000.0,
        rotates_part=True,
        rotated_share=_rotated_share_of_minimax,
    ),
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        lambda config: {
            **_gated_delta_facts(config, merged_projections=True),
            "experts": _with_shared_expert(_qwen3_moe_experts(config), config),
        },
        {
            **_GATED_DELTA,
            **_SHARED_EXPERT,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "decoder_sparse_step": 1,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
        },
        {**_RECURRENT_FIELDS, **_EXPERT_FIELDS, "shared_expert_intermediate_size": integer(1)},
        rotates_part=True,
        rotated_share=lambda config: 0.25,
        left_out=(MTP,),
    ),
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        _gated_delta_facts,
        {**_QWEN3_5, "num_key_value_heads": 4, "intermediate_size": 12288},
        _RECURRENT_FIELDS,
        rotates_part=True,
        rotated_share=lambda config: 0.25,
        left_out=(MTP,),
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        lambda config: {
            **_gated_delta_facts(config),
            "experts": _with_shared_expert(_qwen3_5_experts(config), config),
        },
        {
            **_QWEN3_5,
            **_SHARED_EXPERT,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "intermediate_size": 0,  # all layers have experts
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        {
            **_RECURRENT_FIELDS,
            "moe_intermediate_size": integer(1),
            "shared_expert_intermediate_size": integer(1),
        },
        rotates_part=True,
        rotated_share=lambda config: 0.25,
        left_out=(MTP,),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        lambda config: {
            "qk_norm": True,
            "query_pre_attn_scalar": config.query_pre_attn_scalar,
            "embedding_scale": config.hidden_size**0.5,
            "output_norms": True,
            "zero_centered_norms": True,
        },
        {
            **_ALL,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
        },
        {
            "hidden_activation": TEXT,
            "query_pre_attn_scalar": integer(1),
            "sliding_window_pattern": integer(1, MAX_LAYERS),
            "rope_local_base_freq": THETA,
        },
        theta=1_000_000.0,
        local_theta=10_000.0,
        rope_kinds=("default", "linear"),
    ),
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        lambda config: {
            "qk_norm": True,
            "query_pre_attn_scalar": 1.0,
            "embedding_scale": config.hidden_size**0.5,
            "output_norms": True,
            "wide_norms": True,
            "gemma4": _gemma4(config),
            "experts": _gemma4_experts(config),
        },
        {
            **_ALL,
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "attention_bias": False,
            "sliding_window": 512,
            "layer_types": None,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": None,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        {
            "hidden_activation": TEXT,
            "global_head_dim": integer(1),
            "num_global_key_value_heads": integer(1) | NULL,
            "per_layer_config": OBJECT | NULL,
            "final_logit_softcapping": number(0, above=True) | NULL,
            "use_bidirectional_attention": TEXT | NULL,
            "vocab_size_per_layer_input": integer(1),
            "hidden_size_per_layer_input": integer(0) | NULL,
            "attention_k_eq_v": FLAG,
            "num_kv_shared_layers": integer(0),
            "enable_moe_block": FLAG,
            "use_double_wide_mlp": FLAG,
            "num_experts": EXPERT_COUNT | NULL,
            "top_k_experts": integer(1) | NULL,
            "moe_intermediate_size": integer(1) | NULL,
        },
        local_theta=10_000.0,
        rope_kinds=("default", "proportional"),
        window_pattern=6,
        rope={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        complete=_complete_gemma4,
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _ENTRIES})


# ---- from a config to a network


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
    layers, interval = range(config.num_hidden_layers), getattr(config, "full_attention_interval", None)
    if config.layer_types is None and interval is not None:
        config.layer_types = ["linear_attention" if (index + 1) % interval else "full_attention" for index in layers]
    if config.layer_types is None:
        pattern, num_full = getattr(config, "sliding_window_pattern", pattern), getattr(config, "max_window_layers", 0)
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
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        raise ModelError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    if config.head_dim % 2 or config.head_dim < 2:
        raise ModelError(f"head_dim must be even and above 0, because RoPE turns pairs, but it is {config.head_dim}.")
    windows, attention_bias = _sliding_windows(family, config), getattr(config, "attention_bias", False)
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
