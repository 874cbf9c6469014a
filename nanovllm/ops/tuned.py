"""Kernel configurations that a sweep found fastest, kept by the device's name in tuned/*.json beside this file.

`python -m benchmarks.sweep` writes such a table. A device without one takes the defaults of `kernel_config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops.kernel_config import DecodeConfig, PrefillConfig, decode_config, prefill_config

TABLES = Path(__file__).with_name("tuned")


@dataclass(frozen=True, slots=True)
class TunedEntry:
    """What was fastest for heads of one size in one dtype."""

    head_dim: int
    dtype: str  # as torch calls it, without "torch."
    prefill: PrefillConfig
    decode: DecodeConfig
    cudnn_from_block: int | None = None  # smallest block size from which on cuDNN's attention was faster in prefill


def table_path(device_name: str, directory: Path = TABLES) -> Path:
    """Where the table of a device lies, whether it is there or not."""
    return directory / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read_table(path: Path) -> tuple[TunedEntry, ...]:
    """The entries of a table, none where there is no such file. Raises ConfigError for one that cannot be used."""
    if not path.is_file():
        return ()
    try:
        return tuple(_entry(entry) for entry in json.loads(path.read_text())["entries"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of tuned kernels ({error!r}): delete it, or write it anew with"
            " python -m benchmarks.sweep --keep"
        ) from error


def tuned_entry(device: torch.device, head_dim: int, dtype: torch.dtype) -> TunedEntry | None:
    """What the table of this device says, None where there is no table or no such entry."""
    if device.type != "cuda":
        return None
    entries = read_table(table_path(torch.cuda.get_device_name(device)))
    name = str(dtype).removeprefix("torch.")
    return next((entry for entry in entries if (entry.head_dim, entry.dtype) == (head_dim, name)), None)


@cache
def prefill_config_on(device: torch.device, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The tuned configuration, else the default. Looked up once in a process, so that bits do not change within one."""
    entry = tuned_entry(device, head_dim, dtype)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return prefill_config(head_dim, dtype, capability) if entry is None else entry.prefill


@cache
def decode_config_on(device: torch.device, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """As `prefill_config_on`."""
    entry = tuned_entry(device, head_dim, dtype)
    return decode_config(head_dim, dtype) if entry is None else entry.decode


def _entry(fields: Mapping[str, Any]) -> TunedEntry:
    prefill, decode = PrefillConfig(**fields["prefill"]), DecodeConfig(**fields["decode"])
    return TunedEntry(**{**fields, "prefill": prefill, "decode": decode})
