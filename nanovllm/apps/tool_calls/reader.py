"""How text is read while it is generated: a parser is a generator that yields where it needs more text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from nanovllm.apps.tool_calls.pieces import Arguments, Broken, Call, Ended, Piece, merged
from nanovllm.text.prompts import open_end

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each function's parameters, by name
WHITESPACE = " \t\n\r"


class Reader:
    """The text so far. What its methods return depends on the text alone, not on the pieces in which it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False

    def char(self) -> Steps[str]:
        """The next character, which is not taken; empty at the end."""
        while self.position >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.position]

    def spaces(self) -> Steps[None]:
        """Take spaces and line ends."""
        while (next_one := (yield from self.char())) and next_one in WHITESPACE:
            self.position += 1

    def takes(self, mark: str) -> Steps[bool]:
        """Take the mark if it comes next. Returns whether it does."""
        while True:
            part = self.text[self.position : self.position + len(mark)]
            if part == mark:
                self.position += len(mark)
                return True
            if self.ended or not mark.startswith(part):
                return False
            yield

    def first_of(self, marks: Sequence[str]) -> Steps[str]:
        """The mark that comes next, which is not taken; empty if none does."""
        position = self.position
        for mark in marks:
            if mark and (yield from self.takes(mark)):
                self.position = position
                return mark
        return ""

    def copy_until(self, marks: Sequence[str], write: Callable[[str], None]) -> Steps[str]:
        """Take all text up to the first mark, and the mark, which is returned; empty if the text ends before.

        `write` gets the text before the mark as it comes. Of marks at one place the first in `marks` counts.
        """
        while True:
            rest = self.text[self.position :]
            places = [(place, number) for number, mark in enumerate(marks) if (place := rest.find(mark)) >= 0]
            held = 0 if self.ended or not marks else len(open_end(rest, marks))
            if places and (self.ended or min(places)[0] <= len(rest) - held):
                place, number = min(places)
                self.position += place + len(marks[number])
                self._write(rest[:place], write)
                return marks[number]
            self.position += len(rest) - held
            self._write(rest[: len(rest) - held], write)
            if self.ended:
                return ""
            yield

    @staticmethod
    def _write(text: str, write: Callable[[str], None]) -> None:
        if text:
            write(text)


class Parser:
    """Reads the text of one answer. The pieces, in order, hold all of it. This one finds no calls.

    tools: the functions that may be called; what calls another one stays content.
    """

    BEGINS: Sequence[str] = ()  # marks before calls

    def __init__(self, tools: Tools | None = None) -> None:
        self.tools = tools or {}
        self.reader = Reader()
        self._pieces: list[Piece] = []
        self._spaces: str | None = None  # since a call ended: spaces between calls are no content
        self._in_call = False
        self._begin = 0  # where what may be a call begins
        self._sent = 0  # up to where pieces show the text
        self._steps = self._all()

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        self.reader.text += text
        return self._go()

    def finish(self) -> list[Piece]:
        """What is left, after the last text."""
        self.reader.ended = True
        return self._go()

    def _go(self) -> list[Piece]:
        next(self._steps, None)
        pieces = merged(self._pieces)
        self._pieces = []
        return pieces

    # ---- what formats define

    def opening(self) -> Steps[None]:
        """Read calls that stand without a mark at the beginning of an answer."""
        yield from ()

    def calls(self) -> Steps[bool]:
        """Read the calls after a mark, by `call`, `arguments` and `end`. Returns False at what belongs to none."""
        yield from ()
        return False

    # ---- what formats use

    def content(self, text: str) -> None:
        if self._spaces is not None:
            text = self._spaces + text
            self._spaces = None if text.strip(WHITESPACE) else text
            if self._spaces is not None:
                return
        self._pieces.append(text)

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def call(self, name: str) -> None:
        self.add(Call(name))
        self._in_call = True
        self._sent = self.reader.position

    def arguments(self, text: str) -> None:
        self.add(Arguments(text))
        self._sent = self.reader.position

    def end(self) -> None:
        self.add(Ended())
        self._in_call = False
        self._spaces = ""
        self._begin = self._sent = self.reader.position

    def tool_name(self, ends: Sequence[str]) -> Steps[str | None]:
        """Take a name of one of the tools, which one of `ends` follows; the name without spaces around it, or None."""
        text = ""
        reader = self.reader
        while not (yield from reader.first_of(ends)):
            text += yield from reader.char()
            if reader.position >= len(reader.text) or not any(name.startswith(text.strip()) for name in self.tools):
                return None
            reader.position += 1
        return text.strip() if text.strip() in self.tools else None

    def closing(self, mark: str) -> Steps[None]:
        """Take the mark behind a call, or its beginning if the text ends within it. Without it the text goes on."""
        reader = self.reader
        yield from reader.spaces()
        if not mark or not (yield from reader.takes(mark)):
            rest = reader.text[reader.position :]
            reader.position = len(reader.text) if reader.ended and mark.startswith(rest) else self._begin

    def attempt(self, mark: str, calls: Steps[bool]) -> Steps[None]:
        """Read the calls at a mark that was taken. What is none becomes content again."""
        reader = self.reader
        self._begin = self._sent = reader.position - len(mark)
        begin = self._begin
        if (yield from calls):
            return
        if self._in_call:
            raw = reader.text[self._begin : reader.position]
            self.add(Broken(raw, reader.text[self._sent : reader.position]))
            self._in_call = False
            self._spaces = None
        elif self._begin > begin:  # there were calls before what is none
            reader.position = self._begin
        else:
            reader.position = begin + len(mark)
            self.content(mark)

    def _all(self) -> Steps[None]:
        yield from self.opening()
        while not self.reader.ended or self.reader.position < len(self.reader.text):
            reader = self.reader
            reader.text = reader.text[reader.position :]
            reader.position = 0
            mark = yield from reader.copy_until(self.BEGINS, self.content)
            if mark:
                yield from self.attempt(mark, self.calls())
