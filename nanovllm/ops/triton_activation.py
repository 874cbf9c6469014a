"""The activation of gated MLPs in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_PROGRAM = 1024


@triton.jit
def _silu_kernel(out_ptr, gate_up_ptr, size, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (activated * up).to(dtype), mask=mask)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """`layers.activation.silu_and_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if out.numel():
        assert gate_up.stride(1) == 1, "rows must be contiguous"
        _silu_kernel[(rows, triton.cdiv(size, COLUMNS_PER_PROGRAM))](
            out, gate_up, size, gate_up.stride(0), BLOCK=COLUMNS_PER_PROGRAM, enable_fp_fusion=True
        )
    return out
