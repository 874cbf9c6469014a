"""Random GGUF files for tests, from checkpoints of `checkpoints.py`, whose model gets the weights that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gemma4_gguf
import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from recurrent_gguf import Recurrent, recurrent_facts, recurrent_tensors
from tiny_gguf import MERGES, NAMES, SPECIAL, TEMPLATE, VOCAB
from tokenizer_files import byte_symbols
from transformers import PreTrainedModel

from nanovllm.formats.gguf.model import RANDOM_SCALES

PLAIN = ("F32", "F16", "BF16")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
WIDE = {"hidden": 256, "intermediate": 256, "head_dim": 64, "vocab": VOCAB}  # rows that blocks of 256 divide
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
RECURRENT = ("qwen35", "qwen35moe", "qwen3next")
OWN_NAMES = {
    "gemma3": {
        "pre_feedforward_layernorm": "ffn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    **dict.fromkeys(("seed_oss", "gpt-oss", *RECURRENT), POST_NORM),
}
# What llama.cpp calls an architecture, by Transformers' model type, if it is another name.
ARCHITECTURES = {
    **{"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"},
    "gemma4_text": "gemma4",
    **{"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"},
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "Q8_0",
    *,
    changes: Mapping[str, Any] | None = None,
    pre: str | None = "smollm",
    factors: Any = None,
) -> Path:
    """Write `model`, whose matrices become the stored ones.

    kind: the type of all matrices, or by their name in GGUF. changes: metadata to add or replace. pre: the
    pre-tokenizer; None for a file without tokenizer. factors: of RoPE.
    """
    architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    facts = network_facts(model, architecture)
    for key in facts.keys() - dict(changes or {}).keys():
        add_value(writer, key, facts[key])
    if pre is not None:
        add_tokenizer(writer, pre)
    for key, value in dict(changes or {}).items():
        add_value(writer, key, value)
    if architecture == "gemma4" and factors is None:
        factors = gemma4_gguf.rope_factors(model.config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    for name, whole in model.state_dict().items():
        if ".linear_attn." in name:
            for recurrent_tensor in recurrent_tensors(name, whole, model.config):
                add_recurrent(writer, recurrent_tensor, kind if isinstance(kind, str) else kind(recurrent_tensor.name))
            continue
        for stored, weight in gguf_tensors(name, whole, architecture):
            if not (stored == "output.weight" and model.config.tie_word_embeddings):
                add_tensor(writer, stored, weight, model, kind if isinstance(kind, str) else kind(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_recurrent(writer: Any, stored: Recurrent, kind: str) -> None:
    """Add a tensor of a recurrent layer; a matrix becomes what was stored."""
    rows = stored.rows[:, None]
    columns = stored.columns
    weight = stored.weight
    if not stored.is_matrix:
        writer.add_tensor(stored.name, stored.change(weight.float()[stored.rows]).numpy())
        return
    packed = pack(weight.float().numpy()[rows, columns], kind)
    weight.numpy()[rows, columns] = dequantize(packed, Type[kind])
    writer.add_tensor(stored.name, packed, raw_dtype=Type[kind])


def add_tensor(writer: Any, stored: str, weight: torch.Tensor, model: PreTrainedModel, kind: str) -> None:
    """Add a tensor as llama.cpp's conversion does; a matrix, or that of every expert, becomes what was stored."""
    turned = turned_rows(weight, stored, model) if writer.arch == "llama" else slice(None)
    if weight.dim() == 1 or stored.endswith((".bias", "ffn_gate_inp_shexp.weight")):
        added = writer.arch in ("gemma3", *RECURRENT) and stored.endswith("norm.weight")
        numbers = weight.float() if weight.dim() == 1 else weight.float().squeeze(0)
        writer.add_tensor(stored, numbers.numpy()[turned] + np.float32(added))
        return
    type_name = "F32" if stored.endswith("ffn_gate_inp.weight") else kind
    packed = pack(weight.float().numpy().reshape(-1, weight.shape[-1]), type_name)
    weight.copy_(torch.from_numpy(dequantize(packed, Type[type_name]).reshape(weight.shape)))
    data = np.ascontiguousarray(packed[turned]).reshape(*weight.shape[:-1], -1)
    writer.add_tensor(stored, data, raw_dtype=Type[type_name])


def gguf_tensors(name: str, weight: torch.Tensor, architecture: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the file that hold one of Transformers, as views of it."""
    if architecture == "gemma4" and (own := gemma4_gguf.tensor(name, weight)) is not None:
        return [own]
    module, _, end = name.rpartition(".")
    if module in OTHER_NAMES:
        return [(f"{OTHER_NAMES[module]}.{end}", weight)]
    _, _, index, module = module.split(".", 3)
    if module == "self_attn":
        return [(f"blk.{index}.attn_sinks.weight", weight)]
    if module == "mlp.experts" and architecture == "gpt-oss":
        return gpt_oss_experts(f"blk.{index}.ffn_", end, weight)
    if module == "mlp.experts":
        module = f"{module}.{end}"
        end = "weight"
    if module == "mlp.experts.gate_up_proj":
        gate, up = weight.chunk(2, dim=1)
        return [(f"blk.{index}.ffn_gate_exps.weight", gate), (f"blk.{index}.ffn_up_exps.weight", up)]
    return [(f"blk.{index}.{(LAYER_NAMES | OWN_NAMES.get(architecture, {}))[module]}.{end}", weight)]


def gpt_oss_experts(prefix: str, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Those of gpt-oss, in which gate and up alternate, and matrices multiply from the right."""
    weight, end = (weight, "bias") if name.endswith("_bias") else (weight.transpose(1, 2), "weight")
    if name.startswith("down"):
        return [(f"{prefix}down_exps.{end}", weight)]
    return [(f"{prefix}{part}_exps.{end}", weight[:, index::2]) for index, part in enumerate(("gate", "up"))]


def pack(weight: Any, kind: str) -> Any:
    """The bytes of a matrix. K types, which the package cannot write, get random ones of about the same size."""
    if kind not in K_TYPES:
        return quantize(weight, Type[kind])
    rows, columns = weight.shape
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = np.random.default_rng(int(1e6 * abs(float(weight.sum())))).integers(
        0, 256, (rows, columns // block_size, block_bytes), np.uint8
    )
    for start, value in RANDOM_SCALES[kind].items():
        blocks[..., start : start + 2] = np.array([value * weight.std()], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def turned_rows(weight: torch.Tensor, stored: str, model: PreTrainedModel) -> Any:
    """The order in which llama.cpp has the rows: the two of a rotary pair side by side."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    number = heads.get(stored.split(".")[-2])
    if number is None:
        return slice(None)
    return np.arange(len(weight)).reshape(number, 2, -1).swapaxes(1, 2).reshape(-1)


def network_facts(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The metadata of the network."""
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4: those of layers with a window
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": None if architecture == "qwen35moe" else config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else None,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    ropes = config.rope_parameters
    if architecture == "gpt-oss" and ropes["rope_type"] == "yarn":
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(ropes["factor"])}
        facts["rope.scaling.original_context_length"] = ropes["original_max_position_embeddings"]
    facts["rope.freq_base"] = float(ropes.get("full_attention", ropes)["rope_theta"])
    if architecture == "gemma3":
        facts["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
        facts["attention.sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
    if getattr(config, "sliding_window", None):
        facts["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma4":
        return _as_metadata(architecture, {**facts, **gemma4_gguf.facts(config)})
    if architecture in RECURRENT:
        facts |= recurrent_facts(config)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        facts |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        inner = config.intermediate_size if architecture == "gpt-oss" else None
        facts["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", inner)
        facts["expert_shared_feed_forward_length"] = getattr(config, "shared_expert_intermediate_size", None)
    return _as_metadata(architecture, facts)


def _as_metadata(architecture: str, facts: dict[str, Any]) -> dict[str, Any]:
    facts["attention.value_length"] = facts["attention.key_length"]
    return {f"{architecture}.{key}": value for key, value in facts.items() if value is not None}


def add_value(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def add_tokenizer(writer: Any, pre: str) -> None:
    """A byte-level tokenizer with VOCAB tokens and a chat template."""
    symbols = byte_symbols()
    pairs = [tuple("".join(symbols[byte] for byte in part.encode()) for part in pair) for pair in MERGES]
    tokens = [*SPECIAL, *(symbols[byte] for byte in range(256)), *("".join(pair) for pair in pairs)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
