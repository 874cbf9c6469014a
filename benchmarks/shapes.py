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
from math import prod
from pathlib import Path
from typing import Any

import torch

import nanovllm
from benchmarks.stored_shapes import quantized_config, write_gguf_header
from nanovllm.errors import ConfigError
from nanovllm.features.planner.network import Network
from nanovllm.formats.hub import is_gguf
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.spec import DecoderSpec

CONFIGS = Path(nanovllm.__file__).parent / "apps" / "planner" / "configs"


def shape_names() -> list[str]:
    """The models that come with the benchmarks."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


@dataclass(frozen=True, slots=True)
class Shape:
    """A model directory or GGUF file, without weights unless `load_format` says so, and the network it describes."""

    name: str
    path: Path
    spec: DecoderSpec
    dtype: torch.dtype
    load_format: str = "dummy"  # the engine's argument
    stored: str | None = None  # one of STORED_FORMS, if weights are not in the form that the config says

    @property
    def network(self) -> Network:
        return Network(self.spec, str(self.dtype).removeprefix("torch."))

    @property
    def weight_bytes(self) -> int:
        return self.network.weight_bytes

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token over all layers."""
        return self.network.layout(1).token_bytes

    def prefill_operations(self, prompt_len: int) -> float:
        """Operations of a prompt's prefill: projections, attention, one row of logits. A multiply-add counts as two.

        A token takes each recurrent state through three products, as of a matrix and a vector.
        """
        network = self.network
        logits = 2.0 * self.spec.vocab_size * self.spec.hidden_size
        states = 0 if self.spec.recurrent is None else prod(self.spec.recurrent.state_shape)
        recurrence = 6.0 * self.spec.num_recurrent_layers * states * prompt_len
        return network.matrix_operations(prompt_len) + network.attention_operations(0, prompt_len) + recurrence + logits

    def decode_bytes(self, context_len: int) -> int:
        """Bytes that a sequence's decode step must read: visible KV, recurrent states, and weights without the
        embedding table and the experts that its row does not choose."""
        network = self.network
        itemsize = self.dtype.itemsize
        table = 0 if self.spec.tie_word_embeddings else self.spec.head_bytes(itemsize)
        unread = self.spec.layer_weight_bytes(itemsize) - self.spec.layer_weight_bytes(itemsize, rows=1)
        weights = network.weight_bytes - table - self.spec.num_layers * unread
        return weights + network.attended_bytes(context_len - 1, 1) + network.state_bytes

    def facts(self) -> dict[str, Any]:
        """The shape in the report."""
        return {
            "name": self.name,
            "architecture": self.spec.architecture,
            "num_layers": self.spec.num_layers,
            "hidden_size": self.spec.hidden_size,
            "num_heads": self.spec.num_heads,
            "num_kv_heads": self.spec.num_kv_heads,
            "head_dim": self.spec.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_bytes": self.weight_bytes,
            "load_format": self.load_format,
            "stored": self.stored,
        }

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Random token ids, the same for the same arguments."""
        rng = random.Random(f"{seed}-{length}")
        return [rng.choices(range(self.spec.vocab_size), k=length) for _ in range(count)]


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
        spec = load_decoder_spec(path)
        if stored is None:
            yield Shape(Path(model).name, path, spec, _dtype(dtype, spec))
            return
        kept = _dtype(dtype, spec)
        if stored == "q4_k_m":
            path /= f"{Path(model).name}.gguf"
            write_gguf_header(spec, path)
        else:
            config["quantization_config"] = quantized_config(spec, stored)
            (path / "config.json").write_text(json.dumps(config))
        yield Shape(Path(model).name, path, load_decoder_spec(path), kept, stored=stored)


def _checkpoint(model: str, num_layers: int | None, dtype: str) -> Shape:
    if num_layers is not None:
        raise ConfigError(f"--num-layers {num_layers}: --load-format auto takes them all: say --num-layers all")
    if not is_gguf(model) and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model {model!r}: --load-format auto needs the directory of a checkpoint, or a GGUF file")
    spec = load_decoder_spec(Path(model))
    return Shape(Path(model).resolve().name, Path(model), spec, _dtype(dtype, spec), "auto")


def _dtype(name: str, spec: DecoderSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype if name == "auto" else name)
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
