"""Beam search on sequences: after each step the beams fork, finish, or are dropped, and their blocks with them."""

from __future__ import annotations

from nanovllm.engine.batch import Sample, TokenLogprobs
from nanovllm.engine.beam_search import BeamRow, BeamSearch, Candidate
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams


def make_beam_search(
    params: SamplingParams, prompt_len: int, limits: SchedulerLimits, vocab_size: int
) -> BeamSearch[Sequence] | None:
    """The beam search that the parameters ask for, or None."""
    if not params.use_beam_search:
        return None
    most_tokens = max(1, limits.max_model_len - prompt_len)
    ends = {token for token in limits.eos_token_ids if token < vocab_size}
    return BeamSearch(
        width=params.num_sequences,
        max_length=min(params.max_tokens or most_tokens, most_tokens),
        end_token_ids={*params.stop_token_ids, *(() if params.ignore_eos else ends)},
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        min_length=params.min_tokens,
        banned_before_min_length={*params.stop_token_ids, *ends} if params.min_tokens else frozenset(),
        vocab_size=vocab_size,
    )


def advance_beams(request: Request, samples: list[Sample], manager: BlockManager) -> bool:
    """Replace the beams by their best continuations, given one sample per beam. Returns whether the search has ended.

    The first continuation of a beam keeps its sequence; further ones fork it and share its blocks. Blocks of beams
    without a continuation are freed, and those of all beams when the search ends.
    """
    search, beams = request.beam_search, request.live
    assert search is not None
    length = beams[0].num_output_tokens + 1
    rows = [_row(beam, sample) for beam, sample in zip(beams, samples, strict=True)]
    expansion = search.expand(rows, length)
    for candidate in expansion.finished:
        search.keep(_finished(beams[candidate.beam], candidate, rows))
    if search.has_ended(expansion.running, length):
        _replace(request, [], manager)
        return True
    continued: dict[int, Sequence] = {}
    following: list[tuple[Sequence, Candidate]] = []
    for candidate in expansion.running:
        beam = beams[candidate.beam]
        if candidate.beam in continued:
            child = beam.fork()
            manager.fork(beam, child)
            following.append((child, candidate))
        else:
            following.append((continued.setdefault(candidate.beam, beam), candidate))
    for seq, candidate in following:
        seq.append(_sample(candidate, rows, request))
    _replace(request, [seq for seq, _ in following], manager)
    return False


def _replace(request: Request, beams: list[Sequence], manager: BlockManager) -> None:
    """Make `beams` the sequences of the request, and free the blocks of all others."""
    for seq in request.live:
        if seq not in beams:
            manager.free(seq)
    request.sequences = beams


def _finished(beam: Sequence, candidate: Candidate, rows: list[BeamRow]) -> Sequence:
    """A finished beam, as a sequence without blocks."""
    seq = beam.fork()
    seq.append(_sample(candidate, rows, beam.request))
    search = beam.request.beam_search
    assert search is not None
    is_end = candidate.token_id in search.end_token_ids
    seq.finish_reason = "stop" if is_end else "length"
    if candidate.token_id in seq.params.stop_token_ids:
        seq.stop_reason = candidate.token_id
    return seq


def _row(beam: Sequence, sample: Sample) -> BeamRow:
    if sample.logprobs is None:
        raise EngineError(f"the executor reported no logprobs for a beam of request {beam.request.request_id!r}")
    return BeamRow(beam.cumulative_logprob, sample.logprobs.top_token_ids, sample.logprobs.top_logprobs)


def _sample(candidate: Candidate, rows: list[BeamRow], request: Request) -> Sample:
    """The candidate's token, with the log-probabilities that the request reports."""
    row, count = rows[candidate.beam], request.sampling.num_logprobs or 0
    top = TokenLogprobs(candidate.logprob, candidate.rank + 1, row.top_token_ids[:count], row.top_logprobs[:count])
    return Sample(candidate.token_id, top)
