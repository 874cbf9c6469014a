"""Products of many rows in fp8 by torch's library, with scales for rows or for groups of 128 inputs.

Inputs are rounded as `triton_packed.round_inputs` does. Whether the library has a product for this card, version of
torch and layout is tried once for each kind of scales and dtype, against fp64.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

GROUP = 128  # inputs of a scale, where there is more than one
ROW_MULTIPLE = SIZE_MULTIPLE = 16  # of rows, and of inputs and outputs
_CHECK_BOUND = 2e-2  # of the sum of the products' sizes, for results in 16 bits


def scaled_linear(x: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None, group_size: int) -> Tensor | None:
    """x W^T + b of 16-bit x [rows, in] rounded to fp8, or None if the library does not multiply this weight here.

    data: float8_e4m3fn [out, in]; scales: fp32 [out, groups]; group_size: inputs that share a scale.
    """
    (rows, in_features) = x.shape
    out_features = data.shape[0]
    grouped = group_size < in_features
    if (grouped and (group_size != GROUP or in_features % GROUP)) or in_features % SIZE_MULTIPLE:
        return None
    if out_features % SIZE_MULTIPLE or not library_multiplies(x.device, x.dtype, grouped):
        return None
    return _product(x, data, scales, bias, group_size)[:rows]


def _product(x: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None, group_size: int) -> Tensor:
    """[rows, in] -> [rows, out] and up to a multiple of ROW_MULTIPLE rows of arbitrary content."""
    from torch.nn.functional import ScalingType, scaled_mm

    from nanovllm.ops.triton_packed import round_inputs

    rounded, x_scales = round_inputs(x, group_size, ROW_MULTIPLE)
    if group_size < x.shape[1]:  # both with the scales of a group one after the other
        recipe = ScalingType.BlockWise1x128
        of_weight = scales.t().contiguous().t()
    else:
        recipe = ScalingType.RowWise
        x_scales = x_scales.flatten().unsqueeze(1)
        of_weight = scales.reshape(1, -1)
    return scaled_mm(rounded, data.t(), x_scales, recipe, of_weight, recipe, bias=bias, output_dtype=x.dtype)


@cache
def library_multiplies(device: torch.device, dtype: torch.dtype, grouped: bool) -> bool:
    """Whether the library's product with results in this dtype agrees with fp64, with scales for groups or for rows."""
    kind = "groups of inputs" if grouped else "rows"
    try:
        error = _error(device, dtype, GROUP if grouped else 3 * GROUP)
    except Exception as reason:  # which cards and layouts it has differs by version, and so do its errors
        logger.info("products in fp8 with scales for %s are not left to torch, which fails: %s", kind, reason)
        return False
    if error > _CHECK_BOUND:
        logger.warning("products in fp8 with scales for %s are not left to torch: their error is %g", kind, error)
    return error <= _CHECK_BOUND


def _error(device: torch.device, dtype: torch.dtype, group_size: int) -> float:
    """The largest error of a small product, of the sum of the sizes of its terms; NaN counts as infinite."""
    from nanovllm.ops.triton_packed import round_inputs

    rows = 133
    in_features = 3 * GROUP
    out_features = 2 * GROUP
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, in_features, generator=generator).to(device, dtype)
    data = torch.randn(out_features, in_features, generator=generator).to(device, torch.float8_e4m3fn)
    scales = (torch.rand(out_features, in_features // group_size, generator=generator) + 0.5).to(device)
    bias = torch.randn(out_features, generator=generator).to(device, dtype)
    product = _product(x, data, scales, bias, group_size)[:rows].double()
    rounded, x_scales = round_inputs(x, group_size)
    wide, weight = (
        values.double() * factors.double().repeat_interleave(group_size, dim=1)
        for values, factors in ((rounded, x_scales), (data, scales))
    )
    size = wide.abs() @ weight.abs().T + bias.double().abs()
    return float(((product - wide @ weight.T - bias.double()).abs() / size).nan_to_num(torch.inf).max())
