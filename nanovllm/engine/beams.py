"""Beam search as in Transformers (`GenerationMixin._beam_search`, version 5).

Each step ranks the continuations of all beams by cumulative log-probability and considers the best `num_candidates`,
enough for `width` of them not to end. Of the best `width` candidates, those that end are finished beams. The best
`width` candidates that do not end are the next beams. The score of a finished beam is
cumulative_logprob / length ** length_penalty, where length counts the generated tokens including the end token. The
best `width` finished beams are kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.data.batch import Sample, TokenLogprobs
from nanovllm.engine.request import Blocks, Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import EngineError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam continued by one token. `rank`: position among the most likely tokens of that beam."""

    beam: int
    rank: int
    token_id: int
    logprob: float
    cumulative_logprob: float
    is_end: bool


@dataclass
class BeamSearch:
    """The beam search of one request. `results`: the best finished beams so far as (score, beam), best first.

    Lengths count generated tokens. The first `min_length` tokens are none of `banned_before_min_length`.
    """

    width: int
    max_length: int
    end_token_ids: Set[int]
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_length: int = 0
    banned_before_min_length: Set[int] = frozenset()
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        wanted = max(2, 1 + len(self.end_token_ids | self.banned_before_min_length)) * self.width
        self.num_candidates = wanted if self.vocab_size is None else min(wanted, self.vocab_size)
        self.results: list[tuple[float, Sequence]] = []

    def score(self, cumulative_logprob: float, length: int) -> float:
        """cumulative_logprob / length ** length_penalty."""
        try:
            return cumulative_logprob / length**self.length_penalty
        except OverflowError:  # length**penalty is too large for a float
            return -0.0
        except ZeroDivisionError:  # length**penalty underflows to 0
            return -math.inf if cumulative_logprob else 0.0

    def expand(self, beams: Seq[tuple[float, TokenLogprobs]], length: int) -> tuple[list[Candidate], list[Candidate]]:
        """Continue beams by one token, to `length` tokens: the candidates that go on and those that end, best first.

        beams: the cumulative log-probability of each, and its most likely next tokens.
        """
        banned = self.banned_before_min_length if length <= self.min_length else frozenset[int]()
        candidates = [
            Candidate(
                index, rank, token, logprob, total + logprob, token in self.end_token_ids or length == self.max_length
            )
            for index, (total, top) in enumerate(beams)
            for rank, (token, logprob) in enumerate(zip(top.top_token_ids, top.top_logprobs, strict=True))
            if token not in banned
        ]
        best = heapq.nsmallest(self.num_candidates, candidates, key=lambda c: -c.cumulative_logprob)
        running = [candidate for candidate in best if not candidate.is_end][: self.width]
        return running, [candidate for candidate in best[: self.width] if candidate.is_end]

    def keep(self, beam: Sequence) -> None:
        """Add a finished beam to the results, if it is good enough."""
        self.results.append((self.score(beam.cumulative_logprob, beam.num_output_tokens), beam))
        self.results.sort(key=lambda result: -result[0])
        del self.results[self.width :]

    def has_ended(self, running: Seq[Candidate], length: int) -> bool:
        """Whether the search ends, given the candidates that would go on, of `length` tokens each."""
        if not running:
            return True
        if len(self.results) < self.width:
            return False
        if self.early_stopping is True:
            return True
        # The best score that a running beam can reach: a bound with "never", otherwise an estimate.
        bounded = self.early_stopping == "never" and self.length_penalty > 0
        best = self.score(running[0].cumulative_logprob, self.max_length if bounded else length)
        return best <= self.results[-1][0]

    def ranked(self, unfinished: Seq[Sequence]) -> list[Sequence]:
        """All finished beams and, if the search was aborted, the `unfinished` ones; best first."""
        cut_off = [(self.score(beam.cumulative_logprob, max(beam.num_output_tokens, 1)), beam) for beam in unfinished]
        return [beam for _, beam in sorted([*self.results, *cut_off], key=lambda result: -result[0])]


class BeamRequest(Request):
    """A request answered by beam search. Its sequences are the beams of the last step; it begins with one."""

    decodes_at_end = True

    def __init__(self, limits: SchedulerLimits, vocab_size: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        params = self.params
        most_tokens = max(1, limits.max_model_len - self.prompt_len)
        ends = {token for token in limits.eos_token_ids if token < vocab_size}
        self.search = BeamSearch(
            width=params.num_sequences,
            max_length=min(params.max_tokens or most_tokens, most_tokens),
            end_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else ends)},
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            min_length=params.min_tokens,
            banned_before_min_length={*params.stop_token_ids, *ends} if params.min_tokens else frozenset(),
            vocab_size=vocab_size,
        )

    def new_sequences(self) -> list[Sequence]:
        return [Sequence(self, next(self.seq_ids))]

    @property
    def takes_drafts(self) -> bool:
        return False

    @property
    def num_seqs(self) -> int:
        """Sequence slots for all beams, from the beginning."""
        return self.search.width

    @property
    def num_logprobs(self) -> int:
        """The search can consider more tokens than the user asked for."""
        return max(self.sampling.num_logprobs or 0, self.search.num_candidates)

    @property
    def is_ranked(self) -> bool:
        return True

    def ranked(self) -> list[Sequence]:
        return self.search.ranked(self.sequences)

    def append_samples(self, samples: Seq[Sample], blocks: Blocks) -> None:
        """Replace the beams by their best continuations, given one sample per beam; by none if the search has ended.

        The first continuation of a beam keeps its sequence; further ones fork it and share its blocks. Blocks of beams
        without a continuation are freed, and those of all beams when the search ends.
        """
        self.fork(blocks)
        if not samples:
            return
        beams = self.live
        length = beams[0].num_output_tokens + 1
        tops = [self._top(sample) for sample in samples]
        scored = [(beam.cumulative_logprob, top) for beam, top in zip(beams, tops, strict=True)]
        running, finished = self.search.expand(scored, length)
        for candidate in finished:
            self.search.keep(self._finished(beams[candidate.beam], candidate, tops[candidate.beam]))
        if self.search.has_ended(running, length):
            self._replace([], blocks)
            return
        following: dict[int, Sequence] = {}  # the next beams, by seq_id
        for candidate in running:
            beam = beams[candidate.beam]
            if beam.seq_id in following:
                beam = self._forked(beam)
                blocks.fork(beams[candidate.beam], beam)
            following[beam.seq_id] = beam
        for beam, candidate in zip(following.values(), running, strict=True):  # after the forks of all
            beam.append(self._sample(candidate, tops[candidate.beam]))
        self._replace(list(following.values()), blocks)

    def _replace(self, beams: list[Sequence], blocks: Blocks) -> None:
        """Make `beams` the sequences of the request, and free the blocks of all others."""
        for seq in self.live:
            if seq not in beams:
                blocks.free(seq)
        self.sequences = beams

    def _forked(self, beam: Sequence) -> Sequence:
        """A new sequence with the same tokens and no blocks."""
        child = Sequence(self, next(self.seq_ids), beam.index)
        child.token_ids = list(beam.token_ids)
        child.cumulative_logprob = beam.cumulative_logprob
        child.logprobs = list(beam.logprobs)
        return child

    def _finished(self, beam: Sequence, candidate: Candidate, top: TokenLogprobs) -> Sequence:
        """A finished beam, as a sequence without blocks."""
        seq = self._forked(beam)
        seq.append(self._sample(candidate, top))
        seq.finish_reason = "stop" if candidate.token_id in self.search.end_token_ids else "length"
        if candidate.token_id in seq.params.stop_token_ids:
            seq.stop_reason = candidate.token_id
        return seq

    def _top(self, sample: Sample) -> TokenLogprobs:
        if sample.logprobs is None:
            raise EngineError(f"the executor reported no logprobs for a beam of request {self.request_id!r}")
        return sample.logprobs

    def _sample(self, candidate: Candidate, top: TokenLogprobs) -> Sample:
        """The candidate's token, with the log-probabilities that the request reports."""
        count = self.sampling.num_logprobs or 0
        ids = top.top_token_ids[:count]
        logprobs = top.top_logprobs[:count]
        return Sample(candidate.token_id, TokenLogprobs(candidate.logprob, candidate.rank + 1, ids, logprobs))
