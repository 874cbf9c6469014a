"""Networks with random weights in a stored form: configs of quantized checkpoints, and GGUF files of a header alone.

A GGUF file has a hole where the weights would be: engines with load_format "dummy" read its header and draw the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.quantize_checkpoint import PROJECTION, quantization_config
from nanovllm.errors import ConfigError
from nanovllm.formats.gguf.header import TENSOR_TYPES
from nanovllm.formats.gguf.names import LAYER_MODULES, MODULES
from nanovllm.models.config_fields import head_dim_of, kv_heads_of
from nanovllm.models.network_config import NetworkConfig

GGUF_TYPES = {"F32": 0, "Q4_K": 12, "Q6_K": 14}  # numbers of ggml
# types of GGUF's values
TEXT = 8
UINT32 = 4
FLOAT32 = 6
ALIGNMENT = 32


def quantized_config(network: NetworkConfig, form: str) -> dict[str, Any]:
    """quantization_config of a checkpoint of this network: all projections of its layers are quantized."""
    modules = (name.removesuffix(".weight") for name, tensor in network.on_meta().tensors() if len(tensor.shape) == 2)
    plain = [module for module in modules if PROJECTION.fullmatch(f"{module}.weight") is None]
    if form == "int4":
        return quantization_config("gptq", 4, 128, True, plain)
    return quantization_config("fp8", 8, 128, True, plain)


def write_gguf_header(network: NetworkConfig, path: Path) -> None:
    """A GGUF file of a Llama's shape in Q4_K_M. Raises ConfigError for other networks."""
    if network.architecture != "LlamaForCausalLM":
        raise ConfigError(
            f"--stored q4_k_m: files are written of LlamaForCausalLM alone, not of {network.architecture}"
        )
    values = b"".join(_value(key, value) for key, value in _metadata(network))
    tensors = list(_tensors(network))
    infos: list[bytes] = []
    offset = 0
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(name) + dims + struct.pack("<IQ", GGUF_TYPES[kind], offset))
        stored = TENSOR_TYPES[kind]
        num_bytes = prod(shape) // stored.block_size * stored.block_bytes
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(list(_metadata(network))))
    header = counts + values + b"".join(infos)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(-(-len(header) // ALIGNMENT) * ALIGNMENT + offset)


def _metadata(network: NetworkConfig) -> Iterator[tuple[str, Any]]:
    config = network.config
    head_dim = head_dim_of(config)
    yield "general.architecture", "llama"
    yield "llama.embedding_length", config.hidden_size
    yield "llama.block_count", config.num_hidden_layers
    yield "llama.feed_forward_length", config.intermediate_size
    yield "llama.attention.head_count", config.num_attention_heads
    yield "llama.attention.head_count_kv", kv_heads_of(config)
    yield "llama.attention.key_length", head_dim
    yield "llama.attention.value_length", head_dim
    yield "llama.rope.dimension_count", head_dim
    yield "llama.context_length", network.network.max_model_len
    yield "llama.vocab_size", config.vocab_size
    yield "llama.attention.layer_norm_rms_epsilon", 1e-5
    yield "llama.rope.freq_base", 500000.0


def _tensors(network: NetworkConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor of a file in Q4_K_M."""
    names = {module: name for name, module in MODULES.items()}
    num_layers = network.config.num_hidden_layers
    of_layer = {module: name for name, module in LAYER_MODULES.items()}
    for name, tensor in network.on_meta().tensors():
        module = name.removesuffix(".weight")
        _, _, rest = module.partition("model.layers.")
        layer, _, module_of_layer = rest.partition(".")
        stored = f"blk.{layer}.{of_layer[module_of_layer]}" if rest else names[module]
        yield f"{stored}.weight", tensor.shape, _type(stored, int(layer or 0), len(tensor.shape), num_layers)


def _type(name: str, layer: int, dimensions: int, layers: int) -> str:
    """As llama.cpp mixes types in Q4_K_M: half of the layers have v and down in Q6_K, and so is the output."""
    if dimensions == 1:
        return "F32"
    in_more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    more = name == "output" or (name.endswith(("attn_v", "ffn_down")) and in_more_bits)
    return "Q6_K" if more else "Q4_K"


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", UINT32, value)
    return _text(key) + struct.pack("<If", FLOAT32, value)
