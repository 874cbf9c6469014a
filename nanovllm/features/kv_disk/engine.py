"""The store of one engine: what it is made of, and what decides the bits of its K and V."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import gib
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.features.kv_disk.identity import FileDigests, code_files, digest, digest_of_fields, model_files
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.features.kv_disk.records import MAGIC
from nanovllm.features.kv_disk.segments import all_segments
from nanovllm.features.kv_disk.store import DiskStore
from nanovllm.features.kv_disk.units import UnitCopier
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import is_chunk_invariant
from nanovllm.ops.cpu_kernels import cpu_kernel_choice

KEY_TILE = 128  # of the CPU's attention, counted from a block's start: kTileKeys of csrc/cpu_attention.h

logger = logging.getLogger(__name__)


def open_store_of(config: EngineConfig, runner: ModelRunner) -> DiskStore | None:
    """The store in `config.kv_cache_dir`, which is made if need be; None, with a warning, if it cannot be used.

    The first engine of a model reads all its weights for their digest.
    """
    assert config.kv_cache_dir is not None
    root = Path(config.kv_cache_dir)
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        digests = FileDigests(root)
        identity = digest(
            digest_of_fields(_facts(config, runner)), digests.of(model_files(config.model)), digests.of(code_files())
        )
        space = _space(root, config.kv_cache_dir_space)
        return DiskStore(root, identity, config.model_name, space, UnitCopier(runner.device, runner.kv_cache.pools))
    except OSError as error:
        logger.warning("kv_cache_dir=%r is not used: %s", str(root), error)
        return None


def _tile(block_size: int, backend: AttentionBackend, device: torch.device) -> int:
    """Keys after which attention merges what it has: sums of blocks with the same tile have the same order."""
    tiled = device.type == "cpu" and is_chunk_invariant(backend) and block_size % KEY_TILE == 0
    return KEY_TILE if tiled else block_size


def _facts(config: EngineConfig, runner: ModelRunner) -> Mapping[str, Any]:
    """All that bits depend on besides files and tokens. Lengths and memory are not among it."""
    layout, device = runner.kv_cache.pools.layout, runner.device.torch_device
    kv_dtype = runner.kv_cache.pools.resident.dtype
    backend = select_backend(device, runner.spec.hardest_head_dim, kv_dtype)
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
    return facts


def _space(root: Path, asked: float | None) -> int:
    """Bytes that the directory may take; asked: GiB, None for half of what is free and taken already."""
    if asked is not None:
        return int(asked * 2**30)
    taken = sum(found.st_size for _, found in all_segments(root))
    space = (shutil.disk_usage(root).free + taken) // 2
    logger.info("kv_cache_dir_space: %s, half of what is free in %s", gib(space), root)
    return space
