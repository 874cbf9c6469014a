"""Prompts from arguments, files, JSON lines and standard input, read one at a time.

A prompt that cannot be read becomes an item with an error, so that a bad line does not affect the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from nanovllm.apps.cli.boundary import Boundary
from nanovllm.errors import ConfigError, RequestError, quoted, unknown_name_message
from nanovllm.sampling_params import SamplingParams

TEXT = "text"
FILE = "file"
LINES = "lines"
JSONL = "jsonl"
STDIN = "-"
OF_FLAGS = object()  # the adapter that the flags name
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MOST_ID_DIGITS = 18
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
    """One prompt as text, token ids or messages, or the error in place of it."""

    source: str  # for messages, such as "prompts.txt line 3"
    prompt: str | None = None
    prompt_token_ids: Any = None
    messages: Any = None
    params: dict[str, Any] = field(default_factory=dict)  # sampling parameters that it gives
    cache_salt: Any = None
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


def read_prompts(sources: Sequence[Source], boundary: Boundary) -> Iterator[PromptItem]:
    """All prompts, in order."""
    texts = 0
    for source in sources:
        if source.kind == TEXT:
            texts += 1
            yield _item(f"prompt {texts}", TEXT, source.value.encode("utf-8", "surrogateescape"), boundary)
            continue
        name = "standard input" if source.is_stdin else os.fsencode(source.value).decode(errors="replace")
        try:
            # A separate file object: sys.stdin is not safe in a thread that still waits when the process exits.
            with open(os.dup(sys.stdin.fileno()) if source.is_stdin else source.value, "rb") as file:
                if source.kind == FILE:
                    yield _item(name, FILE, file.read().removeprefix(BYTE_ORDER_MARK), boundary)
                    continue
                for number, line in enumerate(file, start=1):
                    content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                    if source.kind == LINES or content.strip():
                        yield _item(f"{name} line {number}", source.kind, content, boundary)
        except OSError as error:
            yield PromptItem(name, error=f"cannot be read: {error.strerror}")


def _item(where: str, kind: str, content: bytes, boundary: Boundary) -> PromptItem:
    item = PromptItem(where)
    _, item.error = boundary.attempt(lambda: _read_content(item, kind, content))
    return item


def _read_content(item: PromptItem, kind: str, content: bytes) -> None:
    """Put the content into the item. Raises RequestError."""
    try:
        text = (content if kind == TEXT else content.removesuffix(b"\n").removesuffix(b"\r")).decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(f"is not UTF-8: byte 0x{byte:02x} at position {error.start}") from None
    if kind == JSONL:
        _read_object(item, _json_object(text))
    else:
        item.prompt = text


# ---- JSON lines


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("it has an escape for half a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"it must be a JSON object with one of {', '.join(PROMPT_KEYS)}, got {quoted(text)}")
    return value


def _read_object(item: PromptItem, value: dict[str, Any]) -> None:
    """Put the object of a line into the item. Raises RequestError."""
    given_id = value.pop("id", None)
    try:
        json.dumps(given_id, allow_nan=False)  # Python reads NaN and infinity, which are not JSON
    except ValueError:
        raise RequestError("its id holds NaN or infinity, and cannot be written as JSON") from None
    item.given_id = given_id
    item.cache_salt = value.pop("cache_salt", None)
    item.lora = value.pop("lora", OF_FLAGS)
    prompts = {key: value.pop(key) for key in PROMPT_KEYS if key in value}
    if len(prompts) != 1:
        has = " and ".join(prompts) or "none"
        raise RequestError(f"it needs exactly one of {', '.join(PROMPT_KEYS)}, and has {has}")
    if not isinstance(prompts.get("prompt", ""), str):
        raise RequestError(f"prompt must be text, got {quoted(prompts['prompt'])}")
    messages = prompts.get("messages", [{}])
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError(f"messages must be a list of objects with role and content, got {quoted(messages)}")
    known = [f.name for f in fields(SamplingParams) if f.name != "output_kind"]
    for key in value:
        if key not in known:
            raise RequestError(unknown_name_message("key", key, [*known, *PROMPT_KEYS, "cache_salt", "id", "lora"]))
    if isinstance(value.get("logit_bias"), dict):  # JSON keys are strings
        value["logit_bias"] = {_token_id(key): bias for key, bias in value["logit_bias"].items()}
    item.prompt = prompts.get("prompt")
    item.prompt_token_ids = prompts.get("prompt_token_ids")
    item.messages = prompts.get("messages")
    item.params = value


def _token_id(key: str) -> int | str:
    return int(key) if key.isdecimal() and len(key) <= MOST_ID_DIGITS else key


# ---- reading ahead


class Feed:
    """Reads prompts in a thread, so that the engine continues while a pipe is empty.

    `take` waits for files, so that the batches do not depend on the speed of reading.
    """

    def __init__(self, sources: Sequence[Source], boundary: Boundary) -> None:
        self.ended = False
        self._can_stall = any(source.can_stall for source in sources)
        self._queue: Queue[PromptItem | BaseException | None] = Queue(READ_AHEAD)
        Thread(target=self._read, args=(sources, boundary), daemon=True, name="prompts").start()

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

    def _read(self, sources: Sequence[Source], boundary: Boundary) -> None:
        try:
            for item in read_prompts(sources, boundary):
                self._queue.put(item)
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)
