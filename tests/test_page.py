"""The page at `/` and the events beside it, as the server sends them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_helpers import ask, listening
from waiting import eventually

from nanovllm.apps.server.app import PAGE
from nanovllm.apps.server.async_llm import AsyncLLM

HTML = PAGE.read_text(encoding="utf-8")


def test_the_policy_allows_the_script_and_style_of_the_file_alone(engine: AsyncLLM) -> None:
    answer = ask(engine, "/")
    assert answer.status_code == 200 and answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_page_is_free_and_the_events_need_the_key(engine: AsyncLLM) -> None:
    assert ask(engine, "/", api_keys=("secret",)).status_code == 200
    refused = ask(engine, "/v1/kv-cache/events", api_keys=("secret",))
    assert refused.status_code == 401 and "API key" in refused.json()["error"]["message"]


def read_events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_events_over_a_socket_while_a_prompt_is_answered(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[object] = []
    watch_steps = engine.llm.watch_steps
    monkeypatch.setattr(engine.llm, "watch_steps", lambda on_layer: (watched.append(on_layer), watch_steps(on_layer)))
    with listening(engine) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with client.stream("GET", "/v1/kv-cache/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            found = read_events(answer)
            name, layout = next(found)
            assert name == "layout" and layout["tiers"]["device"] == 160
            cells = bytearray(sum(layout["tiers"].values()))
            body = {"model": "tiny", "prompt": "a b c " * 60, "max_tokens": 8, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
            for name, snapshot in found:
                assert name == "snapshot"
                for first, count, state in snapshot["runs"]:
                    cells[first : first + count] = bytes([state]) * count
                if snapshot["totals"]["output_tokens"] >= 8 and not snapshot["requests"]["running"]:
                    break
            assert cells.count(layout["states"].index("cached")) >= 240 // 16
            assert watched[-1] is not None
        assert eventually(lambda: watched[-1] is None), "without a client the steps are watched no longer"


def test_a_server_that_stops_ends_the_streams(engine: AsyncLLM) -> None:
    with listening(engine) as (server, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with client.stream("GET", "/v1/kv-cache/events") as answer:
            found = read_events(answer)
            next(found)
            server.handle_exit(15, None)
            assert len(list(found)) <= 2
        assert eventually(lambda: server.should_exit)
