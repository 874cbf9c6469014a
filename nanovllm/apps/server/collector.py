"""The outputs of one request between the engine's thread and its consumer: merged until the consumer takes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from nanovllm.outputs import CompletionOutput, RequestOutput, RequestOutputKind


class OutputCollector:
    """Holds at most one output. A slow consumer gets fewer and larger ones, and the engine never waits for it.

    Outputs without tokens, as a prompt's chunks make them, wait for the first that has some.
    Belongs to the event loop that runs when it is made: `take` is called there, `put` and `fail` in any thread.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self.loop = asyncio.get_running_loop()
        self._kind = kind
        self._lock = threading.Lock()
        self._filled = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add an output. Returns whether the consumer has to be woken, with `wake`."""
        with self._lock:
            was_ready = self._is_ready()
            merges = self._output is not None and self._kind is RequestOutputKind.DELTA
            self._output = merged(self._output, output) if merges and self._output is not None else output
            return self._is_ready() and not was_ready

    def fail(self, error: Exception) -> None:
        """End with an error, which `take` raises after the last output."""
        with self._lock:
            self._error = error

    async def take(self) -> RequestOutput:
        """Everything since the last call; waits until there is something."""
        while True:
            with self._lock:
                if self._output is not None and self._is_ready():
                    output, self._output = self._output, None
                    return output
                if self._error is not None:
                    raise self._error
                self._filled.clear()
            await self._filled.wait()

    def _is_ready(self) -> bool:
        return self._output is not None and (bool(self._output.outputs) or self._output.finished)

    def wake_here(self) -> None:
        """Wake the consumer; called in its event loop."""
        self._filled.set()


def wake(collectors: Iterable[OutputCollector]) -> None:
    """Wake the consumers of these collectors from another thread, with one call for each event loop."""
    ordered = sorted(collectors, key=lambda collector: id(collector.loop))
    for _, group in groupby(ordered, key=lambda collector: id(collector.loop)):
        members = list(group)
        if not members[0].loop.is_closed():
            members[0].loop.call_soon_threadsafe(_wake_all, members)


def _wake_all(collectors: Iterable[OutputCollector]) -> None:
    for collector in collectors:
        collector.wake_here()


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two consecutive outputs of `output_kind` DELTA as one."""
    completions = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = completions.get(new.index)
        completions[new.index] = new if old is None else _joined(old, new)
    prompt_logprobs = second.prompt_logprobs
    if first.prompt_logprobs is not None:
        prompt_logprobs = [*first.prompt_logprobs, *(second.prompt_logprobs or ())]
    return replace(second, outputs=list(completions.values()), prompt_logprobs=prompt_logprobs)


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = new.logprobs
    if old.logprobs is not None and new.logprobs is not None:
        logprobs = [*old.logprobs, *new.logprobs]
    return replace(new, text=old.text + new.text, token_ids=[*old.token_ids, *new.token_ids], logprobs=logprobs)
