"""Random Hugging Face checkpoints for tests: small, in safetensors, with logits that differ clearly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizer_files import write_byte_level
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from nanovllm.errors import ModelError


class Tested(NamedTuple):
    """Transformers' classes of a family, and options of `make_checkpoint` with which its logits are compared."""

    config: Any
    model: Any
    options: tuple[dict[str, Any], ...] = ({},)


_WINDOW = {"sliding_window": 20}
_OTHER_HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 24}
_RECURRENT = ({}, {"layers": 4, "attention_bias": True}, {**_OTHER_HEADS, "linear_value_head_dim": 40})
_ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
# Every family of the engine. Tests of all families read this table.
FAMILIES: dict[str, Tested] = {
    "qwen3": Tested(Qwen3Config, Qwen3ForCausalLM, ({}, {"attention_bias": True}, _WINDOW)),
    "qwen2": Tested(Qwen2Config, Qwen2ForCausalLM, ({}, _WINDOW)),
    "llama": Tested(LlamaConfig, LlamaForCausalLM, ({}, _ALL_BIASES, {"mlp_bias": True})),
    "mistral": Tested(MistralConfig, MistralForCausalLM, ({}, _WINDOW)),
    "ministral3": Tested(Ministral3Config, Ministral3ForCausalLM, ({}, _WINDOW)),
    "phi3": Tested(Phi3Config, Phi3ForCausalLM, ()),  # test_longrope.py has its logits
    "qwen3_moe": Tested(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        ({"layers": 3, "mlp_only_layers": [1]}, {"norm_topk_prob": False}, {"attention_bias": True}),
    ),
    "mixtral": Tested(MixtralConfig, MixtralForCausalLM, ({}, _WINDOW)),
    "qwen3_next": Tested(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        (*_RECURRENT, {"layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 2}),
    ),
    "qwen3_5": Tested(Qwen3_5TextConfig, Qwen3_5ForCausalLM, (*_RECURRENT, {"linear_conv_kernel_dim": 6})),
    "qwen3_5_moe": Tested(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _RECURRENT),
    "seed_oss": Tested(SeedOssConfig, SeedOssForCausalLM, ({}, {"attention_out_bias": True}, {"mlp_bias": True})),
    "gpt_oss": Tested(
        GptOssConfig,
        GptOssForCausalLM,
        ({"layers": 3}, {"attention_bias": False}, {"layer_types": ["full_attention"] * 2}),
    ),
    "olmo3": Tested(Olmo3Config, Olmo3ForCausalLM, ({"layers": 4, **_WINDOW}, {"attention_bias": True})),
    "olmo2": Tested(Olmo2Config, Olmo2ForCausalLM, ({}, {"attention_bias": True})),
    "glm4_moe": Tested(
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        ({"layers": 3, "use_qk_norm": True}, {"attention_bias": True, "n_group": 3, "topk_group": 2, "experts": 9}),
    ),
    "minimax_m2": Tested(MiniMaxM2Config, MiniMaxM2ForCausalLM, ({}, {"rotary_dim": 6})),
    "gemma3": Tested(Gemma3TextConfig, Gemma3ForCausalLM, ()),  # test_gemma3.py
    "gemma4": Tested(Gemma4TextConfig, Gemma4ForCausalLM, ()),  # test_gemma4.py
}
GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # families with recurrent layers
# Layers that keep different things: options of `make_checkpoint`.
MIXES: dict[str, dict[str, Any]] = {
    "full attention and windows": {"family": "gpt_oss", "layers": 4, "sliding_window": 24},
    "heads of two sizes": {"family": "gemma4", "layers": 6, "sliding_window": 24, "attention_k_eq_v": True},
    "full attention and states": {"family": "qwen3_5", "layers": 4},
}
MAX_POSITIONS = 256
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 300.0}  # of Gemma 3's layers with a window

# One of each RoPE kind. The trained length of llama3 and yarn is well below MAX_POSITIONS.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
# Queries are scaled from position 16 on, and more from 32, 48, ... on.
MINISTRAL3_ROPE = {**ROPES["yarn"], "original_max_position_embeddings": 16, "factor": 16.0, "llama_4_scaling_beta": 0.4}
GPT_OSS_ROPE = {**ROPES["yarn"], "truncate": False, "factor": 8.0}


def make_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 199,
    max_positions: int = MAX_POSITIONS,
    rope: dict[str, Any] | None = None,
    tie: bool = False,
    dtype: str = "float32",
    sliding_window: int | None = None,
    max_window_layers: int = 1,
    experts: int = 5,
    experts_per_tok: int = 2,
    eos_token_id: int | list[int] | None = None,
    sharded: bool = False,
    fused_experts: bool = False,
    **fields: Any,
) -> PreTrainedModel:
    """Write a random checkpoint of `family` to `path` and return it as Transformers' model, in eval mode.

    The same arguments give the same weights. `sliding_window` applies to all layers of a Mistral and to the layers
    from `max_window_layers` up of a Qwen, and, unless `fields` have layer_types, to every other layer of a Gemma 3 and
    of a gpt-oss, the first one too, and to three of four of an Olmo 3. `experts` and `experts_per_tok` apply to those
    families that have experts. `sharded` spreads the tensors over several files with an index; `fused_experts` writes
    one tensor for all experts of a layer, as Transformers does on request. fields: further ones of the config.
    """
    config = FAMILIES[family].config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=_rope_parameters(family, rope or ROPES["default"]),
        tie_word_embeddings=tie,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=eos_token_id,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        **{
            **_window_options(family, sliding_window, max_window_layers),
            **_expert_options(family, intermediate, experts, experts_per_tok),
            **_recurrent_options(family),
            **fields,
        },
    )
    model = FAMILIES[family].model(config).eval()
    randomize(model, seed)
    for parameter in model.parameters():  # parameters only: RoPE frequencies stay in float32, as on loading
        parameter.data = parameter.data.to(getattr(torch, dtype))
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shard_size = parameter_bytes // 3 if sharded else "50GB"
    model.save_pretrained(path, max_shard_size=shard_size, save_original_format=not fused_experts)
    return model


def checkpoint_fixture(family: str = "qwen3", *, tokenizer: dict[str, Any] | None = None, **options: Any) -> Any:
    """A fixture of a module: the path of such a checkpoint, and of a tokenizer of bytes made with these options."""

    @pytest.fixture(scope="module")
    def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("model")
        make_checkpoint(directory, family, **options)
        if tokenizer is not None:
            write_byte_level(directory, **tokenizer)
        return directory

    return path


def _rope_parameters(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    if family == "gemma4":
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": rope["rope_theta"]}
        return {"full_attention": full, "sliding_attention": dict(LOCAL_ROPE)}
    if family == "ministral3":
        return dict(rope) if "llama_4_scaling_beta" in rope else dict(MINISTRAL3_ROPE)
    if family not in ("gemma3", "olmo3"):
        return dict(rope)
    return {"full_attention": dict(rope), "sliding_attention": dict(LOCAL_ROPE)}


def _window_options(family: str, sliding_window: int | None, max_window_layers: int) -> dict[str, Any]:
    if family == "gemma3":
        options: dict[str, Any] = {"sliding_window": sliding_window or MAX_POSITIONS, "sliding_window_pattern": 2}
        return {**options, "query_pre_attn_scalar": 24}
    if family == "gpt_oss":
        return {"sliding_window": sliding_window or 20}
    if family == "gemma4":  # by default without what only some of its sizes have
        own = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 199}
        return {"sliding_window": sliding_window or MAX_POSITIONS, **own}
    if family == "olmo3":
        return {"sliding_window": sliding_window or MAX_POSITIONS}
    if family in GATED_DELTA:
        return {}
    if family.startswith("qwen"):
        used = sliding_window is not None
        return {"use_sliding_window": used, "sliding_window": sliding_window, "max_window_layers": max_window_layers}
    return {} if sliding_window is None and family != "mistral" else {"sliding_window": sliding_window}


def _expert_options(family: str, intermediate: int, experts: int, experts_per_tok: int) -> dict[str, Any]:
    if family in ("mixtral", "minimax_m2", "gpt_oss"):
        return {"num_local_experts": experts, "num_experts_per_tok": experts_per_tok}
    if family == "glm4_moe":
        own = {"moe_intermediate_size": intermediate // 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
        return {"n_routed_experts": experts, "num_experts_per_tok": experts_per_tok, **own}
    own = {"num_experts": experts, "num_experts_per_tok": experts_per_tok, "moe_intermediate_size": intermediate // 2}
    if family in ("qwen3_next", "qwen3_5_moe"):
        own["shared_expert_intermediate_size"] = intermediate // 3
    if family in ("qwen3_moe", "qwen3_next"):
        own["norm_topk_prob"] = True
    return own if family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe") else {}


def _recurrent_options(family: str) -> dict[str, Any]:
    """Layers in turn recurrent and with attention, the first one recurrent; four value heads for two of keys."""
    if family not in GATED_DELTA:
        return {}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 24}
    return {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, **sizes}


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights from `seed`: projections keep sizes near 1, logits have a spread of about 4.

    Norm weights are around 1 and biases around 0, both far enough from them that omitting one shows. Gemma 3's norm
    weights are around 0, since 1 is added to them, and its embedding is small, since it is multiplied. So are the norm
    weights of families with recurrent layers, but for those of a recurrence; states decay by a third per token or less.
    """
    is_gemma = isinstance(model, Gemma3ForCausalLM)
    adds_one = is_gemma or isinstance(model, Qwen3NextForCausalLM | Qwen3_5ForCausalLM | Qwen3_5MoeForCausalLM)
    generator = torch.Generator().manual_seed(seed)
    factors = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    for name, parameter in [*model.named_parameters(), *factors]:
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:  # 3 for the experts of a layer
            is_embedding = "embed" in name and not isinstance(model, Gemma3ForCausalLM | Gemma4ForCausalLM)
            gain = 4.0 if is_embedding or "lm_head" in name else 1.2
            parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
        elif name.endswith("A_log"):
            parameter.copy_(noise - 2)
        elif name.endswith("bias") or (adds_one and "linear_attn" not in name):
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(1 + 0.2 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of scores between 0 and 1
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def fix_rope(model: PreTrainedModel, longest: int) -> None:
    """Give a model of dynamic RoPE or longrope, for all lengths, the frequencies of a sequence of `longest` tokens."""
    config: Any = model.config
    rope = dict(config.rope_parameters)
    if rope.get("rope_type") == "longrope":
        is_long = longest > rope["original_max_position_embeddings"]
        rope |= dict.fromkeys(("short_factor", "long_factor"), rope["long_factor" if is_long else "short_factor"])
    elif rope.get("rope_type") == "dynamic" and longest > config.max_position_embeddings:
        size = config.hidden_size // config.num_attention_heads if config.head_dim is None else config.head_dim
        growth = rope["factor"] * longest / config.max_position_embeddings - (rope["factor"] - 1)
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * growth ** (size / (size - 2))}
    else:
        return
    config.rope_parameters = rope
    network: Any = model.base_model
    network.rotary_emb = type(network.rotary_emb)(config)


def edit_config(path: str | Path, file: str = "config.json", **changes: Any) -> None:
    """Set keys of a JSON file in the checkpoint at `path`; a value of `...` removes the key."""
    target = Path(path) / file
    config = json.loads(target.read_text())
    config.update(changes)
    target.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def write_old_style_rope(path: str | Path, key: str = "rope_type") -> None:
    """Rewrite config.json's `rope_parameters` as `rope_theta` and `rope_scaling`, as older checkpoints have it.

    key: "rope_type" or, as the oldest have it, "type".
    """
    parameters = json.loads((Path(path) / "config.json").read_text())["rope_parameters"]
    theta = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    scaling = None if kind == "default" else {key: kind, **parameters}
    edit_config(path, rope_parameters=..., rope_theta=theta, rope_scaling=scaling)


def refusal(action: Callable[[], object], error: type[Exception] = ModelError) -> str:
    """The message with which `action` is refused."""
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)
