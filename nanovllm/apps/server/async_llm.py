"""The engine for asyncio: one thread owns the LLM and steps it. Requests and other calls reach it through a queue."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm import LLM, EngineClient
from nanovllm.errors import EngineError, RequestError, quoted, told
from nanovllm.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, PromptParts, prompt_parts

if TYPE_CHECKING:  # for annotations only: torch comes with it
    from nanovllm import LoRARequest

logger = logging.getLogger(__name__)

MOST_FAILED_STEPS = 3  # in a row; after that the engine is given up
LONG_TEXT = 1 << 17  # characters; the tokenizer takes about 0.1 s for them
CLOSE_SECONDS = 60.0  # most time that a running step may take to end
HEALTH_SECONDS = 1.0  # between two looks at an engine without requests
T = TypeVar("T")


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, in the form of its `output_kind`, from the engine's thread to its consumer.

    Holds at most one output. A slow consumer gets fewer and larger ones, and the engine never waits for it. Outputs
    without tokens, as a prompt's chunks make them, wait for the first that has some.
    Belongs to the event loop that runs when it is made: it is read there, `put` and `fail` are called in any thread.
    """

    def __init__(self, engine: AsyncLLM, request_id: str, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.filled = asyncio.Event()  # set in the event loop
        self._engine = engine
        self._kind = kind
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False

    def put(self, output: RequestOutput) -> bool:
        """Add an output. Returns whether the consumer has to be woken, with `wake`."""
        with self._lock:
            was_ready = self._is_ready()
            merges = self._output is not None and self._kind is RequestOutputKind.DELTA
            self._output = merged(self._output, output) if merges and self._output is not None else output
            return self._is_ready() and not was_ready

    def fail(self, error: Exception) -> None:
        """End with an error, which is raised after the last output."""
        with self._lock:
            self._error = error

    async def __anext__(self) -> RequestOutput:
        """Everything since the last call; waits until there is something."""
        while not self._ended:
            with self._lock:
                if self._output is not None and self._is_ready():
                    output = self._output
                    self._output = None
                    self._ended = output.finished
                    return output
                if self._error is not None:
                    self._ended = True
                    raise self._error
                self.filled.clear()
            await self.filled.wait()
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort the request if it has not ended. Does not wait."""
        if not self._ended:
            self._ended = True
            self._engine.drop([self])

    def _is_ready(self) -> bool:
        return self._output is not None and (bool(self._output.outputs) or self._output.finished)


class AsyncLLM:
    """An LLM whose requests are awaited. The event loop never waits for a step of the engine.

    Arguments and errors are those of `LLM`. Coroutines may be used in any event loop, and in several.

    If a step fails, its requests end with finish_reason "error" and the engine goes on. After MOST_FAILED_STEPS
    failures in a row, or if no step can run any more, every request and every later call raises EngineError.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        self._streams: dict[str, RequestStream] = {}  # of the unfinished requests, by request_id
        self._failed_steps = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_end`: after it is set no command is queued
        self._end: EngineError | None = None
        self._numbers = itertools.count()
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix="long text")
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(model, engine_args, loaded), name="engine", daemon=True)
        self._thread.start()
        loaded.result()

    # ---- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request as they come; as vLLM's `AsyncLLM.generate`.

        Arguments as in `LLM.generate`, for one prompt. request_id: made up if it is None. Closing the generator aborts
        the request. Raises RequestError if it cannot be served.
        """
        stream = await self.add(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Start a request, and return its outputs as soon as the engine has taken it. See `generate`."""
        self.llm.engine.guard.check_process("generate")
        params = sampling_params if sampling_params is not None else self.llm.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(params)}")
        (parts,) = prompt_parts([prompt])
        text = parts.text
        if parts.token_ids is None and text is not None:
            check = self.llm.engine.check_prompt
            parts = parts._replace(token_ids=await self.in_text_thread(lambda: check(text, None, params), len(text)))
        request_id = f"async-{next(self._numbers)}" if request_id is None else request_id
        (stream,) = await self.add_all({request_id: parts}, params, lora_request=lora_request, priority=priority)
        return stream

    async def add_all(
        self, prompts: Mapping[str, PromptParts], params: SamplingParams, **others: Any
    ) -> list[RequestStream]:
        """Start a request for each prompt, of token ids, by its request_id, or none of them. others: as of `add`."""
        if params.structured_outputs is not None:  # compiled here, or no request would be stepped meanwhile
            await self._in_thread(self._grammar_thread, lambda: self.llm.engine.prepare(params))
        streams = [RequestStream(self, request_id, params.output_kind) for request_id in prompts]

        def add(_: LLM) -> None:
            try:
                for stream in streams:
                    request_id = stream.request_id
                    self._client.add(self.llm.engine.make_request(request_id, prompts[request_id], params, **others))
                    self._streams[request_id] = stream
            except Exception:
                self._drop(streams)
                raise

        added = self._submitted(add)
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            if not added.cancel():  # the engine has them, or is about to
                self.drop(streams)
            raise
        return streams

    async def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them, with finish_reason "abort"; consumers get what there is.

        Unknown and finished requests are ignored.
        """
        request_ids = None if request_id is None else [request_id]
        await self.call(lambda _: self._deliver(self._client.abort(request_ids)))

    def drop(self, streams: Iterable[RequestStream]) -> None:
        """Abort requests whose consumer has gone. Does not wait."""
        self._submitted(lambda _: self._drop(streams))

    def _drop(self, streams: Iterable[RequestStream]) -> None:
        for stream in streams:
            if self._streams.get(stream.request_id) is stream:
                self._client.abort([stream.request_id])
                del self._streams[stream.request_id]

    # ---- everything else

    async def call(self, function: Callable[[LLM], T]) -> T:
        """The result of `function(llm)`, called in the engine's thread between two steps; it may use `llm.generate`."""
        return await asyncio.wrap_future(self._submitted(function))

    async def in_text_thread(self, function: Callable[[], T], size: int = 0) -> T:
        """The result of `function()`, called in a thread that tokenizes and renders chat templates.

        size: about the characters of the text. Long texts, which take seconds, have a thread of their own, so that
        others do not wait for them.
        """
        return await self._in_thread(self._long_text_thread if size > LONG_TEXT else self._text_thread, function)

    async def _in_thread(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        await self.check_health()  # an engine that has ended has no such threads
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._end is None or task is None or task.cancelling():
                raise
            raise self._end from None  # `close` has cancelled what waited for the thread

    @property
    def error(self) -> EngineError | None:
        """Why the engine has ended; None while it can be used."""
        return self._end

    async def check_health(self) -> None:
        """Raise EngineError if the engine has ended, or belongs to the process of which this one is a fork."""
        self.llm.engine.guard.check_process("check_health")
        if self._end is not None:
            raise self._end

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Abort all requests, end the threads and release the model. Safe to call twice.

        A step that does not end within `seconds` is left to the end of the process, and so is the model's memory.
        In a fork of the process that made it, it does nothing.
        """
        if self.llm.engine.guard.is_forked:
            return
        self._finish(EngineError("the engine is closed: make a new AsyncLLM"))
        self._commands.put(None)
        self._thread.join(seconds)
        for pool in (self._text_thread, self._long_text_thread, self._grammar_thread):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            logger.error("the engine's step did not end within %.0f s: its memory is not released", seconds)
        else:
            self.llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the engine's thread

    def _submitted(self, function: Callable[[LLM], T]) -> Future[T]:
        """The result that `function(llm)` will have had in the engine's thread."""
        future: Future[T] = Future()
        try:  # before the lock, which another thread may have held at the fork
            self.llm.engine.guard.check_process("call")
        except EngineError as error:
            future.set_exception(error)
            return future

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._end is not None:
                    raise self._end
                future.set_result(function(self.llm))
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._end is None:
                self._commands.put(command)
            else:
                future.set_exception(self._end)
        return future

    def _finish(self, end: EngineError) -> None:
        """Take no further command."""
        with self._lock:
            self._end = self._end or end

    def _run(self, model: str | Path, engine_args: dict[str, Any], loaded: Future[None]) -> None:
        """Load the model, and step it until the end.

        A model that another thread has loaded is slower: for torch's operators OpenMP keeps a team of threads for each
        thread that runs them, and with more teams than cores, threads sleep between two operators instead of spinning.
        """
        try:
            self.llm = LLM(model, **engine_args)
            self._client = EngineClient(self.llm.engine)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            while self._run_commands():
                if self._client.pending:
                    self._step()
        except BaseException as error:
            logger.exception("the engine has ended")
            self._finish(EngineError(f"the engine has ended: {told(error)}"))
        finally:
            self._stop()

    def _run_commands(self) -> bool:
        """Run the commands that have come, and wait for one if there is nothing to compute. False ends the thread."""
        while True:
            try:
                command = self._commands.get(block=not self._client.pending, timeout=HEALTH_SECONDS)
            except queue.Empty:
                if self._client.pending:
                    return True
                self.llm.engine.check_health()
                continue
            if command is None:
                return False
            command()

    def _step(self) -> None:
        try:
            outputs = self._client.step()
        except EngineError as error:
            self._failed_steps += 1
            logger.exception("a step failed, the %d. in a row", self._failed_steps)
            self._deliver([output for output in error.outputs if isinstance(output, RequestOutput)])
            if self._failed_steps == MOST_FAILED_STEPS:
                raise
            self.llm.engine.check_health()
            return
        self._failed_steps = 0
        self._deliver(outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        waiting = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.put(output):
                waiting.append(stream)
            if output.finished:
                self._streams.pop(output.request_id, None)
        wake(waiting)

    def _stop(self) -> None:
        """Fail everything that waits for the engine."""
        try:
            self._client.close()
        except Exception:
            logger.exception("the requests of the ended engine were not aborted")
        assert self._end is not None
        failed = list(self._streams.values())
        for stream in failed:
            stream.fail(self._end)
        wake(failed)
        self._streams.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()


def wake(streams: Iterable[RequestStream]) -> None:
    """Wake the consumers of these streams from another thread, with one call for each event loop."""
    waiting = defaultdict(list)
    for stream in streams:
        waiting[stream.loop].append(stream.filled)
    for loop, events in waiting.items():
        with suppress(RuntimeError):  # the loop is closed, possibly just now: its consumers are gone
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


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
