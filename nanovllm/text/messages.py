"""Messages as a chat template expects them: as Transformers gives them, or in another form if the template needs one.

OpenAI's messages differ in four points from what templates were written for: the role developer, content in parts, no
content beside calls, and arguments of calls as JSON text. `TemplateFacts` says what a template takes. Answers that come
back from a client become what the model wrote, as far as the template can write it (`_as_written`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanovllm.errors import RequestError, quoted
from nanovllm.text.prompts import CONTENT_FORMATS, Message
from nanovllm.text.template_facts import TemplateFacts

# The field with the text, by the type of a part.
TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
)
# Names of a message's reasoning. Transformers fills the first two from any of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
Json = dict[str, Any]


def check_content_format(name: object) -> str:
    """The name of a content format; None stands for "auto". Raises RequestError."""
    if name is None:
        return "auto"
    if not isinstance(name, str) or name not in CONTENT_FORMATS:
        known = ", ".join(map(repr, CONTENT_FORMATS))
        raise RequestError(f"chat_template_content_format={quoted(name)}: must be one of {known}")
    return name


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[tuple[str, Sequence[Message]]]:
    """One conversation or several, with their paths; a list that begins with a message is one. Raises RequestError."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages or a list of such lists, got {quoted(messages)}")
    if messages and _as_mapping(messages[0]) is not None:
        return [("messages", messages)]  # type: ignore[list-item]
    for message in messages:
        if isinstance(message, str) or not isinstance(message, Sequence) or not message:
            raise RequestError(f"a conversation must be a list of at least one message, got {quoted(message)}")
    return [(f"messages.{i}", conversation) for i, conversation in enumerate(messages)]  # type: ignore[misc]


def template_messages(path: str, messages: Sequence[Message], facts: TemplateFacts, content_format: str) -> list[Json]:
    """Copies of the messages of one conversation for the template of `facts`. Raises RequestError.

    As in Transformers, fields without a value are left out, and all others reach the template.
    """
    return [_message(f"{path}.{i}", message, facts, content_format) for i, message in enumerate(messages)]


def _wrong(field: str, sentence: str) -> RequestError:
    return RequestError(f"{field} {sentence}", field=field)


def _message(path: str, given: Any, facts: TemplateFacts, content_format: str) -> Json:
    message = _as_mapping(given)
    if message is None:
        raise _wrong(path, f"must be an object with a role and a content, got {quoted(given)}")
    role = message.get("role")
    if role is None:
        raise _wrong(f"{path}.role", "is missing: give who speaks, such as 'user'")
    if not isinstance(role, str):
        raise _wrong(f"{path}.role", f"must be text such as 'user', got {quoted(role)}")
    fields = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and not facts.knows_developer:
        fields["role"] = role = "system"
    if not fields.get("tool_calls", True):  # which some templates take for an answer that only calls
        del fields["tool_calls"]
    calls = fields.get("tool_calls")
    if calls is not None:
        fields["tool_calls"] = _calls(f"{path}.tool_calls", calls, facts)
    if role == "assistant":
        _as_written(fields, facts)
    if "content" in fields:
        fields["content"] = _content(f"{path}.content", role, fields["content"], facts, content_format)
    elif role in ("system", "user"):
        raise _wrong(f"{path}.content", "is missing: give text, or a list of text parts")
    elif role == "assistant":
        fields |= facts.call_form.no_content if calls else facts.no_answer
    elif role == "tool":
        fields["content"] = ""
    return _with_reasoning(fields, facts)


def _as_mapping(message: Any) -> Mapping[str, Any] | None:
    """The message itself, or the fields of a pydantic model, as the clients of OpenAI's API have them."""
    if not isinstance(message, Mapping) and callable(getattr(message, "model_dump", None)):
        message = message.model_dump()
    return message if isinstance(message, Mapping) else None


def _as_written(fields: Json, facts: TemplateFacts) -> None:
    """Change an answer so that the template writes what the model wrote, which the prefix cache then finds.

    The client has it as it was read: a thought may stand in the content, and the line end before calls, which the
    template writes itself, is the end of the content.
    """
    content = _only_text(fields.get("content"))
    if content is None:
        return
    said = content
    calls = fields.get("tool_calls")
    names = [name for name in REASONING if name in fields]
    if not names and "</" in said and facts.thought is not None and facts.thought.mark in said:
        fields["reasoning"], said = facts.thought.parts(said)
    if calls:
        said = said.removesuffix(facts.before_calls)
    if calls and names and said and not facts.thinks_beside_content:  # one text is all that the template takes
        fields |= dict.fromkeys(names, f"{fields[names[0]]}\n{said}")
        said = ""
    if said != content:
        fields["content"] = said
        if calls and not said:
            del fields["content"]


def _only_text(content: Any) -> str | None:
    """The text of a content that is one text, or one part of text."""
    if isinstance(content, Sequence) and not isinstance(content, str) and len(content) == 1:
        part = content[0]
        content = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    return content if isinstance(content, str) else None


def _with_reasoning(fields: Json, facts: TemplateFacts) -> Json:
    """The reasoning under all names by which templates read it."""
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is None:
        return fields
    own = {"reasoning": reasoning} if facts.reads_reasoning else {}
    return {"thinking": reasoning, **fields, **own, "reasoning_content": reasoning}


# ---- content


def _content(path: str, role: str, content: Any, facts: TemplateFacts, content_format: str) -> str | list[Any]:
    is_text = isinstance(content, str)
    if not is_text and not isinstance(content, Sequence):
        raise _wrong(path, f"must be text or a list of text parts, got {quoted(content)}")
    given = [{"type": "text", "text": content}] if is_text else list(content)
    texts = [_text_of(path, i, part) for i, part in enumerate(given)]
    as_parts = content_format == "openai"
    if content_format == "auto":  # some templates show parts alone
        as_parts = not (is_text and facts.takes(role, "text")) and facts.takes(role, "parts")
    if not as_parts:
        return "\n".join(texts)
    return [_part(role, part, text, facts) for part, text in zip(given, texts, strict=True)]


def _text_of(path: str, index: int, part: Any) -> str:
    text = part
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise _wrong(f"{path}.{index}", f"must be a part of text, {{'type': 'text', 'text': ...}}, got {quoted(part)}")
    return text


def _part(role: str, part: Any, text: str, facts: TemplateFacts) -> Any:
    """The part as it is if the template shows it, else as a part of text."""
    if isinstance(part, Mapping) and part.get("type") == "text":
        return dict(part)
    if isinstance(part, str) and facts.takes(role, "strings"):
        return part
    if isinstance(part, Mapping) and part.get("type") == "thinking" and facts.takes(role, "thinking"):
        return dict(part)
    return {"type": "text", "text": text}


# ---- calls


def _calls(path: str, calls: Any, facts: TemplateFacts) -> list[Json]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise _wrong(path, f"must be a list of calls, got {quoted(calls)}")
    return [_call(f"{path}.{i}", call, facts) for i, call in enumerate(calls)]


def _call(path: str, call: Any, facts: TemplateFacts) -> Json:
    """A call, with or without the object `function` around its name and arguments, as templates take both."""
    is_wrapped = isinstance(call, Mapping) and "function" in call
    function = call["function"] if is_wrapped else call
    at = f"{path}.function" if is_wrapped or not isinstance(call, Mapping) else path
    if not isinstance(function, Mapping):
        raise _wrong(at, f"must be an object with name and arguments, got {quoted(function)}")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{at}.name", f"must be the name of a function, got {quoted(function.get('name'))}")
    arguments = _arguments(f"{at}.arguments", function.get("arguments"), facts)
    read = {**function, "arguments": arguments}
    return {**call, "function": read} if is_wrapped else read


def _arguments(path: str, given: Any, facts: TemplateFacts) -> Json | str:
    """As the template takes them; as text they stay as the model wrote them, but for what JSON escapes of Unicode."""
    read = given
    if given is None or (isinstance(given, str) and not given.strip()):
        read = given = {}
    elif isinstance(given, str):
        try:
            read = json.loads(given)
        except (ValueError, RecursionError):
            read = given
        if read is None:  # some clients write "null" for no arguments
            read = given = {}
    if not isinstance(read, Mapping):
        raise _wrong(path, f"must be a JSON object as text, or an object, got {quoted(given)}")
    if not facts.call_form.arguments_as_text:
        is_kept = isinstance(given, str) and "\\u" not in given and facts.keeps_arguments
        return given if is_kept else dict(read)
    return given if isinstance(given, str) else json.dumps(dict(read), ensure_ascii=False)
