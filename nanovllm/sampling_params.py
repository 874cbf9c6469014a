"""How one request's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from nanovllm.errors import RequestError, as_request_error, unknown_name_message
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_rules import GREEDY_EPS, check


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling of one request, under vLLM's names and rules; refused at once when invalid, also when one is changed.

    A request keeps the parameters that it was added with.

    n: sequences to return. best_of: sequences to generate, of which the n with the highest cumulative logprob are
    returned; None means n. With use_beam_search it is the beam width.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once and for each occurrence.
    repetition_penalty: divides positive logits and multiplies negative ones of tokens in the prompt or the output.
    temperature: 0 is greedy. top_k: 0 and -1 both mean off. top_p in (0, 1]. min_p in [0, 1], relative to the most
    likely token. seed: the same seed gives the same tokens, whatever else is in the batch; -1 means None.
    stop: strings that end the text; it is cut before them unless include_stop_str_in_output. stop_token_ids end the
    request with finish_reason "stop"; ignore_eos goes on past the model's own end tokens, not past stop_token_ids.
    min_tokens: no end token (with ignore_eos neither) and no stop string before that many. max_tokens: None generates
    up to max_model_len.
    logprobs: the k most likely tokens at each output position, and the chosen one; -1 is the whole vocabulary.
    prompt_logprobs: the same for the prompt. Both are of the raw logits, before penalties and temperature.
    logit_bias: token id to a number added to its logit; -inf bans it. bad_words: strings whose last token is never
    sampled when the tokens before it end the output.
    length_penalty, early_stopping: beam search only; a finished beam scores cumulative logprob / length ** penalty, and
    early_stopping True ends the search with as many finished beams as wanted, False when no better one is likely, and
    "never" when no better one is possible.
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

    def __new__(cls, **params: Any) -> Self:
        known = [f.name for f in fields(cls)]
        for name in params:
            if name not in known:
                raise RequestError(unknown_name_message("sampling parameter", name, known))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if len(vars(self)) == len(fields(self)):  # complete, and so no longer being made
            vars(self).update(vars(replace(self, **{name: value})))
        else:
            vars(self)[name] = value

    def __post_init__(self) -> None:
        with as_request_error("the sampling parameters cannot be read"):
            check(self)
            # Callers of vLLM pass None for "none of them", and keep using the lists that they passed.
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
        """Sequences that are generated: best_of, or n."""
        return self.best_of if self.best_of is not None else self.n
