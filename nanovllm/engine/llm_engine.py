"""The engine: requests in, steps, outputs out. It knows tokens and blocks, and nothing of tensors."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from nanovllm.engine.admission import check_num_sequences
from nanovllm.engine.batch import Executor
from nanovllm.engine.beams import make_beam_search
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import SequenceText
from nanovllm.engine.guard import EngineGuard
from nanovllm.engine.metrics import EngineMetrics, Progress, engine_metrics
from nanovllm.engine.output_processor import TokenTexts, request_output
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.resolved_sampling import SamplingFacts, resolve_sampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import EngineError, RequestError, as_request_error, quoted, told
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.sampling_rules import check_characters
from nanovllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What request checking needs to know of the model."""

    vocab_size: int
    # Prompts longer than this have K/V that depend on the prompt's length (dynamic RoPE): only prompts of the same
    # length may share their blocks. None: never.
    length_dependent_above: int | None = None


def shorten_or_raise(num_tokens: int) -> str:
    """What to do with a prompt that is too long, where nothing is known of the memory."""
    return "shorten the prompt or raise max_model_len"


class LLMEngine:
    """Adds, steps and aborts requests. One thread at a time may use it, and no callback of a step: EngineError.

    `advise` says what can be done for a prompt of so many tokens, which are too many. `guard` is for whoever makes
    calls of many steps.
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
        advise: Callable[[int], str] = shorten_or_raise,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.scheduler = Scheduler(limits, block_manager)
        self.executor = executor
        self.tokenizer = tokenizer
        self._sampling_facts = SamplingFacts(facts.vocab_size, limits.eos_token_ids, tokenizer, max_logprobs)
        self._token_texts = TokenTexts(tokenizer)
        self._seed = seed
        self._advise = advise
        self._numbers = itertools.count()
        self._seq_ids = itertools.count()
        self._requests: dict[str, Request] = {}
        self._dropped: deque[str] = deque()  # requests to abort before anything else is done
        self.guard = EngineGuard()
        self.closed = False

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
    ) -> None:
        """Queue a request, given as text or as token ids; lower `priority` runs first.

        `arrival_time` is on the `time.monotonic` clock, now by default. Only requests with the same `cache_salt` find
        each other's content in the prefix cache. Raises RequestError, with nothing added, for a request that cannot be
        served.
        """
        with self.guard.operation("add_request"):
            self.check_open()
            self._abort_dropped()
            if not isinstance(request_id, str):
                raise RequestError(f"request_id={quoted(request_id)}: must be a string")
            if request_id in self._requests:
                raise RequestError(f"request id {quoted(request_id)} is in use: give every request an id of its own")
            with as_request_error("the request cannot be taken"):
                request = self._request(
                    request_id, prompt, sampling_params, prompt_token_ids, arrival_time, priority, cache_salt
                )
                self.scheduler.add(request)
            self._requests[request_id] = request

    def check_prompt(self, prompt: str | None, prompt_token_ids: Seq[int] | None) -> list[int]:
        """The prompt's token ids. Raises RequestError if it cannot be served."""
        token_ids = self._tokenize(prompt, prompt_token_ids)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) > self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.limits.max_model_len}: "
                f"{self._advise(len(token_ids))}"
            )
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.facts.vocab_size:
                raise RequestError(
                    f"token id {quoted(token)} in the prompt is not one of the model's: ids are of type int, from 0 to "
                    f"{self.facts.vocab_size - 1}"
                )
        return token_ids

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks on both tiers; None if there is no such request."""
        with self.guard.operation("abort_request"):
            return self._abort(request_id)

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests that nobody will hear of: now, or before the next use where the engine is in use now."""
        self._dropped.extend(request_ids)
        with suppress(EngineError), self.guard.operation("abort_request"):
            self._abort_dropped()

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; requests under way keep theirs."""
        with self.guard.operation("reset_prefix_cache"):
            self.scheduler.block_manager.reset_prefix_cache()

    def metrics(self) -> EngineMetrics:
        return engine_metrics(self.scheduler)

    def progress(self) -> Progress:
        """How far the running requests are, in tokens."""
        return Progress.of(self.scheduler.running, self.limits.num_layers)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that it advanced, in batch order. Without work it runs nothing.

        What is said of a request is as its `output_kind` asks: with FINAL_ONLY nothing before it has ended.
        Raises EngineError if the forward pass failed: the requests that were running end with finish_reason "error"
        and are the error's `outputs`, waiting ones stay, and the engine can go on.
        """
        with self.guard.operation("step"):
            self._abort_dropped()
            try:
                stepped = self._step()
            except BaseException as error:
                # An interrupt can come between deciding a block move and carrying it out: nothing in the cache is
                # trusted.
                failed = self._outputs(self.scheduler.fail(time.monotonic(), f"a step failed: {told(error)}"))
                if not isinstance(error, Exception):  # Ctrl-C and the like pass through as what they are
                    raise
                raise EngineError(f"a step failed and ended {len(failed)} running requests: {error}", failed) from error
            return self._outputs(stepped)

    def close(self) -> None:
        """Release what the executor holds. Safe to call twice. Refused while a call of another thread runs."""
        with self.guard.operation("close", beside_suspended=True):
            self.closed = True
            self.executor.close()

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self.closed:
            raise EngineError("the engine is closed: make a new LLM")

    # ---- helpers

    def _request(
        self,
        request_id: str,
        prompt: str | None,
        sampling_params: SamplingParams | None,
        prompt_token_ids: Seq[int] | None,
        arrival_time: float | None,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        """A checked request. Raises RequestError."""
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(params)}")
        if type(priority) is not int:
            raise RequestError(f"priority={quoted(priority)}: must be a whole number; lower ones run first")
        is_time = isinstance(arrival_time, int | float) and abs(arrival_time) <= sys.float_info.max
        if arrival_time is not None and not is_time:
            raise RequestError(f"arrival_time={quoted(arrival_time)}: must be seconds on the time.monotonic clock")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt={quoted(cache_salt)}: must be None or a string that is not empty")
        check_num_sequences(request_id, params.num_sequences, self.limits)
        params = copy.copy(params)  # the caller's may change
        token_ids = self.check_prompt(prompt, prompt_token_ids)
        number = next(self._numbers)
        return Request(
            request_id,
            token_ids,
            params,
            number=number,
            seq_ids=self._seq_ids,
            # Requests without a seed differ from each other and repeat from run to run with the engine's seed.
            seed=params.seed if params.seed is not None else hash((self._seed, number)),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            prompt=prompt,
            cache_salt=self._cache_salt(len(token_ids), cache_salt),
            sampling=resolve_sampling(params, token_ids, self._sampling_facts),
            beam_search=make_beam_search(params, len(token_ids), self.limits, self.facts.vocab_size),
            new_text=None if self.tokenizer is None else partial(SequenceText, self.tokenizer, params, token_ids),
        )

    def _step(self) -> list[Request]:
        batch = self.scheduler.schedule(time.monotonic())
        if not batch.sequences:
            return []
        result = self.executor.execute(batch)
        stepped = self.scheduler.update(batch, result, time.monotonic())
        for request in stepped:
            self._write_texts(request)
        return stepped

    def _abort(self, request_id: str) -> RequestOutput | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.scheduler.abort(request, time.monotonic())
        return self._output(request)

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort(self._dropped.popleft())

    def _write_texts(self, request: Request) -> None:
        """Give new tokens to the texts of a request's sequences; a stop string ends its sequence."""
        for seq in request.sequences:
            if seq.text is None or seq.text.num_tokens == seq.num_output_tokens:
                continue
            try:
                new_token_ids = seq.token_ids[seq.prompt_len + seq.text.num_tokens :]
                stop_string = seq.text.append(new_token_ids, ends=seq.ended_by_token)
                if seq.finished:
                    stop_string = seq.text.finish()
            except Exception as error:  # of whatever the tokenizer raises: this request ends, the others go on
                self._text_failed(seq, error)
                self.scheduler.abort(request, time.monotonic(), "error")
                return
            if stop_string is not None:
                self.scheduler.end_by_string(seq, stop_string, time.monotonic())

    def _text_failed(self, seq: Sequence, error: Exception) -> None:
        logger.exception("the text of request %r cannot be made", seq.request.request_id)
        seq.request.error = f"the text cannot be made: {told(error)}"
        seq.text = None
        if seq.finished:
            seq.finish_reason = "error"

    def _tokenize(self, prompt: str | None, prompt_token_ids: Seq[int] | None) -> list[int]:
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(f"a prompt must be text, and token ids are prompt_token_ids: got {quoted(prompt)}")
        if prompt is not None:
            check_characters("the prompt", prompt)
        if prompt_token_ids is not None:
            if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Seq):
                raise RequestError(f"prompt_token_ids must be a list of token ids, got {quoted(prompt_token_ids)}")
            return list(prompt_token_ids)
        if prompt is None:
            raise RequestError("a request needs a prompt: give text or token ids")
        if self.tokenizer is None:
            raise RequestError(
                "the model directory has no tokenizer files, so a text prompt cannot be read: give token ids, or add "
                "the tokenizer's files to the directory"
            )
        with as_request_error("the tokenizer cannot read the prompt"):
            return self.tokenizer.encode(prompt)

    def _cache_salt(self, prompt_len: int, asked: str | None) -> bytes:
        """Different for all that must not share blocks: salts, and lengths that K/V depend on."""
        threshold = self.facts.length_dependent_above
        length = 0 if threshold is None or prompt_len <= threshold else prompt_len
        return length.to_bytes(8, "little") + (asked or "").encode("utf-8", "surrogatepass")

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        outputs = [self._output(request) for request in requests]
        return [output for output in outputs if output is not None]

    def _output(self, request: Request) -> RequestOutput | None:
        if request.finished and request.beam_search is not None:  # its results have their texts since just now
            self._write_texts(request)
        for seq in request.sequences:
            if seq.finished and seq.text is not None:
                try:
                    seq.text.finish()
                except Exception as error:
                    self._text_failed(seq, error)
        if request.finished:
            del self._requests[request.request_id]
        return request_output(request, self._token_texts)
