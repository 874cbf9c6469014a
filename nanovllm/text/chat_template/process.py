"""Renders chat templates, which are programs from a model or a request, in a separate process.

The kernel bounds the process's CPU time, memory and output, since a single operation of a template, such as
'a' * 10 ** 10, can exhaust any of them. The process runs Jinja2 in its sandbox, with an empty environment and no files
of this process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError, one_line
from nanovllm.text.chat_template import worker
from nanovllm.text.chat_template.worker import FAILED, LENGTH_BYTES, OUT_OF_MEMORY, RENDERED, TOO_LONG
from nanovllm.text.worker_process import WorkerProcess

# Bounds of one rendering, and what is added per byte of the conversation.
CPU_SECONDS, CPU_SECONDS_PER_BYTE = 5.0, 1e-6
MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 30, 32
OUTPUT_CHARS, OUTPUT_PER_BYTE = 1 << 24, 4
WALL_SECONDS = 60.0  # beyond CPU time, for a busy machine
READ_BYTES = 1 << 20


class TemplateProcess:
    """Renders templates, one at a time."""

    def __init__(self) -> None:
        self._worker = WorkerProcess(worker.__file__, ["jinja2", "markupsafe"], ["TZ"], "for the chat template")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises RequestError for a template that fails or exceeds a bound."""
        try:
            size = len(template) + len(json.dumps(variables))
            cpu_seconds = CPU_SECONDS + CPU_SECONDS_PER_BYTE * size
            request = json.dumps(
                {
                    "template": template,
                    "variables": variables,
                    "cpu_seconds": cpu_seconds,
                    "memory_bytes": MEMORY_BYTES + MEMORY_PER_BYTE * size,
                    "max_chars": (max_chars := OUTPUT_CHARS + OUTPUT_PER_BYTE * size),
                }
            ).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages and template arguments must hold what JSON can express: {error}") from None
        with self._worker.lock:
            answer = self._ask(request, cpu_seconds, 4 * max_chars + 1)
        status, text = answer[0], answer[1:].decode("utf-8", "surrogatepass")
        if status == RENDERED:
            return text
        raise RequestError(
            {
                TOO_LONG: f"the chat template writes more than {max_chars:,} characters",
                OUT_OF_MEMORY: "the chat template takes more memory than it may have",
                FAILED: f"the chat template cannot take the messages: {one_line(text, 300)}",
            }.get(status, "the process that renders chat templates gave no answer")
        )

    def close(self) -> None:
        """End the process. The next call starts another."""
        self._worker.close()

    def _ask(self, request: bytes, cpu_seconds: float, most: int) -> bytes:
        """The status and text of the answer. Any failure ends the process."""
        process = self._worker.started()
        assert process.stdin is not None and process.stdout is not None
        try:
            deadline = time.monotonic() + cpu_seconds + WALL_SECONDS
            _write(process.stdin.fileno(), len(request).to_bytes(LENGTH_BYTES, "little") + request, deadline)
            length = int.from_bytes(_read(process.stdout.fileno(), LENGTH_BYTES, deadline), "little")
            if not 1 <= length <= most:
                raise EOFError
            return _read(process.stdout.fileno(), length, deadline)
        except (EOFError, OSError):
            reason = _how_it_ended(process, cpu_seconds)
            self.close()
            raise RequestError(f"the chat template {reason}") from None
        except BaseException:  # an interrupt: the next request would read this request's answer
            self.close()
            raise


def _write(pipe: int, data: bytes, deadline: float) -> None:
    os.set_blocking(pipe, False)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_WRITE)
        view = memoryview(data)
        while view:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise EOFError
            view = view[os.write(pipe, view[:READ_BYTES]) :]


def _read(pipe: int, length: int, deadline: float) -> bytes:
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(data) < length:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise EOFError
            part = os.read(pipe, min(length - len(data), READ_BYTES))
            if not part:
                raise EOFError
            data += part
    return bytes(data)


def _how_it_ended(process: subprocess.Popen[bytes], cpu_seconds: float) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return f"gave no answer within {cpu_seconds + WALL_SECONDS:.0f} s"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took more than {cpu_seconds:.0f} s of CPU time, or more memory than there is"
    return f"ended the process that renders it, with status {status}"
