"""The few PTX instructions of the kernels' inline assembly, for Triton's interpreter, which has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Words = Any  # an array of uint32, or a number


def _permuted(low: Words, high: Words, selector: int) -> Words:
    """PTX's prmt: byte i of the result is that of the eight bytes which digit i of the selector names."""
    result: Words = 0
    for place in range(4):
        byte = selector >> 4 * place & 7
        word = low if byte < 4 else high
        result = result | (word >> 8 * (byte % 4) & 0xFF) << 8 * place
    return result


def _of_pairs(dtype: torch.dtype, compute: Callable[..., torch.Tensor]) -> Callable[..., Words]:
    """An instruction on two 16-bit floats in each word, whose result is rounded once."""

    def instruction(*operands: Words) -> Words:
        words = np.broadcast_arrays(*(np.asarray(operand, dtype=np.uint32) for operand in operands))
        pairs = [torch.from_numpy(np.ascontiguousarray(word).reshape(-1)).view(dtype).double() for word in words]
        made = compute(*pairs).to(dtype).view(torch.int32).numpy().view(np.uint32)
        return made.reshape(words[0].shape).astype(np.uint64)

    return instruction


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "sub.f16x2": _of_pairs(torch.float16, lambda a, b: a - b),
    "fma.rn.bf16x2": _of_pairs(torch.bfloat16, lambda a, b, c: a * b + c),
}


def computed(asm: str, *given: Words) -> tuple[Words, Words]:
    """The registers $0 and $1 that the instructions leave, from $2 and those after it, uint32 each. Raises KeyError for
    other instructions."""
    registers: dict[str, Words] = {f"${number}": words for number, words in enumerate(given, start=2)}
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", asm).split(";"):
        if line.strip():
            name, operands = line.split(maxsplit=1)
            target, *sources = (operand.strip() for operand in operands.split(","))
            values = [registers[source] if source in registers else int(source, 0) for source in sources]
            registers[target] = INSTRUCTIONS[name](*values)
    return registers["$0"], registers["$1"]


def install() -> None:
    """Let the interpreter compute inline assembly on four bytes at a time that makes 16-bit numbers."""
    from triton.language import int16
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_inline_asm(
        self: Any, asm: str, constraints: str, values: list[Any], types: Any, is_pure: bool, pack: int
    ) -> SimpleNamespace:
        assert (constraints, pack) == ("=r,=r" + ",r" * len(values), 4), "other assembly is not interpreted"
        words = [np.ascontiguousarray(value.data).view(np.uint32).astype(np.uint64) for value in values]
        pairs = [np.asarray(value + 0 * words[0], dtype=np.uint32) for value in computed(asm, *words)]
        made = np.stack(pairs, axis=-1).view(np.int16).reshape(values[0].data.shape)
        return SimpleNamespace(get_result=lambda index: TensorHandle(made, int16))

    InterpreterBuilder.create_inline_asm = create_inline_asm
