"""A request, its sequences, and everything the engine knows about them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from nanovllm.engine.batch import Sample, TokenLogprobs, token_array
from nanovllm.engine.beam_search import BeamSearch
from nanovllm.engine.resolved_sampling import ResolvedSampling
from nanovllm.engine.text import SequenceText
from nanovllm.kvcache.prefill_plan import LayerwisePrefill
from nanovllm.outputs import Logprob, RequestMetrics
from nanovllm.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Request:
    """A prompt, how it is to be answered, and the sequences that answer it.

    `number` counts the engine's requests; `seq_ids` gives every sequence a number of its own. Several sequences share
    the prompt: until it is in the cache (`forked`), the first of them computes it for all. With `beam_search` the
    sequences are the beams of the last step. `new_text` makes the text of a sequence; None without a tokenizer.
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
        beam_search: BeamSearch[Sequence] | None = None,
        new_text: Callable[[], SequenceText] | None = None,
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
        self.num_sent_prompt_logprobs = 0  # in earlier outputs
        self.status = RequestStatus.WAITING
        self.error: str | None = None  # what went wrong, where it ends with finish_reason "error"
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.beam_search = beam_search
        self.new_text = new_text
        self.seq_ids = seq_ids
        count = params.num_sequences if beam_search is None else 1
        self.sequences = [Sequence(self, next(seq_ids), index) for index in range(count)]
        self.forked = count == 1
        if new_text is not None and beam_search is None:  # beams get their texts when they are results
            for seq in self.sequences:
                seq.text = new_text()

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
    def computing(self) -> list[Sequence]:
        """The sequences that compute next: all that have not ended, or the first of them while it is not forked."""
        return self.live if self.forked else self.live[:1]

    @property
    def num_seqs(self) -> int:
        """Sequences that it may have running at once from now on."""
        return len(self.live) if self.beam_search is None else self.beam_search.width

    @property
    def num_logprobs(self) -> int | None:
        """What its samples have to report: more than was asked for where sequences are ranked by it."""
        asked = self.sampling.num_logprobs
        if self.beam_search is not None:
            return max(asked or 0, self.beam_search.num_candidates)
        return (asked or 0) if self.is_ranked else asked

    @property
    def is_ranked(self) -> bool:
        """Whether the sequences that are returned are known only in the end."""
        return self.beam_search is not None or self.params.num_sequences > self.params.n

    @property
    def outputs(self) -> list[Sequence]:
        """The sequences to report: none of a request that is ranked, until it has ended."""
        return self.sequences if self.finished or not self.is_ranked else []

    def rewind(self) -> None:
        """Its sequences have lost their blocks: the prompt is computed once for all of them, then they go on."""
        self.forked = len(self.live) == 1

    def finish(self) -> None:
        """It has ended: keep the `n` best of sequences that are ranked, best first."""
        self.status = RequestStatus.FINISHED
        if not self.is_ranked:
            return
        if self.beam_search is not None:
            self.sequences = self.beam_search.ranked(self.sequences)
        else:
            self.sequences = sorted(self.sequences, key=lambda seq: -seq.cumulative_logprob)
        del self.sequences[self.params.n :]
        for index, seq in enumerate(self.sequences):
            seq.index = index
            if seq.text is None and self.new_text is not None:
                seq.text = self.new_text()

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of the scheduler: priority (lower first), then arrival."""
        return (self.priority, self.metrics.arrival_time, self.number)


class Sequence:
    """Prompt and generated tokens, how many of them are in the KV cache, and the blocks that hold them.

    `[0, num_computed)` is in the cache. The last token is never computed before it is needed: sampling from it is
    what computing it is for. `index` is its place among the request's sequences; `seed` names its draws, and the first
    sequence has the request's own. `text` makes its text; None where there is no tokenizer.
    """

    def __init__(self, request: Request, seq_id: int, index: int, token_ids: list[int] | None = None) -> None:
        self.request = request
        self.seq_id = seq_id
        self.index = index
        self.seed = request.seed if index == 0 else hash((request.seed, index))
        self.token_ids = list(request.prompt_token_ids if token_ids is None else token_ids)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: SequenceText | None = None
        self.cumulative_logprob = 0.0  # of the tokens whose logprobs were asked for
        self.logprobs: list[TokenLogprobs] = []  # for each output token, where they were asked for
        self.reported_logprobs: list[Mapping[int, Logprob]] = []  # the same for the user, as far as an output had them
        self.num_sent_tokens = 0  # output tokens in earlier outputs
        self.sent_end = False  # whether an output has said that it has ended
        self.num_computed = 0
        self.block_table: list[int] = []
        self.layerwise: LayerwisePrefill | None = None  # of its tokens, those to prefill layer by layer
        self.layerwise_done = 0  # of these, units that are done; no token counts as computed before all are
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were asked for
        self.found_prefix: list[int] = []  # blocks of its prefix, see PrefixCache.find
        self.prefix_age = -1
        self._output_array = token_array()  # its output, as far as it was asked for

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_by_token(self) -> bool:
        """Whether its last token is an end token."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def end(self) -> int:
        """Tokens that it computes before it samples or is forked."""
        return len(self.token_ids) if self.request.forked else self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; at least 1 while it runs."""
        return self.end - self.num_computed

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
        return known if missing else self.end - 1

    def output_array(self) -> array[int]:
        """The output in the form in which it travels; the sequence's own, which grows with it."""
        self._output_array.extend(self.token_ids[self.prompt_len + len(self._output_array) :])
        return self._output_array

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold all tokens up to its `end`."""
        return -(-self.end // block_size)

    def fork(self) -> Sequence:
        """A sequence that begins as this one stands, without blocks."""
        child = Sequence(self.request, next(self.request.seq_ids), self.index, self.token_ids)
        child.cumulative_logprob, child.logprobs = self.cumulative_logprob, list(self.logprobs)
        return child

    def append(self, sample: Sample) -> None:
        """Take a drawn token in."""
        self.token_ids.append(sample.token_id)
        if sample.logprobs is not None:
            self.logprobs.append(sample.logprobs)
            self.cumulative_logprob += sample.logprobs.logprob
