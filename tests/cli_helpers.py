"""What the tests of the command line share: a checkpoint with a tokenizer, `generate`, and standard input."""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from checkpoints import make_checkpoint
from tokenizer_files import write_byte_level

from nanovllm.apps.cli.main import main
from nanovllm.data.batch import Batch, StepResult
from nanovllm.engine.model_runner import ModelRunner

SMALL_CACHE = ["--kvcache-block-size", "16", "--num-gpu-blocks", "80"]
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% if tools %}answer with <tool_call>{% endif %}"
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'system', 'tool') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(path: Path, *, template: str | None = TEMPLATE, **checkpoint: Any) -> str:
    """A tiny random checkpoint for 1,024 positions, with a byte-level tokenizer."""
    make_checkpoint(path, **{"vocab": 300, "max_positions": 1024, **checkpoint})
    write_byte_level(path, chat_template=template)
    return str(path)


def generate(model: str, *options: str) -> int:
    """`nanovllm generate` in a small cache, greedy."""
    return main(["generate", "--model", model, *SMALL_CACHE, *GREEDY, *options])


def exit_status(words: list[str]) -> object:
    """What the command line returns or exits with."""
    try:
        return main(words)
    except SystemExit as stopped:
        return stopped.code


def no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def json_lines(text: str) -> list[dict[str, Any]]:
    """The value of each line, which must be strict JSON: without NaN and infinity."""
    return [json.loads(line, parse_constant=no_json) for line in text.splitlines()]


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, *, is_terminal: bool = False) -> None:
    """Standard input that holds these bytes and ends."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the stream
    file.write(content)
    file.seek(0)
    stdin = io.TextIOWrapper(file)
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stdin", stdin)


def write_jsonl(path: Path, *lines: object) -> str:
    """Each line as JSON, or bytes as they are."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def at_steps(monkeypatch: pytest.MonkeyPatch, actions: Mapping[int, Callable[[], object]]) -> list[Batch]:
    """Before step n is executed, the first being 1, `actions[n]` is called. Returns the batches, which grow."""
    execute = ModelRunner.execute
    batches = []

    def watched(self: ModelRunner, batch: Batch) -> StepResult:
        batches.append(batch)
        actions.get(len(batches), bool)()
        return execute(self, batch)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    return batches


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise RuntimeError("out of luck")
