"""The files of an adapter, checked against the model from headers alone: nothing of a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import ModelError, quoted
from nanovllm.features.lora.adapter_config import CONFIG, MERGE, AdapterConfig, read_adapter_config
from nanovllm.formats.checkpoint import StoredTensor, headers
from nanovllm.layers.linear_method import FLOATS
from nanovllm.memory.adapters import modules_of
from nanovllm.models.spec import DecoderSpec

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before the model's own names
TENSOR = re.compile(r"(.+)\.lora_(A|B)\.weight")


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """An adapter's part for one module: y += scale * B A x, with A [rank, in] and B [out, rank]."""

    module: str
    rank: int
    scale: float

    @property
    def a(self) -> str:
        """The name of A in the file."""
        return f"{PREFIX}{self.module}.lora_A.weight"

    @property
    def b(self) -> str:
        """The name of B in the file."""
        return f"{PREFIX}{self.module}.lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits the model: its safetensors file, and its parts by the name of the module."""

    weights: Path
    modules: Mapping[str, ModuleAdapter]


def stamp_of(directory: Path) -> tuple[int, ...]:
    """Sizes, times and inodes of an adapter's files, which change with their content. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory: give the local directory of an adapter in PEFT's format.")
    stamp: list[int] = []
    for name in (CONFIG, WEIGHTS):
        try:
            found = (directory / name).stat()
        except OSError:
            pickled = name == WEIGHTS and any(directory.glob("adapter_model.bin"))
            hint = ", but a pickled adapter_model.bin: save it with safe_serialization=True" if pickled else ""
            raise ModelError(f"{directory} has no {name}{hint}.") from None
        stamp += (found.st_size, found.st_mtime_ns, found.st_ino)
    return tuple(stamp)


def read_adapter(directory: Path, spec: DecoderSpec, max_lora_rank: int) -> AdapterFiles:
    """The adapter in a directory. Raises ModelError, with the field or tensor, if it does not fit the model.

    spec: of the model, or of a tensor-parallel rank's part of it.
    """
    spec = spec.whole or spec
    config, path = read_adapter_config(directory / CONFIG), directory / WEIGHTS
    stored = headers(path)
    _check_names(path, spec, config, stored)
    modules: dict[str, ModuleAdapter] = {}
    for module, (out_size, in_size) in modules_of(spec).items():
        found = ModuleAdapter(module, config.rank_of(module), config.scale_of(module))
        if found.a not in stored and found.b not in stored:
            if config.targets_module(module):
                missing = f"{path} lacks {found.a}"
                raise ModelError(f"{missing}: {CONFIG} says that the adapter has it; save the adapter anew.")
            continue
        _check_rank(path, module, found.rank, max_lora_rank)
        for name, shape in ((found.a, (found.rank, in_size)), (found.b, (out_size, found.rank))):
            _check_tensor(path, name, shape, stored)
        modules[module] = found
    return AdapterFiles(path, modules)


def _check_names(path: Path, spec: DecoderSpec, config: AdapterConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ModelError for tensors that are no low-rank addition to a linear layer of the model."""
    if not stored:
        raise ModelError(f"{path} holds no tensors: save the adapter anew.")
    known = modules_of(spec)
    for name in stored:
        if ".lora_magnitude_vector" in name:
            raise ModelError(f"{path} holds {quoted(name)}: not supported: it is DoRA; {MERGE}.")
        match = TENSOR.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
        if match is None:
            raise ModelError(f"{path} holds {quoted(name)}: not supported: only lora_A and lora_B are read; {MERGE}.")
        if match[1] not in known and spec.experts is not None and f".{spec.experts.block}." in match[1]:
            raise ModelError(
                f"{path} holds {quoted(name)}: not supported: experts and routers are not adapted; {MERGE}."
            )
        if match[1] not in known:
            raise ModelError(
                f"{path} holds {quoted(name)}: a {spec.architecture} of {spec.num_layers} layers has no such linear "
                "layer to adapt; take an adapter of this model."
            )
        if config.targets is not None and not config.targets_module(match[1]):
            raise ModelError(f"{path} holds {quoted(name)}: target_modules of {CONFIG} does not name it.")


def _check_rank(path: Path, module: str, rank: int, max_lora_rank: int) -> None:
    if rank > max_lora_rank:
        rule = f"max_lora_rank={max_lora_rank}: raise max_lora_rank to {rank}"
        raise ModelError(f"{path.parent}: {module} has rank {rank}, and {rule}.")


def _check_tensor(path: Path, name: str, shape: tuple[int, int], stored: Mapping[str, StoredTensor]) -> None:
    if name not in stored:
        raise ModelError(f"{path} lacks {name}, the other half of an addition: save the adapter anew.")
    if stored[name].shape != shape:
        expected, found = list(shape), list(stored[name].shape)
        raise ModelError(f"{path}: {name} expected {expected}, found {found}: take an adapter of this model.")
    if stored[name].dtype not in FLOATS:
        raise ModelError(f"{path}: {name} is {stored[name].dtype}: not read; read are {', '.join(FLOATS)}.")
