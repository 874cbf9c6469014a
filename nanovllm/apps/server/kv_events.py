"""Where the KV cache is, as server-sent events: the stream of `GET /v1/kv-cache/events`.

The engine's thread takes snapshots while a client listens. All clients share them. A client that reads slowly gets the
latest snapshot and misses those in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm import AsyncLLM, KVBlockState
from nanovllm.apps.server.responses import event
from nanovllm.errors import EngineError

if TYPE_CHECKING:  # torch comes with it
    from nanovllm import LLM

INTERVAL = 0.25  # seconds between snapshots
MAX_SHARE = 0.02  # of the engine's time for snapshots: those of a very large KV cache are taken less often


class KVCacheEvents:
    """Snapshots of one engine for its listeners. Belongs to the event loop in which they listen.

    is_over: whether the streams shall end; asked once an interval.
    """

    def __init__(self, engine: AsyncLLM, is_over: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_over = is_over
        self._ticker: asyncio.Task[None] | None = None
        self.num_listeners = 0
        # Written by the engine's thread:
        self._is_watched = False  # whether it looks within steps too
        self._next_time = 0.0  # of a snapshot
        self._latest: KVSnapshot | None = None

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """The stream of one client: a `layout` event, then `snapshot` events, the first one with all cells.

        A snapshot is sent when something has changed.
        """
        self.num_listeners += 1
        try:
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.create_task(self._tick())
            yield named("layout", layout(self._engine.llm))
            sent = None
            while not self._is_over():
                snapshot = self._latest
                if snapshot is not None and snapshot is not sent:
                    yield named("snapshot", snapshot.message(sent))
                    sent = snapshot
                await asyncio.sleep(INTERVAL / 2)
        finally:
            self.num_listeners -= 1

    async def _tick(self) -> None:
        """Have the engine's thread look between steps too, until no client listens and the steps are not watched."""
        with suppress(EngineError):  # the engine has ended; the last picture stays
            while self.num_listeners or self._is_watched:
                await self._engine.call(self._look)
                await asyncio.sleep(INTERVAL)

    # ---- the engine's thread

    def _look(self, llm: LLM) -> None:
        self._is_watched = self.num_listeners > 0
        llm.watch_steps((lambda share: self._take(llm, share)) if self._is_watched else None)
        if self._is_watched:
            self._take(llm, None)
        else:
            self._latest = None

    def _take(self, llm: LLM, step_share: float | None) -> None:
        """Take a snapshot if it is time for one. step_share: as in `KVSnapshot.take`."""
        begin = time.monotonic()
        if begin < self._next_time:
            return
        snapshot = KVSnapshot.take(llm, step_share)
        if self._latest is None or not snapshot.is_like(self._latest):
            self._latest = snapshot
        end = time.monotonic()
        self._next_time = end + max(INTERVAL, (end - begin) / MAX_SHARE)


def named(name: str, data: dict[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(data)


def layout(llm: LLM) -> dict[str, Any]:
    """What stays the same while an engine lives. Cells are numbered across the tiers, in their order."""
    stats = llm.kv_stats()
    view = llm.view()
    return {
        "block_size": stats.block_size,  # tokens
        "block_bytes": stats.bytes_per_block,  # all layers of a KV group
        "windows": stats.windows,  # of each KV group, null for all tokens
        "tiers": view.tiers,  # blocks of each
        "num_layers": view.limits.num_layers,
        "max_model_len": view.limits.max_model_len,
        "states": [state.name.lower() for state in KVBlockState],
    }


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """The state of every block, and the numbers that go with it.

    time: seconds on the monotonic clock. states: one `KVBlockState` byte for each physical block.
    numbers: `prefill` is the progress of the prompts that are being computed; its `layer` counts the layers that have
    begun: of this step, or of a layer-by-layer prefill; 0 if neither is under way. `totals` are since the engine was
    created; a client divides differences by the time between two snapshots.
    """

    time: float
    states: bytes
    numbers: dict[str, dict[str, Any]]

    @classmethod
    def take(cls, llm: LLM, step_share: float | None = None) -> KVSnapshot:
        """To be called by the thread that steps the engine, between steps or from `LLM.watch_steps`.

        step_share: the share of the layers that are done, within a step; None between steps.
        """
        view = llm.view()
        metrics = view.metrics()
        moved = view.kv_stats().transfers
        prefill = view.prefill(step_share)
        totals = {
            "h2d_bytes": moved.h2d_bytes,
            "d2h_bytes": moved.d2h_bytes,
            "cpu_attention_bytes": moved.cpu_attention_bytes,  # host blocks that the CPU attended to in place
            "prompt_tokens": metrics.prompt_tokens_computed + prefill.uncounted,
            "cached_tokens": metrics.prefix_cache.hit_tokens,  # found in the prefix cache instead
            "cached_tokens_host": metrics.prefix_cache.hit_tokens_on_host,
            "cached_tokens_disk": metrics.prefix_cache.hit_tokens_on_disk,
            "recomputed_tokens": metrics.prefix_cache.recomputed_tokens,  # not found, though computed for others
            "output_tokens": metrics.tokens_generated,
        }
        progress = {name: getattr(prefill, name) for name in ("tokens", "tokens_done", "layer", "layer_by_layer")}
        numbers = {"requests": asdict(metrics.requests), "prefill": progress, "totals": totals}
        return cls(time.monotonic(), view.block_states(step_share), numbers)

    def is_like(self, other: KVSnapshot) -> bool:
        """Whether nothing but the time differs."""
        return (self.states, self.numbers) == (other.states, other.numbers)

    def message(self, before: KVSnapshot | None) -> dict[str, Any]:
        """As JSON data: the numbers, and the states as runs `[first cell, number of cells, state]`.

        Runs cover the cells that have changed since `before`; all cells if there is no `before`.
        """
        runs = changed_runs(self.states, before.states if before is not None else None)
        return {"time": self.time, "runs": runs, **self.numbers}


def changed_runs(states: bytes, before: bytes | None) -> list[list[int]]:
    """Runs `[first, count, state]` of equal states, among the cells whose state differs from `before`."""
    cells = np.frombuffer(states, np.uint8).astype(np.int16)
    if before is not None:
        cells[cells == np.frombuffer(before, np.uint8)] = -1
    first = np.flatnonzero(np.diff(cells, prepend=-2))
    runs = np.stack([first, np.diff(first, append=len(cells)), cells[first]], axis=1)
    kept: list[list[int]] = runs[runs[:, 2] >= 0].tolist()
    return kept
