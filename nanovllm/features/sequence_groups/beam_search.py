"""Beam search as in Transformers (`GenerationMixin._beam_search`, version 5), as a pure function of scores.

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
from typing import Literal

from nanovllm.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class BeamRow:
    """A beam's score and its most likely next tokens, the most likely first."""

    cumulative_logprob: float
    top_token_ids: Seq[int]
    top_logprobs: Seq[float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam continued by one token. `rank`: position among that beam's `top_token_ids`."""

    beam: int
    rank: int
    token_id: int
    logprob: float
    cumulative_logprob: float
    is_end: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """The candidates that go on and those that end, each list best first."""

    running: list[Candidate]
    finished: list[Candidate]


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

    def expand(self, beams: Seq[BeamRow], length: int) -> Expansion:
        """Continue the beams by one token, to `length` tokens."""
        banned = self.banned_before_min_length if length <= self.min_length else frozenset[int]()
        candidates = [
            Candidate(index, rank, token, logprob, beam.cumulative_logprob + logprob, self._is_last(token, length))
            for index, beam in enumerate(beams)
            for rank, (token, logprob) in enumerate(zip(beam.top_token_ids, beam.top_logprobs, strict=True))
            if token not in banned
        ]
        best = heapq.nsmallest(self.num_candidates, candidates, key=lambda c: -c.cumulative_logprob)
        running = [candidate for candidate in best if not candidate.is_end][: self.width]
        return Expansion(running, [candidate for candidate in best[: self.width] if candidate.is_end])

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

    def _is_last(self, token: int, length: int) -> bool:
        return token in self.end_token_ids or length == self.max_length
