"""Keys, hosts, origins, the size of bodies and queues, and what a request may not do to others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from server_helpers import (
    CACHE,
    CHAT,
    COMPLETIONS,
    ask,
    client_of,
    error,
    held_steps,
    in_engine,
    nothing_left,
    ok,
    run_async,
    settings,
)
from waiting import PATIENCE

from nanovllm.apps.server.admission import Admission
from nanovllm.apps.server.app import build_app
from nanovllm.apps.server.async_llm import LONG_TEXT, AsyncLLM

HELLO = [{"role": "user", "content": "hello"}]


def test_keys(engine: AsyncLLM) -> None:
    keys = {"api_keys": ("first", "second")}
    for value in ("", "Bearer", "Bearer wrong", "Basic first", "Bearer firs", "Bearer first second"):
        response = ask(engine, "/v1/models", headers={"authorization": value}, **keys)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert ask(engine, "/v1/models", headers={"authorization": f"bearer {key}"}, **keys).status_code == 200
    assert error(engine, "/metrics", None, 401, **keys)["type"] == "authentication_error"
    assert ask(engine, "/health", **keys).status_code == 200


def test_a_server_for_this_machine_takes_no_other_names(engine: AsyncLLM) -> None:
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:80", "[::1].evil.example", ""):
        assert error(engine, "/health", None, 403, headers={"host": host})["code"] == "wrong_host"
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000"):
        assert ask(engine, "/health", headers={"host": host}).status_code == 200
    for others in ({"api_keys": ("k",)}, {"host": "0.0.0.0"}):
        assert ask(engine, "/health", headers={"host": "my.example"}, **others).status_code == 200


def test_pages_of_other_origins_need_permission(engine: AsyncLLM) -> None:
    asked = {"origin": "https://chat.example"}
    assert "access-control-allow-origin" not in ask(engine, "/health", headers=asked).headers
    allowed = ask(engine, "/health", headers=asked, allowed_origins=("https://chat.example",))
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_full_queue_is_refused_and_told_when_to_come_back(model: str) -> None:
    async def flood(engine: AsyncLLM) -> list[Any]:
        async with client_of(engine, max_queue=3) as client:
            body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
            with held_steps(engine):
                answers = [asyncio.ensure_future(client.post(COMPLETIONS, json=body)) for _ in range(12)]
                while sum(answer.done() for answer in answers) < 8:
                    await asyncio.sleep(0.01)
            return await asyncio.gather(*answers)

    with AsyncLLM(model, **CACHE, max_num_seqs=1) as engine:
        responses = run_async(flood(engine))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429} and statuses.count(200) in (3, 4), "three wait, and one may run"
        refused = next(response for response in responses if response.status_code == 429)
        assert int(refused.headers["retry-after"]) > 0 and refused.json()["error"]["code"] == "queue_full"
        assert nothing_left(engine)


def test_a_client_that_is_gone_before_its_stream_begins_leaves_nothing(engine: AsyncLLM) -> None:
    """Some servers raise OSError from `send`, as ASGI has it, once the client is gone."""
    admission = Admission(engine, 1024)
    body = b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise OSError("the client is gone")

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "root_path": ""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = build_app(engine, settings(), admission)
    with held_steps(engine):
        with pytest.raises(OSError, match="gone"):
            run_async(app({**scope, "headers": headers}, receive, send))
        assert in_engine(engine, lambda llm: llm.engine.get_num_unfinished_requests()) == 0
    assert admission.num_prompts == 0
    assert nothing_left(engine)


def test_prompts_are_not_logged(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        ok(engine, COMPLETIONS, prompt="a secret", max_tokens=2)
        ok(engine, CHAT, messages=[{"role": "user", "content": "a secret"}], max_tokens=2, stream=True)
        error(engine, COMPLETIONS, {"prompt": "a secret", "temperature": -3})
    assert "a secret" not in caplog.text


def test_no_request_waits_for_the_long_text_of_another(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine.llm.engine.tokenizer
    # type: ignore[union-attr]
    encode = tokenizer.encode
    begun = threading.Event()
    go_on = threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        if len(text) >= LONG_TEXT:
            begun.set()
            assert go_on.wait(PATIENCE)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)

    async def asked() -> None:
        async with client_of(engine) as client:
            text = "a" * LONG_TEXT
            bodies = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
            long = [asyncio.ensure_future(client.post(path, json=body)) for path, body in bodies.items()]
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
                assert (await client.post(path, json={**body, "max_tokens": 1})).status_code == 200
            assert not any(answer.done() for answer in long)
            go_on.set()
            for answer in await asyncio.gather(*long):
                assert answer.json()["error"]["code"] == "context_length_exceeded"

    run_async(asked())


def test_admission_is_released_by_every_end(engine: AsyncLLM) -> None:
    admission = Admission(engine, 100)

    async def asked() -> None:
        async with client_of(engine, admission) as client:
            body: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 3}
            for more in ({}, {"stream": True}, {"temperature": -1}, {"prompt": [[1], [4000]]}, {"prompt": ["a", ""]}):
                await client.post(COMPLETIONS, json={**body, **more})
                assert admission.num_prompts == 0, more

    run_async(asked())
    assert in_engine(engine, lambda llm: llm.metrics()).requests.running == 0
