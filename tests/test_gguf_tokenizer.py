"""Tokenizers of GGUF files: the same ids as the tokenizers that they were made from, and what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cases import QUICK, TEXTS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GemmaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf
from checkpoints import refusal
from gguf import TokenType
from gguf_files import add_value
from tokenizer_files import byte_symbols, data_of

from nanovllm.formats.gguf.header import read_header
from nanovllm.formats.gguf.tokenizer import end_token_ids, merges_by_score
from nanovllm.text.tokenizer import HuggingFaceTokenizer, load_tokenizer

END = "<|end|>"
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
WORDS = ("the", " the", "'s", "42", "in", " in", "\n\n", "  ", "日本", "é", "ab")
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def write(path: Path, values: dict[str, Any]) -> Path:
    """A GGUF file that has nothing but metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        add_value(writer, key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# ---- byte-level


def byte_level() -> tuple[list[str], list[tuple[str, str]]]:
    """A vocabulary in which words are merged, and its merges."""
    symbols = byte_symbols()
    tokens = [symbols[byte] for byte in range(256)]
    merges: list[tuple[str, str]] = []
    for text in WORDS:
        whole, *rest = (symbols[byte] for byte in text.encode())
        for symbol in rest:
            if (whole, symbol) not in merges:
                merges.append((whole, symbol))
            whole += symbol
            if whole not in tokens:
                tokens.append(whole)
    return [*tokens, END, "<tool>"], merges


def byte_level_values(pre: str, **others: Any) -> dict[str, Any]:
    tokens, merges = byte_level()
    types = [TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL, TokenType.USER_DEFINED]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
        **others,
    }


def byte_level_reference(expression: str, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    """As a tokenizer.json has it."""
    tokens, merges = byte_level()
    vocab = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


REFERENCES = {
    "llama-bpe": byte_level_reference(LLAMA_3, ignore_merges=True),
    "qwen2": byte_level_reference(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"), nfc=True),
    "qwen35": byte_level_reference(QWEN_3_5, nfc=True),
}


@pytest.fixture(scope="module", params=REFERENCES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    values = byte_level_values(request.param, add_bos_token=False)
    path = write(tmp_path_factory.mktemp("gguf") / "model.gguf", values)
    return HuggingFaceTokenizer(path), REFERENCES[request.param]


@given(text=TEXTS)
@QUICK
def test_byte_level_gives_the_ids_of_the_original(pair: tuple[Any, Tokenizer], text: str) -> None:
    tokenizer, reference = pair
    for each in (text, f"a{text} 1234{END}{text}<tool> the's\n"):
        ids = reference.encode(each).ids
        assert tokenizer.encode(each) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert data_of(tokenizer, ids) == reference.decode(ids, skip_special_tokens=False).encode()


IN_THREES = ["123", "4"]
DIGITS = {
    **{"gpt-2": ["1234"], "llama-bpe": IN_THREES, "gpt-4o": IN_THREES},
    **{name: list("1234") for name in ("qwen2", "qwen35", "smollm")},
}


@pytest.mark.parametrize("pre", DIGITS)
def test_numbers_are_split_as_the_pre_tokenizer_says(pre: str, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write(tmp_path / "model.gguf", byte_level_values(pre)))
    assert tokenizer.backend is not None and tokenizer.backend.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("1234")] == DIGITS[pre]


def test_a_message_of_gpt_oss_does_not_end_a_sequence(tmp_path: Path) -> None:
    values = byte_level_values("gpt-4o")
    count = len(values["tokens"])
    ends = ["<|return|>", "<|call|>"]
    for others, expected in (([], [count - 2]), (ends, [count - 2, count, count + 1])):
        tokens = [*values["tokens"], *others]
        types = [*values["token_type"], *[int(TokenType.CONTROL)] * len(others)]
        tokens[0], types[0] = "<|end|>", int(TokenType.CONTROL)
        tokens[count - 2] = "<|endoftext|>"
        path = write(tmp_path / "model.gguf", {**values, "tokens": tokens, "token_type": types})
        assert sorted(end_token_ids(read_header(path))) == ([0, *expected] if not others else expected)


# ---- SentencePiece


def sentence_piece_values(**others: Any) -> dict[str, Any]:
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "日", "é", "▁t", "he", "▁the", "in", "▁in", "ing", "▁a", "▁▁", "th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [int(kind) for kind in [*types, *[TokenType.NORMAL] * len(pieces)]],
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **others,
    }


def sentence_piece_ids(values: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE as llama.cpp describes it: the neighbours whose union scores most are joined first."""
    tokens = values["tokens"]
    scores = values["scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    parts = list(f" {text}".replace(" ", "▁")) if text else []
    while True:
        joined = [(scores[vocab[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not joined:
            break
        i = -max(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [[vocab[p]] if p in vocab else [vocab[f"<0x{byte:02X}>"] for byte in p.encode()] for p in parts]
    return [1, *(token for group in ids for token in group)]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write(tmp_path_factory.mktemp("gguf") / "m.gguf", sentence_piece_values()))


@given(text=TEXTS)
@QUICK
def test_sentence_piece_gives_the_ids_of_its_algorithm(sentence_piece: HuggingFaceTokenizer, text: str) -> None:
    values = sentence_piece_values()
    for each in (text, f"the {text}ing  in then a"):
        if not any(piece in each for piece in ("<0x", "<unk>", "<s>", "</s>", "▁")):
            ids = sentence_piece.encode(each)
            assert ids == sentence_piece_ids(values, each)
            assert sentence_piece.decode(ids) == each
            assert data_of(sentence_piece, ids[1:]).decode() in (each, f" {each}")


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> tuple[HuggingFaceTokenizer, Any]:
    """A tokenizer with the merges of the file, in an order that scores do not have, and Transformers' one."""
    values = sentence_piece_values(model="gemma4", scores=None)
    merges = [("i", "n"), ("▁", "in"), ("in", "g"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("t", "h")]
    values |= {"merges": [" ".join(pair) for pair in merges], "add_bos_token": True}
    vocab = {text: index for index, text in enumerate(values["tokens"])}
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": None}
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", values)
    return HuggingFaceTokenizer(path), GemmaTokenizer(vocab, merges, **special)


@given(text=TEXTS)
@QUICK
def test_given_merges_make_the_ids_of_transformers(gemma4: tuple[HuggingFaceTokenizer, Any], text: str) -> None:
    own, reference = gemma4
    for each in (text, f"the {text}ing  in\n\nthen a</s>thing"):
        ids = reference(each).input_ids
        assert own.encode(each) == ([] if ids[:1] == [1] else [1]) + ids
        assert own.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_prefix_follow_the_metadata(tmp_path: Path) -> None:
    values = sentence_piece_values(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    tokenizer = HuggingFaceTokenizer(write(tmp_path / "model.gguf", values))
    ids = tokenizer.encode("the</s> a")
    assert ids[-1] == 2 and ids[0] != 1 and ids.count(2) == 2
    assert tokenizer.decode(ids) == "the a"
    assert tokenizer.silent_ids == {0, 1, 2}


@given(
    scores=st.dictionaries(st.text("ab▁", min_size=1, max_size=5), st.sampled_from([0.0, -1.0, -2.5]), max_size=30),
    special=st.sets(st.text("ab▁", min_size=1, max_size=2), max_size=2),
)
@QUICK
def test_merges_follow_from_scores_as_in_transformers(scores: dict[str, float], special: set[str]) -> None:
    vocab = {text: index for index, text in enumerate(scores)}
    assert merges_by_score(vocab, scores, special) == generate_merges(vocab, scores, special)


# ---- refused

TOKENS = byte_level()[0]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"model": None}, "has no tokenizer; supported: gpt2, llama, gemma4"),
    "another kind": ({"model": "t5"}, "has a tokenizer of kind 't5'; supported: gpt2, llama, gemma4"),
    "a pre-tokenizer": ({"pre": "superbpe"}, "pre='superbpe': this pre-tokenizer is not supported"),
    "no tokens": ({"tokens": None, "token_type": None}, "has no tokenizer.ggml.tokens, which its tokenizer needs"),
    "tokens twice": ({"tokens": [*TOKENS[:-1], "a"]}, "has 'a' twice, as tokens 97 and"),
    "merges of others": ({"merges": ["zz zz"]}, "the tokenizer in .* cannot be read: .*zz"),
    "types of some": ({"token_type": [1, 1]}, "token_type must be a list of .* numbers, and it has 2 values"),
    "spaces": ({"add_space_prefix": True}, "add_space_prefix=True is not supported"),
}


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    cases = [(byte_level_values("gpt-2") | changes, message) for changes, message in REFUSED.values()]
    for values, message in [*cases, (sentence_piece_values(scores=None), "scores must be a list of")]:
        path = write(tmp_path / "model.gguf", values)
        found = refusal(lambda path=path: HuggingFaceTokenizer(path))
        assert re.search(message, found), found
    assert load_tokenizer(write(path, byte_level_values("gpt-2") | {"model": None})) is None
