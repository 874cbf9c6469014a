"""The choice between prefill chunk by chunk and layer by layer, its steps and its memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.transfers import predict_request
from nanovllm.data.batch import LayerwisePrefill, LayerwiseStep
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layerwise import (
    NO_LAYERWISE,
    LayerwiseMemory,
    divide_memory,
    plan_prefill,
    prefill_steps,
    step_end,
)
from nanovllm.memory.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=8, itemsize=2)
BLOCK = LAYOUT.block_size


def loads(host: set[int], begin: int, steps: list[int]) -> int:
    """Tokens that a layer loads when it goes through steps of these lengths, token by token."""
    total = 0
    position = begin
    for step in steps:
        total += sum(earlier // BLOCK in host for earlier in range(position))
        position += step
    return total


def in_chunks(begin: int, end: int, chunk: int) -> list[int]:
    return [min(chunk, end - first) for first in range(begin, end, chunk)]


MEMORY = st.builds(LayerwiseMemory, st.integers(0, 12), st.integers(0, 100))


@given(
    host=st.sets(st.integers(0, 11)),
    begin=st.integers(0, 60),
    end=st.integers(1, 12 * BLOCK),
    chunk=st.integers(1, 40),
    memory=MEMORY,
)
@settings(max_examples=100)
def test_the_way_that_loads_less_is_taken(
    host: set[int], begin: int, end: int, chunk: int, memory: LayerwiseMemory
) -> None:
    if begin >= end:
        return
    layerwise = plan_prefill(sorted(host), BLOCK, begin, end, chunk, memory)
    ends = range(begin + 1, min(end, memory.buffer_blocks * BLOCK, begin + memory.max_tokens) + 1)
    possible = [e for e in ends if e == end or (e - begin) % chunk == 0]  # chunks are cut where they always are
    longest = max(possible, default=begin)
    saves = loads(host, begin, [longest - begin]) < loads(host, begin, in_chunks(begin, longest, chunk))
    if layerwise is None:
        assert longest - begin <= chunk or not saves
    else:
        assert layerwise == LayerwisePrefill(begin, longest, chunk) and longest - begin > chunk and saves


class CountedBlocks(Sequence[int]):
    """Block indices 0 to `count` - 1, and how often one was looked at."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.looks = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return range(self.count)[index]


def test_a_million_tokens_are_planned_in_an_instant() -> None:
    """Not with a look at each of the 4,000 blocks for each of the 500 chunks."""
    tokens = 1 << 20
    chunk = 2048
    host = CountedBlocks(tokens // 256)
    memory = LayerwiseMemory(buffer_blocks=tokens // 256, max_tokens=tokens)
    assert plan_prefill(host, 256, 0, tokens, chunk, memory) == LayerwisePrefill(0, tokens, chunk)
    assert host.looks < 20 * tokens // chunk


@given(resident=st.integers(0, 12), end=st.integers(1, 12 * BLOCK), chunk=st.integers(1, 40), memory=MEMORY)
@settings(max_examples=60)
def test_the_steps_of_a_prompt_cover_it_in_the_same_chunks(
    resident: int, end: int, chunk: int, memory: LayerwiseMemory
) -> None:
    steps = prefill_steps(BLOCK, resident, end, chunk, memory)
    layer_chunks = [step.positions(layer_chunk) for step in steps for layer_chunk in range(step.num_chunks)]
    assert layer_chunks == [range(first, min(first + chunk, end)) for first in range(0, end, chunk)]
    assert all(step.num_chunks == 1 or step.end - step.begin <= memory.max_tokens for step in steps)


@given(
    begin=st.integers(0, 50),
    tokens=st.integers(1, 60),
    chunk=st.integers(1, 25),
    num_layers=st.integers(1, 5),
    budget=st.integers(0, 200),
)
@settings(max_examples=60)
def test_slices_cover_every_unit_once_within_the_budget(
    begin: int, tokens: int, chunk: int, num_layers: int, budget: int
) -> None:
    layerwise = LayerwisePrefill(begin, begin + tokens, chunk)
    ran: list[tuple[int, int]] = []
    first = 0
    while first < num_layers * layerwise.num_chunks:
        part = LayerwiseStep(layerwise, first, step_end(layerwise, first, budget, num_layers))
        last = len(layerwise.positions(part.end_layer_chunk - 1))
        over = part.token_layers - budget
        assert part.end_layer_chunk > first and (2 * over <= last or part.end_layer_chunk == first + 1), (
            "half of the last fits"
        )
        if part.end_layer_chunk < num_layers * layerwise.num_chunks:
            following = len(layerwise.positions(part.end_layer_chunk))
            assert 2 * (over + following) > following, "not half of one more would have fitted"
        ran += [
            (layerwise.layer(layer_chunk), p)
            for layer_chunk in range(first, part.end_layer_chunk)
            for p in layerwise.positions(layer_chunk)
        ]
        first = part.end_layer_chunk
    assert ran == [(layer, position) for layer in range(num_layers) for position in range(begin, begin + tokens)]


# ---- what a request moves


def predicted(
    resident: int, prompt: int, output: int, chunk: int, memory: LayerwiseMemory, layout: KVLayout = LAYOUT
) -> TransferCount:
    steps = prefill_steps(layout.block_size, resident, prompt, chunk, memory)
    return predict_request(layout, resident, prompt, output, chunk, prefill=steps)


# ---- memory


@given(
    longest=st.integers(1, 300),
    memory=st.integers(-100, 60_000),
    row_bytes=st.integers(1, 500),
    chunk=st.integers(1, 60),
)
@settings(max_examples=50)
def test_memory_is_divided_so_that_the_longest_prompt_loads_least(
    longest: int, memory: int, row_bytes: int, chunk: int
) -> None:
    layerwise_prefills = divide_memory(LAYOUT, row_bytes, memory, longest, chunk)
    assert layerwise_prefills.num_bytes(LAYOUT, row_bytes) <= max(memory, 0)

    def loaded(given: LayerwiseMemory) -> int:
        return predicted(0, longest, 1, chunk, given).h2d_bytes

    least = loaded(layerwise_prefills)
    for blocks in range(-(-longest // BLOCK) + 1):
        tokens = (memory - blocks * LAYOUT.block_layer_bytes) // row_bytes
        if tokens >= 0:
            assert least <= loaded(LayerwiseMemory(blocks, min(tokens, longest)))
    if least == loaded(NO_LAYERWISE):
        assert layerwise_prefills == NO_LAYERWISE, "no memory is kept for nothing"
