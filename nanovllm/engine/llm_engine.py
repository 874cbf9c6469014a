"""The engine: requests in, steps, outputs out. It knows tokens and blocks, and nothing of tensors."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.engine.batch import Executor
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler, SchedulerLimits
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.errors import EngineError, RequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What request checking needs to know of the model."""

    vocab_size: int
    # Prompts longer than this have K/V that depend on the prompt's length (dynamic RoPE): only prompts of the same
    # length may share their blocks. None: never.
    length_dependent_above: int | None = None


class LLMEngine:
    """Adds, steps and aborts requests. One thread at a time may use it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        facts: ModelFacts,
        block_manager: BlockManager,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.scheduler = Scheduler(limits, block_manager)
        self.executor = executor
        self.tokenizer = tokenizer
        self._seed = seed
        self._next_seq_id = itertools.count()
        self._requests: dict[str, Sequence] = {}
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Seq[int] | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request, given as text or as token ids; lower `priority` runs first.

        `arrival_time` is on the `time.monotonic` clock, now by default. Raises RequestError, with nothing added, for a
        request that cannot be served.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use: give every request an id of its own")
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {params!r:.100}")
        if type(priority) is not int:
            raise RequestError(f"priority={priority!r}: must be a whole number; lower ones run first")
        if arrival_time is not None and not (isinstance(arrival_time, int | float) and math.isfinite(arrival_time)):
            raise RequestError(f"arrival_time={arrival_time!r}: must be seconds on the time.monotonic clock")
        token_ids = self.check_prompt(prompt, prompt_token_ids)
        seq_id = next(self._next_seq_id)
        seq = Sequence(
            seq_id,
            request_id,
            token_ids,
            params,
            # Requests without a seed differ from each other and repeat from run to run with the engine's seed.
            seed=params.seed if params.seed is not None else hash((self._seed, seq_id)),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            prompt=prompt,
            cache_salt=self._cache_salt(len(token_ids)),
        )
        self.scheduler.add(seq)
        self._requests[request_id] = seq
        if self.tokenizer is not None:
            self._detokenizers[request_id] = IncrementalDetokenizer(self.tokenizer)

    def check_prompt(self, prompt: str | None, prompt_token_ids: Seq[int] | None) -> list[int]:
        """The prompt's token ids. Raises RequestError if it cannot be served."""
        token_ids = self._tokenize(prompt, prompt_token_ids)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) > self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.limits.max_model_len}: shorten the "
                "prompt or raise max_model_len"
            )
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.facts.vocab_size:
                raise RequestError(
                    f"token id {token!r} in the prompt is not one of the model's: ids are of type int, from 0 to "
                    f"{self.facts.vocab_size - 1}"
                )
        return token_ids

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks on both tiers; None if there is no such request."""
        if request_id not in self._requests:
            return None
        self.scheduler.abort(request_id, time.monotonic())
        return self._output(self._requests[request_id])

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that it advanced, in batch order. Without work it runs nothing.

        Raises EngineError if the forward pass failed: the requests that were running end with finish_reason "error"
        and are the error's `outputs`, waiting ones stay, and the engine can go on.
        """
        try:
            stepped = self._step()
        except BaseException as error:
            # An interrupt can come between deciding a block move and carrying it out: nothing in the cache is trusted.
            failed = [self._output(seq) for seq in self.scheduler.fail(time.monotonic())]
            if not isinstance(error, Exception):  # Ctrl-C and the like pass through as what they are
                raise
            raise EngineError(f"a step failed and ended {len(failed)} running requests: {error}", failed) from error
        return [self._output(seq) for seq in stepped]

    def close(self) -> None:
        """Release what the executor holds. Safe to call twice."""
        self.executor.close()

    # ---- helpers

    def _step(self) -> list[Sequence]:
        batch = self.scheduler.schedule(time.monotonic())
        if not batch.sequences:
            return []
        result = self.executor.execute(batch)
        return self.scheduler.update(batch, result, time.monotonic())

    def _tokenize(self, prompt: str | None, prompt_token_ids: Seq[int] | None) -> list[int]:
        if prompt_token_ids is not None:
            if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Seq):
                raise RequestError(f"prompt_token_ids must be a list of token ids, got {prompt_token_ids!r:.100}")
            return list(prompt_token_ids)
        if prompt is None:
            raise RequestError("a request needs a prompt: give text or token ids")
        if self.tokenizer is None:
            raise RequestError(
                "the model directory has no tokenizer files, so a text prompt cannot be read: give token ids, or add "
                "the tokenizer's files to the directory"
            )
        return self.tokenizer.encode(prompt)

    def _cache_salt(self, prompt_len: int) -> bytes:
        threshold = self.facts.length_dependent_above
        return b"" if threshold is None or prompt_len <= threshold else prompt_len.to_bytes(8, "little")

    def _forget(self, seq: Sequence) -> None:
        del self._requests[seq.request_id]
        self._detokenizers.pop(seq.request_id, None)

    def _output(self, seq: Sequence) -> RequestOutput:
        finished = seq.status is SequenceStatus.FINISHED
        completion = CompletionOutput(
            index=0,
            text=self._text(seq, finished),
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )
        if finished:
            self._forget(seq)
        return RequestOutput(
            request_id=seq.request_id,
            prompt=seq.prompt,
            prompt_token_ids=seq.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            metrics=seq.metrics,
            num_cached_tokens=seq.metrics.cached_tokens,
        )

    def _text(self, seq: Sequence, finished: bool) -> str:
        if self.tokenizer is None:
            return ""
        token_ids = seq.output_token_ids
        if not finished:
            return self._detokenizers[seq.request_id].update(token_ids)
        if seq.stop_reason is not None:  # the token that was asked to end the text is not part of it
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids)
