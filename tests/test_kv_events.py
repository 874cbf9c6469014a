"""Snapshots of the KV cache, and the server-sent events that carry them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from block_helpers import BLOCK, cache, running
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, set_prefill
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, KVBlockState
from nanovllm.apps.server.kv_events import KVCacheEvents
from nanovllm.apps.server.kv_snapshot import KVGeometry, KVSnapshot, changed_runs
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
    manager = BlockManager(2, 3, BLOCK, num_swap_blocks=2)
    cache(manager, range(BLOCK))
    seq = running(manager, range(100, 100 + 2 * BLOCK))
    assert manager.physical_ids(seq, 2 * BLOCK) == [1, 0] and manager.num_cached == 1
    free, cached, used = BlockState.FREE, BlockState.CACHED, BlockState.USED
    assert list(manager.block_states()) == [used, used, cached, free, free, free, free]
    manager.swap_out([seq])
    assert list(manager.block_states()) == [free, free, cached, free, free, used, used]


@given(states=STATES)
def test_all_cells_without_a_state_before(states: bytes) -> None:
    runs = changed_runs(states, None)
    assert applied(runs, bytes(len(states))) == states
    assert [(state, count) for _, count, state in runs] == [(s, len(list(group))) for s, group in groupby(states)]


@given(data=st.data())
def test_only_cells_that_have_changed(data: st.DataObject) -> None:
    before = data.draw(STATES)
    after = bytes(data.draw(st.lists(st.sampled_from(KVBlockState), min_size=len(before), max_size=len(before))))
    runs = changed_runs(after, before)
    assert applied(runs, before) == after
    told = [cell for first, count, _ in runs for cell in range(first, first + count)]
    assert told == [cell for cell in range(len(after)) if after[cell] != before[cell]]


# ---- snapshots of an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, layers=4)
    return path


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **offloaded(num_gpu_blocks=5, num_cpu_blocks=30, max_num_batched_tokens=48)) as llm:
        yield llm


def check(llm: LLM, snapshot: KVSnapshot) -> Counter[KVBlockState]:
    """What holds of every snapshot. Returns the number of blocks in each state."""
    tiers, metrics, states = KVGeometry.of(llm).tiers, llm.metrics(), snapshot.states
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
    assert {snapshot.prefill.layer for _, _, snapshot in within} == {1, 2, 3, 4}
    counts = check(llm, KVSnapshot.take(llm))
    assert counts[KVBlockState.CACHED] == 12 and counts[KVBlockState.FREE] == sum(counts.values()) - 12


def test_a_layer_by_layer_prefill_is_followed_layer_by_layer(model: Path) -> None:
    arguments = offloaded(num_gpu_blocks=5, num_cpu_blocks=30, max_num_batched_tokens=32)
    with LLM(model, **arguments) as llm:
        taken = [KVSnapshot.take(llm) for _ in steps(llm, random_prompt(192, 199, 1), max_tokens=1)]
    layerwise = [snapshot for snapshot in taken if snapshot.prefill.layer_by_layer]
    assert {snapshot.prefill.layer for snapshot in layerwise} >= {1, 2, 3, 4}
    assert all(KVBlockState.IN_FLIGHT in s.states or KVBlockState.FILLING in s.states for s in layerwise)
    done = [snapshot.totals.prompt_tokens for snapshot in taken]
    assert done == sorted(done) and len(set(done)) > 4 and done[-1] == 192


def test_totals_are_those_of_the_engine(llm: LLM) -> None:
    prompt = random_prompt(150, 199, 1)
    first = [KVSnapshot.take(llm).totals for _ in steps(llm, prompt)][-1]
    last = [KVSnapshot.take(llm).totals for _ in steps(llm, prompt)][-1]
    transfers = llm.kv_stats().transfers
    assert (last.h2d_bytes, last.d2h_bytes) == (transfers.h2d_bytes, transfers.d2h_bytes) and last.d2h_bytes > 0
    assert last.cpu_attention_bytes == transfers.cpu_attention_bytes
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens) == (150, 0, 4)
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens) == (150 + 150 - 144, 144, 8)


# ---- events


class InlineEngine:
    """Calls functions at once: the tests step the engine in the thread of the event loop."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def call(self, function: Callable[[LLM], None]) -> None:
        function(self.llm)


class Client:
    """Reads one stream, and keeps the states as the page does."""

    def __init__(self, events: KVCacheEvents) -> None:
        self._stream = events.listen()
        self.states = b""
        self.snapshots: list[dict[str, Any]] = []

    async def read(self) -> dict[str, Any]:
        """The next event's data."""
        text = await asyncio.wait_for(anext(self._stream), 20)
        name, data = text.decode().removesuffix("\n\n").split("\n")
        message: dict[str, Any] = json.loads(data.removeprefix("data: "))
        if name == "event: layout":
            self.states = bytes(sum(message["tiers"].values()))
        else:
            assert name == "event: snapshot"
            self.snapshots.append(message)
            self.states = applied(message["runs"], self.states)
        return message

    async def aclose(self) -> None:
        await self._stream.aclose()


async def settled() -> None:
    """Let everything run that the event loop has to do now."""
    for _ in range(20):
        await asyncio.sleep(0)


def run_with(llm: LLM, test: Callable[[KVCacheEvents], Coroutine[Any, Any, None]], interval: float = 0.0) -> None:
    async def run() -> None:
        await test(KVCacheEvents(InlineEngine(llm), interval=interval))

    asyncio.run(run())


def test_a_client_follows_the_cache(llm: LLM) -> None:
    async def test(events: KVCacheEvents) -> None:
        async with aclosing(Client(events)) as client:
            layout = await client.read()
            assert layout["tiers"] == {"device": 4, "host": 30, "swap": 34} and layout["block_size"] == 16
            assert layout["states"] == ["free", "cached", "used", "filling", "in_flight"]
            first = await client.read()
            assert first["runs"] == [[0, 68, KVBlockState.FREE]]
            for _ in steps(llm, random_prompt(150, 199, 1)):
                await settled()
                await client.read()
            await settled()
            while client.states != KVSnapshot.take(llm).states:
                await client.read()
            assert client.states.count(KVBlockState.CACHED) == llm.metrics().cached_blocks > 0
            assert client.snapshots[-1]["totals"]["prompt_tokens"] == 150
            assert sum(count for s in client.snapshots[1:] for _, count, _ in s["runs"]) < 68 * len(client.snapshots)

    run_with(llm, test)


def test_without_a_listener_nothing_is_taken_and_no_step_is_watched(llm: LLM) -> None:
    watching: list[bool] = []
    watch_steps = llm.watch_steps

    def recorded(on_layer: Callable[[float], None] | None) -> None:
        watching.append(on_layer is not None)
        watch_steps(on_layer)

    llm.watch_steps = recorded  # type: ignore[method-assign]

    async def test(events: KVCacheEvents) -> None:
        for _ in steps(llm, random_prompt(100, 199, 1)):
            await settled()
        assert events.num_snapshots == 0 and not watching
        client = Client(events)
        await client.read()
        await client.read()
        assert events.num_snapshots > 0 and watching[-1] and events.num_listeners == 1
        await client.aclose()
        await settled()
        taken = events.num_snapshots
        assert not watching[-1] and events.num_listeners == 0
        for _ in steps(llm, random_prompt(100, 199, 2)):
            await settled()
        assert events.num_snapshots == taken
        assert len(asyncio.all_tasks()) == 1, "no task is left"

    run_with(llm, test)


class SlowAnswer(InlineEngine):
    """Its answers reach the event loop when `open` is set, long after the function was called."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.open = asyncio.Event()

    async def call(self, function: Callable[[LLM], None]) -> None:
        await super().call(function)
        await self.open.wait()


def test_a_client_that_leaves_just_after_a_snapshot_ends_the_watch(llm: LLM) -> None:
    watching: list[bool] = []
    llm.watch_steps = lambda on_layer: watching.append(on_layer is not None)  # type: ignore[assignment, method-assign]

    async def run() -> None:
        engine = SlowAnswer(llm)
        events = KVCacheEvents(engine, interval=0.0)
        client = Client(events)
        await client.read()
        await client.read()
        assert watching[-1]
        await client.aclose()  # the engine's thread has looked already, and the event loop does not know it
        engine.open.set()
        await settled()
        assert not watching[-1] and len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_step_is_seen_while_it_runs(llm: LLM) -> None:
    """With one tick between two steps, the first layer takes the snapshot."""

    async def test(events: KVCacheEvents) -> None:
        async with aclosing(Client(events)) as client:
            await client.read()
            await client.read()
            events._wanted = True
            next(steps(llm, random_prompt(150, 199, 1)))
            await settled()
            assert (await client.read())["prefill"]["layer"] > 0

    run_with(llm, test, interval=3600.0)


def test_listeners_share_snapshots(llm: LLM) -> None:
    async def test(events: KVCacheEvents) -> None:
        async with aclosing(Client(events)) as one, aclosing(Client(events)) as other:
            for client in (one, other):
                await client.read()
                await client.read()
            for _ in steps(llm, random_prompt(100, 199, 1)):
                events._wanted = True
                events._ask()
                await settled()
                await one.read()
            taken = events.num_snapshots
            await other.read()  # has missed the others
            assert other.states == one.states and other.snapshots[-1]["time"] == one.snapshots[-1]["time"]
            assert len(other.snapshots) == 2 < len(one.snapshots) and events.num_snapshots == taken

    run_with(llm, test, interval=3600.0)


def test_nothing_is_sent_while_nothing_changes(llm: LLM) -> None:
    async def test(events: KVCacheEvents) -> None:
        async with aclosing(Client(events)) as client:
            await client.read()
            await client.read()
            reading = asyncio.ensure_future(client.read())
            until = time.monotonic() + 30
            while events.num_snapshots < 6 and time.monotonic() < until:
                await asyncio.sleep(0.02)
            assert events.num_snapshots >= 6 and not reading.done()
            reading.cancel()
            await asyncio.wait([reading])

    run_with(llm, test, interval=0.01)
