"""Integers of 4 or 8 bits that checkpoints pack into int32, as the data and zeros of `PackedWeight`."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.errors import ModelError
from nanovllm.ops.packed_weights import pack_int4, unpack_int4


def unpacked_last(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, values]: the values of a word from its low bits to its high ones."""
    values = packed.contiguous().view(torch.uint8)
    return unpack_int4(values) if bits == 4 else values


def packed_data(values: Tensor, bits: int) -> Tensor:
    """Unsigned values, uint8 [out, in], as the data of scheme int4, or of int8, which is signed."""
    return pack_int4(values) if bits == 4 else signed(values)


def zeros_of(values: Tensor, bits: int) -> Tensor:
    """Unsigned zero points, uint8 [out, groups], as the zeros of scheme int4 or int8."""
    return values if bits == 4 else signed(values)


def signed(values: Tensor) -> Tensor:
    """uint8 from 0 to 255 as int8 from -128 to 127: minus 128."""
    return (values ^ 128).view(torch.int8)


def exact_scales(scales: Tensor, dtype: str) -> Tensor:
    """The scales in another dtype. Raises ModelError if that would round one of them."""
    converted = scales.to(getattr(torch, dtype))
    if not torch.equal(converted.double(), scales.double()) and bool(scales.isfinite().all()):
        raise ModelError(f"a scale of {scales.dtype} does not fit into {dtype}; convert the scales in the checkpoint.")
    return converted


def check_group_order(g_idx: Tensor, group_size: int) -> None:
    """Raise ModelError unless each input belongs to the group of its position."""
    if not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group_size):
        raise ModelError(
            "the groups are ordered by activation (desc_act), which is not supported; quantize without act-order."
        )


def check_multiple(what: str, value: int, factor: int) -> None:
    """Raise ModelError unless the size is a multiple of the values in an int32."""
    if value % factor:
        raise ModelError(f"{what}={value} must be a multiple of {factor} in this format.")
