"""Engines that answer the prompts of sessions in another process, which is killed where they are made anew."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from rank_processes import CONTEXT
from waiting import eventually

from benchmarks.session_patterns import Tokens
from benchmarks.sessions import Engines, Memory


def serve(control: Connection, model: Path, memory: Memory, answer: int) -> None:
    """The main function of the process. It tells an answer when the KV blocks that are worth it are on disk."""
    from nanovllm.features.kv_disk.stored_blocks import StoredBlocks

    engines = Engines(model, memory, answer)
    hooks = engines.llm.engine.scheduler.block_manager.hooks
    (stored,) = (hook for hook in hooks if isinstance(hook, StoredBlocks))
    part = stored.store._parts._part  # type: ignore[attr-defined]
    while True:
        found = engines.ask(*control.recv())
        assert eventually(lambda: part.unwritten_bytes == 0)
        control.send(found)


class KilledEngines:
    """Does what `Engines` does, but an engine is killed instead of closed."""

    def __init__(self, model: Path, memory: Memory, answer: int) -> None:
        self._arguments = (model, memory, answer)
        self._start()

    def _start(self) -> None:
        self._control, other = CONTEXT.Pipe()
        self._process: BaseProcess = CONTEXT.Process(target=serve, args=(other, *self._arguments), daemon=True)
        self._process.start()
        other.close()

    def ask(self, prompt: Tokens, most: int | None = None) -> tuple[Tokens, int]:
        """See `Engines`. Raises EOFError if the process has ended."""
        self._control.send((prompt, most))
        tokens, cached = self._control.recv()
        return tokens, cached

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._control.close()
        assert self._process.exitcode == -signal.SIGKILL, "it ended before it was killed"
