"""Sampling parameters: how the tokens of a request are chosen, and when its sequences end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

import xxhash

from nanovllm.errors import RequestError, as_request_error, quoted, unknown_name_message
from nanovllm.outputs import RequestOutputKind
from nanovllm.rules import FLAG, Rule, argument, check_fields, check_together, is_whole, number, one_of, whole
from nanovllm.sampling_rules import (
    ALLOWED,
    BIAS,
    CHOICE,
    GREEDY_EPS,
    PROCESSORS,
    SCHEMA,
    STOP,
    TEXT,
    TEXTS,
    TOKEN_IDS,
    optional,
)
from nanovllm.vllm_names import SAMPLING_PARAMETERS, own_arguments

MOST_BIAS = 100.0  # that `SamplingParams.from_optional` passes on
# (output token ids, logits) -> logits, or (prompt token ids, output token ids, logits) -> logits.
LogitsProcessor = Callable[..., Any]

PENALTY = number("must be a number from -2 to 2", lambda x: -2 <= x <= 2)
LOGPROBS = whole(0, ", None, or -1 for the whole vocabulary", also=(None, -1), most=None)
EMPTY: tuple[Any, ...] = ((), [], None)
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured outputs


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What every output of a request must match: exactly one of five kinds. Invalid values raise RequestError.

    json: of a pydantic model class the schema is kept. An object with `properties` takes no others, unless the schema
        speaks of them (additionalProperties, patternProperties).
    regex: in the syntax of Rust's regex library: without look-around and backreferences, and with all of Unicode in
        classes such as \\w.
    grammar: in Lark's or GBNF's (EBNF's) notation.
    """

    json: str | dict[str, Any] | type | None = argument(
        None, optional(SCHEMA), "a JSON schema, as a dict, as JSON text, or as a pydantic model class"
    )
    regex: str | None = argument(None, optional(TEXT), "a regular expression that matches the entire output")
    choice: Sequence[str] | None = argument(None, optional(CHOICE), "texts, one of which is the output")
    grammar: str | None = argument(None, optional(TEXT), "a context-free grammar")
    json_object: bool | None = argument(
        None, Rule(lambda value: value is None or value is True, "must be True or left out"), "True for any JSON object"
    )
    disable_any_whitespace: bool = argument(False, FLAG, "JSON without spaces and line breaks between its parts")
    disable_additional_properties: bool = argument(
        False, FLAG, "objects with patternProperties take no other properties either"
    )
    whitespace_pattern: str | None = argument(
        None,
        optional(TEXT),
        "a regular expression for what stands between parts of JSON instead of up to 64 spaces, tabs and line breaks",
    )

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
            check_fields(self, RequestError)
            given = [name for name in KINDS if getattr(self, name) is not None]
            if len(given) != 1:
                kinds = " and ".join(given) or "no kind"
                raise RequestError(f"structured outputs have {kinds}: give exactly one of {', '.join(KINDS)}")
            check_together(self, self._contradictions(given[0]), RequestError)
            if self.choice is not None:
                object.__setattr__(self, "choice", tuple(self.choice))

    def _contradictions(self, kind: str) -> Iterator[tuple[str, bool, str]]:
        """As of `rules.check_together`."""
        is_json = kind in ("json", "json_object")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            yield name, bool(getattr(self, name)) and not is_json, "needs json or json_object"
        yield "disable_additional_properties", self.disable_additional_properties and kind != "json", "needs json"
        is_twice = self.disable_any_whitespace and self.whitespace_pattern is not None
        yield "whitespace_pattern", is_twice, "needs disable_any_whitespace=False"


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and rules.

    Invalid values raise RequestError: when the object is made and, of values that were assigned later, when a request
    is made with it. Changes do not affect requests already added. Of some parameters there is more to say than their
    meaning below:

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
    use_beam_search: a search runs a request of one token for each beam and length. The prefix cache has all but the
        last tokens of a beam, up to kvcache_block_size of them (at most 256): small blocks make a search faster.
        The engine's metrics count these requests.
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
    stop: str | Sequence[str] = argument((), optional(STOP), "text that ends the output", off=EMPTY)
    stop_token_ids: Sequence[int] = argument((), optional(TOKEN_IDS), "token that ends the output")
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
        optional(BIAS),
        "added to a token's logit, such as 42=-inf to ban it",
        off=({}, None),
    )
    bad_words: Sequence[str] = argument((), optional(TEXTS), "text that is never generated", off=EMPTY)
    allowed_token_ids: Sequence[int] | None = argument(
        None, optional(ALLOWED), "the only tokens that are generated", off=(None,)
    )
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
        (), optional(PROCESSORS), "functions that change the logits of each sampled token", off=EMPTY
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
            described = fields(self)
            own = own_arguments(
                "sampling parameter", given, [f.name for f in described], SAMPLING_PARAMETERS, RequestError
            )
            for field in described:
                default = {} if field.default is MISSING else field.default
                setattr(self, field.name, own.get(field.name, default))
            self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values, and keep tuples for lists, which callers may reuse."""
        with as_request_error("the sampling parameters cannot be read"):
            if isinstance(self.structured_outputs, Mapping):  # as JSON has it
                self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
            check_fields(self, RequestError)
            check_together(self, self._contradictions(), RequestError)
            self.seed = None if self.seed == -1 else self.seed
            self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())  # None: an empty list
            self.stop_token_ids = tuple(self.stop_token_ids or ())
            self.bad_words = tuple(self.bad_words or ())
            self.logits_processors = tuple(self.logits_processors or ())
            self.allowed_token_ids = None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            self.logit_bias = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}

    def _contradictions(self) -> Iterator[tuple[str, bool, str]]:
        """What is wrong with values that are right by themselves, as of `rules.check_together`."""
        several = self.num_sequences > 1
        name = "n" if self.n > 1 else "best_of"
        scores = self.max_tokens == 0
        best_of = self.best_of is not None and self.best_of < self.n
        yield "best_of", best_of, f"must be None or a whole number of at least n={self.n}"
        most = self.max_tokens
        yield "min_tokens", most is not None and self.min_tokens > most, f"must be at most max_tokens={quoted(most)}"
        stops = bool(self.stop) and not self.detokenize
        yield "detokenize", stops, "must be True with stop, which is found in the text"
        alone = "must be at least 1, or 0 with prompt_logprobs, which scores the prompt alone"
        yield "max_tokens", scores and self.prompt_logprobs is None, alone
        yield name, scores and several, "must be 1 with max_tokens=0, which generates nothing"
        if not self.use_beam_search:
            same = "must be 1 with greedy sampling, whose sequences would all be the same"
            yield name, self.is_greedy and several, same
            yield "early_stopping", self.early_stopping is not False, "needs use_beam_search=True"
            yield "length_penalty", self.length_penalty != 1.0, "needs use_beam_search=True"
            return
        yield "use_beam_search", not several, "needs n or best_of of at least 2, the beam width"
        for field in fields(self):
            if off := field.metadata["off"]:
                rule = f"must be {off[0]!r} with use_beam_search, which ranks tokens by the raw logits"
                yield field.name, getattr(self, field.name) not in off, rule

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
