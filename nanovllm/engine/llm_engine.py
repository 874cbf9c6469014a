"""The engine: adds requests, runs steps, returns outputs. It handles tokens and blocks; tensors are the executor's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nanovllm.data.batch import Batch, StepResult
from nanovllm.data.progress import Progress
from nanovllm.engine.guard import EngineGuard
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.metrics import EngineMetrics, MetricsReader
from nanovllm.engine.output_processor import OutputProcessor, TokenTexts
from nanovllm.engine.progress import engine_metrics, progress_of
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduler import Scheduler
from nanovllm.errors import EngineError, RequestError, as_request_error, quoted, told
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, PromptParts, prompt_part
from nanovllm.text.tokenizer import HuggingFaceTokenizer

PENDING_SECONDS = 0.05  # that a step waits where all requests wait for content of their blocks


class Clock:
    """Seconds since the epoch, like `time.time()`, that go on as steadily as `time.monotonic()`.

    Differences are durations even if the system's clock is set in between. `reset` follows such a change.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Read `time.time()` anew."""
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


class Executor(Protocol):
    """Runs batches: all that the engine knows of tensors, devices and processes."""

    def execute(self, batch: Batch) -> StepResult: ...

    def advise(self, num_tokens: int) -> str:
        """What to do about a prompt of `num_tokens` tokens, which is too long, as the end of a sentence."""
        ...

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelView:
    """What programs written for vLLM ask the engine's `model_config`."""

    model: str
    max_model_len: int  # tokens of the longest sequence


class LLMEngine:
    """Adds, steps and aborts requests, with vLLM's names: `add_request`, `step`, `has_unfinished_requests`.

    Not thread-safe: using it in two threads at once, or from a callback of a step, raises EngineError. Calls that take
    many steps hold the `guard`. `build.build_engine` makes the engine of a model directory.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        inputs: InputProcessor,
        executor: Executor,
        *,
        model: str = "",
        sampling_defaults: dict[str, Any] | None = None,
        metrics: MetricsReader | None = None,
    ) -> None:
        """model: its name for `model_config`; sampling_defaults: the sampling parameters that it recommends."""
        self.limits = scheduler.limits
        self.vocab_size = inputs.vocab_size
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = inputs.tokenizer
        self.sampling_defaults = sampling_defaults or {}
        self.model_config = ModelView(model, self.limits.max_model_len)
        self.guard = EngineGuard()
        self.closed = False
        self._inputs = inputs
        self._metrics = metrics
        self._token_texts = TokenTexts(self.tokenizer)
        self._clock = Clock()
        self._requests: dict[str, OutputProcessor] = {}  # the unfinished requests, by request_id
        self.inboxes: dict[str, list[RequestOutput]] = {}  # of each `EngineClient`, by the ids of its requests
        self._dropped: deque[str] = deque()  # requests to abort at the next use
        self._batch: Batch | None = None  # of the running step

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLMEngine:
        """The engine that `EngineArgs` describe."""
        engine: LLMEngine = engine_args.create_engine()
        return engine

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Seq[int] | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: object | None = None,
        *,
        params: SamplingParams | None = None,
    ) -> None:
        """Queue a request.

        prompt: text, a list of token ids, or a dict as for `LLM.generate`. params: vLLM's name of sampling_params.
        sampling_params: None is `SamplingParams()`, not the checkpoint's defaults.
        arrival_time: seconds as of `time.time()`; now by default. priority: lower values run first.
        cache_salt: only requests with the same salt share blocks of the prefix cache. lora_request: a `LoRARequest`,
        which names weights that are added to the model's.
        Raises RequestError, and adds nothing, if the request cannot be served.
        """
        self.guard.check_process("add_request")
        self.check_open()
        with as_request_error("the request cannot be taken"):
            parts = _one_prompt(prompt, prompt_token_ids, cache_salt)
        if sampling_params is not None and params is not None:
            raise RequestError("params is another name of sampling_params: give only one of them")
        given = sampling_params if params is None else params
        self.add(self.make_request(request_id, parts, given, arrival_time, priority, lora_request))

    def make_request(
        self,
        request_id: str,
        prompt: PromptParts,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: object | None = None,
    ) -> Request:
        """A request that `add` takes, with arguments as in `add_request`. Any thread may call it.

        Raises RequestError if the request cannot be served.
        """
        arrival = self.arrival_time() if arrival_time is None else arrival_time
        with as_request_error("the request cannot be taken"):
            return self._inputs.request(request_id, prompt, sampling_params, arrival, priority, lora_request)

    def add(self, request: Request) -> None:
        """Queue a request of `make_request`. Raises RequestError, and adds nothing, if it cannot be served.

        `EngineClient.add` takes requests with use_beam_search too, which are many requests for the engine.
        """
        if request.params.use_beam_search:
            raise RequestError(
                f"request {quoted(request.request_id)} has use_beam_search=True, which runs many requests: use "
                "LLM.generate, LLM.beam_search or an EngineClient"
            )
        with self.guard.operation("add_request"):
            self.check_open()
            self._abort_dropped()
            if request.request_id in self._requests:
                raise RequestError(
                    f"request id {quoted(request.request_id)} is in use: give every request an id of its own"
                )
            with as_request_error("the request cannot be taken"):
                outputs = OutputProcessor(request, self._token_texts)
                self.scheduler.add(request)
                self._requests[request.request_id] = outputs

    def last_output(self, request: Request) -> RequestOutput:
        """The output of a request that has ended and that the engine does not know."""
        try:
            outputs = OutputProcessor(request, self._token_texts)
            for seq in request.sequences:
                outputs.detokenize(seq)
        except Exception as error:
            outputs = OutputProcessor(request, TokenTexts(None))
            for seq in request.sequences:
                outputs.fail_text(seq, error)
        output = outputs.output()
        assert output is not None
        return output

    def arrival_time(self) -> float:
        """Now, as the arrival time of a request."""
        if not self._requests:
            self._clock.reset()
        return self._clock.now()

    def check_prompt(
        self, prompt: str | None, prompt_token_ids: Seq[int] | None, params: SamplingParams | None = None
    ) -> list[int]:
        """The token ids of a prompt, truncated as `params` say. Raises RequestError if it cannot be served."""
        return self._inputs.check_prompt(prompt, prompt_token_ids, params)

    def check_lora_request(self, lora_request: object | None) -> None:
        """Raise RequestError if requests cannot use this `LoRARequest`; None is none."""
        self._inputs.check_lora_request(lora_request)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the structured outputs of a request that will be added, which can take seconds, in any thread.

        Raises RequestError if they cannot be compiled.
        """
        self._inputs.prepare(params)

    def abort_request(self, request_id: str | Iterable[str]) -> RequestOutput | None:
        """End a request, free its blocks on both tiers, and return its output if it was unfinished.

        Several ids, as vLLM has them, return None.
        """
        with self.guard.operation("abort_request"):
            if isinstance(request_id, str):
                return self._abort(request_id)
            for name in request_id:
                self._abort(name)
            return None

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

    def get_metrics(self) -> list[Any]:
        """All metrics in vLLM's shapes: `Counter`, `Gauge` and `Histogram` of `features.vllm_api.metrics_reader`."""
        return [] if self._metrics is None else self._metrics.read(self.metrics())

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: those that the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer itself. Raises RequestError if none was loaded."""
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise RequestError(
                "no tokenizer was loaded: the model directory has no tokenizer files, or skip_tokenizer_init=True left "
                "them out; add them, or work with token ids"
            )
        return self.tokenizer.tokenizer

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more, as when one of its processes has failed."""
        with self.guard.operation("check_health"):
            self.check_open()
            self.executor.check_health()

    def progress(self, step_share: float = 0.0) -> Progress:
        """How far the unfinished requests are, in tokens, once this share of the running step is done."""
        num_layers = self.limits.num_layers
        batch = self._batch
        step_tokens = batch.prompt_tokens(num_layers) if batch is not None else 0.0
        return progress_of(self.scheduler, num_layers).plus(step_share * step_tokens)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs of the requests that took part, in batch order, as `output_kind` asks.

        Returns an empty list if there is nothing to run, or not yet: requests wait for content of their blocks, or a
        hook holds them back. If the step fails, raises EngineError: all running requests end with finish_reason "error"
        and are in the error's `outputs`; waiting requests stay, and the engine can be used again. The same after an
        interrupt, which is raised as it is.
        """
        with self.guard.operation("step"):
            try:
                self._abort_dropped()
                return self._outputs(self._step())
            except Exception as error:
                ended = self._fail(f"a step failed: {told(error)}")
                raise EngineError(f"a step failed and ended {len(ended)} running requests: {error}", ended) from error
            except BaseException as interrupt:  # KeyboardInterrupt and SystemExit
                self._fail(f"a step was interrupted: {told(interrupt)}")
                raise

    def _step(self) -> list[Request]:
        batch = self.scheduler.schedule(self._clock.now())
        if not batch.sequences and self.scheduler.wait(PENDING_SECONDS):
            batch = self.scheduler.schedule(self._clock.now())
        if not batch.sequences:
            return []
        result = self._execute(batch)
        stepped = self.scheduler.update(batch, result, self._clock.now())
        for request in stepped:
            self._read_new(request)
        return stepped

    def _execute(self, batch: Batch) -> StepResult:
        self._batch = batch
        begin = time.monotonic()
        try:
            result = self.executor.execute(batch)
        finally:
            self._batch = None
        seconds = time.monotonic() - begin
        for hook in self.scheduler.hooks:
            hook.executed(batch, seconds)
        return result

    def _read_new(self, request: Request) -> None:
        """Make text of the new tokens of a request's sequences, one by one, since each may complete a stop string."""
        outputs = self._requests[request.request_id]
        for seq in request.sequences:
            goes_on = self._read(outputs, seq)
            while self.scheduler.append_next(seq, self._clock.now()):
                goes_on = self._read(outputs, seq)
            if not goes_on:
                return

    def _read(self, outputs: OutputProcessor, seq: Sequence) -> bool:
        """Make text of a sequence's new token, which a stop string may end. Returns False if the tokenizer fails."""
        try:
            stop_string = outputs.detokenize(seq)
        except Exception as error:
            outputs.fail_text(seq, error)
            self.scheduler.abort(outputs.request, self._clock.now(), "error")
            return False
        if stop_string is not None:
            self.scheduler.end_by_string(seq, stop_string, self._clock.now())
        return True

    # ---- closing

    def close(self) -> None:
        """Release what the executor holds. Safe to call twice. Raises EngineError while another thread's call runs.

        In a fork of the engine's process it does nothing: what the executor holds belongs to that process.
        """
        if self.guard.is_forked:
            return
        with self.guard.operation("close"):
            self.closed = True
            with ExitStack() as closing:  # in reverse order, all of them even if one fails; hooks use the executor
                closing.callback(self.executor.close)
                for hook in self.scheduler.hooks:
                    closing.callback(hook.close)

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self.closed:
            raise EngineError("the engine is closed: make a new LLM")

    # ---- helpers

    def _fail(self, why: str) -> list[RequestOutput]:
        """End all running requests and drop all cached content: a block move may be planned and not carried out.

        Returns the last outputs of all requests that have ended.
        """
        self.scheduler.fail(self._clock.now(), why)
        return self._outputs([outputs.request for outputs in self._requests.values() if outputs.request.finished])

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
                if self._metrics is not None:
                    self._metrics.observe(request)
            made.append(outputs.output())
        return [output for output in made if output is not None]


def _one_prompt(prompt: Prompt | None, token_ids: Seq[int] | None, cache_salt: str | None) -> PromptParts:
    """The parts of a prompt, of which arguments may give some. Raises RequestError for those that are given twice."""
    parts = PromptParts(None, None) if prompt is None else prompt_part(prompt)
    if token_ids is not None and parts.token_ids is not None:
        raise RequestError("prompt_token_ids is given twice, in the prompt and as an argument: give it once")
    if cache_salt is not None and parts.cache_salt is not None:
        raise RequestError("cache_salt is given twice, in the prompt and as an argument: give it once")
    ids = parts.token_ids if token_ids is None else token_ids
    return PromptParts(parts.text, ids, parts.cache_salt if cache_salt is None else cache_salt)
