"""Triton kernels against the plain versions of the same functions, in the interpreter or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from attention_cases import BOUNDS, Case, Shape, quantised, same_bits, split
from fast import fast_only, fast_pairs
from torch import Tensor
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from benchmarks.kernel_variants import decode_variants, prefill_variants
from nanovllm.data.kv_groups import kv_groups
from nanovllm.data.network import RopeSpec
from nanovllm.features.cuda_graphs.decode_tables import DecodeTables
from nanovllm.features.cuda_graphs.shapes import Shape as StepShape
from nanovllm.kvcache.base import AttendedPool, AttentionGeometry
from nanovllm.layers import sampler
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.layers.sampler import gumbel_noise
from nanovllm.ops import row_kernels, triton_decode, triton_rows
from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.cpu_kernels import add_rms_norm_, place_heads, rms_norm
from nanovllm.ops.kernel_config import DecodeConfig, PrefillConfig
from nanovllm.ops.merge import merge_attention_outputs_torch
from nanovllm.ops.row_kernels import store_kv
from nanovllm.ops.triton_attention import TritonAttention
from nanovllm.ops.triton_decode import MAX_PARTS, decode_, decode_whole, partitions_of
from nanovllm.ops.triton_prefill import prefill_

pytestmark = [*TRITON_MARKS, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Elementwise kernels round where the plain versions do; sums in another order may tip a rounding.
ONE_ULP = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---- store_kv


@EVERY_DTYPE
@pytest.mark.parametrize("heads, head_dim, block_size", [(1, 16, 4), (3, 80, 16), (8, 128, 5), (2, 256, 32), (5, 7, 3)])
def test_store_kv_writes_the_slots_and_nothing_else(
    heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    tokens = 19
    blocks = 9
    wide = random(tokens, 2 * heads + 1, head_dim, dtype=dtype)  # k and v are views of a merged projection
    k = wide[:, 1 : heads + 1]
    v = wide[:, heads + 1 :]
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    slots[3], slots[-1] = -1, -1
    pool = torch.full((blocks, 2, heads, block_size, head_dim), -7.0, dtype=dtype, device=DEVICE)
    expected = pool.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, :, slot % block_size] = k[token]
            expected[slot // block_size, 1, :, slot % block_size] = v[token]
    plain = pool.cpu()
    store_kv(plain, k.cpu(), v.cpu(), slots.cpu())
    triton_rows.store_kv(pool, k, v, slots)
    triton_rows.store_kv(pool, k[:0], v[:0], slots[:0])
    assert torch.equal(pool, expected) and torch.equal(plain, expected.cpu())


# ---- decode


def with_alibi(case: Case, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 attention of the case's only sequence, each key's score lowered by slope times distance."""
    (seq,) = case.sequences
    ((k, v),) = case.keys
    q = case.q[seq.query_start : seq.query_start + seq.query_len].cpu().double()
    group = case.shape.group
    scores = torch.einsum("thd,shd->hts", q, k.double().repeat_interleave(group, 1)) * case.shape.scale
    positions = seq.context_len + torch.arange(seq.query_len)
    distance = positions.unsqueeze(1) - torch.arange(seq.kv_end)
    scores -= slopes.double()[:, None, None] * distance
    scores.masked_fill_(distance < 0, float("-inf"))
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.double().repeat_interleave(group, 1))
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
def test_alibi_slopes_lower_the_scores_of_distant_keys(dtype: torch.dtype) -> None:
    case = Case(Shape(64, 2, 3, 32, None, ((90, 3),)), dtype, 1, DEVICE)
    slopes = 2.0 ** -torch.arange(1, 7)
    state = AttentionState.empty(case.q)
    table = AttentionMetadata(case.sequences).on(case.q.device)
    decode_(case.q, case.pool, table, state, case.shape.scale, None, slopes.to(DEVICE))
    out, lse = with_alibi(case, slopes)
    assert (state.out[1:4].cpu() - out).abs().max() < BOUNDS[dtype][0]
    assert (state.lse[:, 1:4].cpu() - lse).abs().max() < BOUNDS[dtype][1]


def test_a_small_workspace_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition results are then reduced a block at a time."""
    case = Case(Shape(32, 1, 2, 16, None, ((70, 2), (30, 1))), torch.float32, 1, DEVICE)
    at_once = case.attend(TritonAttention())
    monkeypatch.setattr(triton_decode, "MAX_WORKSPACE", 1)
    by_block = case.attend(TritonAttention())
    assert torch.equal(at_once.out, by_block.out) and torch.equal(at_once.lse, by_block.lse)


def in_partitions(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Attend to so many keys at a time from now on."""
    config = DecodeConfig(32, 4, 2, 4, 2, partition=keys)  # of 8 bits 16, the least that matrix units take
    monkeypatch.setattr(triton_decode, "decode_config_on", lambda *_: config)


@pytest.mark.parametrize(
    ("dtype", "window", "partition", "stored"),
    fast_only(
        [(NARROW, None, 16, None), (torch.float32, 21, 64, None), (NARROW, None, 16, torch.int8)],
        [
            (dtype, window, partition, stored)
            for dtype in (torch.float32, NARROW)
            for window in (None, 21)
            for partition in (16, 64)
            for stored in (None, torch.int8, torch.float8_e4m3fn)
        ],
    ),
    ids=str,
)
def test_attention_without_a_state_gives_the_bits_of_an_empty_one(
    dtype: torch.dtype, window: int | None, partition: int, stored: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sinks and without, into the queries, and in several passes; rows of no sequence stay as they are."""
    in_partitions(monkeypatch, partition)
    shape = Shape(32, 1, 2, 40, window, ((50, 2), (0, 1)))
    case = Case(shape, dtype, 1, DEVICE) if stored is None else quantised(shape, dtype, stored, device=DEVICE)
    blind = SequenceMetadata(0, 1, 0, 0, 0, ())  # a row that sees no key
    case.sequences.append(blind)
    case.keys.append((torch.zeros(0, 1, 32), torch.zeros(0, 1, 32)))
    table = AttentionMetadata(case.sequences).on(case.q.device)
    new = torch.zeros(len(case.q), dtype=torch.bool)
    for seq in case.sequences:
        new[seq.query_start : seq.query_start + seq.query_len] = True
    for sinks, workspaces in ((None, (1 << 20,)), (random(shape.heads), (1 << 20, 1))):
        state = case.attend(TritonAttention(), sinks=sinks)
        expected = torch.where(new.to(DEVICE)[:, None, None], state.out.to(dtype), case.q)
        for workspace in workspaces:
            monkeypatch.setattr(triton_decode, "MAX_WORKSPACE", workspace)
            found = case.q.clone()
            decode_whole(found, case.pool, table, found, shape.scale, window, sinks)
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("parts", "blocks"), [(1, 5), (2, 1), (3, 9)])
def test_partitions_are_summed_by_block_and_blocks_merged_in_order(
    parts: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the reduction makes of any sums, beside a plain version: rows of 20 elements, some without keys."""
    rows = 2
    heads = 3
    head_dim = 20
    in_partitions(monkeypatch, 16)
    acc = random(blocks, parts, rows, heads, 32)
    top = random(blocks, parts, rows, heads) * 4
    total = random(blocks, parts, rows, heads, seed=1).abs() + 0.5
    for hidden in ((0, slice(None), 0, 0), (blocks - 1, 0, 1), (slice(None), slice(None), 1, 2)):
        acc[hidden], top[hidden], total[hidden] = 0.0, float("-inf"), 0.0
    sinks = random(heads)

    class Sums:
        """Has the sums of a launch of the decode kernel, if that would compute them."""

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **options: [
                place.copy_(sums.flatten(0, 1)) for place, sums in zip(arguments[5:8], (acc, top, total), strict=True)
            ]

    monkeypatch.setattr(triton_decode, "_decode_kernel", Sums())
    q = torch.zeros(rows, heads, head_dim, device=DEVICE)
    pool = torch.zeros(1, 2, heads, 16 * parts, head_dim, device=DEVICE)
    end = blocks * 16 * parts
    table = AttentionMetadata([SequenceMetadata(0, rows, end - rows, 0, end, [0] * blocks)]).on(q.device)
    state = AttentionState.empty(q, sinks)
    decode_(q, pool, table, state, 1.0, None)
    found = torch.empty_like(q, dtype=NARROW)
    decode_whole(q, pool, table, found, 1.0, None, sinks)

    expected = AttentionState.empty(q, sinks)
    for block in range(blocks):
        highest = top[block].amax(0)
        weight = torch.exp2(top[block] - highest.masked_fill(highest == -torch.inf, 0.0))
        mass = (weight * total[block]).sum(0)
        out = (weight[..., None] * acc[block]).sum(0) / mass.masked_fill(mass == 0, 1.0)[..., None]
        lse = (highest + mass.log2()) * math.log(2.0)
        merge_attention_outputs_torch(expected.out, expected.lse, out[..., :head_dim], lse.t())
    torch.testing.assert_close(state.out, expected.out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(state.lse, expected.lse, rtol=2e-6, atol=2e-6)
    assert torch.equal(found, state.out.to(NARROW)) and not state.out[1, 2].any()


@pytest.mark.parametrize(("programs", "window"), fast_pairs([(7, 20)], (1, 7), (None, 20)))
def test_few_programs_take_several_partitions_to_the_same_bits(
    programs: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Shape(32, 1, 2, 40, window, ((90, 2), (30, 1), (0, 5))), torch.float32, 1, DEVICE)
    one_each = case.attend(TritonAttention())
    in_partitions(monkeypatch, 16)
    parts_of_blocks = case.attend(TritonAttention())
    monkeypatch.setattr(triton_decode, "MAX_PROGRAMS", programs)
    in_steps = case.attend(TritonAttention())
    case.check(in_steps)
    assert torch.equal(parts_of_blocks.out, in_steps.out) and torch.equal(parts_of_blocks.lse, in_steps.lse)
    assert torch.equal(one_each.lse.isinf(), in_steps.lse.isinf())


@pytest.mark.parametrize(
    ("dtype", "window", "programs"),
    fast_pairs([(NARROW, 37, 8192)], (torch.float32, NARROW), (None, 37), (8192, 4)),
)
def test_tables_of_a_graph_give_the_bits_of_those_of_a_step(
    window: int | None, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled after they were made, with rows of no sequence, for sequences far longer than these."""
    monkeypatch.setattr(triton_decode, "MAX_PROGRAMS", programs)
    shape = Shape(32, 2, 2, 16, window, ((69, 1), (0, 1), (15, 1), (16, 1), (47, 1)))
    case = Case(shape, dtype, 2, DEVICE)
    sequences = [SequenceMetadata.full(row, 1, s.context_len, s.block_table) for row, s in enumerate(case.sequences)]
    new = torch.tensor([s.query_start for s in case.sequences], device=DEVICE)
    rows = 8
    k = random(8, 2, 32, dtype=dtype, seed=3)
    v = random(8, 2, 32, dtype=dtype, seed=4)
    pools = torch.stack([case.pool.nan_to_num(7.0), case.pool])  # the layer is the second
    sinks = random(2, shape.heads)
    geometry = AttentionGeometry(shape.scale, shape.heads, dtype, tuple(sinks))
    attention = TritonAttention()
    step = StepShape(rows, rows, 1)
    attended = AttendedPool([pools], kv_groups((window, window), 16), geometry, attention)
    tables = DecodeTables(attended, attention, [step, StepShape(9, 9, 1)], 3000)
    tables.fill([*sequences[::-1], *sequences[:4]], StepShape(9, 9, 1))  # a step before
    tables.fill(sequences, step)
    q = random(rows, shape.heads, 32, dtype=dtype, seed=5)
    q[: len(new)] = case.q[new]
    unused = q[len(new) :].clone()
    found = tables.attend(1, q, k, v, step)

    assert torch.equal(pools[0], case.pool.nan_to_num(7.0))
    expected = case.pool.clone()
    for row, (seq, before) in enumerate(zip(sequences, case.sequences, strict=True)):
        block = seq.block_table[seq.context_len // 16]
        offset = seq.context_len % 16
        expected[block, 0, :, offset], expected[block, 1, :, offset] = k[row], v[row]
        keys, values = case.keys[row]
        keys[before.context_len], values[before.context_len] = k[row].cpu(), v[row].cpu()
    assert torch.equal(pools[1].nan_to_num(7.0), expected.nan_to_num(7.0))
    case.pool = expected
    state = case.attend(TritonAttention(), sinks=sinks[1])
    case.check(state, sinks[1])
    assert torch.equal(found[: len(new)], state.out[new].to(dtype))
    assert torch.equal(found[len(new) :], unused), "a row of no sequence is left as it is"


@pytest.mark.parametrize("block_size", [1, 5, 16, 100, 256, 512, 513, 4096, 100_000])
def test_partitions_cover_a_block(block_size: int) -> None:
    partition, count = partitions_of(block_size, 512)
    assert partition >= 16 and partition & (partition - 1) == 0
    assert count <= MAX_PARTS and (count - 1) * partition < block_size <= count * partition


# ---- every configuration that a sweep tries


PREFILL_VARIANTS = sorted({c for major in (8, 9) for c in prefill_variants(128, NARROW, (major, 0))}, key=str)


@pytest.mark.parametrize(
    ("config", "block_size", "window"),
    fast_only(
        [(config, *((128, None) if number % 3 else (48, 70))) for number, config in enumerate(PREFILL_VARIANTS[::3])],
        [(config, *case) for config in PREFILL_VARIANTS for case in ((128, None), (48, 70))],
    ),
    ids=str,
)
def test_prefill_with_every_configuration(block_size: int, window: int | None, config: PrefillConfig) -> None:
    """Exact, and the same bits one block at a time; blocks of whole tiles and others."""
    case = Case(Shape(32, 1, 1, block_size, window, ((70, 131), (0, 66))), NARROW, 1, DEVICE)

    def attend(groups: list[list[SequenceMetadata]]) -> AttentionState:
        state = AttentionState.empty(case.q)
        for group in groups:
            table = AttentionMetadata(group).on(case.q.device)
            prefill_(case.q, case.pool, table, state, case.shape.scale, window, config)
        return state

    together = attend([case.sequences])
    case.check(together)
    assert same_bits(attend([[piece] for s in case.sequences for piece in split(s, [1, 2, 3], block_size)]), together)


@pytest.mark.parametrize("config", fast_only(decode_variants(128, NARROW)[::4], decode_variants(128, NARROW)), ids=str)
def test_decode_with_every_configuration(config: DecodeConfig) -> None:
    case = Case(Shape(32, 1, 2, 160, None, ((330, 2), (30, 1))), NARROW, 1, DEVICE)

    def attend(groups: list[list[SequenceMetadata]]) -> AttentionState:
        state = AttentionState.empty(case.q)
        for group in groups:
            table = AttentionMetadata(group).on(case.q.device)
            decode_(case.q, case.pool, table, state, case.shape.scale, None, None, config)
        return state

    together = attend([case.sequences])
    case.check(together)
    assert same_bits(attend([[piece] for s in case.sequences for piece in split(s, [1, 2], 160)]), together)


def test_the_flattened_loop_carries_a_state_on_that_is_not_empty() -> None:
    """Rows that have seen keys, rows that have not, and rows that see none here, whose LSE must not change by a bit."""
    case = Case(Shape(16, 1, 2, 16, None, ((40, 70),)), torch.float32, 1, DEVICE)
    state = case.attend(TritonAttention())
    (seq,) = case.sequences
    late = replace(seq, first_position=seq.context_len + 30, kv_end=seq.kv_end + 30)
    before = AttentionState(state.out.clone(), state.lse.clone())
    case.pool = case.pool.nan_to_num(0.5)
    TritonAttention().attend(case.q, case.pool, AttentionMetadata([late]), state, case.shape.scale, None)
    blind = slice(seq.query_start, seq.query_start + 30)
    assert torch.equal(state.lse[:, blind], before.lse[:, blind]) and torch.equal(state.out[blind], before.out[blind])
    assert (state.lse[:, blind.stop : seq.query_start + 70] > before.lse[:, blind.stop : -1]).all()


# ---- norm, heads, activation


@EVERY_DTYPE
@pytest.mark.parametrize(("size", "wide"), [(16, False), (96, False), (96, True), (1000, False)])
def test_rms_norm(size: int, wide: bool, dtype: torch.dtype) -> None:
    x = random(3, size + 8, dtype=dtype)[:, :size]
    weight = random(size, dtype=torch.float32 if wide else dtype, seed=1)
    expected = rms_norm(x.cpu(), weight.cpu(), 1e-6)
    torch.testing.assert_close(triton_rows.rms_norm(x, weight, 1e-6).cpu(), expected, rtol=ONE_ULP[dtype], atol=1e-6)


@EVERY_DTYPE
def test_add_rms_norm(dtype: torch.dtype) -> None:
    residual = random(3, 96, dtype=dtype)
    x = random(3, 96, dtype=dtype, seed=1)
    weight = random(96, dtype=dtype, seed=2)
    plain_residual = residual.cpu().clone()
    expected = add_rms_norm_(plain_residual, x.cpu(), weight.cpu(), 1e-5)
    out = triton_rows.add_rms_norm_(residual, x, weight, 1e-5)
    assert torch.equal(residual.cpu(), plain_residual)
    torch.testing.assert_close(out.cpu(), expected, rtol=ONE_ULP[dtype], atol=1e-6)


@EVERY_DTYPE
@pytest.mark.parametrize("normed", [None, "narrow", "wide"])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(2, 1, 16), (14, 2, 80), (4, 4, 128)])
def test_place_heads(num_heads: int, num_kv_heads: int, head_dim: int, normed: str | None, dtype: torch.dtype) -> None:
    tokens = 3
    positions = torch.tensor([0, 7, 100_000])
    cos, sin = RotaryEmbedding(RopeSpec(), head_dim, torch.device("cpu")).cos_sin(positions)
    heads = random(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    weight_dtype = torch.float32 if normed == "wide" else dtype
    weight = random(num_heads + num_kv_heads, head_dim, dtype=weight_dtype, seed=1) if normed else None
    shapes = [(tokens, count, head_dim) for count in (num_heads, num_kv_heads, num_kv_heads)]
    expected = [torch.empty(shape, dtype=dtype) for shape in shapes]
    place_heads(heads.cpu(), None if weight is None else weight.cpu(), 1e-6, cos, sin, *expected)
    placed = [torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for shape in shapes]
    triton_rows.place_heads(heads, weight, 1e-6, cos.to(DEVICE), sin.to(DEVICE), *placed)
    assert torch.equal(placed[2].cpu(), expected[2])
    for ours, theirs in zip(placed, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=ONE_ULP[dtype], atol=2 * ONE_ULP[dtype])


@EVERY_DTYPE
@pytest.mark.parametrize("size", [16, 1500])
def test_gated_units(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    for name in ("silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu"):
        ours = getattr(triton_rows, name)
        plain = getattr(row_kernels, name)
        torch.testing.assert_close(ours(gate_up).cpu(), plain(gate_up.cpu()), rtol=ONE_ULP[dtype], atol=1e-6)


# ---- drawing


@dataclass(frozen=True)
class Row:
    seed: int
    index: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    adjustments: None = None


@pytest.mark.parametrize("width", [1, 97, 5000])
@pytest.mark.parametrize("ordered", [False, True])
def test_tokens_drawn(width: int, ordered: bool) -> None:
    """The very tokens of the plain version, which has the noise of every token in memory."""
    rows = [Row(0, 0), Row(2**63 + 5, 7), Row(1, 2**40), Row(3, 3)]
    scores = random(len(rows), width) * 3
    scores[:, width // 2 + 1 :] = -torch.inf
    tokens = torch.arange(width)
    if ordered:  # a row's own order, as after sorting
        tokens = torch.stack([torch.randperm(width, generator=torch.Generator().manual_seed(i)) for i in range(4)])
    expected = torch.argmax(scores.cpu() + gumbel_noise(rows, tokens), dim=-1)
    drawn = triton_rows.draw(scores, tokens.to(DEVICE), sampler.noise_starts(rows).to(DEVICE))
    assert torch.equal(drawn.cpu(), expected)
