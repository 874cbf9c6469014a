"""Sampling parameters: how the tokens of a request are chosen, and when its sequences end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from nanovllm.errors import RequestError, as_request_error, quoted, unknown_name_message
from nanovllm.outputs import RequestOutputKind
from nanovllm.sampling_rules import GREEDY_EPS, check, check_structured_outputs
from nanovllm.vllm_names import SAMPLING_PARAMETERS, own_arguments

MOST_BIAS = 100.0  # that `SamplingParams.from_optional` passes on
# (output token ids, logits) -> logits, or (prompt token ids, output token ids, logits) -> logits.
LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What every output of a request must match: exactly one of five kinds. Invalid values raise RequestError.

    json: a JSON schema, as a dict, as text, or as a pydantic model class, of which the schema is kept.
    json_object: True for any JSON object.
    regex: a regular expression that matches the entire output, in the syntax of Rust's regex library: without
        look-around and backreferences, and with all of Unicode in classes such as \\w.
    choice: a list of texts, one of which is the output.
    grammar: a context-free grammar in Lark's or GBNF's (EBNF's) notation.
    disable_any_whitespace: JSON without spaces and line breaks between its parts. whitespace_pattern: a regular
        expression for what may stand between them instead of up to 64 spaces, tabs and line breaks.
    disable_additional_properties: an object of the JSON schema has no properties but those that the schema names.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __new__(cls, **params: Any) -> Self:
        known = [f.name for f in fields(cls)]
        for name in params:
            if name not in known:
                raise RequestError(unknown_name_message("parameter of structured outputs", name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        with as_request_error("the structured outputs cannot be read"):
            schema: Any = self.json
            if hasattr(schema, "model_json_schema"):
                vars(self).update(json=schema.model_json_schema())
            check_structured_outputs(self)
            vars(self).update(choice=None if self.choice is None else tuple(self.choice))


class _Named(type):
    """Checks the names before an object is made. vLLM's parameters that mean nothing here are left out."""

    def __call__(cls, *values: Any, **params: Any) -> Any:
        if values:
            raise TypeError(f"{cls.__name__} takes its parameters by name, such as temperature=0.8")
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
    max_tokens: None generates up to max_model_len; 0, with prompt_logprobs, computes and scores the prompt alone.
    logprobs: how many of the most likely tokens to report for each output position, besides the sampled one; -1 means
        the entire vocabulary. prompt_logprobs: the same for the prompt. Log-probabilities are of the raw logits.
    logit_bias: numbers added to the logits, by token id; -inf bans a token.
    bad_words: strings whose last token is never sampled when the output ends with the tokens before it.
    allowed_token_ids: the only tokens that are sampled; None for all.
    structured_outputs: what every output matches, see StructuredOutputsParams. An end token comes exactly where the
        output may end, before min_tokens only if nothing else may follow. An output that max_tokens cuts is incomplete,
        and its finish_reason is "length".
    logits_processors: functions that change the logits [vocab] of each sampled token, fp32 and on the engine's device,
        before everything else does. Called as (output token ids, logits), or with the prompt's token ids in front.
    detokenize: False leaves the text empty and log-probabilities without text.
    truncate_prompt_tokens: keeps the last so many tokens of the prompt; -1 as many as the model can take.
    skip_clone: `clone` may share the parameters' parts, since nothing changes them.
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
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if len(vars(self)) == len(self.__dataclass_fields__):  # after construction
            vars(self).update(vars(replace(self, **{name: value})))
        else:
            vars(self)[name] = value

    def __post_init__(self) -> None:
        with as_request_error("the sampling parameters cannot be read"):
            if isinstance(self.structured_outputs, Mapping):  # as JSON has it
                vars(self).update(structured_outputs=StructuredOutputsParams(**self.structured_outputs))
            check(self)
            if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
                rule = "must be StructuredOutputsParams or a dict of their fields"
                raise RequestError(f"structured_outputs={quoted(self.structured_outputs)}: {rule}")
            # As in vLLM, None stands for an empty list. Lists are copied, as callers may reuse theirs.
            vars(self).update(
                seed=None if self.seed == -1 else self.seed,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                bad_words=tuple(self.bad_words or ()),
                allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                logits_processors=tuple(self.logits_processors or ()),
                logit_bias={int(t): float(b) for t, b in (self.logit_bias or {}).items()},
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate: best_of, or n."""
        return self.best_of if self.best_of is not None else self.n

    @classmethod
    def from_optional(cls, **optional: Any) -> Self:
        """As the constructor, for values that a caller leaves open: None stands for the default.

        Where None has a meaning of its own, as for max_tokens, it keeps that. As in vLLM, the token ids of logit_bias
        may be text, and its numbers are cut to [-100, 100].
        """
        without_none = {f.name for f in fields(cls) if "None" not in str(f.type)}
        given = {name: value for name, value in optional.items() if value is not None or name not in without_none}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            with as_request_error(f"logit_bias={quoted(bias)}: must be a dict from token id to a number"):
                given["logit_bias"] = {int(t): max(-MOST_BIAS, min(b, MOST_BIAS)) for t, b in bias.items()}
        return cls(**given)

    def clone(self) -> Self:
        """A copy that shares nothing with this object but the logits processors; with skip_clone, a shallow copy."""
        if self.skip_clone:
            return copy.copy(self)
        return copy.deepcopy(self, {id(shared): shared for shared in (self.logits_processors, *self.logits_processors)})
