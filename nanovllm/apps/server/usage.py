"""Token counts of answers, and the identifiers and times that they carry."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.apps.server.protocol import SamplingFields
from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import RequestOutput

LONGEST_ID = 128


def new_id(prefix: str, given: str | None = None) -> str:
    """An identifier of an answer, with the one that the request brought, if any. Raises RequestError."""
    if given is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not given or len(given) > LONGEST_ID or not given.isprintable():
        raise RequestError(f"request_id={quoted(given)}: must be 1 to {LONGEST_ID} printable characters")
    return f"{prefix}-{given}"


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: of its prompts, found in the prefix cache, and generated."""

    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by the number of the prompt
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0

    def count(self, number: int, output: RequestOutput) -> None:
        """Count an output that is final, or holds only what is new."""
        self.prompt_tokens[number] = len(output.prompt_token_ids)
        self.cached_tokens[number] = output.num_cached_tokens
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def as_json(self) -> dict[str, Any]:
        prompt = sum(self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


class Envelope:
    """What every part of an answer repeats, and the usage in the parts that carry it."""

    def __init__(self, request_id: str, kind: str, model: str, request: SamplingFields) -> None:
        self.usage = Usage()
        self._fields = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        options = request.stream_options
        self.sends_usage = options is not None and options.include_usage
        self._always = self.sends_usage and options is not None and options.continuous_usage_stats

    def chunk(self, choices: Sequence[dict[str, Any]], **others: Any) -> dict[str, Any]:
        """A part of a streamed answer. With include_usage, all but the last one have a usage of null, as OpenAI's."""
        part = {**self._fields, "choices": choices, **others}
        if self.sends_usage:
            part["usage"] = self.usage.as_json() if self._always else None
        return part

    def usage_chunk(self) -> dict[str, Any]:
        """The last part: no choices, only the usage."""
        return {**self._fields, "choices": [], "usage": self.usage.as_json()}

    def complete(self, choices: Sequence[dict[str, Any]], **others: Any) -> dict[str, Any]:
        """An answer in one piece."""
        return {**self._fields, "choices": choices, "usage": self.usage.as_json(), **others}
