"""How the answers to one request are read, by its tools, the template's format and the tokenizer's special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nanovllm.apps.tool_calls.detection import Shown, shown_by
from nanovllm.apps.tool_calls.formats import FORMATS
from nanovllm.apps.tool_calls.json_formats import ForcedCall, ForcedList
from nanovllm.apps.tool_calls.pieces import Piece
from nanovllm.apps.tool_calls.reader import Parser
from nanovllm.apps.tool_calls.response_template import FORM, ResponseTemplateParser, has_calls
from nanovllm.apps.tool_choice import named_function
from nanovllm.text.prompts import open_end
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

MOST_TEMPLATES = 8  # whose formats are kept: a checkpoint's own, and what requests bring
HARMONY = "openai"


class Formats:
    """What a tokenizer's chat templates show. Each template is looked at once.

    chosen: the name of the format that calls are read in, one of `PARSERS`; "auto" is the one that a template writes.
    """

    def __init__(self, tokenizer: Tokenizer | None, chosen: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._chosen = chosen
        self._shown: dict[str | None, Shown] = {}  # by the template's text; None is the tokenizer's own

    def shown(self, template: str | None) -> Shown:
        """What a template shows. It is rendered, so it has to be trusted. Call it in the thread that reads prompts."""
        if template not in self._shown:
            while len(self._shown) >= MOST_TEMPLATES:
                del self._shown[next(iter(self._shown))]
            self._shown[template] = self._look_at(template)
        return self._shown[template]

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
        *,
        skips_special: bool = True,
    ) -> Reading:
        """How answers are read. form: the format's name, "none", or None where it is not known."""
        return Reading(self, self._tokenizer, form, tools, choice, skips_special)

    def _look_at(self, template: str | None) -> Shown:
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
        skips_special: bool,
    ) -> None:
        self.form = form
        self._choice = choice
        self._tokenizer = tokenizer
        self._tools = [] if choice == "none" else list(tools)
        self._is_forced = bool(self._tools) and (choice == "required" or named_function(choice) is not None)
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

    def plain(self, text: str) -> str:
        """The text of an answer without the special tokens that only calls need."""
        return re.sub("|".join(map(re.escape, self._hidden)), "", text) if self._hidden else text

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
        self._first = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts))
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        text = self._held + text
        tail = self._pattern.split(text)[-1]  # behind the last special token
        may_be_open = not self._first.isdisjoint(tail[-self._longest :])
        self._held = open_end(tail, self._texts) if may_be_open else ""
        return self._parser.feed(self._pattern.sub("", text[: len(text) - len(self._held)]))

    def finish(self) -> list[Piece]:
        return [*self._parser.feed(self._held), *self._parser.finish()]


def _texts(value: Any) -> list[str]:
    """All texts in a structure, patterns also without their backslashes."""
    if isinstance(value, str):
        return [value, value.replace("\\", "")]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]
