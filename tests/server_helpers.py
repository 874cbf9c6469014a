"""What the tests of the server share: a tiny model with tools in its template, the application, and real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import httpx
from waiting import PATIENCE, eventually

from nanovllm import LLM
from nanovllm.apps.server.admission import Admission
from nanovllm.apps.server.app import build_app
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.run import Server, open_socket
from nanovllm.apps.server.settings import ServerSettings

T = TypeVar("T")
NAME = "tiny"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CACHE = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 160}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def settings(**others: Any) -> ServerSettings:
    return ServerSettings(**{"served_model_names": (NAME, "alias"), **others})


def client_of(engine: AsyncLLM, admission: Admission | None = None, **others: Any) -> httpx.AsyncClient:
    """A client of the application, in process."""
    app = build_app(engine, settings(**others), admission)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120)


def ask(engine: AsyncLLM, path: str, body: Any = None, **others: Any) -> httpx.Response:
    """One request to an application of its own: GET without a body."""

    async def request() -> httpx.Response:
        headers = others.pop("headers", {})
        async with client_of(engine, **others) as client:
            if body is None:
                return await client.get(path, headers=headers)
            if isinstance(body, bytes):
                return await client.post(path, content=body, headers={"content-type": "application/json"} | headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(request())


def events(text: str) -> list[Any]:
    """The values of server-sent events without comments; the last one is "[DONE]"."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and not line.startswith(":")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ok(engine: AsyncLLM, path: str, **body: Any) -> Any:
    """The answer to a request that is served: its JSON, or the events of a stream."""
    response = ask(engine, path, body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


def error(engine: AsyncLLM, path: str, body: Any, status: int = 400, **others: Any) -> dict[str, Any]:
    """The error of a request that is refused, in the form of OpenAI's."""
    response = ask(engine, path, body, **others)
    assert response.status_code == status, response.text
    (name, fields), *rest = response.json().items()
    assert name == "error" and not rest and set(fields) == {"message", "type", "param", "code"}
    assert fields["message"] and "\n" not in fields["message"]
    return dict(fields)


def in_engine(engine: AsyncLLM, function: Callable[[LLM], T]) -> T:
    """What the function returns in the engine's thread."""
    return asyncio.run(engine.call(function))


def nothing_left(engine: AsyncLLM) -> bool:
    """Whether every block is free or cached, soon."""

    def is_idle() -> bool:
        metrics = in_engine(engine, lambda llm: llm.metrics())
        blocks = engine.llm.engine.scheduler.block_manager.pool.num_blocks
        idle = not metrics.requests.running and not metrics.requests.waiting and not engine.llm.engine._requests
        return idle and metrics.blocks.used == 0 and metrics.blocks.free + metrics.blocks.cached == blocks

    return eventually(is_idle)


@contextmanager
def held_steps(engine: AsyncLLM) -> Iterator[None]:
    """After the first step within this context, each waits for the next call into the engine or for the context's end.

    For tests of what happens while a request runs: without this, a slow test would come after its end.
    """
    step = engine._step
    is_first = [True]
    released = threading.Event()

    def held() -> None:
        while not is_first[0] and engine._commands.empty() and not released.wait(0.01):
            pass
        is_first[0] = False
        step()

    engine._step = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        released.set()
        engine._step = step  # type: ignore[method-assign]


@contextmanager
def listening(engine: AsyncLLM, **others: Any) -> Iterator[tuple[Server, int]]:
    """The server on a port of this machine, in a thread. The engine is left open."""
    chosen = settings(port=0, **others)
    with open_socket(chosen) as opened:
        server = Server(engine, chosen)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            assert eventually(lambda: server.started)
            yield server, opened.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def raw(port: int, data: bytes, *, close: bool = False) -> bytes:
    """What the server answers to these bytes until it closes the connection, which it has to do in time."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        with suppress(ConnectionError):  # the server may have closed it before it read everything
            connection.sendall(data)
            if close:
                connection.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
        return received


def run_async(work: Awaitable[T], seconds: float = 120.0) -> T:
    """The result of a coroutine, which has to come in time."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, seconds)  # type: ignore[arg-type]

    return asyncio.run(bounded())
