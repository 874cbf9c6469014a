"""A request, its sequences, and everything the engine knows about them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from enum import Enum

from nanovllm.engine.batch import Sample, TokenLogprobs, token_array
from nanovllm.engine.resolved_sampling import ResolvedSampling
from nanovllm.engine.text import SequenceText
from nanovllm.kvcache.prefill_plan import PrefillSpan
from nanovllm.outputs import Logprob, RequestMetrics
from nanovllm.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A prompt, how it is to be answered, and the sequences that answer it.

    `number` counts the engine's requests; `seq_ids` gives every sequence a number of its own.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        number: int,
        seq_ids: Iterator[int],
        seed: int,
        arrival_time: float,
        priority: int = 0,
        prompt: str | None = None,
        cache_salt: bytes = b"",
        sampling: ResolvedSampling | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.number = number
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.sampling = sampling if sampling is not None else ResolvedSampling()
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the second prompt token and on, as far as they are computed
        self.reported_prompt_logprobs: list[Mapping[int, Logprob] | None] = [None]
        self.status = RequestStatus.WAITING
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.sequences = [Sequence(self, next(seq_ids), index=0)]

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def live(self) -> list[Sequence]:
        """Its sequences that have not ended."""
        return [seq for seq in self.sequences if not seq.finished]

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of the scheduler: priority (lower first), then arrival."""
        return (self.priority, self.metrics.arrival_time, self.number)


class Sequence:
    """Prompt and generated tokens, how many of them are in the KV cache, and the blocks that hold them.

    `[0, num_computed)` is in the cache. The last token is never computed before it is needed: sampling from it is
    what computing it is for. `index` is its place among the request's sequences. `text` makes its text; None where
    there is no tokenizer.
    """

    def __init__(self, request: Request, seq_id: int, index: int) -> None:
        self.request = request
        self.seq_id = seq_id
        self.index = index
        self.token_ids = list(request.prompt_token_ids)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: SequenceText | None = None
        self.cumulative_logprob = 0.0  # of the tokens whose logprobs were asked for
        self.logprobs: list[TokenLogprobs] = []  # for each output token, where they were asked for
        self.reported_logprobs: list[Mapping[int, Logprob]] = []  # the same for the user, as far as an output had them
        self.num_computed = 0
        self.block_table: list[int] = []
        self.span: PrefillSpan | None = None  # of its tokens, those to prefill layer by layer
        self.span_units = 0  # of these, units that are done; no token counts as computed before all are
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were asked for
        self._output_array = token_array()  # its output, as far as it was asked for

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; at least 1 while it runs."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_cacheable(self) -> int:
        """Tokens that may be taken from the prefix cache: not the last, which has to be computed, and none whose
        row gives a log-probability that is still missing."""
        known = len(self.request.prompt_logprobs)
        missing = self.request.sampling.num_prompt_logprobs is not None and known < self.prompt_len - 1
        return known if missing else len(self.token_ids) - 1

    def output_array(self) -> array[int]:
        """The output in the form in which it travels; the sequence's own, which grows with it."""
        self._output_array.extend(self.token_ids[self.prompt_len + len(self._output_array) :])
        return self._output_array

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all its tokens."""
        return -(-len(self.token_ids) // block_size)

    def append(self, sample: Sample) -> None:
        """Take a drawn token in."""
        self.token_ids.append(sample.token_id)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
            self.cumulative_logprob += sample.logprobs.logprob
