"""Messages to a prompt, through the chat template of the model's tokenizer or of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import prompts
from nanovllm.errors import ConfigError, RequestError
from nanovllm.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from nanovllm.llm import LLM


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


class ChatTemplate:
    """Turns messages into token ids. `text` is used in place of the tokenizer's own template, where given."""

    def __init__(self, llm: LLM, text: str | None) -> None:
        tokenizer = llm.engine.tokenizer
        if text is None and isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer in {llm.config.model} has no chat template, which says how messages become a prompt: "
                "name a Jinja template with --chat-template FILE"
            )
        self._template = prompts.ChatTemplate(tokenizer, text)

    def token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that asks for the next answer. Raises RequestError for messages that the template refuses."""
        (prompt,) = self._template.prompts(list(messages))
        return list(prompt.token_ids or ())
