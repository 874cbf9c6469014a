"""Packed weights of every scheme with random values, for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.ops.packed_weights import FP8_BLOCK, GGUF_BLOCKS, SCHEMES, PackedWeight, gguf_weight, pack_int4

# Where the fp16 numbers of a GGUF block are.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
    "q6_k": (208,),
}  # fmt: skip
LARGEST = {
    "q4_0": 8, "q4_1": 15, "q5_0": 16, "q5_1": 31, "q8_0": 128, "q4_k": 63 * 15, "q5_k": 63 * 31, "q6_k": 127 * 32,
}  # fmt: skip
# Variants of the schemes: the scheme, then what is special.
VARIANTS = (
    *GGUF_BLOCKS,
    "int4", "int4 zeros", "int4 float32 64", "int4 bfloat16 zeros 128", "int4 channel",
    "int8", "int8 zeros bfloat16", "int8 channel",
    "fp8 tensor", "fp8 channel", "fp8 blocks", "mxfp4",
)  # fmt: skip
assert {variant.split()[0] for variant in VARIANTS} == set(SCHEMES)


def input_multiple(variant: str) -> int:
    """Of which the inputs of this variant are a multiple."""
    scheme, *special = variant.split()
    if scheme in GGUF_BLOCKS:
        return GGUF_BLOCKS[scheme].inputs
    if scheme == "fp8":
        return 1
    return 2 if "channel" in special else max([32, *(int(word) for word in special if word.isdigit())])


def random_weight(variant: str, out_features: int, in_features: int, seed: int = 0) -> PackedWeight:
    """Weights of about 1 / sqrt(in_features): every value that the bits can have, with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = in_features**-0.5
    scheme, *special = variant.split()
    if scheme in GGUF_BLOCKS:
        return _gguf(scheme, out_features, in_features, size, generator)
    if scheme == "mxfp4":
        return _mxfp4(out_features, in_features, size, generator)
    if scheme == "fp8":
        return _fp8(special[0], out_features, in_features, size, generator)
    digits = [int(word) for word in special if word.isdigit()]
    group = in_features if "channel" in special else digits[0] if digits else 32
    bits = 4 if scheme == "int4" else 8
    q = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, generator=generator)
    data = pack_int4(q) if bits == 4 else q.view(torch.int8)
    dtype = next((getattr(torch, word) for word in special if word in ("float32", "bfloat16")), torch.float16)
    scales = torch.randn(out_features, in_features // group, generator=generator) * size / 2 ** (bits - 1)
    zeros = None
    if "zeros" in special:
        zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, generator=generator).view(data.dtype)
    return PackedWeight(scheme, data, scales.to(dtype), zeros, group, in_features)


def _gguf(scheme: str, out_features: int, in_features: int, size: float, generator: torch.Generator) -> PackedWeight:
    block = GGUF_BLOCKS[scheme]
    shape = (out_features, in_features // block.inputs, block.bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in HALVES[scheme]:
        d = torch.randn(*shape[:2], 1, generator=generator) * size / LARGEST[scheme]
        data[..., at : at + 2] = d.half().view(torch.uint8)
    return gguf_weight(scheme, data.flatten(1))


def _fp8(kind: str, out_features: int, in_features: int, size: float, generator: torch.Generator) -> PackedWeight:
    bits = torch.randint(0, 256, (out_features, in_features), dtype=torch.uint8, generator=generator)
    bits[bits & 127 == 127] -= 1  # NaN
    outputs = {"tensor": out_features, "channel": 1, "blocks": FP8_BLOCK}[kind]  # that share a scale
    shape = (-(-out_features // outputs), -(-in_features // FP8_BLOCK) if kind == "blocks" else 1)
    scales = (torch.randn(shape, generator=generator) * size / 448).repeat_interleave(outputs, dim=0)[:out_features]
    group = FP8_BLOCK if kind == "blocks" else in_features
    return PackedWeight("fp8", bits.view(torch.float8_e4m3fn), scales, None, group, in_features)


def _mxfp4(out_features: int, in_features: int, size: float, generator: torch.Generator) -> PackedWeight:
    """Some groups have the smallest scales, of which two are subnormal."""
    data = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(-3, 1, (out_features, in_features // 32), generator=generator)
    scales = exponents + (127 + round(math.log2(size)))
    scales.flatten()[::7] = torch.arange(len(scales.flatten()[::7])) % 3
    return PackedWeight("mxfp4", data, scales.to(torch.uint8), None, 32, in_features)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    as_int = torch.int32 if ours.dtype == torch.float32 else torch.int16
    return ours.shape == theirs.shape and torch.equal(ours.contiguous().view(as_int), theirs.contiguous().view(as_int))
