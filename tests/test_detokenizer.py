"""Incremental detokenization: complete characters only, and the text of all tokens at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cases import QUICK
from tokenizer_files import write_byte_fallback, write_byte_level

from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("bytes")
    write_byte_level(path)
    return HuggingFaceTokenizer(path)


@pytest.fixture(scope="module")
def marks_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("marks")
    write_byte_fallback(path)
    return HuggingFaceTokenizer(path)


class Slow:
    """The same tokenizer without its backend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self.token_text = tokenizer.token_text


BOTH = pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])


def pieces(tokenizer: Any, token_ids: Sequence[int], prompt: Sequence[int] = (), **options: Any) -> list[str]:
    """What each token brings, then what is flushed."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.step(token) for token in token_ids), detokenizer.flush()]


@BOTH
@given(data=st.data())
@QUICK
def test_any_tokens_give_their_text(bytes_tokenizer: HuggingFaceTokenizer, slow: bool, data: st.DataObject) -> None:
    """Bytes that are no text, characters cut anywhere, special tokens, and tokens that only the model knows."""
    tokenizer = Slow(bytes_tokenizer) if slow else bytes_tokenizer
    token = st.one_of(st.integers(0, 290), st.integers(128, 255), st.integers(256, 275))
    token_ids = data.draw(st.lists(token, max_size=40))
    prompt = data.draw(st.lists(token, max_size=12))
    if tokenizer.decode(prompt).endswith(REPLACEMENT):
        prompt = [*prompt, *b"a"]
    for skip in (True, False):
        found = pieces(tokenizer, token_ids, prompt, skip_special_tokens=skip)
        assert "".join(found) == tokenizer.decode(token_ids, skip_special_tokens=skip)


# ---- byte fallback and marked spaces


@BOTH
@given(data=st.data())
@QUICK
def test_text_continues_that_of_the_prompt(
    marks_tokenizer: HuggingFaceTokenizer, slow: bool, data: st.DataObject
) -> None:
    tokenizer = Slow(marks_tokenizer) if slow else marks_tokenizer
    alphabet = st.sampled_from("abc é日本 🎉")
    prompt = data.draw(st.text(alphabet, max_size=8))
    text = data.draw(st.text(alphabet, max_size=12))
    prompt_ids = tokenizer.encode(prompt)
    token_ids = tokenizer.encode(text)
    text = tokenizer.decode([*prompt_ids, *token_ids])
    shown = pieces(tokenizer, token_ids, prompt_ids)
    assert tokenizer.decode(prompt_ids) + "".join(shown) == text
    assert not any(REPLACEMENT in piece for piece in shown)


def test_malformed_bytes_never_change_what_was_shown(marks_tokenizer: HuggingFaceTokenizer) -> None:
    """A run of bytes is decoded together: if it becomes malformed, that would take back the character before."""
    byte = {value: marks_tokenizer.tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    a, b = marks_tokenizer.tokenizer.convert_tokens_to_ids(["▁a", "b"])
    good = [byte[value] for value in "日".encode()]
    assert pieces(marks_tokenizer, [*good, byte[255], a, b]) == ["", "", "日", "", REPLACEMENT + " a", "b", ""]
    shown = pieces(marks_tokenizer, [a, *[byte[255]] * 50, *good, b])
    assert shown[0] == "a" and "".join(shown).replace(REPLACEMENT, "") in ("ab", "a日b")


# ---- slow tokenizers


class SentencePieceLike:
    """A space before each word; that before the first is dropped, as such decoders do. 0 is a special token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" {chr(token)}" for token in token_ids if token)[1:]


def test_spaces_between_words_are_kept_where_decoders_drop_the_first() -> None:
    assert "".join(pieces(SentencePieceLike(), [97, 98, 99, 0, 100, 0, 0, 101])) == "a b c d e"
    assert "".join(pieces(SentencePieceLike(), [97, 98], [100])) == " a b"
