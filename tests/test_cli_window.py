"""`nanovllm generate` with more prompts than the engine holds at a time; results come in order."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nanovllm.llm
from nanovllm import CompletionOutput, RequestOutput, SamplingParams
from nanovllm.apps.cli import generate as command
from nanovllm.apps.cli.main import main
from nanovllm.apps.cli.prompts import Feed, Source
from nanovllm.data.progress import Progress
from nanovllm.outputs import RequestMetrics
from nanovllm.text.prompts import PromptParts


class SlowestFirst:
    """An engine that finishes requests in any order, and records how many it held."""

    def __init__(self) -> None:
        self.tokenizer = object()
        self.progress = Progress
        self.sampling_defaults: dict[str, Any] = {}
        self.waiting: dict[str, str] = {}
        self.most = 0
        self.random = random.Random(0)

    def make_request(self, request_id: str, prompt: PromptParts, params: SamplingParams, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(request_id=request_id, prompt=prompt.text, prompt_len=len(prompt.text or ""))

    def add(self, request: SimpleNamespace) -> None:
        self.waiting[request.request_id] = request.prompt
        self.most = max(self.most, len(self.waiting))

    def step(self) -> list[RequestOutput]:
        names = list(self.waiting)
        chosen = self.random.sample(names[1:] or names, k=min(4, max(1, len(names) - 1)))
        if self.random.random() < 0.1:
            chosen = [*chosen[:-1], names[0]]
        return [self._output(name, self.waiting.pop(name)) for name in dict.fromkeys(chosen)]

    def _output(self, name: str, prompt: str) -> RequestOutput:
        completion = CompletionOutput(0, prompt.upper(), [1], finish_reason="length")
        return RequestOutput(name, prompt, [1] * len(prompt), [completion], True, RequestMetrics(0.0))


class FakeLLM:
    """An LLM with only an engine."""

    def __init__(self, engine: SlowestFirst) -> None:
        self.engine = engine
        self.config = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=100)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def watch_steps(self, on_layer: object) -> None:
        raise AssertionError("progress is for terminals")

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_long_file_runs_through_a_window(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, held = SlowestFirst(), []
    monkeypatch.setattr(nanovllm.llm, "LLM", lambda model, **_: FakeLLM(engine))
    put = command.InOrder.put

    def recorded(self: command.InOrder, index: int, line: str) -> Iterator[str]:
        yield from put(self, index, line)
        held.append(self.num_held)

    monkeypatch.setattr(command.InOrder, "put", recorded)
    lines = [f"line {number}" for number in range(10_000)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    assert main(["generate", "--model", model, "--lines", str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out.splitlines() == [line.upper() for line in lines]
    assert engine.most == command.WINDOW * 4 and 8 < max(held) <= command.HELD * 4


def test_long_prompts_fill_the_window_sooner(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowestFirst()
    monkeypatch.setattr(nanovllm.llm, "LLM", lambda model, **_: FakeLLM(engine))
    monkeypatch.setattr(command, "WINDOW_TOKENS", 25)
    (tmp_path / "lines.txt").write_text("ten tokens\n" * 50)
    assert main(["generate", "--model", model, "--lines", str(tmp_path / "lines.txt")]) == 0
    assert engine.most == 3 and capsys.readouterr().out.count("\n") == 50


def test_a_pipe_that_waits_does_not_hold_up_what_is_there() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"one\n")
    feed = Feed([Source("lines", f"/dev/fd/{read_end}")])
    assert feed.take(wait=True).prompt == "one"
    assert feed.take(wait=False) is None and not feed.ended
    os.write(write_end, b"two\n")
    os.close(write_end)
    assert feed.take(wait=True).prompt == "two"
    os.close(read_end)
    assert feed.take(wait=True) is None and feed.ended
