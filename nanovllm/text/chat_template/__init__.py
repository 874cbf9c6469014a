"""Chat templates, rendered in a process with limits: a side, see `nanovllm.engine.sides.ChatTemplates`."""

from nanovllm.text.chat_template.process import TemplateProcess
from nanovllm.text.chat_template.template import ChatTemplate

__all__ = ["ChatTemplate", "TemplateProcess"]
