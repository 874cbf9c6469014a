"""Which format a chat template writes calls in: one is rendered, and the format is the one whose parser reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nanovllm.apps.tool_calls.formats import FORMATS, PARSERS
from nanovllm.apps.tool_calls.messages import assembled
from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.tokenizer import Tokenizer

LISTED = "listed_function"
CALLED = "called_function"
ARGUMENTS: Mapping[str, Any] = {"place": "North Pole", "days": 31}
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
    },
    "required": ["place"],
}
USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Answer."}


class Shown(NamedTuple):
    """What a chat template shows. tools: whether it shows them to the model. form: the name of the format of calls."""

    tools: bool
    form: str | None


def shown_by(tokenizer: Tokenizer | None, template: str | None) -> Shown:
    """What a template shows, or the tokenizer's own without one; nothing where it cannot be rendered."""
    prompts = [_rendered(tokenizer, template, messages) for messages in ([USER], [SYSTEM, USER])]
    shows_tools = any(LISTED in prompt for prompt in prompts)
    # Where an answer may begin: `<think>` at the end of a prompt begins like `<tool_call>`.
    starts = (prompts[0], _rendered(tokenizer, template, [USER], ends=False))
    for call in _calls():
        whole = _rendered(tokenizer, template, [USER, *call], ends=False)
        if CALLED not in whole:
            continue
        answers = [whole[_same(start, whole) :] for start in starts]
        form = next((name for answer in answers for name in FORMATS if _reads(name, answer)), None)
        if form is not None:
            return Shown(shows_tools, form)
    return Shown(shows_tools, None)


def check_shown(shown: Shown, choice: Any) -> None:
    """Raise RequestError for tools that the model would not see, and for those whose calls could not be read.

    shown: its form is "none" where calls are to stay text. choice: the request's `tool_choice`.
    """
    if not shown.tools:
        raise RequestError(
            "tools: the model's chat template does not show tools to the model; give one that does with "
            "--chat-template FILE"
        )
    if shown.form is None and choice in (None, "auto"):
        known = ", ".join(PARSERS[1:-1])
        raise RequestError(
            "tools: the chat template writes calls in no format that is read here; name the format that the model "
            f"writes with --tool-call-parser ({known}), or none to get calls as text"
        )


def _calls() -> Iterator[list[dict[str, Any]]]:
    """Messages with a call, as different templates take them."""
    result = {"role": "tool", "tool_call_id": "call00001", "name": CALLED, "content": "cold"}
    for arguments in (dict(ARGUMENTS), json.dumps(ARGUMENTS)):
        function = {"name": CALLED, "arguments": arguments}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        for content in (None, ""):
            message = {"role": "assistant", "content": content, "tool_calls": calls}
            yield [message]
            yield [message, result]


def _rendered(
    tokenizer: Tokenizer | None, template: str | None, messages: list[dict[str, Any]], *, ends: bool = True
) -> str:
    """The prompt, empty if the template cannot take the messages. ends: with what begins an answer."""
    function = {"name": LISTED, "description": "of a place", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]
    try:
        made = ChatTemplate(tokenizer, template, tools=tools, add_generation_prompt=ends)
        (prompt,) = made.prompts(messages)
    except RequestError:
        return ""
    return prompt.text or ""


def _same(one: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _reads(name: str, text: str) -> bool:
    """Whether the format's parser reads the one call in the text."""
    parser = FORMATS[name].make({CALLED: PARAMETERS})
    calls = assembled([*parser.feed(text), *parser.finish()]).calls
    return [call.name for call in calls] == [CALLED] and json.loads(calls[0].arguments) == ARGUMENTS
