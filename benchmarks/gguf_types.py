"""Matrices in the types of GGUF: those that the package gguf writes, and Q4_K. Needs numpy and gguf only."""

from __future__ import annotations

from typing import Any

import numpy as np

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K")
# of a block of Q4_K
GROUPS = 8
GROUP = 32


def quantize(weight: Any, kind: str) -> Any:
    """fp32 [rows, columns] -> the bytes of each row in the type `kind`. Blocks must divide the columns."""
    import gguf
    from gguf.quants import quantize as quantize_simple

    return quantize_q4_k(weight) if kind == "Q4_K" else quantize_simple(weight, gguf.GGMLQuantizationType[kind])


def quantize_q4_k(weight: Any) -> Any:
    """fp32 [rows, columns] -> the blocks of Q4_K, uint8 [rows, bytes]. Columns must be a multiple of 256.

    A group's 32 weights are scale * q - minimum with q from 0 to 15. Of the 8 scales and minimums of a block, 6 bits
    each are multiples of two fp16 numbers.
    """
    groups = weight.reshape(-1, GROUPS, GROUP)
    minimums = np.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + minimums) / 15
    (d, scale_steps) = _six_bits(scales)
    (dmin, minimum_steps) = _six_bits(minimums)
    step = d * scale_steps
    base = dmin * minimum_steps
    q = (groups + base[..., None]) / np.where(step == 0, 1, step)[..., None]
    q = np.clip(np.rint(q), 0, 15).astype(np.uint8)
    packed = np.concatenate([_fp16(d), _fp16(dmin), _packed_steps(scale_steps, minimum_steps), _nibbles(q)], axis=-1)
    return packed.reshape(len(weight), -1)


def _six_bits(values: Any) -> tuple[Any, Any]:
    """Values [blocks, 8] of at least 0 as d * steps, with d fp16 [blocks, 1] as fp32 and steps from 0 to 63."""
    d = (values.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    steps = np.rint(values / np.where(d == 0, 1, d)).clip(0, 63)
    return d, steps


def _fp16(values: Any) -> Any:
    return values.astype(np.float16).view(np.uint8)


def _packed_steps(scales: Any, minimums: Any) -> Any:
    """Twelve bytes [blocks, 12]: see `ops.packed_weights`, which reads them."""
    scales = scales.astype(np.uint8)
    minimums = minimums.astype(np.uint8)
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4], axis=-1)


def _nibbles(q: Any) -> Any:
    """[blocks, 8, 32] -> [blocks, 128]: two neighbouring groups share 32 bytes."""
    pairs = q.reshape(-1, GROUPS // 2, 2, GROUP)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(q), -1)
