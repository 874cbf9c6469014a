"""Reads grammars in a separate process, whose time, memory and stack the kernel bounds.

A grammar of a few kilobytes can take llguidance any amount of memory, or more stack than a thread has, which would end
the engine. One that the process has read within its bounds can be compiled by the engine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError, one_line
from nanovllm.features.structured_outputs import grammar_worker
from nanovllm.features.structured_outputs.worker_process import WorkerProcess

WALL_SECONDS = 60.0  # of one grammar: more than its CPU time, for a busy machine
MOST_SHOWN = 400  # characters of the library's reason


class GrammarProcess:
    """Reads grammars, one at a time."""

    def __init__(self) -> None:
        self._worker = WorkerProcess(grammar_worker.__file__, ["llguidance"], [], "to read it")

    def read(self, kind: str, text: str, options: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
        """What llguidance compiles. Raises RequestError for a grammar that is invalid or exceeds a bound."""
        request = json.dumps({"kind": kind, "text": text, "options": options, "limits": dict(limits)})
        with self._worker.lock:
            answer = self._ask(request)
        if "error" in answer:
            raise RequestError(one_line(answer["error"].replace("<non-verbose/>", ""), MOST_SHOWN))
        return str(answer["grammar"])

    def close(self) -> None:
        """End the process. The next call starts another."""
        self._worker.close()

    def _ask(self, request: str) -> dict[str, str]:
        """The answer. Any failure ends the process."""
        process = self._worker.started()
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


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return f"reading it took more than {WALL_SECONDS:.0f} s"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"reading it took more than {grammar_worker.CPU_SECONDS} s"
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return "it is nested too deeply"
    return f"reading it took more than {grammar_worker.MEMORY_BYTES >> 20} MiB of memory"
