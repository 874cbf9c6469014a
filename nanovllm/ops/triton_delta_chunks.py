"""The gated delta rule over whole chunks of CHUNK tokens, as products of matrices, in Triton.

Within a chunk that begins with the state S, with d[i] the decays, D[i, j] the product of d[j + 1] to d[i], P[i] that of
d[0] to d[i] and E[i] that of what follows d[i] (no logarithm is taken and nothing divided, so a decay may be 0):

    A[i, j] = beta[i] D[i, j] k[i]·k[j]  for j < i             T = (1 + A)^-1 diag(beta)
    M[i, j] = D[i, j] q[i]·k[j]          for j <= i
    U = T (V - diag(P) K S)              what the tokens write
    Y = diag(P) Q S + M U                what they read
    S = P[last] S + (diag(E) K)^T U      the state after the chunk

T and M do not depend on the state: `_solve_kernel` computes them for all chunks at once, `_advance_kernel` takes the
columns of a state from chunk to chunk. T is applied to the difference V - diag(P) K S, not to its two terms apart: the
difference of the results would lose digits where keys repeat. Source: Yang et al., "Gated Delta Networks" (2024)
and "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).

In 16 bits q and k are what the convolution gave, exactly, times a factor for each row that is applied to the products;
other operands are sums of two numbers of 16 bits, so that products are exact to 2^-16 in bf16, and summed in fp32. In
fp32 they are products of tf32 in three parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.data.network import RECURRENT_CHUNK, RecurrentSpec
from nanovllm.ops.delta_inputs import ChunkRows, DeltaInputs, StateRows
from nanovllm.ops.triton_support import compute_capability

CHUNKS_AT_ONCE = 32  # whose T and M are kept: 32 MiB for 32 heads, which stay in the L2 of a large GPU
WIDEST_KEY = 128  # so that a program's operands fit the shared memory of all GPUs
MANY_COLUMNS = 4096  # of the states of a sequence: enough for 128 programs of 32 columns
FACTORS = 4  # of a row of a chunk: of k before the state, of q, of k after it, and P


@triton.jit
def _split(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """An fp32 tile as the sum of two of 16 bits."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _exact_times(a, x):  # type: ignore[no-untyped-def]
    """The product of a, in the network's dtype, with an fp32 tile."""
    if a.dtype == tl.float32:
        product = tl.dot(a, x, input_precision="tf32x3")
    else:
        high, low = _split(x, a.dtype)
        product = tl.dot(a, high, tl.dot(a, low))
    return product


@triton.jit
def _times(high, low, x):  # type: ignore[no-untyped-def]
    """The product of high + low, as `_split` gives them in 16 bits and with low unused in fp32, with an fp32 tile."""
    if high.dtype == tl.float32:
        product = tl.dot(high, x, input_precision="tf32x3")
    else:
        x_high, x_low = _split(x, high.dtype)
        product = tl.dot(high, x_high, tl.dot(high, x_low, tl.dot(low, x_high)))
    return product


@triton.jit
def _wide_times(a, x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of two fp32 tiles."""
    high = a
    low = a
    if dtype != tl.float32:
        high, low = _split(a, dtype)
    return _times(high, low, x)


@triton.jit
def _inverse(a, dtype: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 + a)^-1 for a strictly lower triangular [CHUNK, CHUNK] fp32.

    Blocks of 16 on the diagonal by substitution in fp32; then (X, 0; B, Y)^-1 = (X^-1, 0; -Y^-1 B X^-1, Y^-1) twice.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    block = tl.arange(0, BLOCKS)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    of_blocks = tl.sum(tl.where(diagonal, tl.reshape(a, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(of_blocks)
    for index in range(1, 16):
        of_row = tl.sum(tl.where(row == index, of_blocks, 0.0), 1)
        known = tl.sum(of_row[:, :, None] * inverse, 1)
        inverse = tl.where(row == index, inverse - known[:, None, :], inverse)
    result = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    for size in tl.static_range(1, 3):
        half = 16 * size
        below = tl.where((i // half > j // half) & (i // (2 * half) == j // (2 * half)), a, 0.0)
        result -= _wide_times(result, _wide_times(below, result, dtype), dtype)
    return result


@triton.jit
def _store_parts(at, x, dtype: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what `_times` takes, one part after the other."""
    if dtype == tl.float32:
        tl.store(at, x)
    else:
        high, low = _split(x, dtype)
        tl.store(at, high)
        tl.store(at + SIZE, low)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["first_rows_ptr"])
def _solve_kernel(  # type: ignore[no-untyped-def]
    solve_ptr,
    mix_ptr,
    factors_ptr,
    qk_ptr,
    scale_ptr,
    decay_ptr,
    beta_ptr,
    first_rows_ptr,
    first,
    key_heads,
    value_heads,
    key_dim,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Program (value head, chunk after `first`): its T, M and factors of rows."""
    head = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * value_heads + head
    key_head = head // (value_heads // key_heads)
    dtype: tl.constexpr = qk_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    row = tl.load(first_rows_ptr + first + tl.program_id(1)) + token
    of_q = tl.load(scale_ptr + row * 2 * key_heads + key_head)
    of_k = tl.load(scale_ptr + row * 2 * key_heads + key_heads + key_head)
    decay = tl.load(decay_ptr + row * value_heads + head)
    beta = tl.load(beta_ptr + row * value_heads + head)
    i = token[:, None]
    j = token[None, :]
    between = tl.cumprod(tl.where(i > j, decay[:, None], 1.0), 0)  # D, where i >= j
    after = tl.sum(tl.where(i == CHUNK - 1, between, 0.0), 0)
    before = tl.cumprod(decay, 0)
    at_factors = factors_ptr + at * FACTORS * CHUNK + token
    tl.store(at_factors, before * of_k)
    tl.store(at_factors + CHUNK, before * of_q)
    tl.store(at_factors + 2 * CHUNK, after * of_k)
    tl.store(at_factors + 3 * CHUNK, before)
    between = tl.where(i >= j, between, 0.0) * of_k[None, :]
    tile = at * PARTS * CHUNK * CHUNK + i * CHUNK + j
    of_queries = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    of_keys = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for start in range(0, key_dim, SLICE):
        column = start + tl.arange(0, SLICE)
        at_q = qk_ptr + (row * 2 * key_heads + key_head)[:, None] * key_dim + column[None, :]
        mask = (column < key_dim)[None, :] & (token >= 0)[:, None]
        k = tl.load(at_q + key_heads * key_dim, mask=mask, other=0.0)
        q = tl.load(at_q, mask=mask, other=0.0)
        of_queries += tl.dot(q, tl.trans(k), input_precision="tf32x3")
        of_keys += tl.dot(k, tl.trans(k), input_precision="tf32x3")
    mix = of_queries * between * of_q[:, None]
    _store_parts(mix_ptr + tile, mix, dtype, CHUNK * CHUNK)
    a = of_keys * between * (beta * of_k)[:, None]
    solve = _inverse(tl.where(i > j, a, 0.0), dtype, CHUNK) * beta[None, :]
    _store_parts(solve_ptr + tile, solve, dtype, CHUNK * CHUNK)


@triton.jit(
    do_not_specialize=["first", "end"],
    do_not_specialize_on_alignment=["slots_ptr", "begins_ptr", "chunks_ptr", "states_ptr"],
)
def _advance_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    qk_ptr,
    v_ptr,
    solve_ptr,
    mix_ptr,
    factors_ptr,
    states_ptr,
    slots_ptr,
    begins_ptr,
    chunks_ptr,
    first,
    end,
    slot_stride,
    key_heads,
    value_heads,
    key_dim,
    value_dim,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (tile of columns, value head, run): its chunks among those from `first` to before `end`."""
    head = tl.program_id(1)
    run = tl.program_id(2)
    of_run = tl.load(chunks_ptr + run)
    begin = tl.maximum(of_run, first)
    stop = tl.minimum(tl.load(chunks_ptr + run + 1), end)
    if begin < stop:
        key_head = head // (value_heads // key_heads)
        of_key = tl.arange(0, HALF)
        column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        token = tl.arange(0, CHUNK)
        in_value = (column < value_dim)[None, :]
        in_values = in_value & (token >= 0)[:, None]
        in_low = of_key < key_dim
        in_high = of_key + HALF < key_dim
        at_state = states_ptr + tl.load(slots_ptr + run) * slot_stride + head * key_dim * value_dim
        at_low = at_state + of_key[:, None] * value_dim + column[None, :]
        at_high = at_low + HALF * value_dim
        low = tl.load(at_low, mask=in_low[:, None] & in_value, other=0.0)
        high = tl.load(at_high, mask=in_high[:, None] & in_value, other=0.0)
        in_low_keys = in_low[None, :] & (token >= 0)[:, None]
        in_high_keys = in_high[None, :] & (token >= 0)[:, None]
        of_keys = token[:, None] * (2 * key_heads * key_dim) + of_key[None, :]
        of_values = token[:, None] * (value_heads * value_dim) + column[None, :]
        square = token[:, None] * CHUNK + token[None, :]
        first_row = tl.load(begins_ptr + run)
        for chunk in tl.range(begin, stop, num_stages=STAGES):
            row = first_row + (chunk - of_run) * CHUNK
            at = (chunk - first).to(tl.int64) * value_heads + head
            at_q = qk_ptr + (row * 2 * key_heads + key_head) * key_dim + of_keys
            at_k = at_q + key_heads * key_dim
            at_v = (row * value_heads + head) * value_dim + of_values
            at_factors = factors_ptr + at * FACTORS * CHUNK + token
            k_low = tl.load(at_k, mask=in_low_keys, other=0.0)
            k_high = tl.load(at_k + HALF, mask=in_high_keys, other=0.0)
            v = tl.load(v_ptr + at_v, mask=in_values, other=0.0).to(tl.float32)
            known = _exact_times(k_low, low) + _exact_times(k_high, high)
            q_low = tl.load(at_q, mask=in_low_keys, other=0.0)
            q_high = tl.load(at_q + HALF, mask=in_high_keys, other=0.0)
            y = _exact_times(q_low, low) + _exact_times(q_high, high)
            missing = v - tl.load(at_factors)[:, None] * known
            at_solve = solve_ptr + at * PARTS * CHUNK * CHUNK + square
            written = _times(tl.load(at_solve), tl.load(at_solve + (PARTS - 1) * CHUNK * CHUNK), missing)
            at_mix = mix_ptr + at * PARTS * CHUNK * CHUNK + square
            read = _times(tl.load(at_mix), tl.load(at_mix + (PARTS - 1) * CHUNK * CHUNK), written)
            y = tl.load(at_factors + CHUNK)[:, None] * y + read
            tl.store(y_ptr + at_v, y.to(y_ptr.dtype.element_ty), mask=in_values)
            kept = tl.load(factors_ptr + at * FACTORS * CHUNK + FACTORS * CHUNK - 1)
            written *= tl.load(at_factors + 2 * CHUNK)[:, None]
            low = low * kept + _exact_times(tl.trans(k_low), written)
            high = high * kept + _exact_times(tl.trans(k_high), written)
        tl.store(at_low, low, mask=in_low[:, None] & in_value)
        tl.store(at_high, high, mask=in_high[:, None] & in_value)


def tile_of(dtype: torch.dtype, capability: int, width: int) -> tuple[int, int]:
    """Columns of a state that a program advances, and the stages of its loop: without spilled registers in 16 bits, in
    152 KiB of shared memory on 9.0 and 73 KiB elsewhere.

    capability: as 90; width: columns of the states of a sequence. There should be programs for all multiprocessors.
    """
    if dtype == torch.float32:
        return 16, 1
    return 32 if capability // 10 == 9 and width >= MANY_COLUMNS else 16, 2


def takes_chunks(spec: RecurrentSpec) -> bool:
    """Whether heads are of a size that these kernels take."""
    return spec.key_dim <= WIDEST_KEY


def advance_chunks_(
    spec: RecurrentSpec, rows: StateRows, chunks: ChunkRows, inputs: DeltaInputs, states: Tensor, y: Tensor
) -> None:
    """`delta_rule_` for the rows of whole chunks: writes their rows of y, and advances the states of their runs."""
    qk, v, decay, beta, scale = inputs
    assert scale is not None, "the Triton kernels have q and k as they were convolved"
    count = len(chunks.first_rows)
    heads = spec.num_value_heads
    parts = 1 if v.dtype == torch.float32 else 2
    at_once = min(count, CHUNKS_AT_ONCE)
    solve, mix = v.new_empty(2, at_once, heads, parts, RECURRENT_CHUNK, RECURRENT_CHUNK)
    factors = decay.new_empty(at_once, heads, FACTORS, RECURRENT_CHUNK)
    sizes = (spec.num_key_heads, heads, spec.key_dim)
    block = max(32, triton.next_power_of_2(spec.key_dim))
    columns, stages = tile_of(v.dtype, compute_capability(v.device), spec.value_size)
    tiles = {"PARTS": parts, "CHUNK": RECURRENT_CHUNK, "FACTORS": FACTORS, "num_warps": 4, "enable_fp_fusion": True}
    grid = (triton.cdiv(spec.value_dim, columns), heads, len(rows.slots))
    for first in range(0, count, at_once):
        end = min(first + at_once, count)
        _solve_kernel[(heads, end - first)](
            solve, mix, factors, qk, scale, decay, beta, chunks.first_rows, first, *sizes, SLICE=32, **tiles,
        )  # fmt: skip
        _advance_kernel[grid](
            y, qk, v, solve, mix, factors, states, rows.slots, chunks.begins, chunks.starts, first, end,
            states.stride(0), *sizes, spec.value_dim, HALF=block // 2, BLOCK_V=columns, STAGES=stages, **tiles,
        )  # fmt: skip
