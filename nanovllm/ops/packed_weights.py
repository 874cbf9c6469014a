"""Weights of linear layers that stay quantised in memory: their layouts, their values, and products with them.

| scheme | values of a group | a weight |
|---|---|---|
| int4 | 4 bits, unsigned | (q - zero) * scale |
| int8 | 8 bits, signed | (q - zero) * scale |
| fp8 | float8_e4m3fn | q * scale |
| mxfp4 | float4_e2m1fn | q * 2^(scale - 127) |
| q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k | as in a GGUF file | as in llama.cpp |

Checkpoints of other layouts (GPTQ, AWQ, compressed-tensors) are converted to int4, int8 or fp8 at load, without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops import _cpu_kernels, gguf_planes, packed_panels
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES, address, choose
from nanovllm.ops.dequantized_product import dequantized_linear
from nanovllm.ops.packed_panels import HALF_BYTES
from nanovllm.ops.scaled_product import scaled_linear
from nanovllm.ops.triton_support import multiplies_fp8, use_triton

MXFP4_GROUP = 32  # inputs that share a scale
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by their bits
FP8_BLOCK = 128  # inputs that share a scale, where an fp8 weight has scales per block
_CHECKED_ROWS = 256  # of an fp8 weight at a time
_DEQUANTIZED_BYTES = 8 << 20  # of fp32 weights that a product in plain torch has at a time


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The quantised weight [out_features, in_features] of a linear layer. ValueError if the parts do not fit together.

    | scheme | data [out_features, bytes of a row] | scales [out_features, groups] | zeros [out_features, groups] |
    |---|---|---|---|
    | int4 | uint8, two inputs in a byte, the even one in the low half | bfloat16, float16, float32 | uint8, None: 8 |
    | int8 | int8 | bfloat16, float16, float32 | int8, None: 0 |
    | fp8 | float8_e4m3fn | float32 | None |
    | mxfp4 | as int4 | uint8 | None |
    | of GGUF | uint8, the bytes of the file | None | None |
    """

    scheme: str
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group_size: int  # inputs that share a scale
    in_features: int
    panel_outputs: int | None = None  # the out_features of a weight in panels (`in_panels`), None in other orders
    fp8_inputs: bool = False  # the checkpoint was made for inputs rounded to fp8; `packed_linear` says where they are
    planes: bool = False  # whether data is in planes (`in_planes`)
    # int32 zeros for weights in planes, which a product counts up and leaves at zero. None for some rows of a weight.
    arrivals: Tensor | None = None

    def __post_init__(self) -> None:
        is_as_stored = self.panel_outputs is None and not self.planes  # other orders come from parts that fit
        misfit = _misfit(self) if is_as_stored else None
        if misfit is not None:
            raise ValueError(misfit)

    @property
    def out_features(self) -> int:
        return self.data.shape[0] if self.panel_outputs is None else self.panel_outputs

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features], as of the dense weight."""
        return self.out_features, self.in_features

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """The bytes of data, scales and zeros."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """Data, scales and zeros, those that there are."""
        return [part for part in (self.data, self.scales, self.zeros) if part is not None]

    def read_from(self, parts: Sequence[Tensor]) -> PackedWeight:
        """The same weight with other `parts`, of the same order, shapes and dtypes, on any device."""
        (data, *others) = parts
        scales = None if self.scales is None else others[0]
        zeros = None if self.zeros is None else others[1]
        arrivals = self.arrivals
        if arrivals is not None and arrivals.device != data.device:
            arrivals = torch.zeros_like(arrivals, device=data.device)
        return replace(self, data=data, scales=scales, zeros=zeros, arrivals=arrivals)

    def to(self, device: torch.device | str) -> PackedWeight:
        data, scales, zeros = (
            None if part is None else part.to(device) for part in (self.data, self.scales, self.zeros)
        )
        assert data is not None
        return replace(self, data=data, scales=scales, zeros=zeros)

    def rows(self, index: slice | Tensor) -> PackedWeight:
        """The weight of some outputs, a slice or int64 [rows], never in panels. A slice shares memory if it can."""
        if self.panel_outputs is not None:
            return self._rows_of_panels(torch.arange(self.out_features)[index])
        scales, zeros = (None if part is None else part[index] for part in (self.scales, self.zeros))
        return replace(self, data=self.data[index], scales=scales, zeros=zeros, arrivals=None)

    def in_panels(self, in_place: bool = False) -> PackedWeight:
        """The same weight in the order in which the C++ kernel reads it; `packed_linear` rearranges others every time.

        It takes as much memory, rounded up to 16 outputs and 32 inputs. in_place: in the same memory where that is no
        more; this weight cannot be used then. Raises ValueError for fp8 weights that are NaN.
        """
        if self.panel_outputs is not None or not self.data.is_cpu:
            return self
        data = self.data.view(torch.uint8)
        if self.scheme == "fp8" and any(bool((part & 127 == 127).any()) for part in data.split(_CHECKED_ROWS)):
            raise ValueError("An fp8 weight is NaN, which the CPU kernel does not support.")
        parts = (self.scales, self.zeros)
        scales, zeros = (None if part is None else packed_panels.groups_to_panels(part) for part in parts)
        data = packed_panels.rows_to_panels(self.scheme, data, self.block_bytes, in_place)
        return replace(self, data=data, scales=scales, zeros=zeros, panel_outputs=self.out_features)

    def in_rows(self) -> PackedWeight:
        """The same weight in rows, the inverse of `in_panels` and `in_planes`."""
        if self.planes:
            data = gguf_planes.planes_to_rows(self.scheme, self.data, self.in_features)
            return replace(self, data=data, planes=False, arrivals=None)
        return self if self.panel_outputs is None else self.rows(slice(None))

    def for_kernels(self) -> PackedWeight:
        """The same weight in the order of the kernels of its device, in place: this weight cannot be used then."""
        if self.scheme in GGUF_BLOCKS and use_triton(self.data):
            return self.in_planes()
        return self.in_panels(in_place=True)

    def in_planes(self) -> PackedWeight:
        """The same weight of a GGUF scheme in the order in which the Triton kernels read it, `gguf_planes`.

        In the same memory where rows have room for it, as `gguf_planes.empty_rows` makes them; this weight cannot be
        used then.
        """
        if self.planes:
            return self
        data = gguf_planes.rows_to_planes(self.scheme, self.data, self.in_features)
        arrivals = torch.zeros(self.out_features, dtype=torch.int32, device=self.device)
        return replace(self, data=data, planes=True, arrivals=arrivals)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one output: of GGUF's blocks, else of 32 inputs."""
        block = GGUF_BLOCKS.get(self.scheme)
        return block.bytes if block else 16 if self.scheme in HALF_BYTES else 32

    def _rows_of_panels(self, outputs: Tensor) -> PackedWeight:
        data = packed_panels.panels_to_blocks(self.scheme, self.data, self.block_bytes, outputs)
        if self.scheme in GGUF_BLOCKS:
            data = data.flatten(1)
        else:
            row_bytes = self.in_features // 2 if self.scheme in HALF_BYTES else self.in_features
            data = packed_panels.blocks_to_rows(self.scheme, data, row_bytes).view(_DATA_DTYPES[self.scheme])
        parts = (self.scales, self.zeros)
        scales, zeros = (None if part is None else packed_panels.panels_to_groups(part, outputs) for part in parts)
        return replace(self, data=data, scales=scales, zeros=zeros, panel_outputs=None)


def gguf_weight(scheme: str, data: Tensor) -> PackedWeight:
    """The weight of a GGUF tensor: `scheme` is "q4_0" to "q6_k", data uint8 [out_features, bytes of a row]."""
    if scheme not in GGUF_BLOCKS:
        raise ValueError(f"Scheme must be one of {', '.join(GGUF_BLOCKS)}, got {scheme!r}.")
    block = GGUF_BLOCKS[scheme]
    row_bytes = data.shape[-1] if data.dim() == 2 else 0
    in_features = row_bytes // block.bytes * block.inputs
    return PackedWeight(scheme, data, None, None, block.group_size, in_features)


def pack_int4(q: Tensor) -> Tensor:
    """Values from 0 to 15, uint8 [out_features, in_features], as the data of scheme int4. In features must be even."""
    if q.dtype != torch.uint8 or q.dim() != 2 or q.shape[1] % 2:
        raise ValueError(f"q must be uint8 [out, in] with an even number of inputs, got {q.dtype} {tuple(q.shape)}.")
    return q[:, 0::2] | q[:, 1::2] << 4


def unpack_int4(data: Tensor) -> Tensor:
    """The values of `pack_int4`: uint8 [out_features, bytes of a row] -> uint8 [out_features, in_features]."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + b: [rows, in_features] -> [rows, out_features] of x's dtype. bias: [out_features] or None.

    out: memory for the result, whose rows may be strided.

    On the CPU the bits of a row depend on the row and the weight alone; csrc/cpu_packed.h says how it is computed. With
    `fp8_inputs` a GPU that multiplies fp8 rounds 16-bit x to fp8 (`triton_packed.round_inputs`); nothing else does.
    """
    _check_product(x, weight, bias)
    if weight.planes:
        return _gguf_linear(x, weight, bias, out)
    y = _row_linear(x, weight, bias)
    return y if out is None else out.copy_(y)


def _gguf_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """`packed_linear` with a weight in planes."""
    from nanovllm.ops import triton_gguf

    if x.shape[0] <= triton_gguf.MOST_ROWS:
        return triton_gguf.gguf_linear(x, weight, bias, out)
    return dequantized_linear(x, weight, bias, triton_gguf.gguf_dequantize_, out)


def _row_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """`packed_linear` with a weight in another order."""
    if x.is_cpu:
        return cpu_packed_linear(x, weight, bias)
    if weight.scales is not None and use_triton(x):
        fp8_inputs = weight.fp8_inputs and x.dtype != torch.float32 and multiplies_fp8(x.device)
        return triton_linear(x, weight, bias, fp8_inputs=fp8_inputs)
    y = x.new_empty(x.shape[0], weight.out_features)
    wide = x.float()
    count = max(1, _DEQUANTIZED_BYTES // (4 * weight.in_features))
    for begin in range(0, weight.out_features, count):
        part = slice(begin, begin + count)
        y[:, part] = F.linear(wide, dequantize(weight.rows(part)), None if bias is None else bias[part].float())
    return y


def triton_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, fp8_inputs: bool = False) -> Tensor:
    """`packed_linear` on a GPU, of int4, int8, fp8 and mxfp4. Few rows are multiplied with the packed weight; torch
    multiplies many rows with the weight's values in their dtype.

    fp8_inputs: whether x, in 16 bits, may be rounded to fp8. Many rows are rounded where torch's library multiplies fp8
    with such scales.
    """
    from nanovllm.ops import triton_packed

    parts = _parts(weight)
    if x.shape[0] <= triton_packed.MOST_ROWS:
        return triton_packed.packed_linear(x, *parts, bias, fp8_inputs=fp8_inputs)
    _, data, scales, _, group_size = parts
    y = scaled_linear(x, data, scales, bias, group_size) if fp8_inputs else None
    if y is not None:
        return y
    return dequantized_linear(x, weight, bias, lambda some, out: triton_packed.dequantize_(out, *_parts(some)))


def _parts(weight: PackedWeight) -> tuple[str, Tensor, Tensor, Tensor | None, int]:
    """The parts of a weight whose scales are not in its data, as `triton_packed` takes them."""
    assert weight.scales is not None, weight.scheme
    return weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size


def cpu_packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    isa: str | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """`packed_linear` on the CPU by the C++ kernel; all instruction sets give the same bits. The GIL is released."""
    if x.stride()[1] != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    weight = weight.in_panels()
    y = x.new_empty(x.shape[0], weight.out_features)
    _cpu_kernels.packed_linear(
        isa=choose(isa, "packed"), dtype=KERNEL_DTYPES[x.dtype], x=address(x), weight=kernel_weight(weight),
        bias=0 if bias is None else bias.data_ptr(), y=address(y), rows=x.shape[0],
        threads=torch.get_num_threads() if num_threads is None else num_threads,
    )  # fmt: skip
    return y


def kernel_weight(weight: PackedWeight) -> _cpu_kernels.PackedWeight:
    """A weight in panels as the C++ kernel takes it; valid as long as `weight` lives."""
    scales = weight.scales
    zeros = weight.zeros
    return _cpu_kernels.PackedWeight(
        scheme=weight.scheme, data=weight.data.data_ptr(), scales=0 if scales is None else scales.data_ptr(),
        scale_dtype="float32" if scales is None or weight.scheme == "mxfp4" else KERNEL_DTYPES[scales.dtype],
        zeros=0 if zeros is None else zeros.data_ptr(), outputs_per_scale=1, group_size=weight.group_size,
        in_features=weight.in_features, out_features=weight.out_features,
    )  # fmt: skip


def dequantize(weight: PackedWeight) -> Tensor:
    """The weight in fp32, [out_features, in_features]: the formulas of the formats, one rounding after each operation.

    The GGUF schemes give the bits of the `gguf` package.
    """
    weight = weight.in_rows()
    if weight.scheme in GGUF_BLOCKS:
        block = GGUF_BLOCKS[weight.scheme]
        blocks = weight.data.unflatten(-1, (-1, block.bytes))
        return block.dequantize(blocks).reshape(weight.shape)
    assert weight.scales is not None
    q = unpack_int4(weight.data) if weight.scheme in HALF_BYTES else weight.data
    columns = torch.arange(weight.in_features, device=weight.device) // weight.group_size
    if weight.scheme == "mxfp4":
        numbers = torch.tensor(FP4_NUMBERS, device=weight.device)
        return numbers[q.long()] * powers_of_two(weight.scales)[:, columns]
    scales = weight.scales[:, columns].float()
    if weight.scheme == "fp8":
        return q.float() * scales
    zeros = float(_DEFAULT_ZEROS[weight.scheme]) if weight.zeros is None else weight.zeros[:, columns].float()
    return (q.float() - zeros) * scales


def dequantized_rows(weight: PackedWeight, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of the weight, rounded to dtype: int64 [n] -> [n, in_features]."""
    if not weight.planes:
        return dequantize(weight.rows(indices)).to(dtype)
    from nanovllm.ops.triton_gguf import gguf_dequantize_

    rows = torch.empty(len(indices), weight.in_features, dtype=dtype, device=weight.device)
    return gguf_dequantize_(weight, rows, indices)


def powers_of_two(codes: Tensor) -> Tensor:
    """2^(code - 127) of codes 0 to 254, uint8, in fp32; the first is subnormal. The codes are those of e8m0."""
    bits = torch.where(codes > 0, codes.int() << 23, 1 << 22)
    return bits.int().view(torch.float32)


# ---- the blocks of GGUF; llama.cpp documents them in ggml-common.h


def _halves(data: Tensor) -> Tensor:
    """fp16 of bytes [..., 2] as fp32 [..., 1]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[..., bytes] -> [..., 2 * bytes]: the low halves of all bytes, then the high halves."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., :2]) * (_nibbles(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., :2]) * _nibbles(blocks[..., 4:]).float() + _halves(blocks[..., 2:4])


def _five_bits(blocks: Tensor) -> Tensor:
    """[..., 20] -> [..., 32]: bit i of the first four bytes is the fifth bit of number i, whose others follow."""
    fifths = torch.stack([blocks[..., :4] >> bit & 1 for bit in range(8)], dim=-1).flatten(-2)
    return _nibbles(blocks[..., 4:]) | fifths << 4


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., :2]) * (_five_bits(blocks[..., 2:]).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., :2]) * _five_bits(blocks[..., 4:]).float() + _halves(blocks[..., 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).float()


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups of a block of Q4_K or Q5_K, fp32 [..., 8, 1].

    The 6 bits of each are in 12 bytes: those of the first four groups in bytes 0 to 7, of the others the low four bits
    in bytes 8 to 11 and the high two bits above those of the first four groups.
    """
    first = blocks[..., 4:8]
    second = blocks[..., 8:12]
    low = blocks[..., 12:16]
    scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, low >> 4 | second >> 6 << 4), dim=-1)
    d = _halves(blocks[..., :2])
    dmin = _halves(blocks[..., 2:4])
    return (d * scales.float()).unsqueeze(-1), (dmin * minimums.float()).unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    q = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return scales * q.float() - minimums


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = torch.stack([blocks[..., 16:48] >> bit & 1 for bit in range(8)], dim=-2)
    return scales * (low | high << 4).float() - minimums


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    two_bits = blocks[..., 128:192].unflatten(-1, (2, 32))
    high = torch.stack([two_bits >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
    q = (low | high << 4).float() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return (_halves(blocks[..., 208:210]) * scales).unsqueeze(-1) * q.unflatten(-1, (16, 16))


@dataclass(frozen=True, slots=True)
class GgufBlock:
    """How a scheme of GGUF stores so many inputs of one output."""

    inputs: int
    bytes: int
    group_size: int
    dequantize: Callable[[Tensor], Tensor]  # uint8 [..., bytes] -> fp32 [..., inputs] or [..., groups, group_size]


GGUF_BLOCKS = {
    "q4_0": GgufBlock(32, 18, 32, _q4_0),
    "q4_1": GgufBlock(32, 20, 32, _q4_1),
    "q5_0": GgufBlock(32, 22, 32, _q5_0),
    "q5_1": GgufBlock(32, 24, 32, _q5_1),
    "q8_0": GgufBlock(32, 34, 32, _q8_0),
    "q4_k": GgufBlock(256, 144, 32, _q4_k),
    "q5_k": GgufBlock(256, 176, 32, _q5_k),
    "q6_k": GgufBlock(256, 210, 16, _q6_k),
}

# ---- checks

SCHEMES = ("int4", "int8", "fp8", "mxfp4", *GGUF_BLOCKS)
_DATA_DTYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}
_DEFAULT_ZEROS = {"int4": 8, "int8": 0}


def _misfit(weight: PackedWeight) -> str | None:
    """The error message for parts that do not fit together, or None."""
    scheme = weight.scheme
    data = weight.data
    (outputs, inputs) = weight.shape
    if scheme not in SCHEMES:
        return f"Scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}."
    if weight.group_size < 1 or inputs < 1:
        return f"Inputs and group size must be positive, got {inputs} and {weight.group_size}."
    block = GGUF_BLOCKS.get(scheme)
    groups = -(-inputs // weight.group_size)
    unit = block.inputs if block else MXFP4_GROUP if scheme == "mxfp4" else 2 if scheme == "int4" else 1
    row_bytes = inputs // unit * block.bytes if block else inputs // (2 if scheme in HALF_BYTES else 1)
    if data.shape != (outputs, row_bytes) or inputs % unit or data.dtype != _DATA_DTYPES.get(scheme, torch.uint8):
        return f"{inputs} inputs of {scheme} do not fit data {_described(data)}."
    if block is not None:
        fits = weight.group_size == block.group_size and weight.scales is None and weight.zeros is None
        return None if fits else f"{scheme} has groups of {block.group_size} with their scales in the data, only."
    if scheme == "mxfp4" and (weight.group_size != MXFP4_GROUP or weight.zeros is not None):
        return f"Groups of mxfp4 have {MXFP4_GROUP} inputs and no zeros, got {weight.group_size}."
    if weight.group_size != inputs and weight.group_size % (FP8_BLOCK if scheme == "fp8" else 32):
        return f"Groups of {scheme} have a multiple of 32 inputs, of fp8 of 128, or all, got {weight.group_size}."
    scale_dtypes = {"fp8": {torch.float32}, "mxfp4": {torch.uint8}}.get(scheme, set(KERNEL_DTYPES))
    parts = [("scales", weight.scales, scale_dtypes), ("zeros", weight.zeros, {data.dtype} - {torch.float8_e4m3fn})]
    for name, part, dtypes in parts if weight.zeros is not None else parts[:1]:
        if part is None or part.shape != (outputs, groups) or part.dtype not in dtypes:
            allowed = " or ".join(str(dtype) for dtype in dtypes) or "absent"
            return f"The {name} of {scheme} must be {allowed} [{outputs}, {groups}], got {_described(part)}."
    return None


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _check_product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    if x.dtype not in KERNEL_DTYPES or x.dim() != 2 or x.shape[1] != weight.in_features or x.device != weight.device:
        raise ValueError(
            f"x must be bfloat16, float16 or float32 [rows, {weight.in_features}] on {weight.device}, got"
            f" {_described(x)} on {x.device}."
        )
    if bias is not None and (bias.shape != (weight.out_features,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(f"bias must be {x.dtype} [{weight.out_features}] on {x.device}, got {_described(bias)}.")
