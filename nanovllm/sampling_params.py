"""Sampling parameters: how the tokens of a request are chosen, and when its sequences end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from nanovllm.errors import RequestError, as_request_error
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_rules import GREEDY_EPS, check
from nanovllm.vllm_names import SAMPLING_PARAMETERS, own_arguments


class _Named(type):
    """Checks the names before an object is made. vLLM's parameters that mean nothing here are left out."""

    def __call__(cls, **params: Any) -> Any:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        own = own_arguments("sampling parameter", params, known, SAMPLING_PARAMETERS, RequestError)
        return super().__call__(**own)


@dataclass(kw_only=True)
class SamplingParams(metaclass=_Named):
    """Sampling parameters of one request, with vLLM's names and rules.

    Invalid values raise RequestError, at construction and at assignment. Changes do not affect requests already added.

    n: number of sequences to return.
    best_of: number of sequences to generate, of which the n with the highest cumulative log-probability are returned;
        None means n. With use_beam_search, the beam width.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once or per occurrence.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
    temperature: 0 is greedy.
    top_k: 0 and -1 mean off. top_p: in (0, 1]. min_p: in [0, 1], relative to the most likely token.
    seed: the same seed gives the same tokens, whatever else is in the batch; -1 means None.
    stop: strings that end the text, which is cut before them unless include_stop_str_in_output is set.
    stop_token_ids: end the sequence with finish_reason "stop".
    ignore_eos: continue after the model's own end tokens, but not after stop_token_ids.
    min_tokens: no end token (even with ignore_eos) and no stop string before this many tokens.
    max_tokens: None generates up to max_model_len.
    logprobs: how many of the most likely tokens to report for each output position, besides the sampled one; -1 means
        the entire vocabulary. prompt_logprobs: the same for the prompt. Log-probabilities are of the raw logits.
    logit_bias: numbers added to the logits, by token id; -inf bans a token.
    bad_words: strings whose last token is never sampled when the output ends with the tokens before it.
    length_penalty: beam search scores finished beams by cumulative log-probability / length ** length_penalty.
    early_stopping: beam search ends with True as soon as enough beams are finished, with False when a better one is
        unlikely, with "never" when a better one is impossible.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __setattr__(self, name: str, value: Any) -> None:
        if len(vars(self)) == len(fields(self)):  # after construction
            vars(self).update(vars(replace(self, **{name: value})))
        else:
            vars(self)[name] = value

    def __post_init__(self) -> None:
        with as_request_error("the sampling parameters cannot be read"):
            check(self)
            # As in vLLM, None stands for an empty list. Lists are copied, as callers may reuse theirs.
            vars(self).update(
                seed=None if self.seed == -1 else self.seed,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                bad_words=tuple(self.bad_words or ()),
                logit_bias={int(t): float(b) for t, b in (self.logit_bias or {}).items()},
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate: best_of, or n."""
        return self.best_of if self.best_of is not None else self.n
