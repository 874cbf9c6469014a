"""A network of a few kilobytes and adapters of any network, for checks."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanovllm.data.network import Network
from nanovllm.lora_request import LoRARequest


def write_tiny_config(directory: Path) -> Path:
    """A directory with only a config.json, created if missing. Its heads and dtype suit every GPU kernel."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,  # a multiple of the blocks of Q4_K
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A matrix that keeps the size of its inputs, or a norm's weight near 1."""
    values = torch.randn(shape, generator=generator)
    return values * shape[1] ** -0.5 if len(shape) == 2 else 1 + values / 10


def write_adapter(
    directory: Path, network: Network, modules: Collection[str], rank: int, number: int, size: float = 1.0
) -> LoRARequest:
    """A random adapter of these modules in every layer; size: what its products are multiplied with."""
    generator = torch.Generator().manual_seed(number)
    tensors = dict[str, Tensor]()
    for module, shape in network.modules.items():
        out_size, in_size = shape.whole
        if module.rpartition(".")[2] in modules:
            prefix = f"base_model.model.{module}.lora_"
            tensors[f"{prefix}A.weight"] = random_tensor((rank, in_size), generator)
            tensors[f"{prefix}B.weight"] = random_tensor((out_size, rank), generator) * size
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, number, str(directory))
