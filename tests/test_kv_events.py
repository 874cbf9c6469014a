"""Snapshots of the KV cache, and the server-sent events that carry them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import checkpoint_fixture
from engines import greedy, offloaded, random_prompt, set_prefill
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, KVBlockState
from nanovllm.apps.server.kv_events import KVSnapshot, changed_runs, layout
from nanovllm.apps.server.metrics import ServerMetrics

STATES = st.lists(st.sampled_from(KVBlockState), min_size=1, max_size=60).map(bytes)


def applied(runs: list[list[int]], before: bytes) -> bytes:
    """The states after a message, as a client keeps them."""
    cells = bytearray(before)
    for first, count, state in runs:
        cells[first : first + count] = bytes([state]) * count
    return bytes(cells)


# ---- states and their encoding


@given(data=st.data())
def test_only_cells_that_have_changed(data: st.DataObject) -> None:
    before = data.draw(STATES)
    after = bytes(data.draw(st.lists(st.sampled_from(KVBlockState), min_size=len(before), max_size=len(before))))
    runs = changed_runs(after, before)
    assert applied(runs, before) == after
    told = [cell for first, count, _ in runs for cell in range(first, first + count)]
    assert told == [cell for cell in range(len(after)) if after[cell] != before[cell]]


# ---- snapshots of an engine


model = checkpoint_fixture(layers=4)


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **offloaded(num_gpu_blocks=5, num_cpu_blocks=30, max_num_batched_tokens=48)) as llm:
        yield llm


def check(llm: LLM, snapshot: KVSnapshot) -> Counter[KVBlockState]:
    """What holds of every snapshot. Returns the number of blocks in each state."""
    tiers = layout(llm)["tiers"]
    metrics = llm.metrics()
    states = snapshot.states
    assert len(states) == sum(tiers.values())
    counts = Counter(KVBlockState(state) for state in states[: tiers["device"] + tiers["host"]])
    active = counts[KVBlockState.USED] + counts[KVBlockState.FILLING] + counts[KVBlockState.IN_FLIGHT]
    found = (counts[KVBlockState.FREE], counts[KVBlockState.CACHED], active)
    assert found == (metrics.blocks.free, metrics.blocks.cached, metrics.blocks.used)
    assert KVBlockState.IN_FLIGHT not in states[: tiers["device"]]
    return counts


def steps(llm: LLM, prompt: list[int], max_tokens: int = 4) -> Iterator[None]:
    """Run a request step by step."""
    llm.engine.add_request("r", None, greedy(max_tokens), prompt)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        yield


def test_a_snapshot_within_a_step_shows_blocks_in_flight(llm: LLM) -> None:
    within: list[tuple[float, Counter[KVBlockState], KVSnapshot]] = []

    def watch(share: float) -> None:
        snapshot = KVSnapshot.take(llm, share)
        within.append((share, check(llm, snapshot), snapshot))

    set_prefill(llm, "chunk-major")
    llm.watch_steps(watch)
    for _ in steps(llm, random_prompt(200, 199, 1)):
        between = KVSnapshot.take(llm)
        assert check(llm, between)[KVBlockState.IN_FLIGHT] == 0
    assert any(counts[KVBlockState.IN_FLIGHT] for _, counts, _ in within)
    assert any(counts[KVBlockState.FILLING] for _, counts, _ in within)
    assert {snapshot.numbers["prefill"]["layer"] for _, _, snapshot in within} == {1, 2, 3, 4}
    counts = check(llm, KVSnapshot.take(llm))
    assert counts[KVBlockState.CACHED] == 12 and counts[KVBlockState.FREE] == sum(counts.values()) - 12


def test_tokens_that_are_computed_again_are_seen_everywhere(llm: LLM) -> None:
    """The cache holds 560 tokens: the other prompts take the place of the first one."""
    prompts = [random_prompt(250, 199, seed) for seed in (1, 2, 3, 1)]
    metrics = [llm.generate(prompt, greedy(2))[0].metrics for prompt in prompts]
    assert [each.recomputed_tokens for each in metrics[:3]] == [0, 0, 0]
    again = metrics[3].recomputed_tokens
    assert again == 240 - metrics[3].cached_tokens > 0 and metrics[3].as_dict()["recomputed_tokens"] == again
    assert llm.metrics().prefix_cache.recomputed_tokens == again
    assert KVSnapshot.take(llm).numbers["totals"]["recomputed_tokens"] == again
    lines = ServerMetrics(llm, "tiny").text().decode().splitlines()
    assert f'nanovllm:recomputed_tokens_total{{model_name="tiny"}} {again:.1f}' in lines


def test_without_prefix_caching_nothing_is_old(model: Path) -> None:
    with LLM(model, enable_prefix_caching=False, kvcache_block_size=16, num_gpu_blocks=20) as llm:
        found = [llm.generate(random_prompt(200, 199, 1), greedy(2))[0].metrics for _ in range(2)]
    assert [each.recomputed_tokens for each in found] == [0, 0] and found[1].prefill_tokens == 200
