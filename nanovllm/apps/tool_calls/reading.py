"""How the answers to one request are read, by its tools, the template's format and the tokenizer's special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from nanovllm.apps.tool_calls.formats import FORMATS, PARSERS
from nanovllm.apps.tool_calls.json_formats import ForcedCall, ForcedList
from nanovllm.apps.tool_calls.pieces import Piece, assembled
from nanovllm.apps.tool_calls.reader import Parser
from nanovllm.apps.tool_calls.response_template import FORM, ResponseTemplateParser, has_calls
from nanovllm.apps.tool_choice import named_function
from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import open_end
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

MOST_TEMPLATES = 8  # whose formats are kept: a checkpoint's own, and what requests bring
HARMONY = "openai"
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


class Answer(NamedTuple):
    """text: as the model writes it, with the marks of calls. message: OpenAI's; None where no format is read."""

    text: str
    finish_reason: str | None
    message: dict[str, Any] | None


class Formats:
    """What a tokenizer's chat templates show. Each template is looked at once.

    chosen: the name of the format that calls are read in, one of `PARSERS`; "auto" is the one that a template writes.
    """

    def __init__(self, tokenizer: Tokenizer | None, chosen: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._look_at = lru_cache(MOST_TEMPLATES)(self._shown_by)  # by the template's text; None is the tokenizer's own

    def shown(self, template: str | None) -> Shown:
        """What a template shows. It is rendered, so it has to be trusted. Call it in the thread that reads prompts."""
        return self._look_at(template)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens, which are left out of text by default."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return ()
        return tuple(text for token_id in sorted(tokenizer.silent_ids) if (text := tokenizer.token_text(token_id)))

    def reading(
        self,
        form: str | None,
        tools: Sequence[Mapping[str, Any]],
        choice: Any = None,
        parallel: bool | None = None,
        *,
        skips_special: bool = True,
    ) -> Reading:
        """How answers are read. form: the format's name, "none", or None where it is not known.

        choice, parallel: `tool_choice` and `parallel_tool_calls`.
        """
        return Reading(self, self._tokenizer, form, tools, choice, parallel, skips_special)

    def _shown_by(self, template: str | None) -> Shown:
        shown = shown_by(self._tokenizer, template)
        if self._chosen != "auto":
            return shown._replace(form=self._chosen)
        own = self._tokenizer.response_template if isinstance(self._tokenizer, HuggingFaceTokenizer) else None
        return shown._replace(form=FORM) if template is None and has_calls(own) else shown


class Reading:
    """How the answers to one request are read.

    form: the format, as `Formats.reading` has it. shows_special: the text has to have special tokens, because marks
    of calls are among them; `parser` leaves out the others.
    """

    def __init__(
        self,
        formats: Formats,
        tokenizer: Tokenizer | None,
        form: str | None,
        tools: Sequence[Mapping[str, Any]],
        choice: Any,
        parallel: bool | None,
        skips_special: bool,
    ) -> None:
        self.form = form
        self.is_named = named_function(choice) is not None
        self.only_first = parallel is False
        self._choice = choice
        self._tokenizer = tokenizer
        self._tools = [] if choice == "none" else list(tools)
        self._is_forced = bool(self._tools) and (choice == "required" or self.is_named)
        marks = self._marks()
        special = formats.special_texts if marks and skips_special else ()
        self.shows_special = any(text in mark for text in special for mark in marks)
        self._hidden = [text for text in special if self.shows_special and not any(text in mark for mark in marks)]

    @property
    def finds_parts(self) -> bool:
        """Whether an answer may have more than content."""
        return self._is_forced or bool(self._marks())

    def parser(self, prompt_token_ids: Sequence[int] = ()) -> Parser:
        """A parser for one answer to the prompt."""
        parser = self._parser(prompt_token_ids)
        return WithoutTexts(parser, self._hidden) if self._hidden else parser

    def read(self, text: str, finish_reason: str | None, prompt_token_ids: Sequence[int]) -> Answer:
        """The finished answer to a prompt."""
        parser = self.parser(prompt_token_ids)
        pieces = [*parser.feed(text), *parser.finish()]
        answer = assembled(pieces, only_first=self.only_first, keeps_broken=self._is_forced)
        reason = self.finish_reason(finish_reason, any(call.is_complete for call in answer.calls))
        plain = re.sub("|".join(map(re.escape, self._hidden)), "", text) if self._hidden else text
        return Answer(plain, reason, answer.fields(self.form))

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """OpenAI's: "tool_calls" for an answer that ends with calls, unless `tool_choice` names the function."""
        return "tool_calls" if reason == "stop" and has_calls and not self.is_named else reason

    def _marks(self) -> tuple[str, ...]:
        """What the format's parser looks for; nothing if no format is read."""
        if self._is_forced or self.form is None or not (self._tools or self.form == HARMONY):
            return ()
        if self.form == FORM:
            template = self._tokenizer.response_template if isinstance(self._tokenizer, HuggingFaceTokenizer) else {}
            return tuple(_texts(template))
        return FORMATS[self.form].marks if self.form in FORMATS else ()

    def _parser(self, prompt_token_ids: Sequence[int]) -> Parser:
        tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self._tools}
        if self._is_forced:
            name = named_function(self._choice)
            return ForcedList(tools) if name is None else ForcedCall(tools, name)
        if not self._marks() or self.form is None:
            return Parser()
        tokenizer = self._tokenizer
        if self.form == FORM and isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.response_template:
            prompt = tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
            return ResponseTemplateParser(tokenizer.response_template, self._tools, prompt)
        return FORMATS[self.form].make(tools)


class WithoutTexts(Parser):
    """A parser that does not see some texts, also where pieces divide them."""

    def __init__(self, parser: Parser, texts: Sequence[str]) -> None:
        super().__init__()
        self._parser = parser
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        text = self._held + text
        tail = self._pattern.split(text)[-1]  # behind the last special token
        self._held = open_end(tail, self._texts)
        return self._parser.feed(self._pattern.sub("", text[: len(text) - len(self._held)]))

    def finish(self) -> list[Piece]:
        return [*self._parser.feed(self._held), *self._parser.finish()]


def _texts(value: Any) -> list[str]:
    """All texts in a structure, patterns also without their backslashes."""
    if isinstance(value, str):
        return [value, value.replace("\\", "")]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


# ---- which format a template writes calls in: one is rendered, and the format is the one whose parser reads it


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
        answers = [whole[_num_same(start, whole) :] for start in starts]
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


def _num_same(one: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _reads(name: str, text: str) -> bool:
    """Whether the format's parser reads the one call in the text."""
    parser = FORMATS[name].make({CALLED: PARAMETERS})
    calls = assembled([*parser.feed(text), *parser.finish()]).calls
    return [call.name for call in calls] == [CALLED] and json.loads(calls[0].arguments) == ARGUMENTS
