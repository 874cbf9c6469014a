"""The server on real sockets: the official client, clients that go away or never finish, and its limits."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_helpers import CACHE, NAME, TOOL, held_steps, listening, nothing_left, raw
from waiting import eventually

from nanovllm import LLM, SamplingParams
from nanovllm.apps.server import run
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


def test_targets_in_absolute_form(port: int) -> None:
    """As proxies send them; the target's host counts, not the header's."""
    for target, status in (
        ("http://localhost/v1/models?x=1", b" 200 "),
        ("HTTP://user@127.0.0.1:80/v1/models/tiny", b" 200 "),
        ("http://localhost", b" 200 "),
        ("https://localhost/v1/nothing", b" 404 "),
        ("ftp://localhost/v1/models", b" 404 "),
    ):
        answer = raw(port, head("Connection: close", method="GET", path=target))
        assert status in answer.partition(b"\r\n")[0], (target, answer)
    assert b"there is no /v1/nothing" in raw(port, head("Connection: close", method="GET", path="http://a/v1/nothing"))


def test_the_host_of_an_absolute_target_is_checked(engine: AsyncLLM) -> None:
    with listening(engine) as (_, port):
        for target, status in (("http://localhost/version", b" 200 "), ("http://other.example/version", b" 403 ")):
            answer = raw(port, head("Connection: close", method="GET", path=target))
            assert status in answer.partition(b"\r\n")[0]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_compressed_bodies_are_refused_as_such(port: int, coding: str) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    fields = ("Content-Type: application/json", f"Content-Encoding: {coding}", f"Content-Length: {len(body)}")
    answer = raw(port, head("Connection: close", *fields) + body)
    assert answer.startswith(b"HTTP/1.1 415 ") and b"accept-encoding: identity" in answer.lower()
    assert f"Content-Encoding: '{coding}'".encode() in answer
    plain = post('{"prompt": "a", "max_tokens": 1}', more="Connection: close\r\nContent-Encoding: identity\r\n")
    assert b" 200 " in raw(port, plain)


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


def test_an_announced_length_is_refused_at_once_and_the_client_may_send_on(engine: AsyncLLM) -> None:
    length = 40_000_000
    with listening(engine) as (_, port), socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(head("Content-Type: application/json", f"Content-Length: {length}") + b"{")
        refusal = connection.recv(65536)
        assert refusal.startswith(b"HTTP/1.1 413 ")
        connection.sendall(b" " * (length - 1) + head("Connection: close", method="GET", path="/health"))
        rest = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"body_too_large" in refusal + rest and b" 200 " in rest


def test_two_lengths_of_a_body_are_refused(port: int) -> None:
    both = head("Content-Type: application/json", "Content-Length: 5", "Transfer-Encoding: chunked")
    answer = raw(port, both + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"both Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1, "what follows is not read as a request"


@pytest.mark.parametrize("data", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_slow_headers_are_cut_off(data: bytes, engine: AsyncLLM) -> None:
    with listening(engine, header_timeout=0.3, idle_timeout=3600) as (server, port):
        assert raw(port, data) == b""
        assert eventually(lambda: not server.server_state.connections)


def test_slow_bodies_are_cut_off(engine: AsyncLLM) -> None:
    with listening(engine, header_timeout=3600, idle_timeout=0.3) as (server, port):
        assert b" 408 " in raw(port, post('{"prompt": "a"}')[:-3])
        assert eventually(lambda: not server.server_state.connections)


def test_connections_beyond_the_limit_are_refused_politely(engine: AsyncLLM) -> None:
    with listening(engine, max_connections=3) as (server, port):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert eventually(lambda: len(server.server_state.connections) == 3)
        refused = raw(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503") and b"Retry-After" in refused and b"too_many_connections" in refused
        for connection in held:
            connection.close()
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
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


def test_draining_answers_what_runs_and_refuses_the_rest(model: str) -> None:
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=300.0) as (server, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as running:
            with held_steps(engine):
                running.sendall(post('{"prompt": "a", "max_tokens": 150, "ignore_eos": true}'))
                assert eventually(lambda: bool(engine._streams))
                server.handle_exit(15, None)
                assert b" 503 " in raw(port, post('{"prompt": "b"}'))
            answer = until_closed(running)
        assert b" 200 " in answer and b'"completion_tokens":150' in answer
        assert eventually(lambda: server.should_exit)


def test_what_does_not_end_in_time_is_aborted(model: str) -> None:
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=0.2) as (server, port):
        with held_steps(engine), socket.create_connection(("127.0.0.1", port), timeout=60) as running:
            running.sendall(post('{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": true}'))
            assert eventually(lambda: bool(engine._streams))
            server.handle_exit(15, None)
            answer = until_closed(running)
        assert b'"finish_reason":"abort"' in answer and b"[DONE]" in answer
        assert nothing_left(engine)


@pytest.mark.slow
def test_a_second_signal_ends_every_stream_with_an_error(
    model: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And cuts off the client that never reads, whose answer waits to be sent."""
    monkeypatch.setattr(run, "FORCED_CLOSE_SECONDS", 10.0)  # it is waited for as long
    body = '{"prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
    unread = body.replace('"a"', f'"{"a" * 900}"').replace("1000", '100, "echo": true, "logprobs": 20')
    streams = [socket.socket() for _ in range(3)]
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with AsyncLLM(model, **CACHE) as engine, listening(engine, shutdown_timeout=300.0) as (server, port):
        caplog.clear()
        for listener in server.servers[0].sockets:  # whose connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        with held_steps(engine):
            for connection, sent in ((silent, unread), *((stream, body) for stream in streams)):
                connection.settimeout(60)
                connection.connect(("127.0.0.1", port))
                connection.sendall(post(sent))
            waiting = socket.create_connection(("127.0.0.1", port), timeout=60)
            waiting.sendall(post(body.replace(', "stream": true', "")))
            assert eventually(lambda: len(engine._streams) == 5)
            assert eventually(lambda: any(each.flow.write_paused for each in server.server_state.connections))
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            answers = [until_closed(connection) for connection in (*streams, waiting)]
        assert eventually(lambda: not server.server_state.tasks and not server.server_state.connections)
    assert not until_closed(silent).endswith(b"0\r\n\r\n"), "the end of a whole answer"
    for answer in answers[:3]:
        assert b'"error":' in answer and b"the server was stopped" in answer and b"[DONE]" not in answer
    assert b" 503 " in answers[3] and b"the server was stopped" in answers[3]
    logged = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert logged == ["stopping at once: 5 prompts are cut off"] and "Traceback" not in "".join(capfd.readouterr())
