"""Turns conversations into prompts with a chat template, which Transformers renders in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.errors import RequestError, one_line, quoted
from nanovllm.sampling_rules import check_characters
from nanovllm.text.messages import check_content_format, conversations, template_messages
from nanovllm.text.prompts import Message, PromptParts
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

# Arguments of Transformers' apply_chat_template, which no template may take for variables of its own.
NOT_VARIABLES = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    }
)


class ChatTemplate:
    """Turns conversations into prompts with the tokenizer's chat template, or with `template` instead.

    content_format: "string" joins the parts of a content with newlines to one text, "openai" makes every content a list
    of parts, and "auto" gives the template a list where it shows the parts of one, and else text.
    Raises RequestError if there is no template, for arguments that are not variables of a template, and for
    conversations that the template rejects. Nothing limits the time and memory that a template takes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        content_format: str | None = "auto",
    ) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise RequestError(
                "the model directory has no tokenizer files, so messages cannot be read: give token ids to generate, "
                "or add the tokenizer's files to the directory"
            )
        if template is not None and not isinstance(template, str):
            raise RequestError(f"chat_template={quoted(template)}: must be the text of a Jinja template")
        if template is None and not tokenizer.chat_template:
            raise RequestError(
                "the tokenizer has no chat template, which says how messages become a prompt: give one as "
                "chat_template, or the finished prompt to generate"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message=True: needs add_generation_prompt=False, because the last message is continued"
            )
        _check_variables(tools, documents, template_kwargs)
        self._tokenizer = tokenizer
        self._content_format = check_content_format(content_format)
        self._arguments = {
            **tokenizer.special_tokens_map,
            **(template_kwargs or {}),
            **({} if documents is None else {"documents": list(documents)}),
            "chat_template": _named_template(tokenizer, template, tools is not None),
            "tools": None if tools is None else [_without_nulls(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    def prompts(self, messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[PromptParts]:
        """The prompt of one conversation, or of each of several."""
        facts = self._tokenizer.template_facts(self._arguments["chat_template"])
        return [
            self._render(template_messages(path, conversation, facts, self._content_format))
            for path, conversation in conversations(messages)
        ]

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of one conversation as token ids."""
        (prompt,) = self.prompts(list(messages))
        return list(prompt.token_ids or ())

    def _render(self, conversation: list[dict[str, Any]]) -> PromptParts:
        from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds to import

        try:
            texts: Any = render_jinja_template([conversation], **self._arguments)
        except Exception as error:  # a template may raise any type
            reason = one_line(str(error) or type(error).__name__, 300)
            raise RequestError(f"the chat template cannot take the messages: {reason}") from None
        text = texts[0][0]  # beside where the answers are
        check_characters("the prompt that the chat template makes", text)
        return PromptParts(text, self._tokenizer.encode(text, add_special_tokens=False))


def _check_variables(tools: Any, documents: Any, template_kwargs: Any) -> None:
    """Raise RequestError for what cannot be given to a template."""
    if tools is not None and not _is_list_of_objects(tools):
        raise RequestError(f"tools={quoted(tools)}: must be a list of JSON schemas")
    if documents is not None and not _is_list_of_objects(documents):
        raise RequestError(f"documents={quoted(documents)}: must be a list of objects, such as with title and text")
    if not isinstance(template_kwargs, Mapping | None):
        raise RequestError(f"chat_template_kwargs={quoted(template_kwargs)}: must be an object with the variables")
    for name in template_kwargs or {}:
        if name in NOT_VARIABLES:
            raise RequestError(f"chat_template_kwargs={name!r}: must hold variables of the template only")


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool without fields of no value, which some templates print as None; the schema stays as it is."""
    fields = {name: value for name, value in tool.items() if value is not None}
    function = fields.get("function")
    if isinstance(function, Mapping):
        fields["function"] = {name: value for name, value in function.items() if value is not None}
    return fields


def _is_list_of_objects(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)


def _named_template(tokenizer: HuggingFaceTokenizer, template: str | None, with_tools: bool) -> str:
    """The text of the template to use; a tokenizer may have several named ones."""
    own = tokenizer.chat_template
    named = own if isinstance(own, Mapping) else {"default": own}
    if template is not None:
        chosen = named.get(template, template) if isinstance(own, Mapping) else template
    else:
        chosen = named.get("tool_use" if with_tools and "tool_use" in named else "default")
    if not isinstance(chosen, str):
        raise RequestError(
            f"the tokenizer has chat templates named {', '.join(map(str, sorted(named)))} and none is the default: "
            "name one as chat_template"
        )
    return chosen
