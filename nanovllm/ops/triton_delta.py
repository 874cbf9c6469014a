"""The operations of `recurrent_kernels` in Triton; those that torch runs in few launches are torch's.

Whole chunks of RECURRENT_CHUNK tokens, counted from a sequence's first, are computed as products of matrices
(`triton_delta_chunks`). Elsewhere a program keeps a tile of a state's columns in registers and takes tokens one by one,
in the same order of operations wherever the run begins. So a state depends on the tokens and on which chunks were whole
in a part of a step, but not on where the other rows were cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows
from nanovllm.ops.torch_delta import NORM_EPS, sigmoid_gate_
from nanovllm.ops.triton_delta_chunks import advance_chunks_, takes_chunks

__all__ = ["delta_inputs_", "delta_rule_", "gated_rms_norm", "sigmoid_gate_"]

COLUMNS_PER_PROGRAM = 8  # of a state, so that one sequence has programs for a whole GPU
ROWS_PER_PROGRAM = 4  # a warp for each: of rows of a head, and of pairs of a row and a head that are normalised
CHANNELS_PER_PROGRAM = 256  # whose last inputs are kept


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "run_ptr", "conv_ptr"]
)
def _inputs_kernel(  # type: ignore[no-untyped-def]
    qk_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    scale_ptr,
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
    rows,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Program (tile of rows, head): the query heads first, then those of keys and of values, as the channels lie.

    ONE_ROW: each run is one row, so that no other program needs what this one keeps of its channels.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    in_rows = row < rows
    run = row
    index = row * 0
    if not ONE_ROW:
        run = tl.load(run_ptr + row, mask=in_rows, other=0)
        index = row - tl.load(starts_ptr + run, mask=in_rows, other=0)
    slot = tl.load(slots_ptr + run, mask=in_rows, other=-1)
    is_value = head >= 2 * key_heads
    of_value = head - 2 * key_heads
    size = tl.where(is_value, value_dim, key_dim)
    column = tl.arange(0, BLOCK)
    mask = in_rows[:, None] & (column < size)[None, :]
    has_slot = mask & (slot >= 0)[:, None]
    first = tl.where(is_value, 2 * key_heads * key_dim + of_value * value_dim, head * key_dim)
    channel = first + column
    of_keys = 2 * key_heads * key_dim
    channels = of_keys + value_heads * value_dim
    is_key_channel = mask & (channel < of_keys)[None, :]
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        in_run = (index + tap >= KERNEL - 1)[:, None]
        at = x_ptr + (row + tap - (KERNEL - 1))[:, None] * x_stride + channel[None, :]
        x = tl.load(at, mask=mask & in_run, other=0.0).to(tl.float32)
        of_row = (slot * conv_stride + index + tap)[:, None]
        kept = conv_ptr + of_row + (channel * (KERNEL - 1))[None, :]
        x += tl.load(kept, mask=has_slot & (index + tap < KERNEL - 1)[:, None], other=0.0).to(tl.float32)
        if ONE_ROW and tap > 0:
            tl.store(kept - 1, x.to(dtype), mask=has_slot)  # by the thread that has read it
        weight = tl.load(weight_ptr + tap * channels + channel, mask=column < size, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    y = (total / (1.0 + tl.exp(-total))).to(dtype)
    at_v = v_ptr + (row * value_heads + of_value)[:, None] * value_dim + column[None, :]
    tl.store(at_v, y, mask=mask & (channel >= of_keys)[None, :])
    at_head = row * 2 * key_heads + head
    tl.store(qk_ptr + at_head[:, None] * key_dim + column[None, :], y, mask=is_key_channel)
    wide = y.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + eps)
    scale *= tl.where(head < key_heads, 1.0 / tl.sqrt(key_dim.to(tl.float32)), 1.0)
    tl.store(scale_ptr + at_head, scale, mask=in_rows & (row * 0 + head < 2 * key_heads))
    in_values = in_rows & (row * 0 + head >= 2 * key_heads)
    at_value = row * value_heads + of_value
    step = tl.load(a_ptr + row * a_stride + of_value, mask=in_values, other=0.0).to(tl.float32)
    step += tl.load(bias_ptr + of_value, mask=is_value, other=0.0)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    rate = tl.load(rate_ptr + of_value, mask=is_value, other=0.0)
    tl.store(decay_ptr + at_value, tl.exp(-rate * step), mask=in_values)
    share = tl.load(b_ptr + row * b_stride + of_value, mask=in_values, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-share))).to(dtype).to(tl.float32)
    tl.store(beta_ptr + at_value, share, mask=in_values)


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
    begin = tl.load(starts_ptr + run)
    end = tl.load(starts_ptr + run + 1)
    tap = tl.arange(0, BLOCK_T)[None, :]
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[:, None]
    number = tl.load(slots_ptr + run)
    mask = (tap < KEPT) & (channel < channels) & (number + tap >= tap)
    source = end - begin + tap  # in what was kept, and then the run
    slot = conv_ptr + number * conv_stride + channel * KEPT
    old = tl.load(slot + source, mask=mask & (source < KEPT), other=0.0)
    new = tl.load(x_ptr + (begin + source - KEPT) * x_stride + channel, mask=mask & (source >= KEPT), other=0.0)
    tl.debug_barrier()  # no thread writes what another has yet to read
    tl.store(slot + tap, tl.where(source < KEPT, old, new), mask=mask)


def empty_inputs(spec: RecurrentSpec, x: Tensor) -> DeltaInputs:
    """Memory for the inputs of the rows of x, with q and k as they were convolved."""
    keys = (len(x), 2, spec.num_key_heads)
    of_values = (len(x), spec.num_value_heads)
    decay, beta, scale = (x.new_empty(size, dtype=torch.float32) for size in (of_values, of_values, keys))
    return DeltaInputs(x.new_empty(*keys, spec.key_dim), x.new_empty(*of_values, spec.value_dim), decay, beta, scale)


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
    count = x.shape[0]
    heads = spec.num_value_heads
    assert x.stride(1) == b.stride(1) == a.stride(1) == 1, "rows must be contiguous"
    assert conv[0].is_contiguous(), "what is in a slot must be contiguous"
    inputs = empty_inputs(spec, x)
    one_row = len(rows.slots) == count
    tile = 1 if one_row else ROWS_PER_PROGRAM  # a warp for each row, and so the same order of sums
    _inputs_kernel[(triton.cdiv(count, tile), 2 * spec.num_key_heads + heads)](
        *inputs, x, weight, conv, b, a, *decay, *rows[:3], x.stride(0), b.stride(0), a.stride(0), conv.stride(0),
        NORM_EPS, count, spec.num_key_heads, heads, spec.key_dim, spec.value_dim, KERNEL=spec.conv_kernel,
        BLOCK=triton.next_power_of_2(max(spec.key_dim, spec.value_dim)), ROWS=tile, ONE_ROW=one_row, num_warps=tile,
        enable_fp_fusion=True,
    )  # fmt: skip
    if spec.conv_kernel > 1 and not one_row:
        _keep_kernel[(len(rows.slots), triton.cdiv(spec.channels, CHANNELS_PER_PROGRAM))](
            conv, x, rows.slots, rows.starts, x.stride(0), conv.stride(0), spec.channels, KEPT=spec.conv_kernel - 1,
            BLOCK_T=triton.next_power_of_2(spec.conv_kernel - 1), BLOCK_C=CHANNELS_PER_PROGRAM, enable_fp_fusion=True,
        )  # fmt: skip
    return inputs


@triton.jit
def _inputs_of_row(  # type: ignore[no-untyped-def]
    qk_ptr, scale_ptr, v_ptr, decay_ptr, beta_ptr, row, key_head, head, of_key, column, in_key, in_value, key_heads,
    value_heads, key_dim, value_dim,
):  # fmt: skip
    """q and k, normalised, v, decay and beta of a row, for a head and some columns."""
    at_head = row * 2 * key_heads + key_head
    at_q = qk_ptr + at_head * key_dim + of_key
    q = tl.load(at_q, mask=in_key, other=0.0).to(tl.float32) * tl.load(scale_ptr + at_head)
    k = tl.load(at_q + key_heads * key_dim, mask=in_key, other=0.0).to(tl.float32)
    k *= tl.load(scale_ptr + at_head + key_heads)
    at_value = row * value_heads + head
    v = tl.load(v_ptr + at_value * value_dim + column, mask=in_value, other=0.0).to(tl.float32)
    return q, k, v, tl.load(decay_ptr + at_value), tl.load(beta_ptr + at_value)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "begins_ptr", "ends_ptr", "states_ptr"])
def _recurrence_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    qk_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    scale_ptr,
    states_ptr,
    slots_ptr,
    begins_ptr,
    ends_ptr,
    slot_stride,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile of columns, value head, run): its rows from its begin to before its end, one after the other."""
    head = tl.program_id(1)
    run = tl.program_id(2)
    begin = tl.load(begins_ptr + run)
    end = tl.load(ends_ptr + run)
    if begin < end:
        of_key = tl.arange(0, BLOCK_K)
        column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_key = of_key < key_dim
        in_value = column < value_dim
        slot = tl.load(slots_ptr + run)
        at = states_ptr + slot * slot_stride + head * key_dim * value_dim
        at_tile = at + of_key[:, None] * value_dim + column[None, :]
        mask = in_key[:, None] & in_value[None, :] & (slot + of_key >= of_key)[:, None]
        state = tl.load(at_tile, mask=mask, other=0.0)
        key_head = head // (value_heads // key_heads)
        q, k, v, decay, beta = _inputs_of_row(
            qk_ptr, scale_ptr, v_ptr, decay_ptr, beta_ptr, begin, key_head, head, of_key, column, in_key, in_value,
            key_heads, value_heads, key_dim, value_dim,
        )  # fmt: skip
        for row in range(begin, end):
            next_q, next_k, next_v, next_decay, next_beta = _inputs_of_row(  # on their way while this row is computed
                qk_ptr, scale_ptr, v_ptr, decay_ptr, beta_ptr, tl.minimum(row + 1, end - 1), key_head, head, of_key,
                column, in_key, in_value, key_heads, value_heads, key_dim, value_dim,
            )  # fmt: skip
            state = state * decay
            delta = beta * (v - tl.sum(state * k[:, None], 0))
            state = state + k[:, None] * delta[None, :]
            y = tl.sum(state * q[:, None], 0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + (row * value_heads + head) * value_dim + column, y, mask=in_value)
            q = next_q
            k = next_k
            v = next_v
            decay = next_decay
            beta = next_beta
        tl.store(at_tile, state, mask=mask)


def delta_rule_(spec: RecurrentSpec, rows: StateRows, inputs: DeltaInputs, states: Tensor) -> Tensor:
    y = inputs.v.new_empty(len(inputs.v), spec.value_size)
    assert states[0].is_contiguous(), "what is in a slot must be contiguous"
    grid = (triton.cdiv(spec.value_dim, COLUMNS_PER_PROGRAM), spec.num_value_heads, len(rows.slots))

    def one_by_one(begins: Tensor, ends: Tensor) -> None:
        _recurrence_kernel[grid](
            y, *inputs, states, rows.slots, begins, ends, states.stride(0), spec.num_key_heads, spec.num_value_heads,
            spec.key_dim, spec.value_dim, BLOCK_K=triton.next_power_of_2(spec.key_dim), BLOCK_V=COLUMNS_PER_PROGRAM,
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip

    begins = rows.starts[:-1]
    ends = rows.starts[1:]
    chunks = rows.chunks
    if chunks is None or not takes_chunks(spec):
        one_by_one(begins, ends)
        return y
    if chunks.any_before:
        one_by_one(begins, chunks.begins)
    advance_chunks_(spec, rows, chunks, inputs, states, y)
    if chunks.any_after:
        one_by_one(chunks.ends, ends)
    return y


@triton.jit(do_not_specialize=["pairs"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    y_ptr, x_ptr, z_ptr, weight_ptr, pairs, heads, size, eps, x_stride, z_stride, y_stride, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (tile of pairs of a row and a head). Rounds where the plain version does."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row = pair // heads
    column = tl.arange(0, BLOCK)
    at = (pair % heads * size)[:, None] + column[None, :]
    mask = (pair < pairs)[:, None] & (column < size)[None, :]
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + (row * x_stride)[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + (row * z_stride)[:, None] + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    scaled = (x * tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]).to(dtype).to(tl.float32)
    normed = (scaled * weight[None, :]).to(dtype).to(tl.float32)
    y = (normed * (z / (1.0 + tl.exp(-z)))).to(dtype)
    tl.store(y_ptr + (row * y_stride)[:, None] + at, y, mask=mask)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    (rows, width) = x.shape
    size = len(weight)
    assert x.stride(1) == z.stride(1) == 1, "rows must be contiguous"
    y = x.new_empty(rows, width)
    heads = width // size
    _gated_norm_kernel[(triton.cdiv(rows * heads, ROWS_PER_PROGRAM),)](
        y, x, z, weight, rows * heads, heads, size, eps, x.stride(0), z.stride(0), y.stride(0), PAIRS=ROWS_PER_PROGRAM,
        BLOCK=triton.next_power_of_2(size), num_warps=ROWS_PER_PROGRAM, enable_fp_fusion=True,
    )  # fmt: skip
    return y
