"""Conversations of every kind that clients send, and the prompt that Transformers' `apply_chat_template` makes of them.

Templates disagree with OpenAI's API in a few points, so what Transformers is given follows rules written here anew: a
developer is the system where the template's text has no such role, arguments are objects, and contents have the first
form of which the template shows all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(__file__).parent / "chat_templates"
Message = dict[str, Any]


class Case(NamedTuple):
    """messages: what a client sends. options: of `apply_chat_template`."""

    messages: list[Message]
    options: Mapping[str, Any] = {}


def text(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, name: str = "get_weather", call_id: str = "call12345") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "function": {  # in another order than pydantic's models would have it
            "parameters": {
                "required": ["city"],
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of a city"},
                    "days": {"type": "integer", "description": "Number of days"},
                },
            },
            "name": "get_weather",
            "description": "The weather of a city",
        },
        "type": "function",
    }
]
USER = {"role": "user", "content": "Weather in Zürich?"}
SYSTEM = {"role": "system", "content": "Answer in French."}
ANSWER = {"role": "assistant", "content": "Le soleil."}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"sky": "sun"}'}
CITY = {"city": "Zürich", "days": 2}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call(json.dumps(CITY))]}
CASES: Mapping[str, Case] = {
    "one question": Case([USER]),
    "system": Case([SYSTEM, USER]),
    "developer": Case([{"role": "developer", "content": "Answer in French."}, USER]),
    "several turns": Case([SYSTEM, USER, ANSWER, {"role": "user", "content": " And tomorrow?\n"}]),
    "no generation prompt": Case([USER, ANSWER], {"add_generation_prompt": False}),
    "the last message goes on": Case([USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": True}),
    "one part": Case([{"role": "user", "content": text("Document: abc ")}]),
    "two parts": Case([{"role": "user", "content": text("Document: abc ", " Question?")}]),
    "parts of all": Case(
        [
            {"role": "system", "content": text("Answer in French.")},
            {"role": "user", "content": text("a ", " b", "c")},
            {"role": "assistant", "content": text(" one", "two ")},
            {"role": "user", "content": text("d", "e")},
        ]
    ),
    "parts of the system": Case([{"role": "system", "content": text("Be brief. ", "Be kind.")}, USER]),
    "parts that go on": Case(
        [USER, {"role": "assistant", "content": text("Le ", "soleil")}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "tools": Case([SYSTEM, USER], {"tools": TOOLS}),
    "a call": Case([USER, CALLING, RESULT], {"tools": TOOLS}),
    "a call with an object": Case([USER, {**CALLING, "tool_calls": [call(CITY)]}, RESULT], {"tools": TOOLS}),
    "a call without arguments": Case([USER, {**CALLING, "tool_calls": [call("")]}, RESULT], {"tools": TOOLS}),
    "a call without tools": Case([USER, CALLING, RESULT]),
    "a call and a text": Case([USER, {**CALLING, "content": "Let me see. "}, RESULT, ANSWER, USER], {"tools": TOOLS}),
    "two calls": Case(
        [
            USER,
            {**CALLING, "tool_calls": [call(CITY), call('{"city": "Rome"}', call_id="call67890")]},
            RESULT,
            {**RESULT, "tool_call_id": "call67890", "content": "rain"},
        ],
        {"tools": TOOLS},
    ),
    "three calls in a row": Case(
        [SYSTEM, USER, *([CALLING, RESULT] * 3), ANSWER, {"role": "user", "content": "Thanks"}], {"tools": TOOLS}
    ),
    "a result of one part": Case([USER, CALLING, {**RESULT, "content": text("sun")}], {"tools": TOOLS}),
    "a result of parts": Case([USER, CALLING, {**RESULT, "content": text("sun", "rain")}], {"tools": TOOLS}),
    "reasoning": Case(
        [USER, {**ANSWER, "reasoning_content": "It is summer."}, USER, {**CALLING, "reasoning": "Again."}, RESULT],
        {"tools": TOOLS},
    ),
    "reasoning by another name": Case(
        [USER, {**ANSWER, "reasoning": "It is summer."}], {"add_generation_prompt": False}
    ),
    "fields of its own": Case([{**USER, "name": "Ann", "weight": 1, "nothing": None}]),
    "documents": Case([USER], {"documents": [{"title": "A", "text": "abc"}]}),
}


def expected(tokenizer: Any, template: str, case: Case) -> str | None:
    """The prompt that Transformers makes of a case; None if the template takes it in no form.

    Of several forms, the one of which the prompt shows most, and among equals the one that is nearest to what was sent.
    """
    best = None
    most = -1
    sent = _adapted(template, case.messages)
    texts = [text for message in sent for text in _texts(message)]
    for messages in _forms(sent):
        prompt = _rendered(tokenizer, template, messages, case.options)
        if prompt is None or _prints_python(prompt, messages):
            continue
        shown = sum(text in prompt for text in texts)
        if shown > most:
            best = prompt
            most = shown
        if shown == len(texts):
            break
    return best


def _adapted(template: str, messages: list[Message]) -> list[Message]:
    """With the role of a developer, and the arguments of calls, as the template's text has them."""
    cleaned = []
    for message in deepcopy(messages):
        if message["role"] == "developer" and not re.search("""["']developer["']""", template):
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            arguments = json.loads(given or "{}") if isinstance(given, str) else given
            if re.search(r"arguments'?\]? *\+ *'", template):  # which is no way to print an object
                arguments = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
            call["function"]["arguments"] = arguments
        cleaned.append({name: value for name, value in message.items() if value is not None})
    return cleaned


def _forms(sent: list[Message]) -> Iterator[list[Message]]:
    """As it was sent; with the parts of one role as one text, of two, of all; with all texts as parts. Each without
    what has no content, with an empty text there, and with None."""
    roles = ("system", "assistant", "user")
    joined = [*((role,) for role in roles), *combinations(roles, 2), (*roles, "tool")]
    contents: list[Callable[[str, Any], Any]] = [
        lambda role, content: content,
        *(partial(_joined_if, each) for each in joined),
        lambda role, content: text(content) if isinstance(content, str) else content,
    ]
    has_parts = any(not isinstance(message.get("content", ""), str) for message in sent)
    used = contents if has_parts else [contents[0], contents[-1]]
    for form, empty in product(used, ({}, {"content": ""}, {"content": None})):
        yield [
            {**message, "content": form(message["role"], message["content"])}
            if "content" in message
            else {**message, **empty}
            for message in sent
        ]


def _joined_if(joined: Collection[str], role: str, content: Any) -> Any:
    return content if isinstance(content, str) or role not in joined else "\n".join(part["text"] for part in content)


def _texts(message: Message) -> list[str]:
    """What a prompt should show of a message."""
    content = message.get("content", "")
    said = [content] if isinstance(content, str) else [part["text"] for part in content]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    values = [str(value) for each in calls if isinstance(each, dict) for value in each.values()]
    return [each.strip() for each in (*said, *values, *(each for each in calls if isinstance(each, str)))]


def _prints_python(prompt: str, messages: list[Message]) -> bool:
    """Whether it has None, a list as Python prints it, or one as JSON where somebody speaks."""
    lists = [message for message in messages if isinstance(message.get("content"), list)]
    printed = [repr(message["content"]).removesuffix("'}]") for message in lists]
    printed += [json.dumps(message["content"]).removesuffix('"}]') for message in lists if message["role"] != "tool"]
    return "None" in prompt or any(each in prompt for each in printed)


def _rendered(tokenizer: Any, template: str, messages: list[Message], options: Mapping[str, Any]) -> str | None:
    """As `apply_chat_template`, which would leave None out. None if the template cannot take the messages."""
    given = {"add_generation_prompt": True, **options, "chat_template": template}
    try:
        if any("content" in message and message["content"] is None for message in messages):
            return str(render_jinja_template([messages], **tokenizer.special_tokens_map, **given)[0][0])
        return str(tokenizer.apply_chat_template(messages, **given, tokenize=False))
    except Exception:
        return None
