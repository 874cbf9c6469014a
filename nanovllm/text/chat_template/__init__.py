"""Chat templates, rendered in a process with limits."""

from nanovllm.text.chat_template.process import TemplateProcess
from nanovllm.text.chat_template.template import ChatTemplate

__all__ = ["ChatTemplate", "TemplateProcess"]
