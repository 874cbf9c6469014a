"""The store of one engine: what it is made of, and what decides the bits of its K and V."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.kv_groups import KVGroups
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.kv_disk.messages import Command, Report
from nanovllm.features.kv_disk.part import PartSetup, StorePart
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.features.kv_disk.records import MAGIC
from nanovllm.features.kv_disk.store import DiskStore, Parts
from nanovllm.features.kv_disk.units import UnitCopier
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import is_chunk_invariant
from nanovllm.ops.cpu_kernels import cpu_kernel_choice

KEY_TILE = 128  # of the CPU's attention, counted from a block's start: kTileKeys of csrc/cpu_attention.h
GPU_MODULES = ("triton", "flash_attn", "flash_attn_interface")  # what `ops` imports on a GPU, where it is installed

logger = logging.getLogger(__name__)


def make_part(
    config: EngineConfig, runner: ModelRunner, rank: int, is_first: bool, report: Callable[[Report], None]
) -> StorePart:
    """The part of a rank. is_first: of the ranks of a machine; it reads the files that all of them have in common."""
    assert config.kv_cache_dir is not None
    setup = PartSetup(
        Path(config.kv_cache_dir),
        config.model_name,
        Path(config.model) if is_first else None,
        _facts(config, runner),
        config.num_bytes("kv_cache_dir_space"),
        rank,
        config.tensor_parallel_size,
    )
    return StorePart(setup, UnitCopier(runner.device, runner.kv_cache.pools), report)


class OwnPart:
    """Implements `store.Parts` for the one rank that runs in the engine's process."""

    num_parts = 1

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._part = make_part(config, runner, 0, True, self._reports.put)

    def tell(self, command: Command) -> None:
        self._part.handle(command)

    def reports(self, seconds: float) -> Iterator[tuple[int, Report]]:
        with suppress(queue.Empty):
            while True:
                yield 0, self._reports.get(timeout=seconds)
                seconds = 0.0


def open_store(config: EngineConfig, parts: Parts, groups: KVGroups) -> DiskStore | None:
    """The store in `config.kv_cache_dir`, which is made if need be; None, with a warning, if it cannot be used."""
    store = DiskStore(parts, groups)
    why = store.open()
    if why is None:
        return store
    logger.warning("kv_cache_dir=%r is not used: %s", str(config.kv_cache_dir), why)
    store.close()
    return None


def _tile(block_size: int, backend: AttentionBackend, device: torch.device) -> int:
    """Keys after which attention merges what it has: sums of blocks with the same tile have the same order."""
    tiled = device.type == "cpu" and is_chunk_invariant(backend) and block_size % KEY_TILE == 0
    return KEY_TILE if tiled else block_size


def _facts(config: EngineConfig, runner: ModelRunner) -> Mapping[str, Any]:
    """All that bits depend on besides files and tokens. Lengths and memory are not among it."""
    layout = runner.kv_cache.pools.layout
    device = runner.device.torch_device
    kv_dtype = runner.kv_cache.pools.resident.dtype
    backend = runner.kv_cache.backend
    facts: dict[str, Any] = {
        "format": MAGIC.decode(),
        "unit": UNIT,
        "torch": torch.__version__,
        "spec": runner.spec,
        "overrides": config.hf_overrides,
        "random": (config.load_format, config.seed) if config.load_format == "dummy" else None,
        "dtypes": (str(runner.dtype), str(kv_dtype), config.kv_cache_dtype),
        "geometry": (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.row_bytes, layout.windows),
        "heads": layout.heads,
        "groups": [(group.window, group.layers) for group in layout.groups],
        "attention": (backend.name, [_tile(group.block_size, backend, device) for group in layout.groups]),
        "batch_invariant": config.batch_invariant is not False,
        "kernels": cpu_kernel_choice().setting,
        "device": device.type,
        "ranks": config.tensor_parallel_size,
    }
    if device.type == "cuda":
        facts["device"] = (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        facts["libraries"] = (torch.version.cuda, library_versions())
    return facts


def library_versions() -> list[tuple[str, str]]:
    """Of the installed libraries besides torch whose kernels, or whose compiler's, compute on a GPU."""
    installed = packages_distributions()
    names = {name for module in GPU_MODULES for name in installed.get(module, ())}
    return [(name, version(name)) for name in sorted(names)]
