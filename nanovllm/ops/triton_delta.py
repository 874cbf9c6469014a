"""The operations of `recurrent_kernels` in Triton; those that torch runs in few launches are torch's.

A program keeps a tile of a state's columns in registers and takes the tokens of a run one by one, in the same order of
operations wherever the run begins.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows
from nanovllm.ops.torch_delta import NORM_EPS, sigmoid_gate_

__all__ = ["delta_inputs_", "delta_rule_", "gated_rms_norm", "sigmoid_gate_"]

COLUMNS_PER_PROGRAM = 8  # of a state, so that one sequence has programs for a whole GPU
CHANNELS_PER_PROGRAM = 256  # whose last inputs are kept


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "run_ptr", "conv_ptr"])
def _inputs_kernel(  # type: ignore[no-untyped-def]
    qk_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    x_ptr,
    weight_ptr,
    conv_ptr,
    b_ptr,
    a_ptr,
    rate_ptr,
    bias_ptr,
    slots_ptr,
    starts_ptr,
    run_ptr,
    x_stride,
    b_stride,
    a_stride,
    conv_stride,
    eps,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, head): the query heads first, then those of keys and of values, as the channels lie."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    run = tl.load(run_ptr + row)
    index = row - tl.load(starts_ptr + run)
    slot = tl.load(slots_ptr + run)
    is_value = head >= 2 * key_heads
    of_value = head - 2 * key_heads
    size = tl.where(is_value, value_dim, key_dim)
    column = tl.arange(0, BLOCK)
    mask = column < size
    first = tl.where(is_value, 2 * key_heads * key_dim + of_value * value_dim, head * key_dim)
    channel = first + column
    of_keys = 2 * key_heads * key_dim
    channels = of_keys + value_heads * value_dim
    position = index + tl.zeros((BLOCK,), dtype=tl.int64)  # conditions of masks are vectors, as the interpreter needs
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        in_run = position + tap >= KERNEL - 1
        at = x_ptr + (row + tap - (KERNEL - 1)) * x_stride + channel
        x = tl.load(at, mask=mask & in_run, other=0.0).to(tl.float32)
        kept = conv_ptr + slot * conv_stride + channel * (KERNEL - 1) + index + tap
        x += tl.load(kept, mask=mask & (position + tap < KERNEL - 1), other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + tap * channels + channel, mask=mask, other=0.0).to(tl.float32)
    y = (total / (1.0 + tl.exp(-total))).to(dtype)
    tl.store(v_ptr + (row * value_heads + of_value) * value_dim + column, y, mask=mask & (channel >= of_keys))
    wide = y.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) + eps)
    factor = tl.where(head < key_heads, 1.0 / tl.sqrt(key_dim.to(tl.float32)), 1.0)
    at_qk = qk_ptr + (row * 2 * key_heads + head) * key_dim + column
    tl.store(at_qk, wide * scale * factor, mask=mask & (channel < of_keys))
    step = tl.load(a_ptr + row * a_stride + of_value, mask=is_value, other=0.0).to(tl.float32)
    step += tl.load(bias_ptr + of_value, mask=is_value, other=0.0)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    rate = tl.load(rate_ptr + of_value, mask=is_value, other=0.0)
    tl.store(decay_ptr + row * value_heads + of_value, tl.exp(-rate * step), mask=is_value)
    share = tl.load(b_ptr + row * b_stride + of_value, mask=is_value, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-share))).to(dtype).to(tl.float32)
    tl.store(beta_ptr + row * value_heads + of_value, share, mask=is_value)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "conv_ptr"])
def _keep_kernel(  # type: ignore[no-untyped-def]
    conv_ptr,
    x_ptr,
    slots_ptr,
    starts_ptr,
    x_stride,
    conv_stride,
    channels,
    KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program (run, tile of channels): its last KEPT inputs, of which some may be in the slot already."""
    run = tl.program_id(0)
    begin, end = tl.load(starts_ptr + run), tl.load(starts_ptr + run + 1)
    tap = tl.arange(0, BLOCK_T)[None, :]
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[:, None]
    mask = (tap < KEPT) & (channel < channels)
    source = end - begin + tap  # in what was kept, and then the run
    slot = conv_ptr + tl.load(slots_ptr + run) * conv_stride + channel * KEPT
    old = tl.load(slot + source, mask=mask & (source < KEPT), other=0.0)
    new = tl.load(x_ptr + (begin + source - KEPT) * x_stride + channel, mask=mask & (source >= KEPT), other=0.0)
    tl.debug_barrier()  # no thread writes what another has yet to read
    tl.store(slot + tap, tl.where(source < KEPT, old, new), mask=mask)


def delta_inputs_(
    spec: RecurrentSpec,
    rows: StateRows,
    x: Tensor,
    weight: Tensor,
    conv: Tensor,
    b: Tensor,
    a: Tensor,
    decay: DecayWeights,
) -> DeltaInputs:
    count, heads = x.shape[0], spec.num_value_heads
    found = DeltaInputs.empty_for(spec, x)
    assert x.stride(1) == b.stride(1) == a.stride(1) == 1, "rows must be contiguous"
    assert conv[0].is_contiguous(), "what is in a slot must be contiguous"
    block = triton.next_power_of_2(max(spec.key_dim, spec.value_dim))
    _inputs_kernel[(count, 2 * spec.num_key_heads + heads)](
        *found, x, weight, conv, b, a, *decay, *rows, x.stride(0), b.stride(0), a.stride(0), conv.stride(0), NORM_EPS,
        spec.num_key_heads, heads, spec.key_dim, spec.value_dim, KERNEL=spec.conv_kernel, BLOCK=block, num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
    if spec.conv_kernel > 1:
        _keep_kernel[(len(rows.slots), triton.cdiv(spec.channels, CHANNELS_PER_PROGRAM))](
            conv, x, rows.slots, rows.starts, x.stride(0), conv.stride(0), spec.channels, KEPT=spec.conv_kernel - 1,
            BLOCK_T=triton.next_power_of_2(spec.conv_kernel - 1), BLOCK_C=CHANNELS_PER_PROGRAM, enable_fp_fusion=True,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "states_ptr"])
def _recurrence_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    qk_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    states_ptr,
    slots_ptr,
    starts_ptr,
    slot_stride,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile of columns, value head, run)."""
    head = tl.program_id(1)
    run = tl.program_id(2)
    of_key = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = of_key < key_dim, column < value_dim
    at = states_ptr + tl.load(slots_ptr + run) * slot_stride + head * key_dim * value_dim
    at_tile = at + of_key[:, None] * value_dim + column[None, :]
    mask = in_key[:, None] & in_value[None, :]
    state = tl.load(at_tile, mask=mask, other=0.0)
    key_head = head // (value_heads // key_heads)
    for row in range(tl.load(starts_ptr + run), tl.load(starts_ptr + run + 1)):
        at_q = qk_ptr + (row * 2 * key_heads + key_head) * key_dim + of_key
        q = tl.load(at_q, mask=in_key, other=0.0)[:, None]
        k = tl.load(at_q + key_heads * key_dim, mask=in_key, other=0.0)[:, None]
        at_v = (row * value_heads + head) * value_dim + column
        v = tl.load(v_ptr + at_v, mask=in_value, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + row * value_heads + head)
        beta = tl.load(beta_ptr + row * value_heads + head)
        state = state * decay
        delta = beta * (v - tl.sum(state * k, 0))
        state = state + k * delta[None, :]
        tl.store(y_ptr + at_v, tl.sum(state * q, 0).to(y_ptr.dtype.element_ty), mask=in_value)
    tl.store(at_tile, state, mask=mask)


def delta_rule_(spec: RecurrentSpec, rows: StateRows, inputs: DeltaInputs, states: Tensor) -> Tensor:
    y = inputs.v.new_empty(len(inputs.v), spec.value_size)
    assert states[0].is_contiguous(), "what is in a slot must be contiguous"
    grid = (triton.cdiv(spec.value_dim, COLUMNS_PER_PROGRAM), spec.num_value_heads, len(rows.slots))
    _recurrence_kernel[grid](
        y, *inputs, states, rows.slots, rows.starts, states.stride(0), spec.num_key_heads, spec.num_value_heads,
        spec.key_dim, spec.value_dim, BLOCK_K=triton.next_power_of_2(spec.key_dim), BLOCK_V=COLUMNS_PER_PROGRAM,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return y


@triton.jit
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    y_ptr, x_ptr, z_ptr, weight_ptr, size, eps, x_stride, z_stride, y_stride, BLOCK: tl.constexpr
):
    """Program (row, head). Rounds where the plain version does."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * size
    column = tl.arange(0, BLOCK)
    mask = column < size
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + first + column, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + first + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(dtype).to(tl.float32)
    normed = (scaled * weight).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * y_stride + first + column, (normed * (z / (1.0 + tl.exp(-z)))).to(dtype), mask=mask)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    (rows, width), size = x.shape, len(weight)
    assert x.stride(1) == z.stride(1) == 1, "rows must be contiguous"
    y = x.new_empty(rows, width)
    _gated_norm_kernel[(rows, width // size)](
        y, x, z, weight, size, eps, x.stride(0), z.stride(0), y.stride(0), BLOCK=triton.next_power_of_2(size),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return y
