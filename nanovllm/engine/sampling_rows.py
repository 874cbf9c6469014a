"""What the executor needs to sample a sequence's next token, and to score its prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.engine.batch import LogitAdjustments, LogitsProcessors, PromptTargets, SamplingRow, TokenMask, token_array
from nanovllm.engine.grammar import GrammarState
from nanovllm.engine.request import Sequence

# Larger values change nothing, and would not fit the sampler's tensors.
MAX_TEMPERATURE = 1e30
MAX_TOP_K = 2**31 - 1
MAX_REPETITION_PENALTY = 1e9


def sampling_row(seq: Sequence) -> SamplingRow:
    """How to sample the next token of `seq`."""
    p, processors = seq.params, None
    if functions := seq.request.sampling.processors:
        processors = LogitsProcessors(functions, seq.request.prompt_token_ids, seq.output_token_ids)
    return SamplingRow(
        temperature=0.0 if p.is_greedy else min(float(p.temperature), MAX_TEMPERATURE),
        top_k=min(max(p.top_k, 0), MAX_TOP_K),
        top_p=p.top_p,
        min_p=p.min_p,
        seed=seq.seed,
        index=seq.num_output_tokens,
        num_logprobs=seq.request.num_logprobs,
        adjustments=_adjustments(seq),
        mask=seq.request.sampling.allowed if seq.grammar is None else _grammar_mask(seq, seq.grammar),
        processors=processors,
    )


def prompt_targets(seq: Sequence, chunk: int) -> PromptTargets | None:
    """The rows of the next `chunk` tokens of `seq` that give missing prompt log-probabilities; None for none."""
    count = seq.request.sampling.num_prompt_logprobs
    first = max(len(seq.request.prompt_logprobs), seq.num_computed)
    end = min(seq.num_computed + chunk, seq.prompt_len - 1)
    if count is None or first >= end:
        return None
    return PromptTargets(first - seq.num_computed, seq.token_ids[first + 1 : end + 1], count)


def banned_tokens(bad_words: Seq[Seq[int]], output: Seq[int]) -> list[int]:
    """The last token of each bad word whose other tokens the output ends with. As in vLLM, the prompt is ignored."""
    banned = []
    for *beginning, last in bad_words:
        if len(beginning) <= len(output) and list(output[len(output) - len(beginning) :]) == beginning:
            banned.append(last)
    return banned


def _grammar_mask(seq: Sequence, grammar: GrammarState) -> TokenMask:
    """The tokens that may come next. The mask is made while the step computes."""
    new = seq.token_ids[seq.prompt_len + grammar.num_read :]
    return grammar.mask(new, hold_end=seq.num_output_tokens < seq.params.min_tokens)


def _adjustments(seq: Sequence) -> LogitAdjustments | None:
    """Changes to the logits of the next token; None, the usual case, for no change."""
    p, s = seq.params, seq.request.sampling
    # A grammar's mask holds end tokens back itself, unless nothing else may follow.
    holds_end = seq.num_output_tokens < p.min_tokens and seq.grammar is None
    banned = list(s.end_tokens) if holds_end else []
    if s.bad_words:
        longest = max(map(len, s.bad_words))
        banned.extend(banned_tokens(s.bad_words, seq.token_ids[max(seq.prompt_len, len(seq) - longest + 1) :]))
    penalized = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0)
    if not banned and not s.biased and not penalized:
        return None
    return LogitAdjustments(
        banned=token_array(banned),
        biased=s.biased,
        biases=s.biases,
        repetition_penalty=max(1 / MAX_REPETITION_PENALTY, min(p.repetition_penalty, MAX_REPETITION_PENALTY)),
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        prompt_tokens=s.prompt_tokens,
        output_tokens=seq.output_array()[:] if penalized else token_array(),
    )
