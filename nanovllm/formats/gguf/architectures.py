"""The architectures of GGUF files that are read, and what only the files of one of them have.

The keys and what they mean without a value are llama.cpp's: https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nanovllm.data.json_fields import TEXT, integer
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.config_fields import EXPERT_COUNT, MAX_HEAD_DIM, MAX_LAYERS, ROPE_FIELDS
from nanovllm.formats.gguf import gemma4
from nanovllm.formats.gguf.header import MAX_SIZE, GgufHeader
from nanovllm.formats.gguf.rows import CHANNELS, LOG_OF_NEGATIVE, MINUS_ONE, ONE_ROW, Change, ValueHeads

Fields = dict[str, Any]
WINDOW = "attention.sliding_window"
EXPERT_KEYS = ("expert_count", "expert_used_count")
# Of Gemma 3, where the file does not say otherwise.
WINDOW_PERIOD = 6
LOCAL_THETA = 10_000.0
LARGEST_GEMMA3 = 62  # layers of the 27B, the only one whose scores are scaled otherwise than by the size of a head


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one architecture store its network. Mappings of names go from GGUF's to Hugging Face's."""

    name: str  # in Transformers
    model_type: str  # in Transformers
    keys: tuple[str, ...] = ()  # that its files may have besides those of all architectures
    # By the field of config.json that says whether there are biases: the tensor of the first layer that is one.
    biases: Mapping[str, str] = field(default_factory=dict)
    # Turns the fields of config.json that all architectures have into its own.
    adjust: Callable[[GgufHeader, Fields], None] = lambda header, fields: None
    modules: Mapping[str, str] = field(default_factory=dict)  # of a layer, besides the common ones
    tensors: Mapping[str, str] = field(default_factory=dict)  # of a layer, where the ends of the names differ too
    experts: Mapping[str, str] = field(default_factory=dict)  # {} stands for the number of the expert
    pairs_heads: bool = False  # the two rows of q or k that RoPE rotates together are neighbours
    adds_one: bool = False  # the conversion adds 1 to the weights of norms, except to those of a recurrence
    rotates_part: bool = False  # RoPE may turn only the first features of a head
    value_heads: Callable[[GgufHeader], ValueHeads] | None = None  # their order, if it has recurrent layers
    # Metadata that take the place of the file's, where layers have several sizes.
    sizes: Callable[[GgufHeader], Mapping[str, Any]] = lambda header: {}

    def change(self, module: str) -> Change | None:
        """How to undo the conversion of a module's tensor. module: its name in the file."""
        if self.adds_one and module.endswith("norm") and module != "ssm_norm":
            return MINUS_ONE
        return _CHANGES.get(module)


def _window_of_all(header: GgufHeader, fields: Fields) -> None:
    """Qwen: if the file has a window, it holds for all layers."""
    if window := header.get(f"{fields['model_type']}.attention.sliding_window", integer(0)):
        fields |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _llama(header: GgufHeader, fields: Fields) -> None:
    """llama.cpp stores Llama, Mistral and Mixtral as llama: a window makes a Mistral, experts make a Mixtral."""
    window = header.get("llama.attention.sliding_window", integer(0)) or None
    experts = header.get("llama.expert_count", EXPERT_COUNT)
    if not (window or experts):
        return
    fields |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if experts:
        fields |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts}
        fields["num_experts_per_tok"] = header.need("llama.expert_used_count", integer(1))


def _qwen3_moe(header: GgufHeader, fields: Fields) -> None:
    """As llama.cpp computes it: every layer has experts, and their weights are scaled to the sum 1."""
    used = header.need("qwen3moe.expert_used_count", integer(1))
    inner = header.get("qwen3moe.expert_feed_forward_length", integer(0))
    fields |= {
        "num_experts": header.need("qwen3moe.expert_count", EXPERT_COUNT),
        "num_experts_per_tok": used,
        "moe_intermediate_size": inner or max(1, fields["intermediate_size"] // used),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _recurrent_fields(header: GgufHeader, name: str) -> Fields:
    """The sizes of layers with the gated delta rule."""
    heads, inner = (header.need(f"{name}.ssm.{key}", integer(1, MAX_SIZE)) for key in ("time_step_rank", "inner_size"))
    if inner % heads:
        raise ModelError(f"{header.path}: {name}.ssm.inner_size={inner} must be a multiple of time_step_rank={heads}.")
    return {
        "linear_conv_kernel_dim": header.need(f"{name}.ssm.conv_kernel", integer(1)),
        "linear_key_head_dim": header.need(f"{name}.ssm.state_size", integer(1, MAX_HEAD_DIM)),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": header.need(f"{name}.ssm.group_count", integer(1, heads)),
        "linear_num_value_heads": heads,
    }


def _value_heads(header: GgufHeader, name: str, tiled: bool) -> ValueHeads:
    sizes = _recurrent_fields(header, name)
    keys = sizes["linear_num_key_heads"]
    repeats = sizes["linear_num_value_heads"] // keys
    key_rows = 2 * keys * sizes["linear_key_head_dim"]
    return ValueHeads(keys, repeats, sizes["linear_value_head_dim"], key_rows, tiled)


def _gated_delta(header: GgufHeader, fields: Fields, name: str) -> None:
    """Every n-th layer has attention. Layers for multi-token prediction are counted with the others."""
    predicting = header.get(f"{name}.nextn_predict_layers", integer(0, fields["num_hidden_layers"] - 1)) or 0
    interval = header.get(f"{name}.full_attention_interval", integer(1, MAX_LAYERS)) or 4
    fields |= {"full_attention_interval": interval, **_recurrent_fields(header, name)}
    fields["num_hidden_layers"] -= predicting


def _gated_delta_experts(header: GgufHeader, fields: Fields, name: str) -> None:
    _gated_delta(header, fields, name)
    inner = header.need(f"{name}.expert_feed_forward_length", integer(1))
    fields |= {
        "num_experts": header.need(f"{name}.expert_count", EXPERT_COUNT),
        "num_experts_per_tok": header.need(f"{name}.expert_used_count", integer(1)),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": header.get(f"{name}.expert_shared_feed_forward_length", integer(0)) or inner,
    }


def _qwen3_next(header: GgufHeader, fields: Fields) -> None:
    _gated_delta_experts(header, fields, "qwen3next")
    fields |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3_5_moe(header: GgufHeader, fields: Fields) -> None:
    _gated_delta_experts(header, fields, "qwen35moe")
    fields.pop("intermediate_size", None)  # all layers have experts


def _gpt_oss(header: GgufHeader, fields: Fields) -> None:
    """Every other layer has a window. The model's YaRN rounds no frequencies, which no key says."""
    fields |= {
        "num_experts": header.need("gpt-oss.expert_count", EXPERT_COUNT),
        "num_experts_per_tok": header.need("gpt-oss.expert_used_count", integer(1)),
        "intermediate_size": header.need("gpt-oss.expert_feed_forward_length", integer(1)),
        "sliding_window": header.need(f"gpt-oss.{WINDOW}", integer(1)),
    }
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False


def _gemma3(header: GgufHeader, fields: Fields) -> None:
    """Every n-th layer sees everything; the others have a window, and a RoPE of their own, which is never scaled."""
    window = header.get("gemma3.attention.sliding_window", integer(0))
    period = header.get("gemma3.attention.sliding_window_pattern", integer(1, MAX_LAYERS)) or WINDOW_PERIOD
    theta = header.get("gemma3.rope.freq_base_swa", ROPE_FIELDS["rope_theta"])
    local = {"rope_type": "default", "rope_theta": LOCAL_THETA if theta is None else theta}
    layers = fields["num_hidden_layers"]
    scalar = fields["head_dim"]
    if layers == LARGEST_GEMMA3:
        scalar = max(1, fields["hidden_size"] // fields["num_attention_heads"])
    del fields["hidden_act"]
    fields |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if window and (index + 1) % period else "full_attention" for index in range(layers)
        ],
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
    }


_CHANGES: Mapping[str, Change] = MappingProxyType(
    {"ssm_a": LOG_OF_NEGATIVE, "ssm_conv1d": CHANNELS, "ffn_gate_inp_shexp": ONE_ROW}
)
ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_SSM_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"))
_GATED_DELTA_KEYS = (*_SSM_KEYS, "full_attention_interval", "nextn_predict_layers", "rope.dimension_sections")
_SHARED_EXPERT_KEYS = (*EXPERT_KEYS, "expert_feed_forward_length", "expert_shared_feed_forward_length")
_GATED_DELTA_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "post_attention_norm": "post_attention_layernorm",
    }
)
_GATED_DELTA_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_SHARED_EXPERT_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    }
)
_GEMMA_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_QWEN_EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_ENTRIES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        (WINDOW, *EXPERT_KEYS),
        {**ATTENTION_BIAS, "mlp_bias": "ffn_down.bias"},
        _llama,
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        pairs_heads=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", (WINDOW,), adjust=_window_of_all),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", (WINDOW,), ATTENTION_BIAS, _window_of_all),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        (*EXPERT_KEYS, "expert_feed_forward_length"),
        ATTENTION_BIAS,
        _qwen3_moe,
        {"ffn_gate_inp": "mlp.gate"},
        experts=_QWEN_EXPERTS,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        _GATED_DELTA_KEYS,
        adjust=lambda header, fields: _gated_delta(header, fields, "qwen35"),
        modules=_GATED_DELTA_MODULES,
        tensors=_GATED_DELTA_TENSORS,
        adds_one=True,
        rotates_part=True,
        value_heads=lambda header: _value_heads(header, "qwen35", tiled=True),
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        (*_GATED_DELTA_KEYS, *_SHARED_EXPERT_KEYS),
        adjust=_qwen3_5_moe,
        modules={**_GATED_DELTA_MODULES, **_SHARED_EXPERT_MODULES},
        tensors=_GATED_DELTA_TENSORS,
        experts=_QWEN_EXPERTS,
        adds_one=True,
        rotates_part=True,
        value_heads=lambda header: _value_heads(header, "qwen35moe", tiled=True),
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        (*_GATED_DELTA_KEYS, *_SHARED_EXPERT_KEYS),
        adjust=_qwen3_next,
        modules={**_GATED_DELTA_MODULES, **_SHARED_EXPERT_MODULES},
        tensors=_GATED_DELTA_TENSORS,
        experts=_QWEN_EXPERTS,
        adds_one=True,
        rotates_part=True,
        value_heads=lambda header: _value_heads(header, "qwen3next", tiled=False),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        (WINDOW, *EXPERT_KEYS, "expert_feed_forward_length"),
        ATTENTION_BIAS,
        _gpt_oss,
        {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
        {"attn_sinks.weight": "self_attn.sinks"},
        _QWEN_EXPERTS,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        (WINDOW, f"{WINDOW}_pattern", "rope.freq_base_swa"),
        ATTENTION_BIAS,
        _gemma3,
        _GEMMA_NORMS,
        adds_one=True,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        gemma4.KEYS,
        adjust=gemma4.complete,
        modules={
            **_GEMMA_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        tensors={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        experts={f"ffn_{name}_exps": f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
        sizes=gemma4.sizes_of_windows,
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        biases=ATTENTION_BIAS,
        modules={"post_attention_norm": "post_attention_layernorm"},
    ),
}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_ENTRIES)


def architecture_of(header: GgufHeader) -> tuple[str, Architecture]:
    """The name of a file's architecture, which its keys begin with, and the architecture. Raises ModelError."""
    name = header.get("general.architecture", TEXT)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: general.architecture={quoted(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    return name, ARCHITECTURES[name]
