"""Sampling parameters resolved for a model and tokenizer, and checked, once per request."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Protocol

from nanovllm.data.batch import DrawParams, LogitAdjustments, PackedMask, TokenMask, token_array
from nanovllm.errors import RequestError, quoted
from nanovllm.sampling_params import LogitsProcessor, SamplingParams, StructuredOutputsParams
from nanovllm.sampling_rules import takes_prompt
from nanovllm.text.tokenizer import Tokenizer


class GrammarState(Protocol):
    """How much of one output a grammar has read. num_read: tokens."""

    num_read: int

    def mask(self, token_ids: Sequence[int], hold_end: bool) -> TokenMask:
        """The tokens that may follow once the output has gone on with `token_ids`.

        hold_end: none of the end tokens, as long as others may follow. The mask may still be in the making.
        """
        ...

    def masks(self, token_ids: Sequence[int], drafts: Sequence[int], hold_ends: Sequence[bool]) -> Sequence[TokenMask]:
        """`mask`, and after each of `drafts` the one that would follow if the output went on with them.

        The state does not read the drafts. After a draft that the grammar does not allow, masks mean nothing.
        hold_ends: one more than drafts.
        """
        ...


class Grammar(Protocol):
    """What the outputs of one request match."""

    def start(self) -> GrammarState:
        """The state of an output without tokens."""
        ...

    def error(self, token_ids: Sequence[int]) -> str | None:
        """What is wrong with an output that has ended, without its end token; None if it is right, as it should be."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one model and tokenizer. Any thread may call it."""

    def compile(
        self, params: StructuredOutputsParams, end_tokens: Collection[int], allowed: PackedMask | None
    ) -> Grammar:
        """The grammar of a request whose outputs end with one of `end_tokens`. allowed: tokens that it may use at all.

        Raises RequestError for a grammar that is invalid, or too large to compile within bounds.
        """
        ...

    def prepare(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar and keep it, so that `compile` finds it. Raises as `compile`; both take up to seconds."""
        ...

    def close(self) -> None:
        """End its threads and processes. Safe to call twice."""
        ...


# Larger values change nothing, and would not fit the sampler's tensors.
MAX_TEMPERATURE = 1e30
MAX_TOP_K = 2**31 - 1
MAX_REPETITION_PENALTY = 1e9
MAX_BIAS = 1e9


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters of one request in terms of the model's token ids."""

    num_logprobs: int | None = None  # as in SamplingParams, with -1 replaced by the size of the vocabulary
    num_prompt_logprobs: int | None = None
    end_tokens: array[int] = field(default_factory=token_array)  # banned before min_tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each
    draw: Mapping[str, Any] = field(default_factory=dict)  # the fields of DrawParams
    # Those of every token. A step adds the banned tokens and the output.
    adjustments: LogitAdjustments = field(default_factory=LogitAdjustments)
    allowed: PackedMask | None = None  # the mask of allowed_token_ids
    processors: tuple[tuple[LogitsProcessor, bool], ...] = ()  # logits processors, and whether each takes the prompt
    grammar: Grammar | None = None  # what the outputs match


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """What `resolve_sampling` needs to know."""

    vocab_size: int
    eos_token_ids: Collection[int] = ()
    tokenizer: Tokenizer | None = None
    max_logprobs: int = 20  # limit of logprobs and prompt_logprobs; -1 for no limit
    grammars: GrammarCompiler | None = None  # compiles structured outputs


def resolve_sampling(params: SamplingParams, prompt_token_ids: Sequence[int], facts: SamplingFacts) -> ResolvedSampling:
    """Resolve `params`. Raises RequestError for values that this model or tokenizer cannot honour."""
    _check_tokenizer("stop", params.stop, "stop_token_ids", facts)
    _check_tokenizer("bad_words", params.bad_words, "a bias of -inf in logit_bias", facts)
    _check_token_ids("stop_token_ids", params.stop_token_ids, facts.vocab_size)
    _check_token_ids("logit_bias", params.logit_bias, facts.vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), facts.vocab_size)
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = PackedMask.of(params.allowed_token_ids, facts.vocab_size)
    eos = {token for token in facts.eos_token_ids if token < facts.vocab_size}
    ends = eos | set(params.stop_token_ids)
    bad_words = _bad_word_tokens(params.bad_words, facts)
    end_tokens = ends if params.min_tokens > 0 else set()
    _check_some_token_is_left(params, end_tokens, bad_words, facts.vocab_size)
    num_logprobs = _num_logprobs("logprobs", params.logprobs, facts)
    num_prompt_logprobs = _num_logprobs("prompt_logprobs", params.prompt_logprobs, facts)
    processors = tuple((function, bool(takes_prompt(function))) for function in params.logits_processors)
    grammar = _grammar(params, set(params.stop_token_ids) if params.ignore_eos else ends, allowed, facts)
    return ResolvedSampling(
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        # A grammar's mask holds end tokens back itself, unless nothing else may follow.
        end_tokens=token_array(end_tokens if grammar is None else ()),
        bad_words=bad_words,
        draw=_draw_params(params),
        adjustments=_adjustments(params, prompt_token_ids),
        allowed=allowed,
        processors=processors,
        grammar=grammar,
    )


def _draw_params(params: SamplingParams) -> dict[str, Any]:
    named = {field.name: getattr(params, field.name) for field in fields(DrawParams)}
    temperature = 0.0 if params.is_greedy else min(float(params.temperature), MAX_TEMPERATURE)
    return {**named, "temperature": temperature, "top_k": min(max(params.top_k, 0), MAX_TOP_K)}


def _adjustments(params: SamplingParams, prompt_token_ids: Sequence[int]) -> LogitAdjustments:
    biases = (max(-MAX_BIAS, min(bias, MAX_BIAS)) if bias > -inf else bias for bias in params.logit_bias.values())
    repetition = max(1 / MAX_REPETITION_PENALTY, min(params.repetition_penalty, MAX_REPETITION_PENALTY))
    return LogitAdjustments(
        biased=token_array(params.logit_bias),
        biases=array("d", biases),
        repetition_penalty=repetition,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        prompt_tokens=token_array(set(prompt_token_ids) if repetition != 1.0 else ()),
    )


def _grammar(
    params: SamplingParams, end_tokens: Set[int], allowed: PackedMask | None, facts: SamplingFacts
) -> Grammar | None:
    if params.structured_outputs is None:
        return None
    if facts.grammars is None:
        raise RequestError("structured_outputs: the engine was made without them; leave them out")
    return facts.grammars.compile(params.structured_outputs, end_tokens, allowed)


def _num_logprobs(name: str, asked: int | None, facts: SamplingFacts) -> int | None:
    if asked is None:
        return None
    count = facts.vocab_size if asked == -1 else asked
    if facts.max_logprobs != -1 and count > facts.max_logprobs:
        meaning = f" asks for all {count}" if asked == -1 else ""
        raise RequestError(
            f"Cannot request more than {facts.max_logprobs} logprobs. {name}={quoted(asked)}{meaning}: ask for fewer, "
            "or raise the engine's max_logprobs"
        )
    return min(count, facts.vocab_size)


def _check_tokenizer(name: str, texts: Sequence[str], instead: str, facts: SamplingFacts) -> None:
    if texts and facts.tokenizer is None:
        raise RequestError(
            f"{name}={quoted(list(texts))}: needs a tokenizer, and the model directory has no tokenizer files: give "
            f"token ids with {instead}, or add the tokenizer's files"
        )


def _check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise RequestError(f"{name}={quoted(token)}: must hold token ids of the model, from 0 to {vocab_size - 1}")


def _check_some_token_is_left(
    params: SamplingParams, end_tokens: Set[int], bad_words: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Check that some token can be sampled first. Bad words of several tokens cannot ban a first token."""
    banned = {token for token, bias in params.logit_bias.items() if bias == -inf}
    banned.update(word[0] for word in bad_words if len(word) == 1)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token in banned or token in end_tokens for token in allowed):
        which = f"{vocab_size}" if params.allowed_token_ids is None else "allowed"
        raise RequestError(
            f"logit_bias, bad_words and min_tokens={quoted(params.min_tokens)}, before which no end token comes, ban "
            f"all {which} tokens of the model: leave at least one that can be chosen"
        )


def _bad_word_tokens(words: Sequence[str], facts: SamplingFacts) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, without and with a leading space.

    As in vLLM, the form with a space counts only if it has as many tokens and another first token.
    """
    banned: list[tuple[int, ...]] = []
    for word in words:
        at_start, after_space = (_encode(prefix + word.lstrip(), facts) for prefix in ("", " "))
        if not at_start:
            raise RequestError(f"bad_words={quoted(word)}: must hold words of at least one token")
        banned.append(at_start)
        if len(after_space) == len(at_start) and after_space[0] != at_start[0]:
            banned.append(after_space)
        for token in (*at_start, *after_space):
            if token >= facts.vocab_size:
                raise RequestError(
                    f"bad_words={quoted(word)}: the tokenizer gives token {token}, and the model's go from 0 to "
                    f"{facts.vocab_size - 1}"
                )
    return tuple(dict.fromkeys(banned))


def _encode(text: str, facts: SamplingFacts) -> tuple[int, ...]:
    assert facts.tokenizer is not None
    return tuple(facts.tokenizer.encode(text, add_special_tokens=False))
