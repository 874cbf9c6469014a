"""The choice between chunk-major and layer-major prefill, slices of spans, and the memory kept for them. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kvcache.budget import TransferCount, predict_request, predict_transfers
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import PrefillSpan, SpanSlice, plan_prefill, span_block_bytes, span_blocks

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, itemsize=2)
BLOCK = LAYOUT.block_size


def loads(host: set[int], begin: int, steps: list[int]) -> int:
    """Tokens that a layer loads when it goes through steps of these lengths, token by token."""
    total, position = 0, begin
    for step in steps:
        total += sum(earlier // BLOCK in host for earlier in range(position))
        position += step
    return total


def in_chunks(begin: int, end: int, chunk: int) -> list[int]:
    return [min(chunk, end - first) for first in range(begin, end, chunk)]


@given(
    host=st.sets(st.integers(0, 11)),
    begin=st.integers(0, 60),
    tokens=st.integers(1, 90),
    chunk=st.integers(1, 40),
    span_tokens=st.integers(0, 12).map(lambda blocks: blocks * BLOCK),
)
@settings(max_examples=400, deadline=None)
def test_the_way_that_loads_less_is_taken(
    host: set[int], begin: int, tokens: int, chunk: int, span_tokens: int
) -> None:
    end = min(begin + tokens, 12 * BLOCK)
    if begin >= end:
        return
    span = plan_prefill(sorted(host), BLOCK, begin, end, chunk, span_tokens)
    chunk_major, reach = loads(host, begin, in_chunks(begin, end, chunk)), min(end, span_tokens)
    layer_major = loads(host, begin, [reach - begin, *in_chunks(reach, end, chunk)]) if reach > begin else chunk_major
    if span is None:
        assert reach - begin <= chunk or layer_major >= chunk_major
    else:
        assert span == PrefillSpan(begin, reach, chunk) and reach - begin > chunk and layer_major < chunk_major


@pytest.mark.parametrize(
    "what, host, begin, end, span_tokens, expected",
    [
        ("everything on the device: nothing to save", (), 0, 400, 800, None),
        ("one step does it", range(50), 0, 64, 800, None),
        ("no memory for spans", range(50), 0, 400, 0, None),
        ("a long prompt", range(50), 0, 400, 800, (0, 400)),
        ("a long prompt on a cached prefix", range(50), 160, 400, 800, (160, 400)),
        ("the rest of a cached prompt is a step", range(50), 340, 400, 800, None),
        ("longer than memory allows: the tail goes by chunks", range(50), 0, 400, 240, (0, 240)),
        ("memory for no more than the cached prefix", range(50), 240, 400, 240, None),
        ("only the last block on the host: each earlier token is on the device", (49,), 0, 400, 800, None),
    ],
)
def test_choices(
    what: str, host: range, begin: int, end: int, span_tokens: int, expected: tuple[int, int] | None
) -> None:
    span = plan_prefill(host, BLOCK, begin, end, 64, span_tokens)
    assert (None if span is None else (span.begin, span.end)) == expected, what


@given(
    begin=st.integers(0, 50),
    tokens=st.integers(1, 60),
    chunk=st.integers(1, 25),
    num_layers=st.integers(1, 5),
    budget=st.integers(0, 200),
)
@settings(max_examples=200, deadline=None)
def test_slices_cover_every_unit_once_within_the_budget(
    begin: int, tokens: int, chunk: int, num_layers: int, budget: int
) -> None:
    span = PrefillSpan(begin, begin + tokens, chunk)
    ran: list[tuple[int, int]] = []
    first = 0
    while first < num_layers * span.num_chunks:
        part = SpanSlice(span, first, span.slice_end(first, budget, num_layers))
        last, over = len(span.positions(part.end_unit - 1)), part.token_layers - budget
        assert part.end_unit > first and (2 * over <= last or part.end_unit == first + 1), "half of the last fits"
        if part.end_unit < num_layers * span.num_chunks:
            following = len(span.positions(part.end_unit))
            assert 2 * (over + following) > following, "not half of one more would have fitted"
        ran += [(span.layer(unit), p) for unit in range(first, part.end_unit) for p in span.positions(unit)]
        first = part.end_unit
    assert ran == [(layer, position) for layer in range(num_layers) for position in range(begin, begin + tokens)]


# ---- what a request moves


@given(
    resident=st.integers(0, 8), prompt=st.integers(1, 90), output=st.integers(1, 9), chunk=st.integers(1, 40)
)
@settings(max_examples=100, deadline=None)
def test_a_prompt_within_the_layer_buffer_loads_nothing(resident: int, prompt: int, output: int, chunk: int) -> None:
    moved = predict_request(LAYOUT, resident, prompt, output, chunk, span_tokens=12 * BLOCK)
    decodes = [predict_transfers(LAYOUT, resident, length, 1) for length in range(prompt, prompt + output - 1)]
    loaded = sum(decode.h2d_bytes for decode in decodes)
    assert moved.h2d_bytes == loaded
    assert moved.d2h_bytes == max(0, prompt + output - 1 - resident * BLOCK) * LAYOUT.token_bytes


def test_the_tail_of_a_prompt_beyond_the_buffer_streams() -> None:
    moved = predict_request(LAYOUT, 2, 400, 1, 64, span_tokens=240)
    steps = [(0, 240), (240, 64), (304, 64), (368, 32)]
    assert moved == sum((predict_transfers(LAYOUT, 2, *step) for step in steps), TransferCount())
    assert moved.h2d_bytes < predict_request(LAYOUT, 2, 400, 1, 64).h2d_bytes


def test_layer_major_stores_every_block_in_one_copy_per_layer() -> None:
    layout = replace(LAYOUT, block_size=100)
    moved = predict_request(layout, 1, 700, 1, 64, span_tokens=1000)
    assert (moved.h2d_copies, moved.d2h_copies) == (0, 6 * layout.num_layers)


# ---- memory


@given(longest=st.integers(1, 5000), memory=st.integers(-100, 10**6), row_bytes=st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_the_layer_buffer_is_no_larger_than_memory_or_use(longest: int, memory: int, row_bytes: int) -> None:
    blocks, per_block = span_blocks(LAYOUT, row_bytes, memory, longest), span_block_bytes(LAYOUT, row_bytes)
    assert blocks * per_block <= max(memory, 0) and (blocks - 1) * BLOCK < longest
    assert (blocks + 1) * per_block > memory or blocks * BLOCK >= longest, "as many as there is memory and use for"
    assert per_block == BLOCK * (LAYOUT.token_layer_bytes + row_bytes)
