"""The chat template of the command line, the tokenizer's or that of a file, and prompts that it makes of messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.apps.cli.prompts import PromptItem
from nanovllm.errors import ConfigError, RequestError
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from nanovllm import LLM


def read_template(path: str | None) -> str | None:
    """The text of a template file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path!r} is not UTF-8: give a Jinja template as text") from None


def chat_template(llm: LLM, text: str | None) -> ChatTemplate:
    """The template with this text; with None, the tokenizer's own. Raises RequestError if there is none."""
    tokenizer = llm.engine.tokenizer
    if text is None and isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.chat_template:
        raise RequestError(
            f"the tokenizer in {llm.config.model} has no chat template, which says how messages become a prompt: "
            "name a Jinja template with --chat-template FILE"
        )
    return ChatTemplate(tokenizer, text)


class Messages:
    """Turns prompts of messages into token ids, and with `is_chat` prompts of text as well."""

    def __init__(self, llm: LLM, template: str | None, is_chat: bool, system: str | None) -> None:
        self._llm = llm
        self._template_text = template
        self._template: ChatTemplate | None = None
        self.is_chat = is_chat
        self._system = [] if system is None else [{"role": "system", "content": system}]

    def token_ids(self, item: PromptItem) -> Any:
        """The prompt's token ids; None for plain text. Raises RequestError."""
        messages = item.messages
        if self.is_chat and item.prompt_token_ids is not None:
            raise RequestError("prompt_token_ids are no message, and --chat needs one: give prompt or messages")
        if self.is_chat and messages is None:
            messages = [{"role": "user", "content": item.prompt}]
        if messages is None:
            return item.prompt_token_ids
        if self._template is None:
            self._template = chat_template(self._llm, self._template_text)
        return self._template.token_ids([*self._system, *messages])
