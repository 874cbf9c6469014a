"""Adapters as PEFT saves them, written without PEFT, and the models that they make."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm.lora_request import LoRARequest

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_shapes(model: PreTrainedModel, targets: Collection[str] = ALL) -> dict[str, tuple[int, int]]:
    """Name and (out, in) of the modules whose names end with one of the targets."""
    return {
        name: tuple(module.weight.shape) for name, module in model.named_modules() if name.rpartition(".")[2] in targets
    }


def adapter_tensors(
    model: PreTrainedModel, targets: Collection[str] = ALL, rank: int = 4, seed: int = 1, size: float = 0.3
) -> dict[str, Tensor]:
    """Random A and B for the targets, under the names that PEFT gives them; `size` of A's and B's numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (out_size, in_size) in linear_shapes(model, targets).items():
        for which, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
            values = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = values
    return tensors


def write_adapter(path: Path, tensors: dict[str, Tensor], rank: int = 4, **config: Any) -> Path:
    """Write tensors and an adapter_config.json with these fields beside the usual ones."""
    path.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-3] for name in tensors})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    content = {**fields, "target_modules": targets, **config}
    (path / "adapter_config.json").write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    return path


def make_adapter(
    path: Path,
    model: PreTrainedModel,
    lora_int_id: int = 1,
    targets: Collection[str] = ALL,
    rank: int = 4,
    seed: int | None = None,
    **config: Any,
) -> LoRARequest:
    """Write a random adapter of the model and return the request that names it."""
    tensors = adapter_tensors(model, targets, rank, lora_int_id if seed is None else seed)
    write_adapter(path, tensors, rank, **config)
    return LoRARequest(path.name, lora_int_id, str(path))


def merge_adapter(model: PreTrainedModel, path: Path) -> None:
    """Add scale * B A to the model's own weights, in float32; `path` is an adapter that `make_adapter` wrote."""
    from safetensors.torch import load_file

    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if ".lora_A." in name:
            module: Any = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            module.weight.data += scale * tensors[name.replace("lora_A", "lora_B")] @ a
