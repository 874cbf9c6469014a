"""Streams of server-sent events: comments while nothing comes, and clients that others wrote."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_helpers import NAME, TOOL, listening, run_async
from waiting import PATIENCE

from nanovllm.apps.server import responses
from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.server.responses import COMMENT, EventStream, event

TEN_MINUTES = 40  # comments, one every 15 seconds
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


# ---- the stream alone


class Client:
    """What a stream sends, to one who goes away when asked."""

    def __init__(self, stalls_at: int | None = None) -> None:
        """stalls_at: the part of the body that is never taken."""
        self.sent: list[bytes] = []
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()
        self._stalls_at = stalls_at

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            self.changed.set()
            if len(self.sent) == self._stalls_at:
                await asyncio.Event().wait()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def has(self, count: int) -> None:
        while len(self.sent) < count:
            self.changed.clear()
            await self.changed.wait()


class Events:
    """A generator of events that come when they are told to."""

    def __init__(self) -> None:
        self.may_come = asyncio.Event()
        self.taken = 0
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in (1, 2):
                await self.may_come.wait()
                self.may_come.clear()
                self.taken += 1
                yield event(number)
            raise ValueError("the third fails")
        finally:
            self.closed = True


def test_comments_are_sent_while_no_event_comes() -> None:
    async def check() -> None:
        events = Events()
        client = Client()
        before = asyncio.all_tasks()
        stream = EventStream(events(), silence=0.001)
        running = asyncio.ensure_future(stream({"type": "http"}, client.receive, client.send))
        for number in (1, 2):
            count = len(client.sent)
            await client.has(count + TEN_MINUTES)
            assert {*client.sent[count:]} == {COMMENT}
            events.may_come.set()
            while event(number) not in client.sent:
                await client.has(len(client.sent) + 1)
        await running
        assert b"internal_error" in client.sent[-2] and client.sent[-1] == b"" and events.closed
        assert asyncio.all_tasks() == before, "none is left"

    run_async(check())


@pytest.mark.parametrize("stalls_at", [None, 3])
def test_a_client_that_goes_away_in_the_silence_ends_the_stream(stalls_at: int | None) -> None:
    """Also one that does not read: nothing more is sent to it."""

    async def check() -> None:
        events = Events()
        client = Client(stalls_at)
        before = asyncio.all_tasks()
        stream = EventStream(events(), silence=0.001)
        running = asyncio.ensure_future(stream({"type": "http"}, client.receive, client.send))
        await client.has(stalls_at or 5)
        if stalls_at is not None:
            events.may_come.set()
            while not events.taken:  # one event waits, and no comment passes it
                await asyncio.sleep(0)
            assert len(client.sent) == stalls_at
        client.gone.set()
        await running
        assert events.closed and asyncio.all_tasks() == before

    run_async(check())


def test_without_silence_there_is_no_comment() -> None:
    async def check() -> None:
        events = Events()
        client = Client()

        async def all_at_once() -> AsyncGenerator[bytes, None]:
            async for data in events():
                events.may_come.set()
                yield data

        events.may_come.set()
        await EventStream(all_at_once(), silence=3600.0)({"type": "http"}, client.receive, client.send)
        assert client.sent[:2] == [event(1), event(2)] and COMMENT not in client.sent

    run_async(check())


# ---- through sockets: what clients make of a prompt that is read for ten minutes


@pytest.fixture
def silent(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A context in which no step but the first `num_steps` runs until ten minutes of comments were sent."""
    monkeypatch.setattr(responses, "SILENCE_SECONDS", 0.002)
    own_next = EventStream._next
    own_step = engine._step

    @contextmanager
    def silent(num_steps: int = 0) -> Iterator[list[bytes]]:
        comments: list[bytes] = []
        released = threading.Event()
        steps = iter(range(num_steps))

        async def counted(stream: EventStream, send_part: Any) -> bytes | None:
            async def send(data: bytes) -> None:
                await send_part(data)
                comments.append(data)
                if len(comments) >= TEN_MINUTES:
                    released.set()

            return await own_next(stream, send)

        def step() -> None:
            assert next(steps, None) is not None or released.wait(PATIENCE)
            own_step()

        with monkeypatch.context() as patches:
            patches.setattr(EventStream, "_next", counted)
            patches.setattr(engine, "_step", step)
            yield comments
        assert len(comments) >= TEN_MINUTES and {*comments} == {COMMENT}

    return silent


def data_lines(text: str) -> list[str]:
    """The events that an `EventSource` sees, by the HTML standard: comments are no events."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.removeprefix("data:").removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        found += ["\n".join(lines)] if lines else []
    return found


def test_the_official_client_and_a_parser_live_through_a_long_prompt(engine: AsyncLLM, silent: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 5, "temperature": 0, "stream": True}
    options["extra_body"] = {"ignore_eos": True}
    with listening(engine) as (_, port):
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="x", max_retries=0, timeout=PATIENCE) as client:
            expected = client.chat.completions.create(**{**options, "stream": False}).choices[0].message.content
            with silent():
                chunks = list(client.chat.completions.create(**options))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
            with silent():
                parts = list(client.completions.create(model=NAME, prompt="hello", max_tokens=3, stream=True))
            assert parts[-1].choices[0].finish_reason
        body = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
        with silent():
            answer = httpx.post(f"{base}/chat/completions", json=body, timeout=PATIENCE)
        *values, done = data_lines(answer.text)
        assert done == "[DONE]" and answer.text.startswith(COMMENT.decode())
        found = [json.loads(value)["choices"][0]["delta"].get("content", "") for value in values]
        assert "".join(found) == expected


def test_a_call_that_is_held_back_is_no_silence(engine: AsyncLLM, silent: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    options["extra_body"] = {"stop_token_ids": [0]}
    with (
        listening(engine) as (_, port),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=PATIENCE) as client,
        silent(num_steps=3),
    ):
        chunks = list(client.chat.completions.create(**options, max_tokens=8, stream=True))
    assert chunks[-1].choices[0].finish_reason


def test_the_header_of_the_events_is_no_stream(engine: AsyncLLM) -> None:
    with listening(engine) as (_, port):
        answer = httpx.head(f"http://127.0.0.1:{port}/v1/kv-cache/events", timeout=PATIENCE)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")


NODE = """
import OpenAI from "openai";
import { EventSource } from "eventsource";
const base = process.argv[2];
const client = new OpenAI({ baseURL: base + "/v1", apiKey: "x", maxRetries: 0 });
const options = { model: "tiny", messages: [{ role: "user", content: "hello" }], max_tokens: 5, temperature: 0 };
let text = "";
for await (const chunk of await client.chat.completions.create({ ...options, ignore_eos: true, stream: true })) {
  text += chunk.choices[0].delta.content ?? "";
}
const body = JSON.stringify({ ...options, ignore_eos: true, stream: true });
const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
const source = new EventSource(base + "/v1/chat/completions", {
  fetch: (url, init) => fetch(url, { ...init, method: "POST", headers: { ...init.headers, ...headers }, body }),
});
const seen = await new Promise((resolve, reject) => {
  let text = "";
  source.onerror = reject;
  source.onmessage = ({ data }) => {
    if (data === "[DONE]") { source.close(); resolve(text); return; }
    text += JSON.parse(data).choices[0].delta.content ?? "";
  };
});
console.log(JSON.stringify([text, seen]));
"""


@pytest.mark.slow
def test_clients_of_node_live_through_a_long_prompt(engine: AsyncLLM, silent: Any, tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "openai", "eventsource"]
    if subprocess.run(install, cwd=tmp_path, capture_output=True, check=False).returncode != 0:
        pytest.skip("npm cannot install the packages openai and eventsource")
    script = tmp_path / "client.mjs"
    script.write_text(NODE)
    with listening(engine) as (_, port), silent():
        command = ["node", str(script), f"http://127.0.0.1:{port}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
        official, source = json.loads(found.stdout)
    assert official == source != ""
