"""The facts of single families that take more than a table: experts, recurrent layers, Gemma 4's layers.

Each function reads Transformers' config object and raises ModelError for values that contradict each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanovllm.data.network import ExpertSpec, Gemma4Spec, RecurrentSpec, SharedExpert
from nanovllm.errors import ModelError, quoted

_FULL_ONLY = (
    "layers with full attention may share another head_dim and num_key_value_heads, and no other layer anything"
)
_NO_SKIP: tuple[str, list[str]] = ("skip", [])  # what Transformers adds to the config of a layer


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


def qwen3_moe_experts(config: Any) -> ExpertSpec | None:
    step = config.decoder_sparse_step
    dense = set(config.mlp_only_layers)
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(config.num_hidden_layers))
    return _experts(config, config.num_experts, config.moe_intermediate_size, config.norm_topk_prob, sparse)


def _experts_of_all_layers(config: Any, intermediate_size: int, name: str, architecture: str) -> ExpertSpec:
    """name: of the field that counts them."""
    layers = (True,) * config.num_hidden_layers
    experts = _experts(config, config.num_experts, intermediate_size, True, layers)
    if experts is None:
        raise ModelError(f"{name} is 0; a {architecture} needs at least 1 expert.")
    return experts


def mixtral_experts(config: Any, architecture: str = "MixtralForCausalLM") -> ExpertSpec:
    experts = _experts_of_all_layers(config, config.intermediate_size, "num_local_experts", architecture)
    return replace(experts, block="block_sparse_moe", projections=("w1", "w3", "w2"))


def gpt_oss(config: Any) -> dict[str, Any]:
    experts = _experts_of_all_layers(config, config.intermediate_size, "num_local_experts", "GptOssForCausalLM")
    experts = replace(experts, router_name="router", scoring="softmax_of_chosen", biases=True, interleaved=True)
    return {"experts": experts, "activation": "clamped_swiglu", "attention_sinks": True, "wide_norms": True}


def glm_experts(config: Any) -> ExpertSpec | None:
    count = config.n_routed_experts
    groups = config.n_group
    chosen_groups = config.topk_group
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


def minimax_experts(config: Any) -> ExpertSpec:
    experts = mixtral_experts(config, "MiniMaxM2ForCausalLM")
    return replace(experts, scoring="sigmoid", correction_bias="e_score_correction_bias")


def _recurrent(config: Any, *, merged_projections: bool = False) -> RecurrentSpec | None:
    """The recurrent layers of a config; None if all layers have attention."""
    layers = tuple(kind == "linear_attention" for kind in config.layer_types)
    heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads={heads} must be a multiple of linear_num_key_heads={key_heads}.")
    sizes = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)
    return RecurrentSpec(layers, key_heads, heads, *sizes, merged_projections) if any(layers) else None


def with_shared_expert(experts: ExpertSpec | None, config: Any) -> ExpertSpec | None:
    """The experts of a layer with the one that all tokens pass through, and its gate."""
    shared = SharedExpert(config.shared_expert_intermediate_size, "shared_expert", "shared_expert_gate")
    return None if experts is None else replace(experts, shared=shared)


def gated_delta(config: Any, *, merged_projections: bool = False) -> dict[str, Any]:
    """Of Qwen3-Next and Qwen3.5."""
    recurrent = _recurrent(config, merged_projections=merged_projections)
    return {"qk_norm": True, "zero_centered_norms": True, "attention_gate": True, "recurrent": recurrent}


def qwen3_5_experts(config: Any) -> ExpertSpec:
    return _experts_of_all_layers(config, config.moe_intermediate_size, "num_experts", "Qwen3_5MoeForCausalLM")


def gemma4_full_heads(config: Any) -> tuple[int, int]:
    """Of layers with full attention: the number of KV heads and the size of a head. Transformers has both by layer."""
    of_all = vars(config)
    heads: set[tuple[int, int]] = set()
    for kind, layer in zip(config.layer_types, config.per_layer_config, strict=True):
        others = {
            name for name, value in vars(layer).items() if of_all.get(name) != value and (name, value) != _NO_SKIP
        }
        if kind == "full_attention":
            others -= {"num_key_value_heads", "head_dim"}
            heads.add((layer.num_key_value_heads, layer.head_dim))
        if others:
            raise ModelError(
                f"per_layer_config is not supported with {quoted(sorted(others))} of a layer; {_FULL_ONLY}."
            )
    if len(heads) != 1:
        raise ModelError(
            f"per_layer_config gives layers with full attention other heads than each other; {_FULL_ONLY}."
        )
    return heads.pop()


def gemma4_experts(config: Any) -> ExpertSpec | None:
    if not getattr(config, "enable_moe_block", False):
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


def gemma4(config: Any) -> Gemma4Spec:
    full = tuple(kind == "full_attention" for kind in config.layer_types)
    owners = full[: len(full) - config.num_kv_shared_layers]
    if config.num_kv_shared_layers >= len(full) or set(full[len(owners) :]) - set(owners):
        raise ModelError(
            f"num_kv_shared_layers={config.num_kv_shared_layers}: of each kind of layers that have no keys and values, "
            f"one of the others must have them, but these are layers of {quoted(', '.join(config.layer_types))}."
        )
    size = getattr(config, "hidden_size_per_layer_input", 0)
    vocab = getattr(config, "vocab_size_per_layer_input", 0)
    if size and vocab < config.vocab_size:
        raise ModelError(f"vocab_size_per_layer_input={vocab} must not be below vocab_size={config.vocab_size}.")
    kv_heads, head_dim = gemma4_full_heads(config)
    if config.num_attention_heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"Layers with full attention have {kv_heads} KV heads of {head_dim}: "
            f"num_attention_heads={config.num_attention_heads} must be a multiple of them, and their size even."
        )
    return Gemma4Spec(
        full=full,
        full_kv_heads=kv_heads,
        full_head_dim=head_dim,
        key_is_value=config.attention_k_eq_v,
        num_shared=config.num_kv_shared_layers,
        shared_intermediate_size=config.intermediate_size * (2 if config.use_double_wide_mlp else 1),
        per_layer_size=size,
        per_layer_vocab=vocab,
        packed_layers=len(full),
        logit_cap=config.final_logit_softcapping,
    )
