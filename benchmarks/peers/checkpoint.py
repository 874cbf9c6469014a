"""A checkpoint with random weights in Hugging Face format: config, weights and tokenizer, enough for every engine."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.shapes import Shape


def make_checkpoint(shape: Shape, directory: Path, seed: int) -> Path:
    """Write `shape` with weights drawn from `seed` to `directory`, unless it is there already; returns it."""
    facts = json.dumps(shape.facts() | {"seed": seed, "config": _config(shape)}, sort_keys=True)
    stamp = directory / "facts.json"
    if not (stamp.is_file() and stamp.read_text() == facts):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(_config(shape), indent=2) + "\n")
        _write_tokenizer(directory, shape.network.vocab_size)
        save_file(random_weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
        stamp.write_text(facts)
    return directory


def random_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor under its Hugging Face name.

    Matrices and convolutions have variance 1 / inputs, so that a normalized input gives outputs of size 1. Factors of
    norms are within 0.1 of 1, and biases within 0.1 of 0. Recurrent states decay to about 0.9 with each token.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    norm = shape.config.on_meta().norm
    for name, size in _tensor_shapes(shape).items():
        noise = torch.empty(size).uniform_(-1, 1, generator=generator)
        if len(size) > 1:
            noise *= (3 / math.prod(size[1:])) ** 0.5
        else:
            noise = noise * 0.1 + _middle(name, zero_centered=norm.zero_centered)
        weights[name] = noise.to(shape.dtype)
    return weights


def _middle(name: str, *, zero_centered: bool) -> float:
    """What the weights of a vector scatter around; zero_centered: whether norms have them minus 1."""
    if name.endswith("A_log"):
        return -2.0
    is_zero_centered = zero_centered and ".linear_attn." not in name
    return 0.0 if is_zero_centered or name.endswith("bias") else 1.0


def _tensor_shapes(shape: Shape) -> dict[str, torch.Size]:
    """The tensors that Transformers would save for the config."""
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(shape.path, trust_remote_code=False), trust_remote_code=False
        )
    tied = {"lm_head.weight"} if shape.is_tied else set()
    return {name: value.shape for name, value in model.state_dict().items() if name not in tied}


def _config(shape: Shape) -> dict[str, object]:
    config = json.loads((shape.path / "config.json").read_text())
    return {**config, "torch_dtype": str(shape.dtype).removeprefix("torch.")}


def vocabulary(size: int) -> list[str]:
    """The bytes of byte-level BPE, then made-up names. Without merges, every text has a tokenization."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    return alphabet + [f"token{index}" for index in range(len(alphabet), size)]


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    names = vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
