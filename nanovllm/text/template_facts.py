"""What a chat template does with messages, found by rendering small conversations with it.

Reading the template's text would miss macros, filters, and what concatenation makes of a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

# Words that no template has.
FIRST = "qzfirst"
SECOND = "qzsecond"
VALUE = "qzvalue"
STRANGER = "qzstranger"
# Contents, by the name of their form. A template takes a form if both words of it are in the text.
SAMPLES: Mapping[str, Any] = MappingProxyType(
    {
        "text": f"{FIRST} {SECOND}",
        "parts": [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}],
        "strings": [FIRST, SECOND],
        "thinking": [{"type": "thinking", "thinking": FIRST}, {"type": "text", "text": SECOND}],
    }
)
ROLES = ("system", "user", "assistant", "tool")
ARGUMENTS: Mapping[str, str] = MappingProxyType({"qzname": VALUE})
TOOL: Mapping[str, Any] = MappingProxyType(
    {
        "name": "qztool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"qzname": {"type": "string", "description": "A name."}}},
    }
)
CALL_ID = "qzcall123"  # Mistral's templates want nine letters and digits
QUESTION: Mapping[str, Any] = MappingProxyType({"role": "user", "content": "A question."})


class CallForm(NamedTuple):
    """How an answer that calls tools is given to a template."""

    no_content: Mapping[str, Any]  # the fields that stand for no content
    arguments_as_text: bool  # arguments of calls are JSON text, not objects


class ThoughtForm(NamedTuple):
    """How a template writes a thought: `begin`, the thought, and `end` before what is said."""

    begin: str  # such as "<think>\n"; a prompt may end with it already, and then the model does not write it
    end: str  # such as "\n</think>\n\n"

    @property
    def mark(self) -> str:
        """The tag behind a thought, without the spaces around it."""
        return self.end.strip()

    def parts(self, content: str) -> tuple[str, str]:
        """The thought in a content that has `mark`, and what is said, of which the template makes the content again."""
        thought, _, said = content.partition(self.mark)
        before, after = self.end.split(self.mark)
        tag = self.begin.strip()
        if tag in thought:
            thought = thought.partition(tag)[2].removeprefix(self.begin.partition(tag)[2])
        return thought.removesuffix(before), said.removeprefix(after)


class TemplateFacts:
    """The facts of one template. Each takes one to seven renderings when it is first needed."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        """template: its text. variables: what every rendering gets, such as the texts of special tokens."""
        self._template = template
        self._variables = dict(variables)
        self._takes: dict[tuple[str, str], bool] = {}  # by role and form

    def takes(self, role: str, form: str) -> bool:
        """Whether the template shows all of a content in a form of `SAMPLES`, and a list not as Python prints it."""
        if role not in ROLES:  # a name that a request invents is not kept
            return self._shows(role, form)
        if (role, form) not in self._takes:
            self._takes[role, form] = self._shows(role, form)
        return self._takes[role, form]

    @cached_property
    def knows_developer(self) -> bool:
        """Whether the template treats the role "developer" otherwise than an unknown one.

        An unknown role is dropped, refused or copied into the text.
        """
        text = self._developer("developer").casefold()
        return FIRST in text and text.replace("developer", STRANGER) != self._developer(STRANGER).casefold()

    @cached_property
    def reads_reasoning(self) -> bool:
        """Whether the template reads reasoning from the field `reasoning` alone, which Transformers does not fill."""
        others = re.search(r"\b(reasoning_content|thinking)\b", self._template)
        return others is None and re.search(r"\breasoning\b", self._template) is not None

    @cached_property
    def no_answer(self) -> Mapping[str, Any]:
        """The fields that stand for no content in an answer without calls: none, or an empty text if one is needed."""
        without: Mapping[str, Any] = {}
        return without if self._render([QUESTION, {"role": "assistant"}, QUESTION]) is not None else {"content": ""}

    @cached_property
    def call_form(self) -> CallForm:
        """The first form in which the template shows a call. The form in which Transformers gives it comes first."""
        for content in ({}, {"content": None}, {"content": ""}):
            for as_text in (False, True):
                text = self._render(self._call(content, as_text))
                if text is not None and _shows_call(text):
                    return CallForm(content, as_text)
        # Some show calls only beside a content, or not at all.
        as_text = not _shows_call(self._render(self._call({"content": SECOND}, False)) or "")
        as_text = as_text and _shows_call(self._render(self._call({"content": SECOND}, True)) or "")
        return CallForm(self.no_answer, as_text)

    @cached_property
    def keeps_arguments(self) -> bool:
        """Whether the template writes arguments that are text as they are, though it takes objects too."""
        content, as_text = self.call_form
        as_object = self._render(self._call(content, False)) or ""
        return not as_text and _shows_call(as_object) and as_object == self._render(self._call(content, True))

    @cached_property
    def before_calls(self) -> str:
        """The spaces and line ends that the template writes between what an answer says and its calls."""
        text = self._render(self._call({"content": SECOND}, self.call_form.arguments_as_text)) or ""
        rest = text.partition(SECOND)[2]
        return rest[: len(rest) - len(rest.lstrip())]

    @cached_property
    def thinks_beside_content(self) -> bool:
        """Whether an answer that calls tools may have reasoning and a content at once."""
        return self._reasoned({"content": SECOND}) is not None or self._reasoned(self.call_form.no_content) is None

    @cached_property
    def thought(self) -> ThoughtForm | None:
        """How the template writes reasoning between tags; None where it does not.

        None also where it takes the thought out of a content by itself, which needs no help.
        """
        whole = self._reasoned({"content": SECOND}) or ""
        found = re.search(rf"(<[\w:]+>\s*){FIRST}(\s*</[\w:]+>\s*){SECOND}", whole)
        if found is None:
            return None
        form = ThoughtForm(found[1], found[2])
        is_begun = (self._render([QUESTION]) or "").endswith(form.begin)
        written = {"content": f"{'' if is_begun else form.begin}{FIRST}{form.end}"}
        by_itself = self._render(self._call(written, self.call_form.arguments_as_text))
        return form if by_itself != self._reasoned(self.call_form.no_content) else None

    # ---- rendering

    def _reasoned(self, content: Mapping[str, Any]) -> str | None:
        """The text of an answer with a thought and calls."""
        names = ("thinking", "reasoning_content", *(["reasoning"] if self.reads_reasoning else []))
        return self._render(self._call({**dict.fromkeys(names, FIRST), **content}, self.call_form.arguments_as_text))

    def _shows(self, role: str, form: str) -> bool:
        message = {"role": role, "content": SAMPLES[form]}
        if role == "tool":
            call = self._call(self.call_form.no_content, self.call_form.arguments_as_text)
            text = self._render([*call[:-1], {**call[-1], **message}])
        elif role == "system":
            text = self._render([message, QUESTION])
        elif role == "user":
            text = self._render([message])
        else:
            text = self._render([QUESTION, message, QUESTION])
        if text is None or not 0 <= text.find(FIRST) < text.find(SECOND):
            return False
        # A list as JSON is a structured result of a tool, and no way to show the parts of what somebody says.
        as_printed = [repr(SAMPLES[form])] if role == "tool" else [repr(SAMPLES[form]), json.dumps(SAMPLES[form])]
        if form == "thinking":
            as_printed += [repr(SAMPLES[form][0]), json.dumps(SAMPLES[form][0])]
        return not any(printed in text for printed in as_printed)

    def _developer(self, role: str) -> str:
        return self._render([{"role": role, "content": FIRST}, QUESTION]) or ""

    def _call(self, content: Mapping[str, Any], as_text: bool) -> list[Mapping[str, Any]]:
        """A question, an answer that calls, and the tool's answer."""
        arguments: Any = json.dumps(dict(ARGUMENTS)) if as_text else dict(ARGUMENTS)
        function = {"name": TOOL["name"], "arguments": arguments}
        call = {"id": CALL_ID, "type": "function", "function": function}
        answer = {"role": "tool", "tool_call_id": CALL_ID, "name": TOOL["name"], "content": "An answer."}
        return [QUESTION, {"role": "assistant", **content, "tool_calls": [call]}, answer]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The text; None if the template cannot take the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds to import

        with_tools = any("tool_calls" in message for message in messages)
        tools = [{"type": "function", "function": dict(TOOL)}] if with_tools else None
        options = {**self._variables, "chat_template": self._template, "tools": tools, "add_generation_prompt": True}
        try:
            texts: Any = render_jinja_template([[dict(message) for message in messages]], **options)
        except Exception:  # a template may raise any type
            return None
        return str(texts[0][0])


def _shows_call(text: str) -> bool:
    """Whether the arguments are there, neither as Python prints them nor as JSON within JSON."""
    wrong = (repr(dict(ARGUMENTS)), json.dumps(json.dumps(dict(ARGUMENTS))), "None")
    return VALUE in text and not any(form in text for form in wrong)
