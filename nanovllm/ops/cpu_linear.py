"""The linear layer on few bf16 rows on the CPU: the bits of torch's, at the speed at which weights can be read.

torch packs the weights anew in every call, which costs a decode step more than the products. This kernel reads them as
they are, and sums in the order in which torch sums many rows, so that a row's bits do not depend on how many there are.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops import _cpu_linear

MAX_ROWS = 24  # with more, packing the weights pays: torch is as fast at 24 to 32 rows (benchmarks/cpu_linear.py)
_PROBE_OUTPUTS = 64
_PROBE_BIAS = 2.0**-17  # about what rounding leaves of the probe's sums: a larger bias would round it away


def available() -> bool:
    """Whether this machine has the instructions."""
    return _cpu_linear.available()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `few_row_linear` takes this product, is the faster one, and gives the bits of F.linear on many rows.

    To torch a single output is another kind of product, with an order of its own.
    """
    return (
        x.is_cpu
        and x.shape[0] <= MAX_ROWS
        and weight.shape[0] > 1
        and _misfit(x, weight, bias) is None
        and available()
        and sums_like_torch(weight.shape[1], bias is not None)
    )


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_threads: int | None = None) -> Tensor:
    """x W^T + b: bf16 [rows, in] -> [rows, out], any number of rows. Knows no gradient; the GIL is released.

    x: rows may lie apart, but the elements of one must not; weight: [out, in] and bias: [out] or None, contiguous.
    Sums are fp32 and rounded once. Raises ValueError for other arguments, and on a machine without AVX512-bf16.
    """
    misfit = _misfit(x, weight, bias)
    if misfit is not None:
        raise ValueError(misfit)
    rows, (out_features, in_features) = x.shape[0], weight.shape
    y = x.new_empty(rows, out_features)
    _cpu_linear.few_row_linear(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_stride=out_features,
        rows=rows,
        in_features=in_features,
        out_features=out_features,
        sum_block=sum_block(in_features),
        threads=torch.get_num_threads() if num_threads is None else num_threads,
    )
    return y


@cache
def sums_like_torch(in_features: int, has_bias: bool) -> bool:
    """Whether F.linear, on the rows that are too many for this kernel, sums in this kernel's order; asked of it once.

    The sums of the data all but cancel, so that what is left of them is rounding, and another order shows at once.
    One shape speaks for all of its length: torch leaves such products to oneDNN, which with AVX512 cuts a sum at inputs
    that follow from its length alone, and distributes rows and outputs whole. Where torch would not leave them to it,
    `layers.linear` pads them.
    """
    rows, half = 2 * MAX_ROWS, -(-in_features // 2)
    generator = torch.Generator().manual_seed(in_features)
    x, weight = (torch.randn(n, half, generator=generator).bfloat16() for n in (rows, _PROBE_OUTPUTS))
    x = torch.cat((x, x), dim=1)[:, :in_features].contiguous()
    weight = torch.cat((weight, -weight), dim=1)[:, :in_features].contiguous()
    bias = (torch.randn(_PROBE_OUTPUTS, generator=generator) * _PROBE_BIAS).bfloat16() if has_bias else None
    ours, theirs = few_row_linear(x, weight, bias), F.linear(x, weight, bias)
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def sum_block(in_features: int) -> int:
    """Inputs that are summed from zero before they are added to the sum of those before: as oneDNN cuts a sum."""
    return 512 if in_features <= 1024 else 1024


def _misfit(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """What is wrong with the arguments of `few_row_linear`, in a sentence, or None."""
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not tensor.is_cpu or tensor.dtype != torch.bfloat16:
            return f"x, weight and bias must be bfloat16 on the CPU, got {tensor.dtype} on {tensor.device}."
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
