"""Where the KV cache is, as server-sent events: the stream of `GET /v1/kv-cache/events`.

The engine's thread takes a snapshot when one is asked for, and one is asked for only while a client listens. All
clients share it. A client that reads slowly gets the latest snapshot and misses those in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.apps.server.events import event
from nanovllm.apps.server.kv_snapshot import KVGeometry, KVSnapshot
from nanovllm.errors import EngineError

if TYPE_CHECKING:  # torch comes with it
    from nanovllm import LLM

INTERVAL = 0.25  # seconds between snapshots
MAX_SHARE = 0.02  # of the engine's time for snapshots: those of a very large KV cache are taken less often
KEEP_ALIVE = 15.0  # seconds without an event until a comment is sent


class Engine(Protocol):
    """An LLM in a thread of its own, such as AsyncLLM."""

    @property
    def llm(self) -> LLM: ...

    async def call(self, function: Callable[[LLM], None], /) -> None:
        """Call `function(llm)` in the engine's thread between two steps, or now if it runs none."""
        ...


class KVCacheEvents:
    """Snapshots of one engine for its listeners. Belongs to the event loop in which they listen.

    is_over: whether the streams shall end; asked once a second or more often.
    """

    def __init__(self, engine: Engine, is_over: Callable[[], bool] = lambda: False, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._is_over = is_over
        self._interval = interval
        self._geometry = KVGeometry.of(engine.llm)
        self._wanted = False  # set by the event loop, cleared by the engine's thread
        self._is_watched = False  # whether the steps are watched; set by the engine's thread
        self._cost = 0.0  # seconds that the last snapshot took
        self._loop: asyncio.AbstractEventLoop
        self._ticker: asyncio.Task[None]
        self._asking: asyncio.Task[None] | None = None  # until the step in progress has ended
        self._news: asyncio.Future[None]  # done when `_latest` is replaced
        self._latest: KVSnapshot | None = None
        self.num_listeners = 0
        self.num_snapshots = 0

    # ---- the engine's thread

    def _serve(self, llm: LLM) -> None:
        """Between two steps. In a long step `_serve_layer` may have come first."""
        self._is_watched = self.num_listeners > 0
        llm.watch_steps((lambda share: self._serve_layer(llm, share)) if self._is_watched else None)
        self._serve_layer(llm, None)

    def _serve_layer(self, llm: LLM, step_share: float | None) -> None:
        """Take a snapshot if one is wanted. step_share: as in `KVSnapshot.take`."""
        if not self._wanted:
            return
        self._wanted = False
        self.num_snapshots += 1
        begin = time.monotonic()
        snapshot = KVSnapshot.take(llm, step_share)
        self._cost = time.monotonic() - begin
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._publish, snapshot)

    # ---- the event loop

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """The stream of one client: a `layout` event, then `snapshot` events, the first one with all cells.

        A snapshot is sent when something has changed.
        """
        with self._listening():
            yield named("layout", asdict(self._geometry))
            sent, quiet_since = None, time.monotonic()
            while not self._is_over():
                snapshot = self._latest
                if snapshot is not None and snapshot is not sent:
                    yield named("snapshot", snapshot.message(sent))
                    sent, quiet_since = snapshot, time.monotonic()
                elif time.monotonic() - quiet_since > KEEP_ALIVE:
                    yield b": nothing has changed\n\n"
                    quiet_since = time.monotonic()
                else:
                    await asyncio.wait([self._news], timeout=1.0)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if self.num_listeners == 0:
            self._loop = asyncio.get_running_loop()
            self._latest, self._news = None, self._loop.create_future()
            self._ticker = self._loop.create_task(self._tick())
        self.num_listeners += 1
        try:
            yield
        finally:
            self.num_listeners -= 1
            if self.num_listeners == 0:
                self._ticker.cancel()
                self._wanted = False
                self._ask()  # ends the watch of the steps

    async def _tick(self) -> None:
        while True:
            self._wanted = True
            self._ask()
            await asyncio.sleep(max(self._interval, self._cost / MAX_SHARE))

    def _ask(self) -> None:
        """Let the engine's thread call `_serve` when the step in progress has ended, unless it will do so anyway."""
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._call_serve())

    async def _call_serve(self) -> None:
        with suppress(EngineError):  # the engine has ended; the last picture stays
            await self._engine.call(self._serve)
            # The last client may have left after `_serve` looked, and before this task was done.
            while self._is_watched != (self.num_listeners > 0):
                await self._engine.call(self._serve)

    def _publish(self, snapshot: KVSnapshot) -> None:
        if self._latest is not None and snapshot.is_like(self._latest):
            return
        self._latest = snapshot
        self._news.set_result(None)
        self._news = self._loop.create_future()


def named(name: str, data: dict[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(data)
