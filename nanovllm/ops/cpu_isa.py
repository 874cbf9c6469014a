"""The instruction sets of the CPU kernels that this machine supports."""

from __future__ import annotations

from functools import cache

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops import _cpu_kernels

KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@cache
def instruction_sets() -> tuple[str, ...]:
    """The subset of "avx512bf16", "avx512", "avx2" and "portable" that this machine supports, best first.

    The environment variable NANOVLLM_CPU_ISA sets the best one to use; ConfigError if the machine does not support it.
    """
    try:
        return tuple(_cpu_kernels.instruction_sets())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def choose(isa: str | None = None) -> str:
    """`isa`, or the best one for None. Raises ValueError if this machine does not support `isa`."""
    available = instruction_sets()
    if isa is not None and isa not in available:
        raise ValueError(f"Instruction set {isa!r} does not run on this machine; choose one of {', '.join(available)}.")
    return isa or available[0]
