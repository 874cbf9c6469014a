"""Answers of gpt-oss: messages in channels, some of them to functions.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`. The recipient may also stand before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nanovllm.apps.tool_calls.json_formats import json_value
from nanovllm.apps.tool_calls.pieces import Reasoning
from nanovllm.apps.tool_calls.reader import Parser, Steps, Tools

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
RETURN = "<|return|>"
CALL = "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<|$)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class Harmony(Parser):
    """Analysis becomes reasoning; final messages, and commentary to nobody, are content."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._is_begun = {"content": False, "reasoning": False}

    def opening(self) -> Steps[None]:
        """The prompt ends within the header of the first message, unless it ends within its text."""
        reader = self.reader
        while (yield from reader.char()):
            if not (yield from reader.first_of((CHANNEL, " to=", "to=", START))):
                yield from self._text(self.content)
                continue
            begin = reader.position
            if not (yield from reader.copy_until((MESSAGE,), lambda text: None)):
                self.content(reader.text[begin:])
                return
            yield from self._message(begin, reader.text[begin : reader.position])

    def content(self, text: str) -> None:
        """Content without marks, as where special tokens are left out."""
        for mark in MARKS:
            text = text.replace(mark, "")
        if text:
            super().content(text)

    def _message(self, begin: int, header: str) -> Steps[None]:
        channel = CHANNEL_NAME.search(header)
        recipient = RECIPIENT.search(header)
        is_thinking = channel is not None and channel[1] == "analysis"
        if recipient is not None:  # models call tools from every channel
            name = recipient[1].removeprefix("functions.")
            if name in self.tools:
                yield from self.attempt(header, self._call(name))
                return
            if not is_thinking:
                self.content(header)
        kind = "reasoning" if is_thinking else "content"
        write = self._think if is_thinking else self.content
        if self._is_begun[kind]:
            write("\n")  # between two messages
        self._is_begun[kind] = True
        yield from self._text(write)

    def _think(self, text: str) -> None:
        self.add(Reasoning(text))

    def _text(self, write: Callable[[str], None]) -> Steps[None]:
        """Take a message's text up to its end, or to the header of another one."""
        while mark := (yield from self.reader.copy_until(MARKS, write)):
            if mark in (START, CHANNEL):
                self.reader.position -= len(mark)
            if mark in (START, CHANNEL, END, RETURN, CALL):
                return

    def _call(self, name: str) -> Steps[bool]:
        reader = self.reader
        yield from reader.spaces()
        is_object = (yield from reader.char()) == "{"
        if not is_object and not (yield from reader.first_of((CALL, END))):
            return False
        self.call(name)
        if is_object and (yield from json_value(reader, self.arguments)) is None:
            return False
        if not is_object:
            self.arguments("{}")
        self.end()
        yield from reader.spaces()
        yield from self.closing((yield from reader.first_of((CALL, END))) or CALL)
        return True
