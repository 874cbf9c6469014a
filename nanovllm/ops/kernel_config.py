"""Tiles and pipelines of Triton kernels: the defaults and the tuned tables.

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
from nanovllm.ops.cpu_kernels import dtype_name

TABLES = Path(__file__).with_name("tuned")
FEW_ROWS = 16  # of x in `triton_few_rows`: the smallest tile of the matrix units, of which absent rows cost no loads


@dataclass(frozen=True, slots=True)
class TunedEntry:
    """The fastest configuration for one head size and dtype."""

    head_dim: int
    dtype: str  # as of `dtype_name`
    prefill: PrefillConfig
    decode: DecodeConfig


@dataclass(frozen=True, slots=True)
class FewRowsEntry:
    """The fastest configuration for few rows times a dense weight, where it is faster than torch's product."""

    out_features: int
    in_features: int
    dtype: str
    config: FewRowsConfig

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class TunedTable:
    """What was tuned on a device: it serves others of the same compute capability that have no table."""

    capability: tuple[int, ...] | None = None
    entries: tuple[TunedEntry, ...] = ()
    few_rows: tuple[FewRowsEntry, ...] = ()


def table_path(device_name: str, directory: Path = TABLES) -> Path:
    """The path of a device's table, which need not exist."""
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read_table(path: Path) -> TunedTable:
    """A table; an empty one if the file does not exist. Raises ConfigError for an invalid table."""
    if not path.is_file():
        return TunedTable()
    try:
        stored = json.loads(path.read_text())
        capability = tuple(map(int, stored["capability"])) if "capability" in stored else None
        entries = [
            TunedEntry(
                **entry | {"prefill": PrefillConfig(**entry["prefill"]), "decode": DecodeConfig(**entry["decode"])}
            )
            for entry in stored["entries"]
        ]
        few_rows = [
            FewRowsEntry(**entry | {"config": FewRowsConfig(**entry["config"])}) for entry in stored.get("few_rows", [])
        ]
        return TunedTable(capability, tuple(entries), tuple(few_rows))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of tuned kernels ({error!r}): delete it, or write it anew with"
            " python -m benchmarks.sweep --keep"
        ) from error


def tuned_table(device: torch.device) -> TunedTable:
    """The table of this device's name; if there is none, the first by name of those of its compute capability."""
    if device.type != "cuda":
        return TunedTable()
    own = table_path(torch.cuda.get_device_name(device), TABLES)
    if own.is_file():
        return read_table(own)
    capability = torch.cuda.get_device_capability(device)
    tables = map(read_table, sorted(TABLES.glob("*.json")))
    return next((table for table in tables if table.capability == capability), TunedTable())


def tuned_entry(device: torch.device, head_dim: int, dtype: torch.dtype) -> TunedEntry | None:
    """The entry of the device's table, or None."""
    name = dtype_name(dtype)
    entries = tuned_table(device).entries
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


@cache
def few_rows_config_on(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> FewRowsConfig | None:
    """How few rows are multiplied with a weight [out, in] by a kernel of our own; None if torch does it.

    Only shapes for which a sweep on such a device has found it faster. All ranks and runs read the same table.
    """
    name = dtype_name(dtype)
    entries = tuned_table(device).few_rows
    return next((entry.config for entry in entries if (entry.shape, entry.dtype) == (shape, name)), None)


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
    reduce_warps: int  # no bit depends on it
    reduce_blocks: int  # whose results are loaded at once
    partition: int = 512  # keys that a program attends to before it stores its sums


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """One launch of `triton_few_rows`."""

    weight_rows: int  # of a tile
    columns: int
    warps: int
    stages: int


def prefill_config(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillConfig:
    """Tiles that fit the device's shared memory and registers; not tuned by timing."""
    wide = head_dim > 128
    if dtype == torch.float32:  # for exactness only: spills registers and is slow
        return PrefillConfig(16, 16, 8, 1) if wide else PrefillConfig(32, 32, 4 if head_dim <= 64 else 8, 1)
    if capability[0] in (9, 10) and head_dim <= 256:  # 227 KiB of shared memory; most others have 99
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
