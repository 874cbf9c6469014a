"""Small quantized checkpoints, changes to them, and their weights by the formats' published formulas.

The formulas are written independently, in numpy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import edit_config, make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quantize_checkpoint import quantize_checkpoint
from nanovllm.formats.quantization.packed_method import QuantizedWeight
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.linear import Linear
from nanovllm.layers.packed_matrix import StackedWeights
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model
from nanovllm.ops.packed_weights import dequantize

VOCAB = 199
# Name of a variant -> format and options of `quantize_checkpoint`.
VARIANTS: dict[str, dict[str, Any]] = {
    "gptq-128": {"format": "gptq"},
    "gptq-64": {"format": "gptq", "group_size": 64},
    "gptq-32-asymmetric": {"format": "gptq", "group_size": 32, "symmetric": False},
    "gptq-channel-asymmetric": {"format": "gptq", "group_size": -1, "symmetric": False},
    "gptq-v2-asymmetric": {"format": "gptq_v2", "group_size": 32, "symmetric": False},
    "gptq-8-bits": {"format": "gptq", "bits": 8},
    "gptq-8-bits-asymmetric": {"format": "gptq", "bits": 8, "group_size": 32, "symmetric": False},
    "awq-32": {"format": "awq", "group_size": 32},
    "awq-128": {"format": "awq"},
    "awq-channel": {"format": "awq", "group_size": -1},
    "pack-quantized-32": {"format": "pack-quantized", "group_size": 32},
    "pack-quantized-asymmetric": {"format": "pack-quantized", "group_size": 64, "symmetric": False},
    "pack-quantized-channel": {"format": "pack-quantized", "group_size": -1},
    "pack-quantized-8-bits": {"format": "pack-quantized", "bits": 8, "symmetric": False},
    "float-quantized": {"format": "float-quantized"},
    "fp8": {"format": "fp8"},
    "fp8-channel": {"format": "fp8-channel"},
    "fp8-tensor": {"format": "fp8-tensor"},
}


def make_plain(directory: Path) -> Path:
    """A checkpoint to quantize: its sizes are multiples of 128 for q, o, gate, up and down, and not for k and v."""
    make_checkpoint(directory, hidden=128, intermediate=256, heads=8, kv_heads=4, vocab=VOCAB)
    return directory


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The model with its weights."""
    return load_model(path, load_network_config(path), dtype, torch.device("cpu"))


def weight_of(linear: Linear) -> Tensor:
    """The fp32 matrix of a linear layer, in whatever form it is stored."""

    def matrix(weight: Any) -> Tensor:
        if isinstance(weight, StackedWeights):
            return torch.cat([matrix(part) for part in weight.weights])
        return dequantize(weight.packed) if isinstance(weight, QuantizedWeight) else weight.dense.float()

    return matrix(linear.weight)


def edit_tensors(path: Path, **changes: Any) -> None:
    """Replace tensors of the first layer's q projection by what a function makes of them; None removes one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for suffix, change in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{suffix}"
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)


def set_quantization(path: Path, **changes: Any) -> None:
    """Set fields of the `quantization_config`; a value of `...` removes one."""
    config = json.loads((path / "config.json").read_text())["quantization_config"] | changes
    edit_config(path, quantization_config={name: value for name, value in config.items() if value is not ...})


def quantize(model: Path, directory: Path, variant: str) -> Path:
    """Write `model` in the form of a variant to `directory`."""
    quantize_checkpoint(model, directory, **VARIANTS[variant])
    return directory


def dequantized(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the network in plain numbers, fp32, from the files alone."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    stored = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    modules: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if tensor.dtype in (torch.int32, torch.int64, torch.float8_e4m3fn) or (
            "scale" in suffix and not module.endswith(".router")  # of Gemma 4, which is plain
        ):
            modules.setdefault(module, {})[suffix] = tensor
        else:
            plain[name] = tensor.float()
    formula = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}[config["quant_method"]]
    return plain | {f"{module}.weight": torch.from_numpy(formula(parts, config)) for module, parts in modules.items()}


def write_dequantized(directory: Path, target: Path) -> Path:
    """The checkpoint in fp32 whose weights are those that `directory` means."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in dequantized(directory).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


Array = np.ndarray[Any, Any]


def _bits_of(words: Array, index: Array, position: Array, bits: int, *, along: int) -> Array:
    """For each (row, index) the value at `position` of the word at `index`, counted from the low bits."""
    words = words.astype(np.int64) & 0xFFFFFFFF
    taken = words[index, :] if along == 0 else words[:, index]
    shift = (position * bits)[:, None] if along == 0 else (position * bits)[None, :]
    return (taken >> shift) & (2**bits - 1)


def _gptq(parts: dict[str, Tensor], config: dict[str, Any]) -> Array:
    bits = config["bits"]
    count = 32 // config["bits"]
    qweight = parts["qweight"].numpy()
    qzeros = parts["qzeros"].numpy()
    scales = parts["scales"].float().numpy()
    inputs = np.arange(qweight.shape[0] * count)
    outputs = np.arange(qweight.shape[1])
    q = _bits_of(qweight, inputs // count, inputs % count, bits, along=0)
    zeros = _bits_of(qzeros, outputs // count, outputs % count, bits, along=1)
    if config["checkpoint_format"] == "gptq":
        zeros = (zeros + 1) % 2**bits
    group = np.zeros_like(inputs) if config["group_size"] == -1 else inputs // config["group_size"]
    return (scales[group] * (q - zeros[group]).astype(np.float32)).T.copy()


def _awq(parts: dict[str, Tensor], config: dict[str, Any]) -> Array:
    qweight = parts["qweight"].numpy()
    qzeros = parts["qzeros"].numpy()
    scales = parts["scales"].float().numpy()
    outputs = np.arange(qweight.shape[1] * 8)
    inputs = np.arange(qweight.shape[0])
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # value p of a word belongs to output order[p]
    position = np.array([order.index(output % 8) for output in outputs])
    q = _bits_of(qweight, outputs // 8, position, 4, along=1)
    zeros = _bits_of(qzeros, outputs // 8, position, 4, along=1)
    group = np.zeros_like(inputs) if config["group_size"] == -1 else inputs // config["group_size"]
    return ((q - zeros[group]).astype(np.float32) * scales[group]).T.copy()


def _fp8(parts: dict[str, Tensor], config: dict[str, Any]) -> Array:
    weight = _e4m3(parts["weight"].view(torch.uint8).numpy())
    scales = (parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]).float().numpy()
    if config.get("weight_block_size"):
        rows = np.arange(weight.shape[0]) // 128
        columns = np.arange(weight.shape[1]) // 128
        return weight * scales[rows][:, columns]
    return weight * scales.reshape(-1, 1)


def _e4m3(codes: Array) -> Array:
    """The values of float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 bits of mantissa. Micikevicius et al.,
    "FP8 formats for deep learning" (2022)."""
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent = (codes >> 3 & 15).astype(np.int64)
    mantissa = (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return (sign * value).astype(np.float32)


def _compressed(parts: dict[str, Tensor], config: dict[str, Any]) -> Array:
    if config["format"] == "float-quantized":
        return _fp8(parts, {})
    weights = config["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    count = 32 // weights["num_bits"]
    outputs, inputs = (np.arange(size) for size in parts["weight_shape"].tolist())
    half = 2 ** (bits - 1)
    q = _bits_of(parts["weight_packed"].numpy(), inputs // count, inputs % count, bits, along=1) - half
    scales = parts["weight_scale"].float().numpy()
    zeros = np.zeros_like(scales)
    if not weights["symmetric"]:
        zeros = _bits_of(parts["weight_zero_point"].numpy(), outputs // count, outputs % count, bits, along=0) - half
    group = inputs // weights["group_size"] if weights["group_size"] else np.zeros_like(inputs)
    return (q - zeros[:, group]).astype(np.float32) * scales[:, group]
