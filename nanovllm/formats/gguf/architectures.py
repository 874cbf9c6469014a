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
from nanovllm.formats.config_fields import EXPERT_COUNT, MAX_LAYERS, ROPE_FIELDS
from nanovllm.formats.gguf.header import GgufHeader

Fields = dict[str, Any]
WINDOW = "attention.sliding_window"
EXPERT_KEYS = ("expert_count", "expert_used_count")
# Of Gemma 3, where the file does not say otherwise.
WINDOW_PERIOD, LOCAL_THETA = 6, 10_000.0
LARGEST_GEMMA3 = 62  # layers of the 27B, the only one whose scores are scaled otherwise than by the size of a head


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is stored. name, model_type: in Transformers.

    keys: of its network, besides those that every architecture may have. biases: fields of config.json that say whether
    there are biases, and a tensor of the first layer that is there if so. adjust: changes the fields of config.json
    that all have into its own. modules: names of a layer's modules besides the common ones, and in Hugging Face format.
    pairs_heads: whether the rows of q and k are in the order of RoPE's pairs. adds_one: whether 1 was added to norms.
    """

    name: str
    model_type: str
    keys: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    adjust: Callable[[GgufHeader, Fields], None] = lambda header, fields: None
    modules: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    pairs_heads: bool = False
    adds_one: bool = False


def _window_of_all(header: GgufHeader, fields: Fields) -> None:
    """A Qwen, which has its window in all layers if the file has one."""
    if window := header.get(f"{fields['model_type']}.attention.sliding_window", integer(0)):
        fields |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _llama(header: GgufHeader, fields: Fields) -> None:
    """Llama, or Mistral or Mixtral, which llama.cpp stores as llama."""
    window = header.get("llama.attention.sliding_window", integer(0)) or None
    experts = header.get("llama.expert_count", EXPERT_COUNT)
    if not (window or experts):
        return
    fields |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if experts:
        fields |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts}
        fields["num_experts_per_tok"] = header.need("llama.expert_used_count", integer(1))


def _qwen3_moe(header: GgufHeader, fields: Fields) -> None:
    """llama.cpp computes it with experts in every layer, whose weights it scales to the sum 1."""
    used = header.need("qwen3moe.expert_used_count", integer(1))
    inner = header.get("qwen3moe.expert_feed_forward_length", integer(1))
    fields |= {
        "num_experts": header.need("qwen3moe.expert_count", EXPERT_COUNT),
        "num_experts_per_tok": used,
        "moe_intermediate_size": inner or max(1, fields["intermediate_size"] // used),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(header: GgufHeader, fields: Fields) -> None:
    """Every n-th layer sees everything; the others have a window, and a RoPE of their own, which is never scaled."""
    window = header.get("gemma3.attention.sliding_window", integer(0))
    period = header.get("gemma3.attention.sliding_window_pattern", integer(1, MAX_LAYERS)) or WINDOW_PERIOD
    theta = header.get("gemma3.rope.freq_base_swa", ROPE_FIELDS["rope_theta"])
    local = {"rope_type": "default", "rope_theta": LOCAL_THETA if theta is None else theta}
    layers, scalar = fields["num_hidden_layers"], fields["head_dim"]
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


ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_ENTRIES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        (WINDOW, *EXPERT_KEYS),
        {**ATTENTION_BIAS, "mlp_bias": "ffn_down.bias"},
        _llama,
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        {
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
        {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        (WINDOW, f"{WINDOW}_pattern", "rope.freq_base_swa"),
        ATTENTION_BIAS,
        _gemma3,
        {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        adds_one=True,
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
