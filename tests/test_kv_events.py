"""Snapshots of the KV cache, and the server-sent events that carry them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from block_helpers import BLOCK, cache, one_group, running
from checkpoints import checkpoint_fixture
from engines import greedy, offloaded, random_prompt, set_prefill
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, KVBlockState
from nanovllm.apps.server import kv_events
from nanovllm.apps.server.kv_events import KVCacheEvents, KVSnapshot, changed_runs, layout
from nanovllm.engine.block_manager import BlockManager, BlockState

STATES = st.lists(st.sampled_from(KVBlockState), min_size=1, max_size=60).map(bytes)


def applied(runs: list[list[int]], before: bytes) -> bytes:
    """The states after a message, as a client keeps them."""
    cells = bytearray(before)
    for first, count, state in runs:
        cells[first : first + count] = bytes([state]) * count
    return bytes(cells)


# ---- states and their encoding


def test_states_are_in_the_order_of_the_physical_ids() -> None:
    manager = BlockManager(2, 3, one_group(BLOCK), num_swap_blocks=2)
    cache(manager, range(BLOCK))
    seq = running(manager, range(100, 100 + 2 * BLOCK))
    assert manager.physical_ids(seq, 2 * BLOCK)[0] == [1, 0] and manager.num_cached == 1
    free, cached, used = BlockState.FREE, BlockState.CACHED, BlockState.USED
    assert list(manager.block_states()) == [used, used, cached, free, free, free, free]
    manager.swap_out([seq])
    assert list(manager.block_states()) == [free, free, cached, free, free, used, used]


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
    tiers, metrics, states = layout(llm)["tiers"], llm.metrics(), snapshot.states
    assert len(states) == sum(tiers.values())
    counts = Counter(KVBlockState(state) for state in states[: tiers["device"] + tiers["host"]])
    active = counts[KVBlockState.USED] + counts[KVBlockState.FILLING] + counts[KVBlockState.IN_FLIGHT]
    found = (counts[KVBlockState.FREE], counts[KVBlockState.CACHED], active)
    assert found == (metrics.free_blocks, metrics.cached_blocks, metrics.used_blocks)
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


# ---- events


class InlineEngine:
    """Calls functions at once: the tests step the engine in the thread of the event loop."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.answers = asyncio.Event()  # until it is set, answers do not reach the event loop
        self.answers.set()

    async def call(self, function: Callable[[LLM], None]) -> None:
        function(self.llm)
        await self.answers.wait()


class Client:
    """Reads one stream, and keeps the states as the page does."""

    def __init__(self, events: KVCacheEvents) -> None:
        self.stream = events.listen()
        self.states = b""
        self.snapshots: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        """The next event's data."""
        text = await asyncio.wait_for(anext(self.stream), 20)
        name, data = text.decode().removesuffix("\n\n").split("\n")
        message: dict[str, Any] = json.loads(data.removeprefix("data: "))
        if name == "event: layout":
            self.states = bytes(sum(message["tiers"].values()))
        else:
            assert name == "event: snapshot"
            self.snapshots.append(message)
            self.states = applied(message["runs"], self.states)
        return message


@pytest.fixture
def watching(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of `watch_steps` began or ended a watch. Also lets every layer take a snapshot."""
    watching: list[bool] = []
    watch_steps = llm.watch_steps
    monkeypatch.setattr(kv_events, "MAX_SHARE", float("inf"))
    monkeypatch.setattr(llm, "watch_steps", lambda look: (watching.append(look is not None), watch_steps(look)))
    return watching


def events_of(llm: LLM, interval: float = 0.0) -> KVCacheEvents:
    return KVCacheEvents(InlineEngine(llm), interval=interval)  # type: ignore[arg-type]


async def settled() -> None:
    """Let everything run that the event loop has to do now."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_clients_follow_the_cache_and_share_snapshots(llm: LLM, watching: list[bool]) -> None:
    async def run() -> None:
        events = events_of(llm)
        one, other = Client(events), Client(events)
        for client in (one, other):
            layout = await client.read()
            assert layout["tiers"] == {"device": 4, "host": 30, "swap": 34} and layout["block_size"] == 16
            assert layout["states"] == ["free", "cached", "used", "filling", "in_flight"]
            assert (await client.read())["runs"] == [[0, 68, KVBlockState.FREE]]
        for _ in steps(llm, random_prompt(150, 199, 1)):
            await settled()
            await one.read()
        while one.states != KVSnapshot.take(llm).states:
            await one.read()
        assert one.states.count(KVBlockState.CACHED) == llm.metrics().cached_blocks > 0
        assert one.snapshots[-1]["totals"]["prompt_tokens"] == 150
        assert sum(count for s in one.snapshots[1:] for _, count, _ in s["runs"]) < 68 * len(one.snapshots)
        await other.read()  # has missed the others
        assert other.states == one.states and other.snapshots[-1]["time"] == one.snapshots[-1]["time"]
        assert len(other.snapshots) == 2 < len(one.snapshots)
        taken, reading = events.num_snapshots, asyncio.ensure_future(one.read())
        await settled()
        assert events.num_snapshots > taken and not reading.done(), "nothing is sent while nothing changes"
        reading.cancel()

    asyncio.run(run())


def test_without_a_listener_nothing_is_taken_and_no_step_is_watched(llm: LLM, watching: list[bool]) -> None:
    async def run() -> None:
        events = events_of(llm)
        for _ in steps(llm, random_prompt(100, 199, 1)):
            await settled()
        assert events.num_snapshots == 0 and not watching
        client = Client(events)
        await client.read()
        await client.read()
        assert events.num_snapshots > 0 and watching[-1] and events.num_listeners == 1
        events._engine.answers.clear()  # type: ignore[attr-defined]
        await settled()
        await client.stream.aclose()  # the engine's thread has looked already, and the event loop does not know it
        events._engine.answers.set()  # type: ignore[attr-defined]
        await settled()
        taken = events.num_snapshots
        assert not watching[-1] and events.num_listeners == 0
        for _ in steps(llm, random_prompt(100, 199, 2)):
            await settled()
        assert events.num_snapshots == taken
        assert len(asyncio.all_tasks()) == 1, "no task is left"

    asyncio.run(run())
