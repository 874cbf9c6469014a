"""A finished answer in one piece: its message, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nanovllm.apps.tool_calls.messages import assembled
from nanovllm.apps.tool_calls.reading import Reading
from nanovllm.apps.tool_choice import named_function


class Answer(NamedTuple):
    """text: as the model writes it, with the marks of calls. message: OpenAI's; None where no format is read."""

    text: str
    finish_reason: str | None
    message: dict[str, Any] | None


class AnswerReader:
    """Reads the finished answers to one request."""

    def __init__(self, reading: Reading, choice: Any, parallel: bool | None) -> None:
        """choice, parallel: `tool_choice` and `parallel_tool_calls`."""
        self._reading = reading
        self._is_named = named_function(choice) is not None
        self._keeps_broken = self._is_named or choice == "required"
        self._only_first = parallel is False
        self.shows_special = reading.shows_special

    def read(self, text: str, finish_reason: str | None, prompt_token_ids: Sequence[int]) -> Answer:
        """The answer to a prompt. An answer that ends with calls has the finish reason "tool_calls", as OpenAI's."""
        parser = self._reading.parser(prompt_token_ids)
        pieces = [*parser.feed(text), *parser.finish()]
        answer = assembled(pieces, only_first=self._only_first, keeps_broken=self._keeps_broken)
        reason = finish_reason
        if reason == "stop" and not self._is_named and any(call.is_complete for call in answer.calls):
            reason = "tool_calls"
        return Answer(self._reading.plain(text), reason, answer.fields(self._reading.form))
