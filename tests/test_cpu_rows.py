"""The C++ row-wise work of a layer: against plain torch, the same to the bit in any batch, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from nanovllm.layers import sampler
from nanovllm.ops import cpu_kernels, torch_rows
from nanovllm.ops.cpu_kernels import add_rms_norm_, place_heads, rms_norm
from nanovllm.ops.row_kernels import clamped_swiglu, gelu_tanh_and_mul, silu_and_mul, store_kv
from nanovllm.ops.torch_rows import rotate

EPS = 1e-6
ONE_ULP = 2.0**-7  # of bf16, relative
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = st.sampled_from([1, 2, 15, 16, 17, 64, 100, 1024]) | st.integers(1, 300)
ROWS = st.integers(0, 9)
SEEDS = st.integers(0, 2**20)


def bf16(seed: int, *shape: int, gap: int = 0, size: float = 1.0) -> Tensor:
    """Normal numbers; `gap` elements lie between the rows, and hold NaN."""
    numbers = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()
    if not gap:
        return numbers
    row = math.prod(shape[1:])
    apart = torch.full((shape[0], row + gap), torch.nan, dtype=torch.bfloat16)
    apart[:, :row] = numbers.reshape(shape[0], row)
    return apart[:, :row].unflatten(1, shape[1:])


def assert_close(ours: Tensor, expected: Tensor, roundings: int = 1) -> None:
    """To one unit in the last place for each rounding: sums in another order may round to the neighbour."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected.double(), rtol=roundings * ONE_ULP, atol=1e-30)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    return torch.equal(ours.contiguous().view(as_int), theirs.contiguous().view(as_int))


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    scale = 1 / torch.sqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    if weight.dtype == torch.float32:
        return (x.double() * scale * weight.double()).bfloat16()
    return (x.double() * scale).bfloat16() * weight


@dataclass(frozen=True)
class Row:
    """What the noise of a draw is named by."""

    seed: int
    index: int


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- norm


@settings(max_examples=60)
@given(SEEDS, ROWS, SIZES, st.sampled_from([0, 3]), st.sampled_from([1e-3, 1.0, 300.0]), st.booleans())
def test_norm_is_the_formula(seed: int, rows: int, width: int, gap: int, size: float, wide: bool) -> None:
    x = bf16(seed, rows, width, gap=gap, size=size)
    weight = bf16(seed + 1, width)
    if wide:
        weight = 1.0 + weight.float()
    assert_close(rms_norm(x, weight, EPS), plain_norm(x, weight), roundings=2)


@settings(max_examples=40)
@given(SEEDS, ROWS, SIZES, st.sampled_from([0, 3]))
def test_norm_of_a_sum_is_the_sum_and_its_norm(seed: int, rows: int, width: int, gap: int) -> None:
    residual = bf16(seed, rows, width, gap=gap)
    x = bf16(seed + 1, rows, width)
    weight = bf16(seed + 2, width)
    total = residual + x
    ours = add_rms_norm_(residual, x, weight, EPS)
    assert same_bits(residual, total) and same_bits(ours, rms_norm(total, weight, EPS))


# ---- heads


@settings(max_examples=60)
@given(
    SEEDS, ROWS, st.integers(1, 5), st.integers(1, 3), st.sampled_from([2, 6, 16, 80, 128]), st.booleans(),
    st.booleans(), st.sampled_from([0, 5]),
)  # fmt: skip
def test_heads_are_normalised_turned_and_placed(
    seed: int, tokens: int, q_heads: int, kv_heads: int, head_dim: int, normed: bool, wide: bool, gap: int
) -> None:
    heads = bf16(seed, tokens, q_heads + 2 * kv_heads, head_dim, gap=gap)
    weight = bf16(seed + 1, q_heads + kv_heads, head_dim) if normed else None
    if weight is not None and wide:
        weight = 1.0 + weight.float()
    angles = torch.randn(tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(seed))
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = angles.sin()
    q, k, v = (bf16(0, tokens, count, head_dim, gap=gap) for count in (q_heads, kv_heads, kv_heads))
    place_heads(heads, weight, EPS, cos, sin, q, k, v)
    to_turn, values = heads.split((q_heads + kv_heads, kv_heads), dim=1)
    turned = rotate(to_turn if weight is None else plain_norm(to_turn, weight), cos, sin)
    # A neighbour's rounding in the norm is worth as much here as what it turns into. Without a norm it is the
    # two float32 products that round, and where they cancel that is large beside the result.
    inherited = ONE_ULP if normed else 2**-22
    for ours, expected in zip((q, k), turned.split((q_heads, kv_heads), dim=1), strict=True):
        size = expected.abs().amax(-1, keepdim=True) if expected.numel() else expected
        assert torch.all((ours.float() - expected).abs() <= ONE_ULP * expected.abs() + inherited * size)
    assert same_bits(v, values)


def test_a_nan_of_any_bits_stays_one() -> None:
    bits = torch.cat((torch.arange(0x7F81, 0x8000), torch.arange(0xFF81, 0x10000)))
    nans = bits.to(torch.int16).view(torch.bfloat16)
    rows = bf16(0, len(nans), 64)
    rows[:, 5] = nans
    assert nans.isnan().all() and rows.isnan().sum() == len(nans)
    all_ones = torch.full((64,), -1, dtype=torch.int32).view(torch.float32)
    assert rms_norm(rows, bf16(1, 64), EPS).isnan().all()
    assert rms_norm(bf16(1, 3, 64), all_ones, EPS).isnan().all()
    residual = bf16(2, len(nans), 64)
    add_rms_norm_(residual, rows, bf16(1, 64), EPS)
    assert torch.equal(residual.isnan(), rows.isnan())
    assert silu_and_mul(torch.cat((torch.ones_like(nans), nans)).unsqueeze(0)).isnan().all()
    q, k, v = (bf16(0, len(nans), 1, 64) for _ in range(3))
    cos = torch.full((len(nans), 1, 64), 0.5)
    sin = torch.full((len(nans), 1, 32), 0.5)
    place_heads(rows.unsqueeze(1).repeat(1, 3, 1), None, EPS, cos, sin, q, k, v)
    for turned in (q, k):
        assert turned[..., [5, 37]].isnan().all() and turned.isnan().sum() == 2 * len(nans)


# ---- activation


@settings(max_examples=60)
@given(SEEDS, ROWS, SIZES, st.sampled_from([0, 2]), st.sampled_from([0.1, 3.0, 40.0]))
def test_activation_is_silu_times_up(seed: int, rows: int, width: int, gap: int, size: float) -> None:
    gate_up = bf16(seed, rows, 2 * width, gap=gap, size=size)
    gate, up = gate_up.double().chunk(2, dim=-1)
    # Twice: the activation may round to the neighbour, and its product with `up` again.
    exact = (gate * torch.sigmoid(gate)).bfloat16().double() * up
    ours = silu_and_mul(gate_up).double()
    assert torch.all((ours - exact).abs() <= 2 * ONE_ULP * exact.abs() + 1e-30)


def test_activation_of_every_number() -> None:
    """All bf16 there are, against torch's; below -87 torch's exponential overflows too."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ours = silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    expected = F.silu(gate.float())
    assert torch.equal(ours.isnan(), expected.isnan())
    finite = ~ours.isnan()
    torch.testing.assert_close(ours[finite].float(), expected[finite], rtol=ONE_ULP, atol=2e-36)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activation_in_other_dtypes(dtype: torch.dtype) -> None:
    """As exact as torch's: in fp32 to 2^-22, and in fp16 rounded where Transformers rounds."""
    gate = torch.linspace(-80, 80, 100_001, dtype=torch.float64).to(dtype)
    wide = gate.double()
    exact = wide * torch.sigmoid(wide)
    ours = silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    assert ours.dtype == dtype
    bound = 2.0**-22 * exact.abs() if dtype == torch.float32 else 2.0**-10 * exact.abs() + 2.0**-24
    assert torch.all((ours.double() - exact).abs() <= bound)
    rows = torch.tensor([[100.0, -100.0, torch.inf, -90.0, torch.nan]])
    expected = torch.tensor([[100.0, 0.0, torch.inf, 0.0, torch.nan]])
    torch.testing.assert_close(silu_and_mul(torch.cat((rows, torch.ones_like(rows)), dim=1)), expected, equal_nan=True)


def exact_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gelu_is_torchs_approximation_by_tanh(dtype: torch.dtype) -> None:
    """Against fp64; where torch subtracts near numbers, far below 0, the result is the more exact one."""
    gate = torch.linspace(-12, 40, 100_001, dtype=torch.float64).to(dtype)
    wide = gate.double()
    exact = exact_gelu(wide)
    torch.testing.assert_close(exact, F.gelu(wide, approximate="tanh"), atol=1e-14, rtol=1e-9)
    ours = gelu_tanh_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    bound = {torch.float32: 2.0**-19, torch.float16: 2.0**-10, torch.bfloat16: ONE_ULP}[dtype]
    assert ours.dtype == dtype and torch.all((ours.double() - exact).abs() <= bound * exact.abs() + 2.0**-24)
    rows = torch.tensor([[1e30, -1e30, torch.inf, -90.0, torch.nan, 2.0]])
    expected = torch.tensor([[3e30, 0.0, torch.inf, 0.0, torch.nan, 3 * F.gelu(rows[0, 5], approximate="tanh")]])
    up = torch.full_like(rows, 3.0)
    torch.testing.assert_close(gelu_tanh_and_mul(torch.cat((rows, up), dim=1)), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_clamped_unit_is_that_of_gpt_oss(dtype: torch.dtype) -> None:
    """Against Transformers' in fp64, with gates and ups on both sides of the limits."""
    gate = torch.linspace(-30, 30, 10_001, dtype=torch.float64).to(dtype)
    up = gate.flip(0).roll(1700)
    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=2, intermediate_size=2))
    exact = theirs._apply_gate(torch.stack((gate, up), dim=-1).flatten().double())
    ours = clamped_swiglu(torch.cat((gate, up)).unsqueeze(0))[0]
    bound = {torch.float32: 2.0**-19, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    factor = up.double().clamp(-7, 7).add(1).abs() + 1  # rounded before the product
    assert ours.dtype == dtype
    assert torch.all((ours.double() - exact).abs() <= bound * (exact.abs() + factor * 2.0**-3) + 2.0**-24)
    rows = torch.tensor([[1e30, -1e30, torch.nan, 1.0, torch.inf, 1.0, 2.0, torch.nan]])
    assert clamped_swiglu(rows).isnan().tolist() == [[False, False, True, True]]


# ---- other dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_and_heads_in_other_dtypes(dtype: torch.dtype) -> None:
    bound = 2.0**-21 if dtype == torch.float32 else 2.0**-9
    x = torch.randn(9, 130).to(dtype)
    weight = torch.randn(130).to(dtype)
    exact = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), exact, rtol=bound, atol=1e-6)
    heads = torch.randn(9, 5, 32).to(dtype)
    angles = torch.randn(9, 1, 16)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = angles.sin()
    q, k, v = (torch.empty(9, count, 32, dtype=dtype) for count in (3, 1, 1))
    place_heads(heads, None, EPS, cos, sin, q, k, v)
    turned = rotate(heads[:, :4], cos, sin)
    torch.testing.assert_close(torch.cat((q, k), dim=1).float(), turned, rtol=bound, atol=bound)
    assert same_bits(v, heads[:, 4:])


# ---- angles, softmax, draws


def test_angles_are_cosines_and_sines() -> None:
    angles = torch.cat((torch.linspace(-7, 7, 999), torch.logspace(-6, 6, 1001))).view(20, 100)
    cos, sin = cpu_kernels.cos_sin(angles, 1.25)
    exact = angles.double()
    torch.testing.assert_close(cos.double(), 1.25 * exact.cos().repeat(1, 2), rtol=0, atol=2.0**-22)
    torch.testing.assert_close(sin.double(), 1.25 * exact.sin(), rtol=0, atol=2.0**-22)


@settings(max_examples=60)
@given(SEEDS, ROWS, SIZES, st.sampled_from([0.1, 10.0, 1000.0]), st.booleans())
def test_softmax_is_torchs(seed: int, rows: int, width: int, size: float, log: bool) -> None:
    x = size * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x[:, 1::7] = -torch.inf
    exact = torch.log_softmax(x.double(), dim=-1) if log else torch.softmax(x.double(), dim=-1)
    torch.testing.assert_close(cpu_kernels.softmax(x, log=log).double(), exact, rtol=1e-5, atol=1e-5 if log else 1e-37)


def test_sigmoid_is_torchs() -> None:
    extremes = torch.tensor([-torch.inf, -1e30, -90.0, 90.0, 1e30, torch.inf])
    x = torch.cat((torch.linspace(-20, 20, 999), extremes)).view(3, -1)
    torch.testing.assert_close(cpu_kernels.sigmoid(x).double(), x.double().sigmoid(), rtol=1e-6, atol=1e-37)


def test_a_draw_takes_the_largest_score_with_its_noise() -> None:
    rows = [Row(seed=index * 7919, index=index) for index in range(50)]
    scores = torch.randn(50, 333)
    scores[:, ::3] = -torch.inf
    tokens = torch.randperm(1000)[:333]
    expected = torch.argmax(scores + sampler.gumbel_noise(rows, tokens), dim=-1)
    assert torch.equal(cpu_kernels.draw(scores, tokens, sampler.noise_starts(rows)), expected)


# ---- rounding


def share_of_equal_bits(ours: Tensor, expected: Tensor) -> float:
    return float((ours.contiguous().view(torch.int16) == expected.contiguous().view(torch.int16)).double().mean())


def test_rounds_where_transformers_does() -> None:
    """One rounding more or less changes the bits of every few numbers; a sum in another order of one in thousands."""
    x = bf16(1, 50, 1024)
    weight = bf16(2, 1024)
    assert share_of_equal_bits(rms_norm(x, weight, EPS), plain_norm(x, weight)) > 0.999
    one_plus = 1.0 + weight.float()
    gemma = Gemma3RMSNorm(1024, EPS)
    gemma.weight.data.copy_(weight)
    assert share_of_equal_bits(rms_norm(x, one_plus, EPS), gemma(x).detach()) > 0.999
    assert share_of_equal_bits(rms_norm(x, one_plus.bfloat16(), EPS), gemma(x).detach()) < 0.9
    gate_up = bf16(3, 50, 2048, size=3.0)
    gate, up = gate_up.chunk(2, dim=-1)
    assert share_of_equal_bits(silu_and_mul(gate_up), F.silu(gate) * up) > 0.999
    activated = exact_gelu(gate.double()).bfloat16()  # torch's subtracts near numbers
    assert share_of_equal_bits(gelu_tanh_and_mul(gate_up), activated * up) > 0.999
    heads = bf16(4, 50, 6, 64)
    head_weight = bf16(5, 5, 64)
    angles = torch.randn(50, 1, 32)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = angles.sin()
    q, k, v = (heads.new_empty(50, count, 64) for count in (4, 1, 1))
    place_heads(heads, head_weight, EPS, cos, sin, q, k, v)
    turned = rotate(plain_norm(heads[:, :5], head_weight), cos, sin).bfloat16()
    assert share_of_equal_bits(torch.cat((q, k), dim=1), turned) > 0.999


# ---- writing of K/V


@settings(max_examples=60)
@given(
    SEEDS, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(1, 3),
    st.sampled_from([1, 3, 16]), st.sampled_from([1, 8, 80]), st.booleans(), st.data(),
)  # fmt: skip
def test_each_token_goes_into_its_slot_and_nowhere_else(
    seed: int, dtype: torch.dtype, kv_heads: int, block_size: int, head_dim: int, strided: bool, draw: st.DataObject
) -> None:
    blocks = 4
    free = draw.draw(st.permutations(range(blocks * block_size)))
    slots = [-1 if draw.draw(st.booleans()) else slot for slot in free[: draw.draw(st.integers(0, len(free)))]]
    kv = bf16(seed, len(slots), 2 * kv_heads, head_dim).to(dtype)
    k, v = kv.split(kv_heads, dim=1) if strided else (part.contiguous() for part in kv.split(kv_heads, dim=1))
    whole = torch.full((blocks + 1, 2, kv_heads, block_size, head_dim), -7.0, dtype=dtype)
    store_kv(whole[1:], k, v, torch.tensor(slots, dtype=torch.int64))
    expected = torch.full_like(whole, -7.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            place = 1 + slot // block_size
            offset = slot % block_size
            expected[place, 0, :, offset], expected[place, 1, :, offset] = k[token], v[token]
    assert torch.equal(whole, expected)


# ---- other rows


def work(seed: int, rows: int) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Each function with tensors that share their rows."""
    cos = torch.randn(rows, 1, 64)
    sin = torch.randn(rows, 1, 32)
    wide = 4 * torch.randn(rows, 321)
    tokens = torch.arange(321)
    starts = torch.arange(seed, seed + rows)

    def add_norm(residual: Tensor, x: Tensor) -> Tensor:
        residual = residual.clone()
        weight = bf16(seed, 200).to(x.dtype)
        return torch.cat((add_rms_norm_(residual, x, weight, EPS), residual), dim=1)

    def heads(all_heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (all_heads.new_empty(len(all_heads), count, 64) for count in (4, 2, 2))
        place_heads(all_heads, bf16(seed, 6, 64).to(all_heads.dtype), EPS, cos, sin, q, k, v)
        return torch.cat((q, k, v), dim=1)

    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "angles": (lambda x: torch.cat(cpu_kernels.cos_sin(x, 1.5), dim=1), [100 * wide]),
        "softmax": (cpu_kernels.softmax, [wide]),
        "sigmoid": (cpu_kernels.sigmoid, [wide]),
        "log softmax": (lambda x: cpu_kernels.softmax(x, log=True), [wide]),
        "draw": (lambda x, starts: cpu_kernels.draw(x, tokens, starts), [wide, starts]),
    }
    for dtype in DTYPES:
        x, y = (bf16(seed + i, rows, 200).to(dtype) for i in range(2))
        calls |= {
            f"norm, {dtype}": (lambda x: rms_norm(x, bf16(seed, 200).to(x.dtype), EPS), [x]),
            f"norm of a sum, {dtype}": (add_norm, [x, y]),
            f"heads, {dtype}": (heads, [bf16(seed, rows, 8, 64).to(dtype), cos, sin]),
            f"norm, fp32 weight, {dtype}": (lambda x: rms_norm(x, bf16(seed, 200).float(), EPS), [x]),
            f"activation, {dtype}": (silu_and_mul, [bf16(seed, rows, 600).to(dtype)]),
            f"gelu, {dtype}": (gelu_tanh_and_mul, [bf16(seed, rows, 600).to(dtype)]),
            f"clamped, {dtype}": (clamped_swiglu, [bf16(seed, rows, 600, size=5.0).to(dtype)]),
        }
    return calls


@pytest.mark.parametrize("name", work(0, 1))
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_depends_on_itself_alone(name: str, count: int) -> None:
    rows = 700  # enough for a second thread
    function, tensors = work(5, rows)[name]
    with threads(1):
        together = function(*tensors)
    with threads(count):
        for begin, end in ((0, 1), (rows - 1, rows), (1, 4), (13, 30), (5, 600), (0, rows)):
            parts = [tensor[begin:end].clone() for tensor in tensors]
            assert same_bits(function(*parts), together[begin:end])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    for name, (function, tensors) in work(6, 3).items():
        bounded = name == "sigmoid" or name.startswith("clamped")
        if name == "draw" or (bounded and value == torch.inf):
            continue
        tensors[0][1].view(-1)[3] = value
        finite = function(*tensors).flatten(1).isfinite()
        assert finite[0].all() and finite[2].all() and not finite[1].all()


def test_threads_write_the_same_slots() -> None:
    kv = bf16(7, 3000, 4, 32)
    slots = torch.randperm(3008)[:3000]
    pools = []
    for count in (1, 3):
        pool = torch.zeros(94, 2, 2, 32, 32, dtype=torch.bfloat16)
        with threads(count):
            store_kv(pool, kv[:, :2], kv[:, 2:], slots)
        pools.append(pool)
    assert torch.equal(*pools)


# ---- other tensors


def test_other_tensors_go_to_torch() -> None:
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(3, 10).to(dtype)
        assert silu_and_mul(x).dtype == dtype
    meta = bf16(0, 3, 10).to("meta")
    assert silu_and_mul(meta).shape == (3, 5)
    transposed = bf16(0, 10, 3).T
    assert_close(silu_and_mul(transposed), silu_and_mul(transposed.contiguous()), roundings=2)


def test_refuses_what_does_not_fit() -> None:
    """Memory that a kernel would read or write beyond what there is. The message has the tensor that does not fit."""
    x = bf16(0, 2, 8)
    heads = bf16(0, 2, 4, 8)
    cos = torch.ones(2, 1, 8)
    q = heads[:, :2]
    k = heads[:, 2:3]
    v = heads[:, 3:]
    sin = cos[..., :4]
    pool = bf16(0, 3, 2, 1, 4, 8)
    slots = torch.tensor([0, 11])
    place_heads(heads, None, EPS, cos, sin, q.clone(), k, v)
    store_kv(pool, k, v, slots)
    refused: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
        (rms_norm, (x, bf16(0, 7), EPS), "weight torch.bfloat16 (7,)"),
        (rms_norm, (bf16(0, 8, 2).T, x[0, :2], EPS), "strides (1, 2)"),
        (rms_norm, (x.double(), x[0].double(), EPS), "torch.float64 (2, 8)"),
        (add_rms_norm_, (x, bf16(0, 3, 8), x[0], EPS), "torch.bfloat16 (3, 8)"),
        (place_heads, (heads, None, EPS, cos, sin, q, k, bf16(0, 2, 2, 8)), "torch.bfloat16 (2, 2, 8)"),
        (place_heads, (heads, None, EPS, cos, sin, bf16(0, 2, 3, 8), k, v), "torch.bfloat16 (2, 3, 8)"),
        (place_heads, (heads, None, EPS, cos, cos, q, k, v), "torch.float32 (2, 1, 8)"),
        (place_heads, (heads, bf16(0, 4, 8), EPS, cos, sin, q, k, v), "weight torch.bfloat16 (4, 8)"),
        (cpu_kernels.silu_and_mul, (bf16(0, 2, 7),), "(2, 7)"),
        (cpu_kernels.sigmoid, (x,), "torch.bfloat16 (2, 8)"),
        (cpu_kernels.softmax, (x,), "torch.bfloat16 (2, 8)"),
        (cpu_kernels.draw, (x.float(), torch.zeros(8), slots), "tokens torch.float32"),
        (cpu_kernels.draw, (x.float(), torch.arange(8), slots[:1]), "starts torch.int64 (1,)"),
        (store_kv, (pool, k, v, slots.int()), "slots torch.int32"),
        (store_kv, (pool, bf16(0, 2, 2, 8), v, slots), "k torch.bfloat16 (2, 2, 8)"),
        (store_kv, (pool.transpose(2, 3), k, v, slots), "pool torch.bfloat16 (3, 2, 4, 1, 8)"),
        (store_kv, (pool, k, v, slots + 1), "3 blocks of 4 tokens, got 12."),
    ]
    for function, arguments, message in refused:
        with pytest.raises(ValueError) as error:
            function(*arguments)
        assert message in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 5000])
def test_likeliest_is_the_first_largest_logit_of_a_finite_row(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(12, vocab).to(dtype)
    logits[3] = logits[4, -1]  # equal ones
    logits[5] = -torch.finfo(dtype).max
    for row, value in ((6, math.nan), (7, math.inf), (8, -math.inf)):
        logits[row, row * 977 % vocab] = value
    tokens = cpu_kernels.likeliest(logits)
    rows = logits.tolist()
    assert tokens.tolist() == [-1 if 6 <= i <= 8 else row.index(max(row)) for i, row in enumerate(rows)]
    assert torch_rows.likeliest(logits).tolist() == tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_additions_and_narrowing_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    wide = torch.randn(70, 3, 40) * 10.0 ** torch.randint(-9, 9, (70, 3, 40))
    wide[0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    target = torch.zeros(70, 5, 40, dtype=dtype)[:, 1:4]
    assert torch.equal(cpu_kernels.narrow_(target, wide).nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))
    x, addend = (torch.randn(70, 240).to(dtype)[:, 20:220] for _ in range(2))
    expected = x + addend
    assert torch.equal(cpu_kernels.add_(x, addend), expected) and torch.equal(x, expected)
    assert torch.equal(cpu_kernels.widened(x), x.float())
    assert cpu_kernels.filled((70, 333), -math.inf).eq(-math.inf).all()
