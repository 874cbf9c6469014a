"""A process that handles what is not trusted, apart from this one: a chat template or a grammar.

The process runs one script of this package. It has neither this process's environment nor its open files, terminal and
Ctrl-C. The script bounds its own time and memory, since a single operation of its input can exhaust any of them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm.errors import RequestError


class WorkerProcess:
    """Started for the first request, and again after one that ended it. `lock`: held from a request to its answer."""

    def __init__(self, script: str, modules: Sequence[str], variables: Sequence[str], purpose: str) -> None:
        """modules: the script's arguments are the directories that hold them. variables: of the environment, passed on.

        purpose: completes "no process can be started", for messages.
        """
        self.lock = threading.Lock()
        self.running: subprocess.Popen[bytes] | None = None
        self._script = script
        self._modules = modules
        self._variables = ("LD_LIBRARY_PATH", *variables)
        self._purpose = purpose
        self._end: weakref.finalize[..., Any] | None = None

    def started(self) -> subprocess.Popen[bytes]:
        """The running process. Raises RequestError if none can be started."""
        if self.running is None or self.running.poll() is not None:
            self.close()
            try:
                self.running = self._start()
            except OSError as error:
                raise RequestError(f"no process can be started {self._purpose}: {error.strerror}") from None
            self._end = weakref.finalize(self, _end, os.getpid(), self.running)
        return self.running

    def close(self) -> None:
        """End the process. The next request starts another."""
        if self._end is not None:
            self._end()
        self.running = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        found = (importlib.util.find_spec(name) for name in self._modules)
        libraries = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", self._script, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in self._variables if name in os.environ},
            cwd="/",
            start_new_session=True,
        )


def _end(owner: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:  # a fork that ends; the pipes close with it
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet has no reader
                pipe.close()
