"""How Triton kernels turn the bytes of packed weights into numbers: int4, int8, fp8 and mxfp4.

Numbers without their scale are exact in bf16, fp16 and fp32. A GPU need not have a type for fp8, which is decoded from
its bytes. The layouts are those of `packed_weights.PackedWeight`.

Four bytes are unpacked at a time, in one register of 32 bits, into two registers of two 16-bit numbers: the compiler
would take each byte by itself, which takes more instructions than a memory-bound product has time for. Integers become
the low bits of the mantissa of a larger number, which is then subtracted; floats are moved to their places, and a power
of two makes good what the exponent differs by.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCHEMES = ("int4", "int8", "fp8", "mxfp4")


@triton.jit
def unpack(data, zeros, SCHEME: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of tiles of one group, without their scale: [outputs, bytes] -> [outputs, inputs] of dtype.

    data: bytes, signed or not; zeros: [outputs], as stored, or None for the scheme's own; dtype: bf16, fp16 or fp32.
    """
    if SCHEME == "int4" or SCHEME == "mxfp4":  # a byte holds two inputs, the even one in the low half
        even, odd = unpack_halves(data, zeros, SCHEME, dtype)
        values = tl.interleave(even, odd)
    else:
        values = _numbers(data, zeros, SCHEME, False, dtype)
    return values


@triton.jit
def unpack_halves(data, zeros, SCHEME: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`unpack` of a scheme with two inputs in a byte: the even ones and the odd ones, [outputs, bytes] each."""
    return _numbers(data, zeros, SCHEME, False, dtype), _numbers(data, zeros, SCHEME, True, dtype)


@triton.jit
def unpack_scales(scales, SCHEME: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factors of `unpack` in fp32, from scales as they are stored."""
    if SCHEME == "mxfp4":
        factors = _power_of_two(scales)
    elif scales.dtype == tl.bfloat16:
        # By its bits: LLVM would narrow a product with a widened bf16 number that is rounded to fp16 to one of fp16
        # numbers, to which small scales are then rounded first.
        factors = (scales.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        factors = scales.to(tl.float32)
    return factors


@triton.jit
def _power_of_two(codes):  # type: ignore[no-untyped-def]
    """2^(code - 127) of bytes; the first is subnormal."""
    code = codes.to(tl.int32)
    return tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(data, zeros, SCHEME: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in bytes, or in the low or the high halves of bytes. All are exact in fp16, from which fp32 comes."""
    narrow: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BF16: tl.constexpr = dtype == tl.bfloat16
    if SCHEME == "int4":  # 128 + q in bf16, 1024 + q in fp16
        exponent: tl.constexpr = 128.0 if BF16 else 1024.0
        values = _placed(data, _integers(BF16, HIGH, False), narrow) - _base(zeros, 8.0, exponent, narrow)
    elif SCHEME == "int8" and BF16:  # 128 + the low seven bits, minus 128 or 256 by the sign
        values = _placed(data, _bits_of_bytes(0x7F), narrow) - _placed(data, _bits_of_bytes(0x80), narrow)
        if zeros is not None:
            values -= zeros.to(narrow)[:, None]
    elif SCHEME == "int8":  # 1024 + 128 + q
        values = _placed(data, _integers(BF16, False, True), narrow) - _base(zeros, 0.0, 1152.0, narrow)
    else:
        values = _placed(data, _floats(SCHEME, BF16, HIGH), narrow) * _number(_float_factor(SCHEME, BF16), narrow)
    return values.to(dtype)


@triton.jit
def _placed(data, ASM: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16-bit numbers that the instructions make of bytes."""
    bits = tl.inline_asm_elementwise(ASM, "=r,=r,r", [data], dtype=tl.int16, is_pure=True, pack=4)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _base(zeros, own: tl.constexpr, offset: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is subtracted from placed integers: the scheme's own zero, or [outputs, 1] of zeros, plus the offset."""
    return _number(own + offset, dtype) if zeros is None else (zeros.to(tl.float32) + offset).to(dtype)[:, None]


@triton.jit
def _number(value: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """[1, 1], since the interpreter knows no other constants in bf16."""
    return tl.full((1, 1), value, tl.float32).to(dtype)


@triton.constexpr_function
def _integers(bf16: bool, high: bool, signed: bool) -> str:
    """Of four halves of bytes, or of bytes with their sign bit turned: q in the low bits of 128 or 1024."""
    exponent = "0x43434343" if bf16 else "0x64646464"
    shifted = "shr.b32 t, $2, 4;\nand.b32 t, t, 0x0F0F0F0F;" if high else "and.b32 t, $2, 0x0F0F0F0F;"
    first = "xor.b32 t, $2, 0x80808080;" if signed else shifted
    pairs = f"prmt.b32 $0, t, {exponent}, 0x4140;\nprmt.b32 $1, t, {exponent}, 0x4342;"
    return f"{{\n.reg .b32 t;\n{first}\n{pairs}\n}}"


@triton.constexpr_function
def _bits_of_bytes(mask: int) -> str:
    """128 of each byte and the bits of the mask, in bf16: added up to 127, and 256 for the top one alone."""
    lines = []
    for out, pair in (("$0", "0x4140"), ("$1", "0x4342")):  # bytes 0 and 1, then 2 and 3, with zeros above each
        lines += [f"prmt.b32 t, $2, 0, {pair};", f"and.b32 t, t, {mask * 0x10001:#010x};"]
        lines += [f"or.b32 {out}, t, 0x43004300;"]
    return "{\n.reg .b32 t;\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _floats(scheme: str, bf16: bool, high: bool) -> str:
    """The sign to the top, and the other bits of e4m3 or e2m1 to the end of the exponent and the mantissa's top."""
    e4m3 = scheme == "fp8"
    places = (4 if bf16 else 1) if e4m3 else (6 if bf16 else 3)
    mask = (0x7F007F00 if e4m3 else 0x70007000) >> places
    lines = ["shl.b32 w, $2, 4;" if not (e4m3 or high) else "mov.b32 w, $2;"]
    for out, pair in (("$0", "0x1404"), ("$1", "0x3424")):  # bytes 0 and 1, then 2 and 3, with zeros below each
        lines += [f"prmt.b32 s, w, 0, {pair};", f"shr.b32 t, s, {places};", f"and.b32 t, t, {mask:#010x};"]
        lines += ["and.b32 s, s, 0x80008000;", f"or.b32 {out}, s, t;"]
    return "{\n.reg .b32 w, s, t;\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _float_factor(scheme: str, bf16: bool) -> float:
    """The power of two by which placed floats are too small: what the exponents' biases differ by."""
    bias = 7 if scheme == "fp8" else 1
    return 2.0 ** ((127 if bf16 else 15) - bias)
