"""The server on real sockets: the official client, clients that go away or never finish, and its limits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
from server_helpers import CACHE, NAME, TOOL, held_steps, listening, nothing_left, raw
from waiting import eventually

from nanovllm import LLM, SamplingParams
from nanovllm.apps.server.async_llm import AsyncLLM

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def port(engine: AsyncLLM) -> Iterator[int]:
    with listening(engine, api_keys=("key",), tool_call_parser="hermes") as (_, port):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=0, timeout=60) as client:
        yield client


def post(body: str, path: str = "/v1/completions", more: str = "Connection: close\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()


# ---- the official client


def test_the_official_client(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [NAME, "alias"]
    params = SamplingParams(temperature=0.5, seed=2, max_tokens=6, logprobs=2, ignore_eos=True)
    with LLM(model, **CACHE) as llm:
        (expected,) = llm.chat(HELLO, params, use_tqdm=False)
    options: Any = {"model": NAME, "messages": HELLO, "temperature": 0.5, "seed": 2, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**options, max_completion_tokens=6, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content == expected.outputs[0].text and choice.finish_reason == "length"
    found = [entry.logprob for entry in choice.logprobs.content]
    positions = zip(expected.outputs[0].logprobs or (), expected.outputs[0].token_ids, strict=True)
    assert found == [at[token].logprob for at, token in positions] and answer.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        **options, max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    completion = client.completions.create(model=NAME, prompt=["a", "b"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    tools = client.chat.completions.create(model=NAME, messages=HELLO, tools=[TOOL], max_tokens=2)  # type: ignore[call-overload]
    assert tools.choices[0].message.role == "assistant"


# ---- clients that go away


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_goes_away_ends_its_request(port: int, engine: AsyncLLM, stream: str) -> None:
    body = f'{{"prompt": ["a", "b"], "max_tokens": 900, "ignore_eos": true, "stream": {stream}}}'
    with held_steps(engine):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(post(body))
            assert eventually(lambda: len(engine._streams) == 2)
        assert eventually(lambda: not engine._streams)
    assert nothing_left(engine)


def test_a_client_that_never_reads_stops_no_other(port: int, engine: AsyncLLM) -> None:
    """Its answer is merged until it is read; the engine computes it and others'."""
    body = '{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true, "logprobs": 20}'
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with held_steps(engine):
            connection.sendall(post(body))
            assert eventually(lambda: len(engine._streams) == 1)
        assert b" 200 " in raw(port, post('{"prompt": "b", "max_tokens": 2}'))
        assert eventually(lambda: not engine._streams), "the engine ended it, although it was not read"
    assert nothing_left(engine)


# ---- connections that are no requests


def test_broken_requests_are_answered_or_closed(port: int) -> None:
    whole = post('{"prompt": "a", "max_tokens": 1}')
    for data in (b"", b"\x00\xff", b"GET", whole[:40], whole[:-5], b"GET / HTTP/one\r\n\r\n", b"\r\n" * 100):
        assert b" 200 " not in raw(port, data, close=True)
    assert raw(port, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 400"), "no Host"
    huge = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"
    assert b" 200 " not in raw(port, huge)
    assert b" 200 " in raw(port, whole), "the server goes on"


def test_connections_send_at_once(engine: AsyncLLM) -> None:
    """A header and its body are two writes: the second would wait for the client's acknowledgement of the first."""
    with listening(engine) as (server, port), socket.create_connection(("127.0.0.1", port)):
        assert eventually(lambda: bool(server.server_state.connections))
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def head(*fields: str, method: str = "POST", path: str = "/v1/completions") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Authorization: Bearer key", *fields, "", ""]
    return "\r\n".join(lines).encode()


def test_connections_beyond_the_limit_get_503(engine: AsyncLLM) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with listening(engine, max_connections=3) as (server, port):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert eventually(lambda: len(server.server_state.connections) == 3)
        assert raw(port, health).startswith(b"HTTP/1.1 503")
        for connection in held:
            connection.close()
        assert eventually(lambda: b" 200 " in raw(port, health))


def test_a_large_body_is_refused_while_it_comes(engine: AsyncLLM) -> None:
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    with (
        listening(engine, max_body_bytes=10_000) as (_, port),
        socket.create_connection(("127.0.0.1", port), 60) as sent,
    ):
        sent.sendall(head("Content-Type: application/json", "Transfer-Encoding: chunked") + chunk)
        refusal = sent.recv(65536)
        assert refusal.startswith(b"HTTP/1.1 413 ")
        sent.sendall(39 * chunk + b"0\r\n\r\n" + head("Connection: close", method="GET", path="/health"))
        rest = b"".join(iter(lambda: sent.recv(65536), b""))
        assert b"body_too_large" in refusal + rest and b" 200 " in rest


# ---- the end


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection, which is closed here too."""
    answer = b""
    with connection:
        while part := connection.recv(65536):
            answer += part
    return answer


def test_stopping_answers_what_runs(model: str) -> None:
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=300.0) as (server, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as running:
            with held_steps(engine):
                running.sendall(post('{"prompt": "a", "max_tokens": 40, "ignore_eos": true}'))
                assert eventually(lambda: bool(engine._streams))
                server.handle_exit(15, None)
                assert eventually(lambda: not any(each.is_serving() for each in server.servers))
            answer = until_closed(running)
        assert b" 200 " in answer and b'"completion_tokens":40' in answer


def test_what_does_not_end_in_time_is_aborted(model: str) -> None:
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=0.2) as (server, port):
        with held_steps(engine), socket.create_connection(("127.0.0.1", port), timeout=60) as running:
            running.sendall(post('{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": true}'))
            assert eventually(lambda: bool(engine._streams))
            server.handle_exit(15, None)
            answer = until_closed(running)
        assert b'"finish_reason":"abort"' in answer and b"[DONE]" in answer
        assert nothing_left(engine)


def test_a_second_signal_cuts_all_connections_off(model: str) -> None:
    body = '{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=300.0) as (server, port):
        with held_steps(engine), socket.create_connection(("127.0.0.1", port), timeout=60) as running:
            running.sendall(post(body))
            assert eventually(lambda: bool(engine._streams))
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            with suppress(ConnectionError):
                assert b"[DONE]" not in until_closed(running)
        assert nothing_left(engine)
