"""The configurations of the Triton kernels that a sweep tries. Of attention the tests run each and compile some."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nanovllm.ops.kernel_config import (
    DecodeConfig,
    FewRowsConfig,
    PrefillConfig,
    decode_config,
    prefill_config,
    row_bytes,
)

if TYPE_CHECKING:
    from nanovllm.ops.triton_packed import PackedConfig


def prefill_variants(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> list[PrefillConfig]:
    """The configurations of a sweep, the default first. All fit the device with almost no spilled registers."""
    default = prefill_config(head_dim, dtype, capability)
    if dtype == torch.float32:
        return [default]
    if head_dim > 128:
        others = [replace(default, branch=not default.branch)]
    elif capability[0] in (9, 10):
        tiles = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)]
        others = [PrefillConfig(*tile, branch) for tile in tiles for branch in (False, True)]
    else:
        tiles = [(128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3)]
        others = [PrefillConfig(*tile, branch) for tile in tiles for branch in (False, True)]
    return [default, *(config for config in others if config != default)]


def decode_variants(head_dim: int, dtype: torch.dtype) -> list[DecodeConfig]:
    """The configurations of a sweep, the default first: tiles of the first kernel, then pipelines of the reduction."""
    default = decode_config(head_dim, dtype)
    if row_bytes(head_dim, dtype) > 256:
        return [default, *(replace(default, reduce_blocks=blocks) for blocks in (1, 8))]
    tiles = [(32, 4, 4), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3)]
    return [
        default,
        *(replace(default, keys=keys, warps=warps, stages=stages) for keys, warps, stages in tiles),
        *(replace(default, reduce_warps=warps) for warps in (1, 2, 8)),
        *(replace(default, reduce_blocks=blocks) for blocks in (1, 8)),
        *(replace(default, partition=keys) for keys in (128, 256)),
    ]


def few_rows_variants() -> list[FewRowsConfig]:
    """Tiles of 4 to 16 KiB, of which 24 to 48 KiB are on their way: two programs of a multiprocessor then have enough
    to wait for at 4 TB/s. All fit 99 KiB."""
    tiles = [(16, 128, 1, 6), (16, 256, 1, 4), (16, 256, 2, 5), (16, 512, 4, 3), (32, 128, 2, 5), (32, 256, 4, 3),
             (64, 64, 4, 5), (64, 128, 4, 4)]  # fmt: skip
    return [FewRowsConfig(*tile) for tile in tiles]


def packed_variants(default: PackedConfig) -> list[PackedConfig]:
    """The configurations for products of few rows with packed weights, the default first: tiles, then parts."""
    tiles = [(32, 1, 4), (32, 2, 6), (64, 2, 3), (64, 2, 6), (64, 4, 4), (128, 2, 4), (128, 4, 3)]
    return [
        default,
        *(replace(default, outputs=outputs, warps=warps, stages=stages) for outputs, warps, stages in tiles),
        *(replace(default, splits=splits) for splits in (1, 2, 4, 8) if splits != default.splits),
    ]
