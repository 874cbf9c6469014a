"""Results as text or as JSON lines, in the order of the prompts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from nanovllm.apps.cli.prompts import PromptItem
from nanovllm.errors import ConfigError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

COMPLETION = ("index", "text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob")


def text_result(output: RequestOutput) -> str:
    """Each sequence's text, and a line end."""
    return "".join(f"{completion.text}\n" for completion in output.outputs)


def json_result(index: int, item: PromptItem, output: RequestOutput | None, error: str | None) -> str:
    """One line of strict JSON: the result of the request, or its error."""
    result: dict[str, Any] = {"index": index}
    if item.given_id is not None:
        result["id"] = item.given_id
    result["source"] = item.source
    if error is not None:
        result["error"] = error.partition("\n")[0]  # without flags
    if output is not None:
        result |= {
            "outputs": [_completion(completion) for completion in output.outputs],
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "prompt_logprobs": _logprobs(output.prompt_logprobs),
            "metrics": output.metrics.as_dict(),
        }
    return json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n"


def _logprobs(rows: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[int, Any] | None] | None:
    if rows is None:
        return None
    return [None if row is None else {token: asdict(logprob) for token, logprob in row.items()} for row in rows]


def _completion(output: CompletionOutput) -> dict[str, Any]:
    return {name: getattr(output, name) for name in COMPLETION} | {"logprobs": _logprobs(output.logprobs)}


class InOrder:
    """Restores the order of lines: holds each line until all earlier ones have come."""

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, str] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def put(self, index: int, line: str) -> Iterator[str]:
        """Add a line; yields the lines that can be written now."""
        self._held[index] = line
        while self._next in self._held:
            yield self._held.pop(self._next)
            self._next += 1

    def rest(self) -> Iterator[str]:
        """The remaining lines, when no more will come."""
        for index in sorted(self._held):
            yield self._held.pop(index)


# ---- output


def check_output(path: str | None, inputs: list[str]) -> None:
    """Raise ConfigError if the file cannot be written, before a model is loaded. Its content is kept."""
    if path is None:
        return
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise ConfigError(f"--output {path!r} cannot be written: {error.strerror}") from None
    for name in inputs:
        if os.path.exists(name) and os.path.samefile(path, name):
            raise ConfigError(f"--output {path!r} is also read: give it another name")


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """The file, or standard output."""
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        yield file
