"""Reads grammars in a separate process, whose time, memory and stack the kernel bounds.

A grammar of a few kilobytes can take llguidance any amount of memory, or more stack than a thread has, which would end
the engine. One that the process has read within its bounds can be compiled by the engine. The process runs
`grammar_worker`, and has neither this process's environment nor its open files, terminal and Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.errors import RequestError, one_line
from nanovllm.features.structured_outputs import grammar_worker

WALL_SECONDS = 60.0  # of one grammar: more than its CPU time, for a busy machine
MOST_SHOWN = 400  # characters of the library's reason


class GrammarProcess:
    """Reads grammars, one at a time. Started for the first, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held from a request to its answer
        self._running: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def read(self, kind: str, text: str, options: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
        """What llguidance compiles. Raises RequestError for a grammar that is invalid or exceeds a bound."""
        request = json.dumps({"kind": kind, "text": text, "options": options, "limits": dict(limits)})
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise RequestError(one_line(answer["error"].replace("<non-verbose/>", ""), MOST_SHOWN))
        return str(answer["grammar"])

    def close(self) -> None:
        """End the process. The next call starts another."""
        if self._end is not None:
            self._end()
        self._running = self._end = None

    def _ask(self, request: str) -> dict[str, str]:
        """The answer. Any failure ends the process."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{request}\n".encode())
            process.stdin.flush()
            return dict(json.loads(process.stdout.readline()))
        except (OSError, ValueError):
            reason = _how_it_ended(process)
            self.close()
            raise RequestError(reason) from None
        except BaseException:  # an interrupt: the next request would read this request's answer
            self.close()
            raise
        finally:
            timer.cancel()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._running.poll() is not None:
            self.close()
            spec = importlib.util.find_spec("llguidance")
            assert spec is not None and spec.origin is not None
            try:
                self._running = subprocess.Popen(
                    [sys.executable, "-I", "-S", grammar_worker.__file__, str(Path(spec.origin).parent.parent)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise RequestError(f"no process can be started to read it: {error.strerror}") from None
            self._end = weakref.finalize(self, _end, os.getpid(), self._running)
        return self._running


def _end(owner: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:  # a fork that ends; the pipes close with it
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet has no reader
                pipe.close()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    process.kill()  # if it has not ended
    status = process.wait()
    if status == -signal.SIGKILL:
        return f"reading it took more than {WALL_SECONDS:.0f} s"
    if status == -signal.SIGXCPU:
        return f"reading it took more than {grammar_worker.CPU_SECONDS} s"
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return "it is nested too deeply"
    return f"reading it took more than {grammar_worker.MEMORY_BYTES >> 20} MiB of memory"
