"""The engine: adds requests, runs steps, returns outputs. It handles tokens and blocks; tensors are the executor's.

`EngineClient` is the step loop: the requests of one caller, from being added until all of them have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any

from nanovllm.data.adapter import Adapters
from nanovllm.data.batch import Batch, Executor
from nanovllm.data.grammar import GrammarCompiler
from nanovllm.data.progress import Progress
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.guard import EngineGuard
from nanovllm.engine.input_processor import InputProcessor, ModelFacts
from nanovllm.engine.metrics import EngineMetrics, engine_metrics, progress_of
from nanovllm.engine.output_processor import OutputProcessor, TokenTexts
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import Advice, EngineError, RequestError, as_request_error, quoted, told
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer


class Clock:
    """Seconds since the epoch, comparable with `time.time()`, that go on as steadily as `time.monotonic()`.

    So differences are durations even if the system's clock is set in between. `reset` follows such a change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Read `time.time()` anew."""
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


class LLMEngine:
    """Adds, steps and aborts requests.

    Not thread-safe: using it in two threads at once, or from a callback of a step, raises EngineError. Calls that take
    many steps hold the `guard`. `advise` returns advice for a prompt of more tokens than max_model_len. `on_finish` is
    called with every request that has ended.
    `grammars` compiles structured outputs, and `adapters` finds LoRA adapters; None refuses them.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        facts: ModelFacts,
        block_manager: BlockManager,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        max_logprobs: int = 20,
        advise: Callable[[int], Advice] = lambda num_tokens: Advice("shorten the prompt or raise max_model_len"),
        grammars: GrammarCompiler | None = None,
        on_finish: Callable[[Request], None] | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.scheduler = Scheduler(limits, block_manager)
        self.executor = executor
        self.tokenizer = tokenizer
        self.guard = EngineGuard()
        self.closed = False
        self._on_finish = on_finish
        self._inputs = InputProcessor(limits, facts, tokenizer, seed, max_logprobs, advise, grammars, adapters)
        self._token_texts = TokenTexts(tokenizer)
        self._clock = Clock()
        self._requests: dict[str, OutputProcessor] = {}  # the unfinished requests, by request_id
        self._dropped: deque[str] = deque()  # requests to abort at the next use
        self._batch: Batch | None = None  # of the running step

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Seq[int] | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: object | None = None,
    ) -> None:
        """Queue a request, given as text or as token ids.

        arrival_time: seconds as of `time.time()`; now by default. priority: lower values run first.
        cache_salt: only requests with the same salt share blocks of the prefix cache. lora_request: the `LoRARequest`
        of the adapter to use.
        Raises RequestError, and adds nothing, if the request cannot be served.
        """
        with self.guard.operation("add_request"):
            self.check_open()
            self._abort_dropped()
            if not isinstance(request_id, str):
                raise RequestError(f"request_id={quoted(request_id)}: must be a string")
            if request_id in self._requests:
                raise RequestError(f"request id {quoted(request_id)} is in use: give every request an id of its own")
            if not self._requests:
                self._clock.reset()
            arrival_time = self._clock.now() if arrival_time is None else arrival_time
            with as_request_error("the request cannot be taken"):
                request = self._inputs.request(
                    request_id,
                    prompt,
                    sampling_params,
                    prompt_token_ids,
                    arrival_time,
                    priority,
                    cache_salt,
                    lora_request,
                )
                outputs = OutputProcessor(request, self._token_texts)
                self.scheduler.add(request)
            self._requests[request_id] = outputs

    def check_prompt(
        self, prompt: str | None, prompt_token_ids: Seq[int] | None, params: SamplingParams | None = None
    ) -> list[int]:
        """The token ids of a prompt, truncated as `params` say. Raises RequestError if it cannot be served."""
        return self._inputs.check_prompt(prompt, prompt_token_ids, params)

    def check_lora_request(self, lora_request: object | None) -> None:
        """Raise RequestError if requests cannot use this `LoRARequest`; None is none."""
        self._inputs.adapter(lora_request)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the structured outputs of a request that will be added, which can take seconds, in any thread.

        Raises RequestError if they cannot be compiled.
        """
        if params.structured_outputs is not None and self._inputs.grammars is not None:
            self._inputs.grammars.prepare(params.structured_outputs)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks on both tiers. Returns None for an unknown or finished request."""
        with self.guard.operation("abort_request"):
            return self._abort(request_id)

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests without outputs: now, or before the next operation if one is in progress."""
        self._dropped.extend(request_ids)
        with suppress(EngineError), self.guard.operation("abort_request"):
            self._abort_dropped()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Unfinished requests keep their blocks. Returns True, as vLLM's does."""
        with self.guard.operation("reset_prefix_cache"):
            self.scheduler.block_manager.reset_prefix_cache()
        return True

    def metrics(self) -> EngineMetrics:
        return engine_metrics(self.scheduler)

    def progress(self, step_share: float = 0.0) -> Progress:
        """How far the unfinished requests are, in tokens, once this share of the running step is done."""
        num_layers, batch = self.limits.num_layers, self._batch
        step_tokens = batch.prompt_tokens(num_layers) if batch is not None else 0.0
        return progress_of(self.scheduler, num_layers).plus(step_share * step_tokens)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs of the requests that took part, in batch order, as `output_kind` asks.

        Returns an empty list if there is nothing to run. If the step fails, raises EngineError: all running requests
        end with finish_reason "error" and are in the error's `outputs`; waiting requests stay, and the engine can be
        used again.
        """
        with self.guard.operation("step"):
            if self._dropped:
                self._abort_dropped()
            try:
                stepped = self._step()
            except BaseException as error:
                # An interrupt may come after a block move was planned and before it was carried out. So all cached
                # content is dropped.
                failed = self._outputs(self.scheduler.fail(self._clock.now(), f"a step failed: {told(error)}"))
                if not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit keep their type
                    raise
                raise EngineError(f"a step failed and ended {len(failed)} running requests: {error}", failed) from error
            return self._outputs(stepped)

    def _step(self) -> list[Request]:
        batch = self.scheduler.schedule(self._clock.now())
        if not batch.sequences:
            return []
        self._batch = batch
        try:
            result = self.executor.execute(batch)
        finally:
            self._batch = None
        stepped = self.scheduler.update(batch, result, self._clock.now())
        for request in stepped:
            outputs = self._requests[request.request_id]
            for seq in request.sequences:
                try:
                    stop_string = outputs.detokenize(seq)
                except Exception as error:
                    outputs.fail_text(seq, error)
                    self.scheduler.abort(request, self._clock.now(), "error")
                    break
                if stop_string is not None:
                    self.scheduler.end_by_string(seq, stop_string, self._clock.now())
        return stepped

    # ---- closing

    def close(self) -> None:
        """Release what the executor holds. Safe to call twice. Raises EngineError while another thread's call runs.

        In a fork of the engine's process it does nothing: what the executor holds belongs to that process.
        """
        if self.guard.is_forked:
            return
        with self.guard.operation("close", allow_suspended=True):
            self.closed = True
            self.executor.close()
            if self._inputs.grammars is not None:
                self._inputs.grammars.close()

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self.closed:
            raise EngineError("the engine is closed: make a new LLM")

    # ---- helpers

    def _abort(self, request_id: str) -> RequestOutput | None:
        if request_id not in self._requests:
            return None
        request = self._requests[request_id].request
        self.scheduler.abort(request, self._clock.now())
        return next(iter(self._outputs([request])), None)

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort(self._dropped.popleft())

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """What `output_kind` asks for now. Requests that have ended are forgotten."""
        made = []
        for request in requests:
            outputs = self._requests[request.request_id]
            if request.finished:
                del self._requests[request.request_id]
                if self._on_finish is not None:
                    self._on_finish(request)
            made.append(outputs.output())
        return [output for output in made if output is not None]


class EngineClient:
    """Adds requests to an engine, and steps it until they have ended: `while client.pending: client.step()`.

    inboxes: shared by clients that may step the engine within each other's loop. Each step's outputs go to the client
    that added the request.
    """

    def __init__(self, engine: LLMEngine, inboxes: dict[str, list[RequestOutput]] | None = None) -> None:
        self._engine = engine
        self._inboxes = {} if inboxes is None else inboxes  # by request_id
        self._inbox: list[RequestOutput] = []
        self.pending: set[str] = set()  # ids of the requests that have not ended

    def add(self, request_id: str, prompt: str | None, params: SamplingParams, **arguments: Any) -> None:
        """Add a request; arguments and errors as in `LLMEngine.add_request`."""
        if request_id in self._inboxes:
            raise RequestError(f"request id {quoted(request_id)} is in use: give every request an id of its own")
        self.pending.add(request_id)
        self._inboxes[request_id] = self._inbox
        try:
            self._engine.add_request(request_id, prompt, params, **arguments)
        except Exception:
            self._forget(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """The next outputs of this client's requests; runs a step of the engine unless another client's step made some.

        Raises EngineError for a failed step, and if the pending requests were aborted by another caller.
        """
        try:
            if not self._inbox:
                for output in self._engine.step():
                    if output.request_id in self._inboxes:
                        self._inboxes[output.request_id].append(output)
        except EngineError as error:
            for failed in error.outputs:
                if isinstance(failed, RequestOutput):
                    self._forget(failed.request_id)
            raise
        outputs = self._inbox.copy()
        self._inbox.clear()
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        if self.pending and not outputs and not self._engine.has_unfinished_requests():
            raise EngineError(f"{len(self.pending)} requests of this call were ended by another")
        return outputs

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """Abort the pending ones of these requests, or all pending ones. Returns their last outputs."""
        ended = self.pending.intersection(self.pending if request_ids is None else request_ids)
        outputs = [self._engine.abort_request(request_id) for request_id in ended]
        for request_id in ended:
            self._forget(request_id)
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Abort all pending requests without outputs."""
        pending = set(self.pending)
        for request_id in pending:
            self._forget(request_id)
        if pending:
            self._engine.drop_requests(pending)

    def _forget(self, request_id: str) -> None:
        self.pending.discard(request_id)
        self._inboxes.pop(request_id, None)
