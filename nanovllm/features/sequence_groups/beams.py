"""Beam search on sequences: after each step the beams fork, finish, or are dropped, and their blocks with them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.data.batch import Sample, TokenLogprobs
from nanovllm.engine.request import Blocks, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import EngineError
from nanovllm.features.sequence_groups.beam_search import BeamRow, BeamSearch, Candidate
from nanovllm.features.sequence_groups.requests import GroupRequest, GroupSequence


class BeamRequest(GroupRequest):
    """A request answered by beam search. Its sequences are the beams of the last step; it begins with one."""

    decodes_at_end = True

    def __init__(self, limits: SchedulerLimits, vocab_size: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        params, most_tokens = self.params, max(1, limits.max_model_len - self.prompt_len)
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
        return [GroupSequence(self, next(self.seq_ids), 0)]

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
        rows = [self._row(beam, sample) for beam, sample in zip(beams, samples, strict=True)]
        expansion = self.search.expand(rows, length)
        for candidate in expansion.finished:
            self.search.keep(self._finished(beams[candidate.beam], candidate, rows))
        if self.search.has_ended(expansion.running, length):
            self._replace([], blocks)
            return
        following: dict[int, Sequence] = {}  # the next beams, by seq_id
        for candidate in expansion.running:
            beam = beams[candidate.beam]
            if beam.seq_id in following:
                beam = self._forked(beam)
                blocks.fork(beams[candidate.beam], beam)
            following[beam.seq_id] = beam
        for beam, candidate in zip(following.values(), expansion.running, strict=True):  # after the forks of all
            beam.append(self._sample(candidate, rows))
        self._replace(list(following.values()), blocks)

    def _replace(self, beams: list[Sequence], blocks: Blocks) -> None:
        """Make `beams` the sequences of the request, and free the blocks of all others."""
        for seq in self.live:
            if seq not in beams:
                blocks.free(seq)
        self.sequences = beams

    def _forked(self, beam: Sequence) -> Sequence:
        """A new sequence with the same tokens and no blocks."""
        child = GroupSequence(self, next(self.seq_ids), beam.index)
        child.token_ids = list(beam.token_ids)
        child.cumulative_logprob, child.logprobs = beam.cumulative_logprob, list(beam.logprobs)
        return child

    def _finished(self, beam: Sequence, candidate: Candidate, rows: list[BeamRow]) -> Sequence:
        """A finished beam, as a sequence without blocks."""
        seq = self._forked(beam)
        seq.append(self._sample(candidate, rows))
        seq.finish_reason = "stop" if candidate.token_id in self.search.end_token_ids else "length"
        if candidate.token_id in seq.params.stop_token_ids:
            seq.stop_reason = candidate.token_id
        return seq

    def _row(self, beam: Sequence, sample: Sample) -> BeamRow:
        if sample.logprobs is None:
            raise EngineError(f"the executor reported no logprobs for a beam of request {self.request_id!r}")
        return BeamRow(beam.cumulative_logprob, sample.logprobs.top_token_ids, sample.logprobs.top_logprobs)

    def _sample(self, candidate: Candidate, rows: list[BeamRow]) -> Sample:
        """The candidate's token, with the log-probabilities that the request reports."""
        row, count = rows[candidate.beam], self.sampling.num_logprobs or 0
        top = TokenLogprobs(candidate.logprob, candidate.rank + 1, row.top_token_ids[:count], row.top_logprobs[:count])
        return Sample(candidate.token_id, top)
