"""Prompts from arguments, files, JSON lines and standard input, read one at a time.

A prompt that cannot be read becomes an item with an error, so that a bad line does not affect the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from nanovllm.apps.batch.rows import USED_COLUMNS, Row, RowFormat, RowRequest
from nanovllm.apps.cli.boundary import Boundary
from nanovllm.errors import ConfigError, RequestError, quoted, told, unknown_name_message

TEXT = "text"
FILE = "file"
LINES = "lines"
JSONL = "jsonl"
STDIN = "-"
OF_FLAGS = object()  # the adapter that the flags name
KEYS = USED_COLUMNS - {"body", "url", "method"}  # of a JSON line, besides its id and its adapter
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
READ_AHEAD = 64  # prompts
PATIENCE = 0.002  # seconds to wait for a prompt from a pipe, which often delivers several at once


@dataclass(frozen=True, slots=True)
class Source:
    """A source of prompts. `kind` is TEXT, or the format of the file at path `value` (or STDIN)."""

    kind: str
    value: str

    @property
    def is_stdin(self) -> bool:
        return self.kind != TEXT and self.value == STDIN

    @property
    def can_stall(self) -> bool:
        """Whether reading may wait for another process to write."""
        return self.kind != TEXT and (self.is_stdin or not Path(self.value).is_file())


@dataclass(slots=True)
class PromptItem:
    """One prompt, or the error in place of it."""

    source: str  # for messages, such as "prompts.txt line 3"
    request: RowRequest | None = None
    given_id: Any = None
    lora: Any = OF_FLAGS  # the name of an adapter; None is the model alone
    error: str | None = None


# ---- reading


def check_sources(sources: Sequence[Source]) -> None:
    """Raise ConfigError if a source cannot be opened, before a model is loaded."""
    if sum(source.is_stdin for source in sources) > 1:
        raise ConfigError("standard input can be read once only: name - one time")
    for source in sources:
        # A pipe is not opened here: closing it again would disconnect its writer.
        if source.kind == TEXT or source.is_stdin or Path(source.value).is_fifo():
            continue
        try:
            open(source.value, "rb").close()
        except OSError as error:
            raise ConfigError(f"{source.value!r} cannot be read: {error.strerror}") from None


def count_prompts(sources: Sequence[Source]) -> int | None:
    """The number of prompts; None if it is only known after reading them."""
    if any(source.can_stall and source.kind in (LINES, JSONL) for source in sources):
        return None
    num_prompts = 0
    for source in sources:
        if source.kind in (TEXT, FILE):
            num_prompts += 1
        else:
            with open(source.value, "rb") as file:
                num_prompts += sum(source.kind == LINES or bool(line.strip()) for line in file)
    return num_prompts


def read_prompts(sources: Sequence[Source], row_format: RowFormat, boundary: Boundary) -> Iterator[PromptItem]:
    """All prompts, in order."""
    texts = 0
    for source in sources:
        if source.kind == TEXT:
            texts += 1
            content = source.value.encode("utf-8", "surrogateescape")
            yield _item(f"prompt {texts}", TEXT, content, row_format, boundary)
            continue
        name = "standard input" if source.is_stdin else os.fsencode(source.value).decode(errors="replace")
        try:
            # A separate file object: sys.stdin is not safe in a thread that still waits when the process exits.
            with open(os.dup(sys.stdin.fileno()) if source.is_stdin else source.value, "rb") as file:
                if source.kind == FILE:
                    yield _item(name, FILE, file.read().removeprefix(BYTE_ORDER_MARK), row_format, boundary)
                    continue
                for number, line in enumerate(file, start=1):
                    content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                    if source.kind == LINES or content.strip():
                        yield _item(f"{name} line {number}", source.kind, content, row_format, boundary)
        except OSError as error:
            yield PromptItem(name, error=f"cannot be read: {error.strerror}")


def _item(where: str, kind: str, content: bytes, row_format: RowFormat, boundary: Boundary) -> PromptItem:
    item = PromptItem(where)
    _, item.error = boundary.attempt(lambda: _read_content(item, kind, content, row_format))
    return item


def _read_content(item: PromptItem, kind: str, content: bytes, row_format: RowFormat) -> None:
    """Put the content into the item. Raises RequestError."""
    try:
        text = (content if kind == TEXT else content.removesuffix(b"\n").removesuffix(b"\r")).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"it is not UTF-8: {error.reason} at position {error.start}") from None
    columns = _json_object(item, text) if kind == JSONL else {"prompt": text}
    item.request = row_format.request(Row(0, item.source, columns, None))


def _json_object(item: PromptItem, text: str) -> dict[str, Any]:
    """The object of a line, without what is no request: its id and its adapter. Raises RequestError."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # which half a surrogate pair has no encoding for
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not JSON: {told(error)}") from None
    if not isinstance(value, dict):
        raise RequestError(f"it must be a JSON object with a prompt, got {quoted(text)}")
    given_id = value.pop("id", None)
    try:
        json.dumps(given_id, allow_nan=False)  # Python reads NaN and infinity, which are not JSON
    except ValueError:
        raise RequestError("its id holds NaN or infinity, and cannot be written as JSON") from None
    item.given_id = given_id
    item.lora = value.pop("lora", OF_FLAGS)
    for key in value:
        if key not in KEYS:
            raise RequestError(unknown_name_message("key", key, [*KEYS, "id", "lora"]))
    return value


# ---- reading ahead


class Feed:
    """Reads prompts in a thread, so that the engine continues while a pipe is empty.

    `take` waits for files, so that the batches do not depend on the speed of reading.
    """

    def __init__(self, sources: Sequence[Source], row_format: RowFormat, boundary: Boundary) -> None:
        self.ended = False
        self._can_stall = any(source.can_stall for source in sources)
        self._queue: Queue[PromptItem | BaseException | None] = Queue(READ_AHEAD)
        prompts = read_prompts(sources, row_format, boundary)
        Thread(target=self._read, args=(prompts,), daemon=True, name="prompts").start()

    def take(self, wait: bool) -> PromptItem | None:
        """The next prompt; None at the end, and without `wait` also if a pipe is empty."""
        try:
            item = self._queue.get(timeout=PATIENCE if self._can_stall and not wait else None)
        except Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.ended = item is None
        return item

    def _read(self, prompts: Iterator[PromptItem]) -> None:
        try:
            for item in prompts:
                self._queue.put(item)
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)
