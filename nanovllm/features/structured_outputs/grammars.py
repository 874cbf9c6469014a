"""Compiles grammars with llguidance, within limits of time, memory and stack."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from nanovllm.data.batch import PackedMask
from nanovllm.errors import RequestError, one_line, quoted, told
from nanovllm.features.structured_outputs.masks import (
    MOST_SHOWN,
    CompiledGrammar,
    MatchedGrammar,
    bit_set,
    library_error,
)
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

WHITESPACE = r"[ \t\n\r]{1,64}"  # without a bound, small models go on with it for ever
MOST_KEPT = 32  # compiled grammars, the least recently used is dropped first
MOST_THREADS = 4
# The library bounds a mask by these limits. It does not bound the time of compiling, which grows with the square of a
# grammar's size, nor its recursion, which takes 8 kB of stack for each reference in a chain. The size of the text does:
# compiling takes a few seconds at most, in a thread that holds no lock of the interpreter.
LIMITS: Mapping[str, Any] = MappingProxyType(
    {"initial_lexer_fuel": 200_000, "max_lexer_states": 20_000, "verbose_errors": False}
)
MOST_BYTES: Mapping[str, int] = MappingProxyType({"json": 1 << 17, "regex": 1 << 15, "grammar": 1 << 15})
MOST_CHOICE_BYTES = 1 << 20  # of choices, which are flat
MOST_PARTS = 3000  # objects of a schema: the time grows with the square of the properties of one
STACK_BYTES = 256 << 20  # of address space; memory is taken as it is used
MOST_SECONDS = 30.0  # of compiling, which then goes on unwatched
MOST_MULTIPLE = 100_000
T = TypeVar("T")
_STACK_SIZE = threading.Lock()  # held while the stack of new threads, which the whole process shares, is another one


class LLGuidanceCompiler:
    """Compiles the structured outputs of one engine's requests. See `engine.resolved_sampling.GrammarCompiler`."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="token masks")
        self._library_tokenizer: Any = None  # llguidance's, made for the first grammar
        self._matchers: OrderedDict[tuple[str, str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # of the matchers, held for moments only
        self._reading = threading.Lock()  # held while a new grammar is compiled

    def compile(
        self, params: StructuredOutputsParams, end_tokens: Collection[int], allowed: PackedMask | None
    ) -> MatchedGrammar:
        if not end_tokens:
            raise RequestError(
                "structured_outputs need a token that ends the output, and ignore_eos or the checkpoint leaves none: "
                "give stop_token_ids, or ignore_eos=False"
            )
        return MatchedGrammar(
            self.prepare(params),
            self._pool,
            self._library_tokenizer,
            eos=bit_set(self._library_tokenizer.eos_tokens),
            ends=bit_set(end_tokens),
            allowed=None if allowed is None else int.from_bytes(allowed.bits, "little"),
        )

    def prepare(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The compiled grammar, before its first token. It is kept for the next request with the same one."""
        for library in ("llguidance", "jsonschema"):
            if importlib.util.find_spec(library) is None:
                raise RequestError(
                    f"structured_outputs need the library {library}, which is not installed: "
                    "pip install 'nanovllm[structured]'"
                )
        kind, text, options = _source(params)
        if kind == "json" and (parts := text.count("{")) > MOST_PARTS:
            raise RequestError(f"json has {parts:,} objects: give at most {MOST_PARTS:,}")
        key = (kind, text, json.dumps(options))
        if (kept := self._kept(key)) is not None:
            return kept
        try:
            with self._reading:
                return self._kept(key) or self._compiled(key, options)
        except RequestError as error:
            value = getattr(params, kind)
            raise RequestError(f"{kind}={quoted(value)}: cannot be used for structured outputs: {error}") from None

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _kept(self, key: tuple[str, str, str]) -> CompiledGrammar | None:
        with self._lock:
            if key in self._matchers:
                self._matchers.move_to_end(key)
            return self._matchers.get(key)

    def _compiled(self, key: tuple[str, str, str], options: dict[str, Any]) -> CompiledGrammar:
        kind, text, _ = key
        tokenizer = self._read_tokenizer()
        judge: Callable[[str], str | None] = _no_judge
        if kind == "json":
            text, judge = prepared(text, options.pop("disable_additional_properties"))
        elif kind == "choice":
            judge = partial(_choice_error, frozenset(json.loads(text)))
        _check_size(kind, text, options)
        compiled = CompiledGrammar(_with_deep_stack(partial(matcher_of, tokenizer, kind, text, options)), judge)
        with self._lock:
            self._matchers[key] = compiled
            if len(self._matchers) > MOST_KEPT:
                self._matchers.popitem(last=False)
        return compiled

    def _read_tokenizer(self) -> Any:
        """The library's tokenizer, which takes about a second for a large vocabulary."""
        if self._library_tokenizer is None:
            from llguidance import LLTokenizer
            from tokenizers import Tokenizer as Backend

            own = self._tokenizer
            if not isinstance(own, HuggingFaceTokenizer) or own.backend is None:
                raise RequestError("they need a tokenizer with a tokenizer.json: add the file to the model directory")
            try:
                copied = Backend.from_str(own.backend.to_str())
                copied.no_padding()
                copied.no_truncation()
                known = copied.get_vocab_size(with_added_tokens=True)
                # It needs an end token that the tokenizer knows; `MatchedGrammar` puts in those of the request.
                ends = [token for token in (*self._eos_token_ids, *own.silent_ids) if token < known]
                self._library_tokenizer = LLTokenizer(
                    copied.to_str(), n_vocab=max(self._vocab_size, known), eos_token=ends or None
                )
            except Exception as error:
                raise RequestError(f"llguidance cannot read the tokenizer: {told(error)}") from None
        return self._library_tokenizer


def _source(params: StructuredOutputsParams) -> tuple[str, str, dict[str, Any]]:
    """Kind, text and options of the grammar."""
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace, "coerce_one_of": True}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    if params.json is not None:
        text = params.json if isinstance(params.json, str) else json.dumps(params.json)
        return "json", text, options | {"disable_additional_properties": params.disable_additional_properties}
    if params.json_object:
        return "json_object", '{"type": "object"}', options
    if params.choice is not None:
        return "choice", json.dumps(params.choice), {}
    if params.regex is not None:
        return "regex", params.regex, {}
    assert params.grammar is not None
    return "grammar", params.grammar, {}


def _check_size(kind: str, text: str, options: Mapping[str, Any]) -> None:
    size = len(text.encode()) + len(options.get("whitespace_pattern", ""))
    most = MOST_BYTES.get(kind, MOST_CHOICE_BYTES)
    if size > most:
        raise RequestError(f"it has {size:,} bytes: give at most {most:,}")


def prepared(text: str, close_all: bool) -> tuple[str, Callable[[str], str | None]]:
    """A schema as the library gets it, and what judges outputs. Raises RequestError."""
    from nanovllm.features.structured_outputs.checks import SchemaCheck
    from nanovllm.features.structured_outputs.schemas import for_grammar, read_json

    try:
        check_multiples(read_json(text))
        return for_grammar(text, close_all), SchemaCheck(read_json(text)).error
    except RecursionError:
        raise RequestError("it is nested too deeply") from None
    except ArithmeticError:
        raise RequestError("it has a number with too large an exponent") from None


def _with_deep_stack(function: Callable[[], T]) -> T:
    """The result of the function, which runs in a thread of its own, with a stack for deep grammars.

    The library recurses, and a stack that overflows ends the process.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:  # a panic of the library is no Exception
            made.set_exception(error)

    # A daemon: what is still compiled must not keep the process from ending.
    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise RequestError(f"no thread can be started to read it: {told(error)}") from None
        finally:
            threading.stack_size(before)
    try:
        return made.result(MOST_SECONDS)
    except TimeoutError:
        raise RequestError(f"compiling it takes more than {MOST_SECONDS:g} s: make it simpler") from None


def check_multiples(schema: Any) -> None:
    """Raise RequestError for a multipleOf that takes the library minutes and gigabytes: both grow with the number."""
    if isinstance(schema, Mapping):
        number = schema.get("multipleOf")
        if isinstance(number, int | float) and number > MOST_MULTIPLE:
            raise RequestError(f"multipleOf={quoted(number)}: must be at most {MOST_MULTIPLE:,}")
    for part in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        check_multiples(part)


def matcher_of(tokenizer: Any, kind: str, text: str, options: Mapping[str, Any]) -> Any:
    """llguidance's matcher before the first token, whose mask has been made once. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        matcher = LLMatcher(tokenizer, _grammar(kind, text, options), log_level=0, limits=LLParserLimits(**LIMITS))
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()
    except BaseException as error:  # no Exception if Rust panics; nothing interrupts a thread but the first
        raise RequestError(one_line(str(error), MOST_SHOWN)) from None
    if not first.is_error():
        return matcher
    reason = library_error(first)
    raise RequestError("it matches nothing" if "NoExtension" in reason else reason)


def _grammar(kind: str, text: str, options: Mapping[str, Any]) -> str:
    """The text as llguidance's grammar. Raises ValueError."""
    import llguidance

    library: Any = llguidance  # its stubs list what may be given by literals

    if kind in ("json", "json_object"):
        return str(library.LLMatcher.grammar_from_json_schema(text, defaults=dict(options)))
    if kind == "choice":
        # One terminal: its automaton takes thousands of choices, where a parser would follow each of them.
        texts = json.loads(text)
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in texts if choice)
        lark = f"start: CHOICE{'?' if '' in texts else ''}\nCHOICE: {choices}" if choices else "start:"
        return str(library.LLMatcher.grammar_from_lark(lark))
    return str(library.grammar_from(kind, text))


def _no_judge(_: str) -> None:
    """Of outputs of which the grammar alone knows the language."""


def _choice_error(choices: Collection[str], text: str) -> str | None:
    return None if text in choices else "it is none of the choices"
