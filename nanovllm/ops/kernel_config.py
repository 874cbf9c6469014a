"""Tiles and pipelines of the Triton attention kernels: the defaults and the tuned tables.

They determine the order of sums and so the last bits. They must not depend on the batch or on KV addresses.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from nanovllm.errors import ConfigError

TABLES = Path(__file__).with_name("tuned")


@dataclass(frozen=True, slots=True)
class TunedEntry:
    """The fastest configuration for one head size and dtype."""

    head_dim: int
    dtype: str  # torch's name without "torch."
    prefill: PrefillConfig
    decode: DecodeConfig


def table_path(device_name: str, directory: Path = TABLES) -> Path:
    """The path of a device's table, which need not exist."""
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read_table(path: Path) -> tuple[TunedEntry, ...]:
    """The entries of a table; none if the file does not exist. Raises ConfigError for an invalid table."""
    if not path.is_file():
        return ()
    try:
        entries = json.loads(path.read_text())["entries"]
        configs = [(PrefillConfig(**entry.pop("prefill")), DecodeConfig(**entry.pop("decode"))) for entry in entries]
        return tuple(TunedEntry(**entry, prefill=p, decode=d) for entry, (p, d) in zip(entries, configs, strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of tuned kernels ({error!r}): delete it, or write it anew with"
            " python -m benchmarks.sweep --keep"
        ) from error


def tuned_entry(device: torch.device, head_dim: int, dtype: torch.dtype) -> TunedEntry | None:
    """The entry of this device's table, or None."""
    if device.type != "cuda":
        return None
    entries = read_table(table_path(torch.cuda.get_device_name(device)))
    name = str(dtype).removeprefix("torch.")
    return next((entry for entry in entries if (entry.head_dim, entry.dtype) == (head_dim, name)), None)


@cache
def prefill_config_on(device: torch.device, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The tuned configuration, else the default. Looked up once per process, so that bits do not change within it."""
    entry = tuned_entry(device, head_dim, dtype)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return prefill_config(head_dim, dtype, capability) if entry is None else entry.prefill


@cache
def decode_config_on(device: torch.device, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """See `prefill_config_on`."""
    entry = tuned_entry(device, head_dim, dtype)
    return decode_config(head_dim, dtype) if entry is None else entry.decode


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """One launch of the prefill kernel."""

    rows: int  # query rows of a tile
    keys: int  # of a tile
    warps: int
    stages: int  # of the pipeline of loads
    branch: bool = False  # normalise the accumulator in a branch, not by a factor (see `triton_prefill`)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One launch of the decode kernel and of its reduction."""

    keys: int  # of a tile
    warps: int
    stages: int
    reduce_warps: int
    reduce_stages: int  # upper bound: large blocks need shared memory for their partitions


def prefill_config(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Tiles that fit the device's shared memory and registers; not tuned by timing."""
    wide = head_dim > 128
    if dtype == torch.float32:  # for exactness only: spills registers and is slow
        return PrefillConfig(16, 16, 8, 1) if wide else PrefillConfig(32, 32, 4 if head_dim <= 64 else 8, 1)
    if capability[0] in (9, 10):  # 227 KiB of shared memory; most others have 99
        return PrefillConfig(128, 32, 8, 2, True) if wide else PrefillConfig(128, 64, 8, 3)
    return PrefillConfig(64, 16, 8, 2, True) if wide else PrefillConfig(128, 32, 8, 3, True)


def decode_config(head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """A configuration that fits every device; not tuned by timing."""
    if row_bytes(head_dim, dtype) > 256:  # larger rows leave less shared memory for the pipeline
        return DecodeConfig(32, 8, 2, 4, 4)
    return DecodeConfig(64, 4, 3, 4, 4)


def padded(head_dim: int) -> int:
    """Columns of a tile: the next power of 2, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one row of a tile."""
    return padded(head_dim) * dtype.itemsize
