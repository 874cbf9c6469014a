"""The names of a checkpoint's tensors in Hugging Face format, and the same tensors' names in GGUF."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from nanovllm.data.json_fields import integer
from nanovllm.errors import ModelError
from nanovllm.formats.config_fields import EXPERT_COUNT, MAX_LAYERS, NETWORK_FIELDS
from nanovllm.formats.gguf.architectures import Architecture, architecture_of
from nanovllm.formats.gguf.header import GgufHeader, GgufTensor
from nanovllm.formats.gguf.rows import Change, Indices, Shape, rows_of_pairs

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
LAYER_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
LAYER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)(?:\.(weight|bias|scale))?")
# Tensors of experts that hold several matrices of each, one below the other.
STACKED: Mapping[str, tuple[str, ...]] = MappingProxyType({"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")})
OTHER = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its name in Hugging Face format, and where it is in the file.

    rows and columns are None if the order is the file's, or if the shape is one that the loader refuses.
    """

    name: str
    tensor: GgufTensor
    rows: Indices | None = None  # the place in the file of each row
    change: Change | None = None  # how to undo its conversion
    columns: Indices | None = None  # the place in the file of each column

    @property
    def shape(self) -> Shape:
        shape = self.tensor.shape if self.rows is None else (len(self.rows), *self.tensor.shape[1:])
        return shape if self.change is None else self.change.shape(shape)


def named_tensors(header: GgufHeader) -> Iterator[NamedTensor]:
    """The tensors of a file under their names in Hugging Face format; a tensor without such a name keeps its own.

    A tensor that holds the matrices, or the biases, of all experts of a layer becomes one tensor for each expert.
    Tensors of layers for multi-token prediction get names that begin with "mtp.". Raises ModelError if a tensor of
    experts has another shape.
    """
    key, architecture = architecture_of(header)
    num_experts = header.get(f"{key}.expert_count", EXPERT_COUNT) or 0
    num_layers = header.need(f"{key}.block_count", NETWORK_FIELDS["num_hidden_layers"])
    predicting = header.get(f"{key}.nextn_predict_layers", integer(0, MAX_LAYERS)) or 0
    extra = tuple(f"blk.{index}." for index in range(num_layers - predicting, num_layers))
    value_heads = None if architecture.value_heads is None else architecture.value_heads(header)
    heads = _rotated_heads(header, key) if architecture.pairs_heads else {}
    for tensor in header.tensors.values():
        if tensor.name.startswith(extra):
            yield NamedTensor(f"mtp.{tensor.name}", tensor)
            continue
        match = LAYER.fullmatch(tensor.name)
        module = tensor.name.partition(".")[0] if match is None else match[2]
        name = hugging_face_name(tensor.name, architecture)
        change = architecture.change(module)
        if match is None:
            yield NamedTensor(name, tensor, None, change)
        elif (parts := STACKED.get(module, (module,)))[0] in architecture.experts and match[3] != "scale":
            names = [f"model.layers.{match[1]}.{architecture.experts[part]}.{match[3]}" for part in parts]
            for number, matrix in enumerate(_experts(tensor, num_experts)):
                yield from _parts([name.format(number) for name in names], matrix)
        elif module == "ssm_ba" and value_heads is not None:
            for part, rows in zip("ba", value_heads.merged_rows(), strict=True):
                own = rows if tensor.shape[0] == 2 * len(rows) else None
                yield NamedTensor(f"model.layers.{match[1]}.linear_attn.in_proj_{part}.{match[3]}", tensor, own)
        elif value_heads is None:
            rows = rows_of_pairs(heads[module], tensor.shape[0]) if module in heads else None
            yield NamedTensor(name, tensor, rows, change)
        else:
            rows = value_heads.rows(module)
            columns = value_heads.columns(module, tensor.type.block_size)
            rows = rows if rows is not None and len(rows) == tensor.shape[0] else None
            columns = columns if columns is not None and len(columns) == tensor.shape[-1] else None
            yield NamedTensor(name, tensor, rows, change, columns)


def hugging_face_name(name: str, architecture: Architecture) -> str:
    """The tensor's name in Hugging Face format; the same name if no supported network has it."""
    if match := LAYER.fullmatch(name):
        whole = architecture.tensors.get(name.split(".", 2)[2])
        if whole is not None:
            return f"model.layers.{match[1]}.{whole}"
        module = architecture.modules.get(match[2]) or LAYER_MODULES.get(match[2])
        return name if module is None or match[3] is None else f"model.layers.{match[1]}.{module}.{match[3]}"
    if (match := OTHER.fullmatch(name)) and match[1] in MODULES:
        return f"{MODULES[match[1]]}.{match[2]}"
    return name


def _rotated_heads(header: GgufHeader, key: str) -> dict[str, int]:
    """The number of heads of each module whose rows llama.cpp puts into another order for RoPE."""
    num_heads = header.need(f"{key}.attention.head_count", integer(1))
    return {"attn_q": num_heads, "attn_k": header.get(f"{key}.attention.head_count_kv", integer(1)) or num_heads}


def _parts(names: Sequence[str], matrix: GgufTensor) -> Iterator[NamedTensor]:
    """The matrix divided into parts of equal numbers of rows, one for each name; whole if it cannot be divided."""
    rows = matrix.shape[0] // len(names)
    for index, name in enumerate(names):
        is_whole = len(names) == 1 or matrix.shape[0] % len(names)
        yield NamedTensor(name, matrix, None if is_whole else np.arange(index * rows, (index + 1) * rows))


def _experts(tensor: GgufTensor, num_experts: int) -> Iterator[GgufTensor]:
    """The matrix of each expert, of a tensor [experts, out, in], or the bias of each, of one [experts, out]."""
    if len(tensor.shape) != (2 if tensor.name.endswith(".bias") else 3) or tensor.shape[0] != num_experts:
        raise ModelError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}; it should have a matrix for each of "
            f"{num_experts} experts."
        )
    single = replace(tensor, shape=tensor.shape[1:])
    for number in range(num_experts):
        yield replace(single, offset=tensor.offset + number * single.num_bytes)
