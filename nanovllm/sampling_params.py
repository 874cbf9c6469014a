"""Sampling parameters: how the tokens of a request are chosen, and when its sequences end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

import xxhash

from nanovllm.errors import RequestError, as_request_error, quoted, unknown_name_message
from nanovllm.outputs import RequestOutputKind
from nanovllm.rules import FLAG, Rule, argument, is_whole, number, one_of, whole
from nanovllm.sampling_rules import GREEDY_EPS, check_lists, check_structured_outputs, check_together
from nanovllm.vllm_names import SAMPLING_PARAMETERS, own_arguments

MOST_BIAS = 100.0  # that `SamplingParams.from_optional` passes on
# (output token ids, logits) -> logits, or (prompt token ids, output token ids, logits) -> logits.
LogitsProcessor = Callable[..., Any]

PENALTY = number("must be a number from -2 to 2", lambda x: -2 <= x <= 2)
LOGPROBS = whole(0, ", None, or -1 for the whole vocabulary", also=(None, -1), most=None)
LIST = Rule(lambda _: True, "")  # `sampling_rules.check_lists`
EMPTY: tuple[Any, ...] = ((), [], None)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What every output of a request must match: exactly one of five kinds. Invalid values raise RequestError.

    json: a JSON schema, as a dict, as text, or as a pydantic model class, of which the schema is kept. An object with
        `properties` takes no others, unless the schema speaks of them (additionalProperties, patternProperties).
    json_object: True for any JSON object.
    regex: a regular expression that matches the entire output, in the syntax of Rust's regex library: without
        look-around and backreferences, and with all of Unicode in classes such as \\w.
    choice: a list of texts, one of which is the output.
    grammar: a context-free grammar in Lark's or GBNF's (EBNF's) notation.
    disable_any_whitespace: JSON without spaces and line breaks between its parts. whitespace_pattern: a regular
        expression for what may stand between them instead of up to 64 spaces, tabs and line breaks.
    disable_additional_properties: objects with patternProperties take no other properties either.
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
                object.__setattr__(self, "json", schema.model_json_schema())
            check_structured_outputs(self)
            if self.choice is not None:
                object.__setattr__(self, "choice", tuple(self.choice))


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and rules.

    Invalid values raise RequestError, at construction and at assignment. Changes do not affect requests already added.
    vLLM's parameters that mean nothing here are left out. Of some parameters there is more to say than their meaning
    below:

    best_of: the n with the highest cumulative log-probability are returned; None means n. With use_beam_search, the
        beam width.
    repetition_penalty: divides positive and multiplies negative logits.
    seed: the same seed gives the same tokens, whatever else is in the batch; -1 means None.
    stop: the text is cut before them unless include_stop_str_in_output is set. stop_token_ids: end the sequence with
        finish_reason "stop", even with ignore_eos.
    min_tokens: no end token (even with ignore_eos) and no stop string before this many tokens.
    max_tokens: 0, with prompt_logprobs, computes and scores the prompt alone.
    logprobs: besides the sampled token. Log-probabilities are of the raw logits.
    bad_words: their last token is never sampled when the output ends with the tokens before it.
    structured_outputs: an end token comes exactly where the output may end, before min_tokens only if nothing else may
        follow. An output that max_tokens cuts is incomplete, and its finish_reason is "length".
    logits_processors: called as (output token ids, logits), or with the prompt's token ids in front; logits are
        [vocab], fp32 and on the engine's device, before everything else changes them.
    detokenize: False leaves the text empty and log-probabilities without text.
    length_penalty: beam search scores finished beams by cumulative log-probability / length ** length_penalty.
    early_stopping: beam search ends with True as soon as enough beams are finished, with False when a better one is
        unlikely, with "never" when a better one is impossible.
    """

    n: int = argument(1, whole(1), "sequences to return for each prompt")
    best_of: int | None = argument(
        None,
        whole(1, also=(None,)),
        "sequences to generate, of which the n best are returned",
    )
    presence_penalty: float = argument(0.0, PENALTY, "subtracted once from logits of generated tokens", off=(0.0,))
    frequency_penalty: float = argument(
        0.0, PENALTY, "subtracted from logits of generated tokens for each occurrence", off=(0.0,)
    )
    repetition_penalty: float = argument(
        1.0,
        number("must be a number above 0", lambda x: x > 0),
        "divides logits of tokens in prompt and output",
        off=(1.0,),
    )
    temperature: float = argument(
        1.0, number("must be a number of at least 0", lambda x: x >= 0), "0 is greedy", off=(0.0,)
    )
    top_p: float = argument(
        1.0,
        number("must be a number above 0 and at most 1", lambda x: 0 < x <= 1),
        "keep the most likely tokens up to this share",
        off=(1.0,),
    )
    top_k: int = argument(
        0,
        whole(1, ", or 0 or -1 for off", also=(0, -1), most=None),
        "keep this many of the most likely tokens; 0 and -1: all",
        off=(0, -1),
    )
    min_p: float = argument(
        0.0,
        number("must be a number from 0 to 1", lambda x: 0 <= x <= 1),
        "drop tokens less likely than this share of the most likely one",
        off=(0.0,),
    )
    seed: int | None = argument(
        None,
        Rule(
            lambda x: x is None or (is_whole(x) and -(2**63) <= x < 2**63),
            "must be None or a whole number that fits 64 bits",
        ),
        "the same for every prompt",
    )
    use_beam_search: bool = argument(False, FLAG, "beam search, n or best_of wide")
    length_penalty: float = argument(
        1.0, number("must be a number"), "of beam search: scores are divided by length ** penalty"
    )
    early_stopping: bool | Literal["never"] = argument(
        False, one_of(True, False, "never"), "of beam search: true, false or never"
    )
    stop: str | Sequence[str] = argument((), LIST, "text that ends the output", off=EMPTY)
    stop_token_ids: Sequence[int] = argument((), LIST, "token that ends the output")
    include_stop_str_in_output: bool = argument(False, FLAG, "keep the stop text")
    ignore_eos: bool = argument(False, FLAG, "continue after the model's end-of-sequence token")
    max_tokens: int | None = argument(
        16,
        whole(0, also=(None,), most=None),
        "most tokens to generate, at most as many as max_model_len leaves; none: as many",
    )
    min_tokens: int = argument(0, whole(0, most=None), "generate at least this many tokens")
    logprobs: int | None = argument(
        None, LOGPROBS, "most likely tokens to report at each output position (JSON); -1: all"
    )
    prompt_logprobs: int | None = argument(None, LOGPROBS, "the same for the prompt")
    skip_special_tokens: bool = argument(True, FLAG, "leave special tokens out of the text")
    logit_bias: Mapping[int, float] = argument(
        {},
        Rule(lambda x: x is None or isinstance(x, Mapping), "must be a dict from token id to a number"),
        "added to a token's logit, such as 42=-inf to ban it",
        off=({}, None),
    )
    bad_words: Sequence[str] = argument((), LIST, "text that is never generated", off=EMPTY)
    allowed_token_ids: Sequence[int] | None = argument(None, LIST, "the only tokens that are generated", off=(None,))
    structured_outputs: StructuredOutputsParams | None = argument(
        None,
        Rule(
            lambda x: isinstance(x, StructuredOutputsParams | None),
            "must be StructuredOutputsParams or a dict of their fields",
        ),
        "what every output matches, see StructuredOutputsParams",
        off=(None,),
    )
    logits_processors: Sequence[LogitsProcessor] = argument(
        (), LIST, "functions that change the logits of each sampled token", off=EMPTY
    )
    detokenize: bool = argument(True, FLAG, "give token ids as text")
    truncate_prompt_tokens: int | None = argument(
        None,
        whole(1, ", None, or -1 for as many as the model can take", also=(None, -1), most=None),
        "keep this many tokens of the prompt's end; -1: as many as the model can take",
    )
    output_kind: RequestOutputKind = argument(
        RequestOutputKind.CUMULATIVE,
        Rule(lambda x: isinstance(x, RequestOutputKind), "must be a RequestOutputKind"),
        "whether outputs hold everything so far, what is new, or only the end",
    )
    skip_clone: bool = argument(False, FLAG, "`clone` may share the parameters' parts, since nothing changes them")

    if not TYPE_CHECKING:  # type checkers see the fields as parameters

        def __init__(self, **given: Any) -> None:
            known = [f.name for f in fields(self)]
            own = own_arguments("sampling parameter", given, known, SAMPLING_PARAMETERS, RequestError)
            self.__dict__.update(_checked(_defaults() | own))

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dict__:
                raise RequestError(unknown_name_message("sampling parameter", name, self.__dict__))
            self.__dict__.update(_checked(self.__dict__ | {name: value}))

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
        # None is the default of the others that may be None.
        known = {f.name for f in fields(cls)} - {"max_tokens"}
        given = {name: value for name, value in optional.items() if value is not None or name not in known}
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


def derived_seed(seed: int, part: Literal["prompt", "sequence"], index: int) -> int:
    """The seed of a part that has none of its own: of a prompt, by the engine's seed and the prompt's number, and of a
    request's further sequence, by the request's seed and the sequence's index.

    It fits 64 bits with a sign, and is the same in every process: xxh3-64 of the decimal text "part seed index".
    """
    return xxhash.xxh3_64_intdigest(f"{part} {seed} {index}".encode()) - 2**63


def _defaults() -> dict[str, Any]:
    """The default of each parameter."""
    return {f.name: {} if f.default is MISSING else f.default for f in fields(SamplingParams)}


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The values as a request keeps them: with tuples for lists, which callers may reuse. Raises RequestError."""
    with as_request_error("the sampling parameters cannot be read"):
        if isinstance(values["structured_outputs"], Mapping):  # as JSON has it
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        for each in fields(SamplingParams):
            each.metadata["rule"].check(each.name, values[each.name], RequestError)
        check_lists(values)
        check_together(values, {field.name: off for field in fields(SamplingParams) if (off := field.metadata["off"])})
        if values["seed"] == -1:
            values["seed"] = None
        if isinstance(values["stop"], str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            values[name] = tuple(values[name] or ())  # as in vLLM, None stands for an empty list
        if values["allowed_token_ids"] is not None:
            values["allowed_token_ids"] = tuple(values["allowed_token_ids"])
        values["logit_bias"] = {int(t): float(b) for t, b in (values["logit_bias"] or {}).items()}
    return values
