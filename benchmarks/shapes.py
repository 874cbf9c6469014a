"""Networks to measure: published configs, cut to fewer layers if need be, with random weights and prompts.

nanovllm/apps/planner/configs has those of the published checkpoints, without Qwen2.5-7B-1M's dual chunk
attention, which is plain attention up to 262,144 tokens.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

import nanovllm
from benchmarks.stored_shapes import quantized_config, write_gguf_header
from nanovllm.data.network import Network
from nanovllm.errors import ConfigError
from nanovllm.features.planner.step_work import StepWork
from nanovllm.formats.hub import is_gguf
from nanovllm.memory.layout import kv_layout
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.network_config import NetworkConfig

CONFIGS = Path(nanovllm.__file__).parent / "apps" / "planner" / "configs"


def shape_names() -> list[str]:
    """The models that come with the benchmarks."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


@dataclass(frozen=True)
class Shape:
    """A model directory or GGUF file, without weights unless `load_format` says so, and the network it describes."""

    name: str
    path: Path
    config: NetworkConfig
    dtype: torch.dtype
    load_format: str = "dummy"  # the engine's argument
    stored: str | None = None  # one of STORED_FORMS, if weights are not in the form that the config says

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def network(self) -> Network:
        """The network in the dtype in which it runs."""
        return self.config.on_meta(self.dtype_name).network

    @property
    def weight_bytes(self) -> int:
        return self.network.weight_bytes

    @property
    def _work(self) -> StepWork:
        return StepWork(self.network, kv_layout(self.network, "auto"))

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token over all layers."""
        return self._work.layout.token_bytes

    def prefill_operations(self, prompt_len: int) -> float:
        """Operations of a prompt's prefill: projections, attention, one row of logits. A multiply-add counts as two.

        A token takes each recurrent state through three products, as of a matrix and a vector.
        """
        network = self.network
        work = self._work
        logits = 2.0 * network.vocab_size * network.hidden_size
        states = 0 if network.recurrent is None else prod(network.recurrent.state_shape)
        recurrence = 6.0 * len(network.recurrent_layers) * states * prompt_len
        return work.matrix_operations(prompt_len) + work.attention_operations(0, prompt_len) + recurrence + logits

    def decode_bytes(self, context_len: int) -> int:
        """Bytes that a sequence's decode step must read: visible KV, recurrent states, and weights without the
        embedding table and the experts that its row does not choose."""
        network = self.network
        table = 0 if self.is_tied else network.head_bytes
        unread = network.layer_weight_bytes() - network.layer_weight_bytes(rows=1)
        weights = network.weight_bytes - table - network.num_layers * unread
        return weights + self._work.attended_bytes(context_len - 1, 1) + network.state_bytes

    @property
    def is_tied(self) -> bool:
        """Whether the output projection is the embedding."""
        return bool(self.config.config.tie_word_embeddings)

    def facts(self) -> dict[str, Any]:
        """The shape in the report, with the heads of the first layer with attention."""
        network = self.network
        num_kv_heads, head_dim = network.kv_heads[0]
        return {
            "name": self.name,
            "architecture": network.architecture,
            "num_layers": network.num_layers,
            "hidden_size": network.hidden_size,
            "num_heads": network.num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "dtype": self.dtype_name,
            "weight_bytes": self.weight_bytes,
            "load_format": self.load_format,
            "stored": self.stored,
        }

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Random token ids, the same for the same arguments."""
        rng = random.Random(f"{seed}-{length}")
        return [rng.choices(range(self.network.vocab_size), k=length) for _ in range(count)]


@contextmanager
def open_shape(
    model: str, num_layers: int | None, dtype: str, load_format: str = "dummy", stored: str | None = None
) -> Iterator[Shape]:
    """The shape called `model`, or that of the directory `model`, in a temporary directory.

    num_layers: keep this many layers; None for all. dtype: a torch dtype's name, or "auto" for the config's.
    load_format: "dummy", or "auto" for the directory `model` itself, with its weights. stored: one of STORED_FORMS, in
    which random weights are stored; None for the config's. Raises ConfigError or ModelError.
    """
    if load_format == "auto":
        yield _checkpoint(model, num_layers, dtype)
        return
    config = _load_config(model)
    if num_layers is not None:
        _cut(config, num_layers)
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(config))
        network = load_network_config(path)
        if stored is None:
            yield Shape(Path(model).name, path, network, _dtype(dtype, network))
            return
        kept = _dtype(dtype, network)
        if stored == "q4_k_m":
            path /= f"{Path(model).name}.gguf"
            write_gguf_header(network, path)
        else:
            config["quantization_config"] = quantized_config(network, stored)
            (path / "config.json").write_text(json.dumps(config))
        yield Shape(Path(model).name, path, load_network_config(path), kept, stored=stored)


def _checkpoint(model: str, num_layers: int | None, dtype: str) -> Shape:
    if num_layers is not None:
        raise ConfigError(f"--num-layers {num_layers}: --load-format auto takes them all: say --num-layers all")
    if not is_gguf(model) and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model {model!r}: --load-format auto needs the directory of a checkpoint, or a GGUF file")
    network = load_network_config(Path(model))
    return Shape(Path(model).resolve().name, Path(model), network, _dtype(dtype, network), "auto")


def _dtype(name: str, network: NetworkConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, network.dtype if name == "auto" else name)
    return dtype


def _load_config(model: str) -> dict[str, Any]:
    path = CONFIGS / f"{model}.json" if model in shape_names() else Path(model) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model {model!r} is neither one of {', '.join(shape_names())} nor a directory with a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model {model!r}: {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {model!r}: {path} must hold a JSON object, it holds a {type(config).__name__}")
    return config


def _cut(config: dict[str, Any], num_layers: int) -> None:
    available = config.get("num_hidden_layers")
    if not isinstance(available, int) or num_layers > available:
        raise ConfigError(f"--num-layers {num_layers}: the model has {available} layers; name fewer")
    config["num_hidden_layers"] = num_layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:num_layers]
