"""Which experts a row takes and with what weights, and the rows of each expert, in Triton.

A router in torch takes some 15 launches a layer. Here one follows the router's product, or two beyond a program's rows.
Nothing is sorted: a row chooses an expert once at most, so that an entry's place is the number of entries of experts
before its own, plus the number of rows before its own that chose the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.data.network import ExpertSpec

BLOCK_ROWS = 16  # of a program, up to 256 experts
FEW_ROWS = (1, 4)  # of a single program; few numbers, as each is compiled
MOST_SCORES = 4096  # of a program, which holds them in registers
# Of a warp, where one has few rows: what a row's choices are compared in then needs no other warp.
SCORES_OF_WARP = 512
COUNTS_AT_ONCE = 2048  # that a program adds up at a time


class Grouping(NamedTuple):
    """One entry for each choice of an expert by a row: expert by expert, and within an expert in the order of rows."""

    ends: Tensor  # int32 [experts]: the number of entries up to the last one of each expert
    rows: Tensor  # int32 [rows * k]: the row of each entry
    entries: Tensor  # int32 [rows, k]: the entry of each of a row's choices


@triton.jit
def _sum_of_row(x, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, 2^STEPS] -> [rows]: the sums by neighbours, which no layout and no number of rows changes."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = even + odd
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    picked, is_picked, row, starts, ends_ptr, order_ptr, entries_ptr, experts, num_experts, total, has_slot,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the entries of a program's rows, and where all experts end.

    picked: int32 [BLOCK_R, K_PAD], experts of a row; is_picked: int32 [BLOCK_R, EXPERTS], the same as 0 and 1; starts:
    the first entry of each expert among these rows; total: the entries of each expert.
    """
    place = starts[None, :] + tl.cumsum(is_picked, 0) - is_picked
    tl.store(order_ptr + place, tl.broadcast_to(row[:, None], place.shape), mask=is_picked > 0)
    slot = tl.arange(0, K_PAD)
    entries = tl.zeros((BLOCK_R, K_PAD), tl.int32)
    for index in range(K):
        expert = tl.sum(tl.where(slot[None, :] == index, picked, 0), 1)
        entry = tl.sum(tl.where(experts[None, :] == expert[:, None], place, 0), 1)
        entries = tl.where(slot[None, :] == index, entry[:, None], entries)
    tl.store(entries_ptr + row[:, None] * K + slot[None, :], entries, mask=has_slot)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + experts, tl.cumsum(total, 0), mask=experts < num_experts)


@triton.jit(do_not_specialize=["rows", "logits_stride", "weight_scale"])
def _route_kernel(  # type: ignore[no-untyped-def]
    weights_ptr,
    chosen_ptr,
    counts_ptr,
    ends_ptr,
    order_ptr,
    entries_ptr,
    logits_ptr,
    share_ptr,
    correction_ptr,
    expert_scale_ptr,
    rows,
    logits_stride,
    num_experts,
    weight_scale,
    SCORING: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EXPERT_BITS: tl.constexpr,
    K_BITS: tl.constexpr,
):
    """Program (BLOCK_R rows). A single program places its entries itself; others leave that to `_place_kernel`."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    experts = tl.arange(0, EXPERTS)
    slot = tl.arange(0, K_PAD)
    is_expert = experts < num_experts
    is_row = row < rows
    logits_at = logits_ptr + row.to(tl.int64) * logits_stride
    mask = is_row[:, None] & is_expert[None, :]
    logits = tl.load(logits_at[:, None] + experts[None, :], mask=mask, other=0.0).to(tl.float32)
    scores = tl.where(is_expert[None, :], logits, float("-inf"))
    if SCORING == "softmax":
        powers = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = powers / _sum_of_row(powers, EXPERT_BITS)[:, None]
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choosing = scores
    if HAS_CORRECTION:
        choosing += tl.load(correction_ptr + experts, mask=is_expert, other=0.0)[None, :]
    choosing = tl.where(choosing == choosing, choosing, float("-inf"))  # NaN is no choice, but stays in the scores
    if GROUPS > 1:
        choosing = _in_chosen_groups(choosing, experts, num_experts, GROUPS, CHOSEN_GROUPS, EXPERTS)
    free = tl.broadcast_to(is_expert[None, :].to(tl.int32), choosing.shape)
    picked = tl.zeros((BLOCK_R, K_PAD), tl.int32)
    weights = tl.zeros((BLOCK_R, K_PAD), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for index in range(K):
        left = tl.where(free > 0, choosing, float("-inf"))
        is_best = (free > 0) & (left == tl.max(left, 1)[:, None])
        best = tl.min(tl.where(is_best, experts[None, :], EXPERTS), 1)  # of equal ones the first
        is_own = experts[None, :] == best[:, None]
        score = tl.sum(tl.where(is_own, scores, 0.0), 1)
        free = tl.where(is_own, 0, free)
        picked = tl.where(slot[None, :] == index, best[:, None], picked)
        weights = tl.where(slot[None, :] == index, score[:, None], weights)
        total += score
    if SCORING == "softmax_of_chosen":
        weights = tl.where(slot[None, :] < K, weights, float("-inf"))
        powers = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = powers / _sum_of_row(powers, K_BITS)[:, None]
    elif NORMALIZED:
        weights /= (total + 1e-20)[:, None]
    has_slot = is_row[:, None] & (slot < K)[None, :]
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale_ptr + picked, mask=has_slot, other=0.0).to(tl.float32)
    weights_at = weights_ptr + row * (K + SHARED)
    tl.store(weights_at[:, None] + slot[None, :], weights * weight_scale, mask=has_slot)
    if SHARED:
        share = tl.full((BLOCK_R,), 1.0, tl.float32)
        if HAS_GATE:
            share = 1.0 / (1.0 + tl.exp(-tl.load(share_ptr + row, mask=is_row, other=0.0).to(tl.float32)))
        tl.store(weights_at + K, share, mask=is_row)
    is_picked = tl.where(is_row[:, None] & is_expert[None, :], 1 - free, 0)
    counts = tl.sum(is_picked, 0)
    if tl.num_programs(0) == 1:
        starts = tl.cumsum(counts, 0) - counts
        _place(picked, is_picked, row, starts, ends_ptr, order_ptr, entries_ptr, experts, num_experts, counts, has_slot,
               K, K_PAD, BLOCK_R)  # fmt: skip
    else:
        tl.store(chosen_ptr + row[:, None] * K + slot[None, :], picked, mask=has_slot)
        tl.store(counts_ptr + tl.program_id(0) * num_experts + experts, counts, mask=is_expert)


@triton.jit
def _in_chosen_groups(  # type: ignore[no-untyped-def]
    choosing, experts, num_experts, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, EXPERTS: tl.constexpr
):
    """The scores that choose experts, -inf outside of the groups whose two best scores have the largest sums."""
    group = experts // (num_experts // GROUPS)
    sums = tl.full(choosing.shape, float("-inf"), tl.float32)
    for index in range(GROUPS):
        is_own = (group == index)[None, :] & (choosing == choosing)
        own = tl.where(is_own, choosing, float("-inf"))
        best = tl.max(own, 1)
        first = tl.min(tl.where(is_own & (own == best[:, None]), experts[None, :], EXPERTS), 1)
        second = tl.max(tl.where(experts[None, :] == first[:, None], float("-inf"), own), 1)
        sums = tl.where(is_own, (best + second)[:, None], sums)
    free = tl.where((group < GROUPS)[None, :] & (choosing == choosing), 1, 0)
    for _ in range(CHOSEN_GROUPS):
        left = tl.where(free > 0, sums, float("-inf"))
        is_best = (free > 0) & (left == tl.max(left, 1)[:, None])
        best_group = tl.min(tl.where(is_best, group[None, :], EXPERTS), 1)
        free = tl.where(group[None, :] == best_group[:, None], 0, free)
    return tl.where(free > 0, float("-inf"), choosing)


@triton.jit(do_not_specialize=["rows"])
def _place_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr,
    counts_ptr,
    ends_ptr,
    order_ptr,
    entries_ptr,
    rows,
    num_experts,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (BLOCK_R rows), as of `_route_kernel`."""
    own = tl.program_id(0)
    row = own * BLOCK_R + tl.arange(0, BLOCK_R)
    experts = tl.arange(0, EXPERTS)
    slot = tl.arange(0, K_PAD)
    has_slot = (row < rows)[:, None] & (slot < K)[None, :]
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, tl.num_programs(0), AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)
        mask = (program < tl.num_programs(0))[:, None] & (experts < num_experts)[None, :]
        counts = tl.load(counts_ptr + program[:, None] * num_experts + experts[None, :], mask=mask, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((program < own)[:, None], counts, 0), 0)
    picked = tl.load(chosen_ptr + row[:, None] * K + slot[None, :], mask=has_slot, other=-1)
    is_picked = tl.zeros((BLOCK_R, EXPERTS), tl.int32)
    for index in range(K):
        expert = tl.sum(tl.where(slot[None, :] == index, picked, 0), 1)
        is_picked = tl.where(experts[None, :] == expert[:, None], 1, is_picked)
    starts = tl.cumsum(total, 0) - total + before
    _place(picked, is_picked, row, starts, ends_ptr, order_ptr, entries_ptr, experts, num_experts, total, has_slot,
           K, K_PAD, BLOCK_R)  # fmt: skip


def route(
    spec: ExpertSpec,
    logits: Tensor,
    share: Tensor | None = None,
    correction_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Grouping]:
    """The weights fp32 [rows, k] of each row's experts, and all of these grouped; see `layers.experts.Experts.route`.

    logits: [rows, experts], the elements of a row contiguous; share: [rows, 1], contiguous, whose sigmoid multiplies
    the shared expert, or None if that has no gate. With a shared expert the weights are [rows, k + 1], its own last.
    Where scores are equal, the experts with the lowest numbers are chosen. All sizes are those that the number of rows
    gives, so that a CUDA graph can record it, with rows that nobody reads.
    """
    (rows, _) = logits.shape
    experts = spec.num_experts
    k = spec.num_experts_per_tok
    shared = spec.has_shared
    weights = logits.new_empty(rows, k + shared, dtype=torch.float32)
    grouping = Grouping(*(logits.new_empty(shape, dtype=torch.int32) for shape in (experts, rows * k, (rows, k))))
    if not rows:
        grouping.ends.zero_()
        return weights, grouping
    assert logits.stride(1) == 1, "rows must be contiguous"
    width = triton.next_power_of_2(experts)
    block_rows = min(MOST_SCORES // width, next((size for size in FEW_ROWS if rows <= size), BLOCK_ROWS))
    programs = triton.cdiv(rows, block_rows)
    chosen = counts = grouping.entries  # not written by a single program
    if programs > 1:
        chosen = torch.empty_like(chosen)
        counts = logits.new_empty(programs, experts, dtype=torch.int32)
    slots = triton.next_power_of_2(k)
    sizes = {"K": k, "K_PAD": slots, "EXPERTS": width, "BLOCK_R": block_rows}
    _route_kernel[(programs,)](
        weights, chosen, counts, *grouping, logits, logits if share is None else share,
        logits if correction_bias is None else correction_bias, logits if expert_scale is None else expert_scale,
        rows, logits.stride(0), experts, spec.weight_scale,
        SCORING=spec.scoring, HAS_CORRECTION=correction_bias is not None, HAS_EXPERT_SCALE=expert_scale is not None,
        NORMALIZED=spec.norm_topk_prob, SHARED=int(shared), HAS_GATE=share is not None,
        GROUPS=spec.num_groups, CHOSEN_GROUPS=spec.chosen_groups, **sizes, EXPERT_BITS=width.bit_length() - 1,
        K_BITS=slots.bit_length() - 1, num_warps=max(1, min(8, block_rows * width // SCORES_OF_WARP)),
    )  # fmt: skip
    if programs > 1:
        _place_kernel[(programs,)](
            chosen, counts, *grouping, rows, experts, **sizes, AT_ONCE=COUNTS_AT_ONCE // width, num_warps=8
        )  # fmt: skip
    return weights, grouping
