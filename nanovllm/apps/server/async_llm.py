"""The engine for asyncio: one thread owns the LLM and steps it. Requests and other calls reach it through a queue."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm import LLM, EngineClient
from nanovllm.apps.server.collector import OutputCollector, wake
from nanovllm.errors import EngineError, RequestError, quoted, told
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, prompt_parts

if TYPE_CHECKING:  # for annotations only: torch comes with it
    from nanovllm import LoRARequest

logger = logging.getLogger(__name__)

MOST_FAILED_STEPS = 3  # in a row; after that the engine is given up
LONG_TEXT = 1 << 17  # characters; the tokenizer takes about 0.1 s for them
CLOSE_SECONDS = 60.0  # most time that a running step may take to end
HEALTH_SECONDS = 1.0  # between two looks at an engine without requests
T = TypeVar("T")


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, in the form of its `output_kind`."""

    def __init__(self, engine: AsyncLLM, request_id: str, collector: OutputCollector) -> None:
        self.request_id = request_id
        self._engine = engine
        self._collector = collector
        self._ended = False

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._collector.take()
        except Exception:
            self._ended = True
            raise
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Abort the request if it has not ended. Does not wait."""
        if not self._ended:
            self._ended = True
            self._engine.drop(self.request_id)


class AsyncLLM:
    """An LLM whose requests are awaited. The event loop never waits for a step of the engine.

    Arguments and errors are those of `LLM`. Coroutines may be used in any event loop, and in several.

    If a step fails, its requests end with finish_reason "error" and the engine goes on. After MOST_FAILED_STEPS
    failures in a row, or if no step can run any more, every request and every later call raises EngineError.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        self._collectors: dict[str, OutputCollector] = {}  # of the unfinished requests, by request_id
        self._failed_steps = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two below: after the end no command is queued
        self._closing = False
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
        (parts,) = prompt_parts([prompt])
        text, token_ids, _ = parts
        params = sampling_params if sampling_params is not None else self.llm.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(params)}")
        if token_ids is None:
            assert text is not None
            token_ids = await self.in_text_thread(lambda: self.llm.engine.check_prompt(text, None, params), len(text))
        if params.structured_outputs is not None:  # compiled here, or no request would be stepped meanwhile
            await self._in_thread(self._grammar_thread, lambda: self.llm.engine.prepare(params))
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        collector = OutputCollector(params.output_kind)

        def add(_: LLM) -> None:
            taken = parts._replace(token_ids=token_ids)
            self._client.add(
                self.llm.engine.make_request(request_id, taken, params, priority=priority, lora_request=lora_request)
            )
            self._collectors[request_id] = collector

        added = self._submitted(add)
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            if not added.cancel():  # the engine has it, or is about to
                self.drop(request_id, collector)
            raise
        return RequestStream(self, request_id, collector)

    async def abort(self, request_id: str | None = None) -> None:
        """End a request, or all of them, with finish_reason "abort"; consumers get what there is.

        Unknown and finished requests are ignored.
        """
        request_ids = None if request_id is None else [request_id]
        await self.call(lambda _: self._deliver(self._client.abort(request_ids)))

    def fail(self, error: Exception) -> None:
        """Have all unfinished requests raise `error` to their consumers, without waiting for the running step."""
        for collector in (failed := list(self._collectors.values())):
            collector.fail(error)
        wake(failed)

    def drop(self, request_id: str, collector: OutputCollector | None = None) -> None:
        """Abort a request whose consumer has gone. Does not wait. collector: drop only a request that has this one."""

        def drop(_: LLM) -> None:
            if collector is None or self._collectors.get(request_id) is collector:
                self._client.abort([request_id])
                self._collectors.pop(request_id, None)

        self._submitted(drop)

    # ---- everything else

    async def call(self, function: Callable[[LLM], T]) -> T:
        """The result of `function(llm)`, called in the engine's thread between two steps."""
        return await asyncio.wrap_future(self._submitted(function))

    async def in_text_thread(self, function: Callable[[], T], size: int = 0) -> T:
        """The result of `function()`, called in a thread that tokenizes and renders chat templates.

        size: about the characters of the text. Long texts, which take seconds, have a thread of their own, so that
        others do not wait for them.
        """
        return await self._in_thread(self._long_text_thread if size > LONG_TEXT else self._text_thread, function)

    async def _in_thread(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        await self.check_health()  # an engine that has ended has no such threads
        return await asyncio.get_running_loop().run_in_executor(pool, function)

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
        with self._lock:
            closes, self._closing = not self._closing, True
        if closes:
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
            if self._end is not None:
                future.set_exception(self._end)
            elif self._closing:
                future.set_exception(EngineError("the engine is closed: make a new AsyncLLM"))
            else:
                self._commands.put(command)
        return future

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
        end = EngineError("the engine is closed: make a new AsyncLLM")
        try:
            while self._run_commands():
                if self._client.pending:
                    self._step()
        except BaseException as error:
            logger.exception("the engine has ended")
            end = EngineError(f"the engine has ended: {told(error)}")
        finally:
            self._stop(end)

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
            collector = self._collectors.get(output.request_id)
            if collector is not None and collector.put(output):
                waiting.append(collector)
            if output.finished:
                self._collectors.pop(output.request_id, None)
        wake(waiting)

    def _stop(self, end: EngineError) -> None:
        """Fail everything that waits for the engine."""
        with self._lock:
            self._end = end
        try:
            self._client.close()
        except Exception:
            logger.exception("the requests of the ended engine were not aborted")
        for collector in self._collectors.values():
            collector.fail(end)
        wake(self._collectors.values())
        self._collectors.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
