"""Linear layers on the CPU, in C++. The bits of a row depend only on the row, the weights and the instruction set.

csrc/cpu_linear.h documents the order of a sum. With few rows reading the weights determines the time, with many rows
the multiplication rate of the processor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels, cpu_isa

_DTYPES = cpu_isa.KERNEL_DTYPES
_HUGE_PAGE = 2 << 20


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `cpu_linear` supports this product: both on the CPU, of one dtype that the kernels support."""
    return x.is_cpu and weight.is_cpu and x.dtype == weight.dtype and x.dtype in _DTYPES


def cpu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    isa: str | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out], bfloat16, float16 or float32, without gradients. The GIL is released.

    x: rows may be strided, the elements of a row are contiguous; weight: [out, in] and bias: [out] or None, contiguous.
    Sums are fp32 and rounded once. `isa` is one of `cpu_isa.instruction_sets()`, by default the best. Raises ValueError
    for other arguments.
    """
    misfit = _misfit(x, weight, bias)
    if misfit is not None:
        raise ValueError(misfit)
    rows, (out_features, in_features) = x.shape[0], weight.shape
    y = x.new_empty(rows, out_features)
    _cpu_kernels.linear(
        isa=cpu_isa.choose(isa),
        dtype=_DTYPES[x.dtype],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_stride=out_features,
        rows=rows,
        in_features=in_features,
        out_features=out_features,
        threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    return y


def use_huge_pages(weight: Tensor) -> None:
    """Request huge pages for a large dense CPU tensor that has not been written yet.

    A product reads a few bytes of each of many rows in turn; with small pages, address translation takes longer than
    reading.
    """
    if weight.is_cpu and weight.nbytes >= _HUGE_PAGE and weight.is_contiguous():
        _cpu_kernels.use_huge_pages(weight.data_ptr(), weight.nbytes)


def _misfit(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """The error message for wrong arguments of `cpu_linear`, or None."""
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not tensor.is_cpu or tensor.dtype not in _DTYPES or tensor.dtype != x.dtype:
            return (
                "x, weight and bias must be on the CPU and all bfloat16, float16 or float32,"
                f" got {tensor.dtype} on {tensor.device}."
            )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.shape[1] == 0:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        return f"x must be [rows, in] and weight [out, in], in being positive, got {shapes}."
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be [{weight.shape[0]}] as weight has outputs, got {tuple(bias.shape)}."
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        return f"weight and bias must be contiguous, got a weight with strides {weight.stride()}."
    if x.stride()[1] != 1 and x.shape[1] > 1:
        return f"A row of x must be contiguous, got strides {x.stride()}."
    return None
