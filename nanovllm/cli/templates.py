"""The chat template of the command line: the tokenizer's, or that of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.engine import sides
from nanovllm.errors import ConfigError, RequestError
from nanovllm.tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from nanovllm.chat_template.template import ChatTemplate
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


def chat_template(llm: LLM, text: str | None) -> ChatTemplate:
    """The template with this text; with None, the tokenizer's own. Raises RequestError if there is none."""
    templates, tokenizer = sides.chat_templates(), llm.engine.tokenizer
    if templates is None:
        raise RequestError(
            "messages need nanovllm.chat_template, which this installation does not have: give finished prompts to "
            "nanovllm generate"
        )
    if text is None and isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.tokenizer.chat_template:
        raise RequestError(
            f"the tokenizer in {llm.config.model} has no chat template, which says how messages become a prompt: "
            "name a Jinja template with --chat-template FILE"
        )
    return templates.ChatTemplate(tokenizer, text, process=None)
