"""Stop strings: found wherever they complete, cut as promised, and never shown before their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from engine_helpers import Bench, prompt_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_requests import SpelledOut
from tokenizer_files import CROSSING, END, MERGED, byte_symbols, write_byte_level

from nanovllm.engine.detokenizer import SequenceText
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import HuggingFaceTokenizer

REPLACEMENT = "\ufffd"
QUICK = settings(max_examples=80, suppress_health_check=list(HealthCheck))
LETTERS = "aab é日本🎉"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(path)
    return HuggingFaceTokenizer(path)


class Ending(NamedTuple):
    """What a text must come to: the visible text after each token, the final text, and why it ended after how many."""

    visible: list[str]
    text: str
    stop: str | None
    num_tokens: int


def reference(tokenizer: HuggingFaceTokenizer, token_ids: Sequence[int], params: SamplingParams) -> Ending:
    """The same from complete decodes, one more token at a time."""
    visible = []
    known = ""
    for count in range(1, len(token_ids) + 2):
        text = tokenizer.decode(token_ids[:count])
        if text.endswith(REPLACEMENT) and count <= len(token_ids):  # part of a character: wait for the rest
            text = known
        for end in range(len(known) + 1, len(text) + 1):
            for stop in params.stop if min(count, len(token_ids)) > params.min_tokens else ():
                if text[:end].endswith(stop):
                    final = text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]
                    return Ending([*visible, final], final, stop, min(count, len(token_ids)))
        known = text
        starts = [n for n in range(1, len(text) + 1) for stop in params.stop if stop[:n] == text[-n:] and n < len(stop)]
        held = 0 if params.include_stop_str_in_output else max(starts, default=0)
        visible.append(text[: len(text) - held])
    return Ending(visible, known, None, len(token_ids))


def cut(tokenizer: HuggingFaceTokenizer, data: bytes, sizes: list[int]) -> list[int]:
    """The bytes as tokens; where one of several bytes fits, `sizes` says in turns whether it is taken."""
    symbols = byte_symbols()
    longer = [*(text.encode() for text in MERGED), *(bytes(values) for values in CROSSING)]
    token_of = {
        piece: tokenizer.tokenizer.convert_tokens_to_ids("".join(symbols[byte] for byte in piece)) for piece in longer
    }
    token_ids = []
    at = 0
    while at < len(data):
        complete = not sizes or sizes[len(token_ids) % len(sizes)] > 1
        fits = [piece for piece in longer if complete and data.startswith(piece, at)]
        token_ids.append(token_of[fits[0]] if fits else data[at])
        at += len(fits[0]) if fits else 1
    return token_ids


CASES = st.fixed_dictionaries(
    {
        "text": st.text(st.sampled_from(LETTERS), max_size=14),
        "sizes": st.lists(st.integers(1, 2), max_size=6),
        "stop": st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=4), max_size=3),
        "include": st.booleans(),
        "min_tokens": st.integers(0, 8),
        "steps": st.lists(st.integers(1, 4), max_size=6),
    }
)


def params_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        stop=case["stop"],
        include_stop_str_in_output=case["include"],
        min_tokens=case["min_tokens"],
        max_tokens=None,
    )


@given(case=CASES)
@QUICK
def test_streamed_text_is_the_reference_cut(tokenizer: HuggingFaceTokenizer, case: dict[str, Any]) -> None:
    params = params_of(case)
    token_ids = cut(tokenizer, case["text"].encode(), case["sizes"])
    assert tokenizer.decode(token_ids) == case["text"]
    expected = reference(tokenizer, token_ids, params)
    text = SequenceText(tokenizer, params)
    shown = []
    for token in token_ids:
        found = text.append([token])
        if found is not None:
            break
        shown.append(text.visible())
        assert REPLACEMENT not in shown[-1]
    found = text.finish()
    assert (found, text.visible(), text.num_tokens) == (expected.stop, expected.text, expected.num_tokens)
    assert shown == expected.visible[: len(shown)]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, [*shown[1:], expected.text], strict=False))


@given(case=CASES)
@QUICK
def test_pieces_join_to_the_text_however_many_tokens_come_at_once(
    tokenizer: HuggingFaceTokenizer, case: dict[str, Any]
) -> None:
    params = params_of(case)
    token_ids = cut(tokenizer, case["text"].encode(), case["sizes"])
    expected = reference(tokenizer, token_ids, params)
    text = SequenceText(tokenizer, params)
    pieces = []
    sizes = iter(case["steps"])
    at = 0
    found = None
    while at < len(token_ids) and found is None:
        size = next(sizes, 1)
        found = text.append(token_ids[at : at + size])
        at = min(at + size, len(token_ids))
        pieces.append(text.take())
        assert text.num_tokens == at, "tokens past the stop string are kept"
    found = text.finish()
    pieces.append(text.take())
    assert (found, "".join(pieces)) == (expected.stop, expected.text)
    assert at >= expected.num_tokens


def read(tokenizer: Any, token_ids: Sequence[int], ends: bool = False, **params: Any) -> tuple[str | None, str]:
    """The stop string and the text of tokens that come all at once."""
    text = SequenceText(tokenizer, SamplingParams(**{"max_tokens": None, **params}))
    text.append(token_ids, ends=ends)
    return text.finish(), text.visible()


def test_the_earliest_to_complete_wins_then_the_first_in_the_list(tokenizer: HuggingFaceTokenizer) -> None:
    assert read(tokenizer, b"xabcd", stop=["abcd", "bc"]) == ("bc", "xa")
    assert read(tokenizer, b"xabcd", stop=["c", "abc"]) == ("c", "xab")
    assert read(tokenizer, b"xabcd", stop=["abc", "c"]) == ("abc", "x")
    at_once = tokenizer.encode("日本")
    assert len(at_once) == 1 and read(tokenizer, at_once, stop=["日本", "日"]) == ("日", "")
    assert read(tokenizer, at_once, stop=["日本", "日"], include_stop_str_in_output=True) == ("日", "日")


def test_the_text_of_an_end_token_is_shown_only_if_that_of_stop_strings_is(tokenizer: HuggingFaceTokenizer) -> None:
    end = tokenizer.encode(END)
    assert read(tokenizer, b"ab", ends=True) == (None, "a")
    assert read(tokenizer, b"ab", ends=True, include_stop_str_in_output=True) == (None, "ab")
    assert read(tokenizer, [*b"ab", *end], ends=True, skip_special_tokens=False) == (None, "ab")
    assert read(tokenizer, [*b"ab", *end], skip_special_tokens=False) == (None, f"ab{END}")
    assert read(tokenizer, [*b"ab", *end]) == (None, "ab")
    assert read(tokenizer, b"ab", ends=True, stop="ab") == (None, "a"), "what was held back is text now"


# ---- in the engine


def test_a_stop_string_ends_its_request_and_no_other() -> None:
    free = Bench(tokenizer=SpelledOut())
    free.add("a", prompt_of(6), 8)
    text = free.run()["a"].outputs[0].text
    tokens = free.tokens("a")
    bench = Bench(tokenizer=SpelledOut())
    stop = text[len(f" {tokens[0]} {tokens[1]}") - 1 : len(f" {tokens[0]} {tokens[1]} ")]  # across two tokens
    bench.add("a", prompt_of(6), 8, stop=stop)
    bench.add("kept", prompt_of(6), 8, stop=stop, include_stop_str_in_output=True)
    bench.add("long", prompt_of(6), 8, stop=stop, min_tokens=8)
    bench.add("other", prompt_of(6, 1), 8)
    bench.run()
    at = text.index(stop)
    assert bench.reason("a") == bench.reason("kept") == ("stop", stop)
    assert bench.finished["a"].outputs[0].text == text[:at]
    assert bench.finished["kept"].outputs[0].text == text[: at + 2]
    assert bench.tokens("a") == bench.tokens("kept") == tokens[:3], "the tokens of the stop string are kept"
    assert bench.reason("long") == ("length", None) and bench.finished["long"].outputs[0].text == text
    assert bench.reason("other") == ("length", None)
    assert bench.manager.pool.num_used == 0
