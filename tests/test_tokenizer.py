"""Text in and out: whole characters only, the same text in the end, and a sentence for files that cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from nanovllm.errors import ModelError
from nanovllm.tokenizer import HuggingFaceTokenizer, IncrementalDetokenizer, Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"
END = "<|end|>"
MERGED = ("th", "in", " a", "日本", "é", "👍🏽", "한")


def byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_byte_level(path: Path) -> None:
    """A byte-level tokenizer: one token for each byte, a few merged ones, and an end token."""
    symbols = byte_symbols()
    vocab = {symbol: byte for byte, symbol in symbols.items()}
    merges: list[tuple[str, str]] = []
    for text in MERGED:
        whole, *rest = (symbols[byte] for byte in text.encode())
        for symbol in rest:
            if (whole, symbol) not in merges:
                merges.append((whole, symbol))
            whole += symbol
            vocab.setdefault(whole, len(vocab))
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    loaded = load_tokenizer(model_dir)
    assert loaded is not None
    return loaded


TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n"),
        st.sampled_from("éßñ"),
        st.sampled_from("日本語한"),
        st.sampled_from("👍🏽🎉𝄞"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def stream(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The text after each step, when steps bring these numbers of tokens (then one each)."""
    detokenizer, texts, length = IncrementalDetokenizer(tokenizer), [], 0
    steps = iter(sizes)
    while length < len(token_ids):
        length += next(steps, 1)
        texts.append(detokenizer.update(token_ids[:length]))
    return texts


def test_special_tokens_are_read_and_not_printed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"in{END}a")
    assert len(ids) == 3, "a merged token, the end token, a byte"
    assert tokenizer.decode(ids) == "ina"
    assert all(type(token) is int for token in ids)


@given(text=TEXTS)
@QUICK
def test_encoding_and_decoding_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), max_size=10))
@QUICK
def test_half_a_character_is_never_shown_and_all_are_in_the_end(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    token_ids = tokenizer.encode(text)
    texts = stream(tokenizer, token_ids, sizes)
    for earlier, later in zip(["", *texts], texts, strict=False):
        assert later.startswith(earlier), "text that was shown never changes"
        assert REPLACEMENT in text or REPLACEMENT not in later
        assert text.startswith(later)
    if texts and not text.endswith(REPLACEMENT):
        assert texts[-1] == text == tokenizer.decode(token_ids)


def test_a_character_of_four_bytes_appears_with_its_last(tokenizer: Tokenizer) -> None:
    token_ids = [*b"x", *"🎉".encode(), *b"y"]
    assert stream(tokenizer, token_ids, []) == ["x", "x", "x", "x", "x🎉", "x🎉y"]


def test_characters_cut_by_steps_of_several_tokens(tokenizer: Tokenizer) -> None:
    token_ids = list("日本語".encode())
    assert stream(tokenizer, token_ids, [2, 2, 2, 3]) == ["", "", "日本", "日本語"]


@given(data=st.binary(max_size=24), sizes=st.lists(st.integers(1, 4), max_size=10))
@QUICK
def test_bytes_that_are_no_text_never_change_what_was_shown(
    tokenizer: Tokenizer, data: bytes, sizes: list[int]
) -> None:
    token_ids = list(data)  # a byte is its own token
    whole = tokenizer.decode(token_ids)
    texts = stream(tokenizer, token_ids, sizes)
    for earlier, later in zip(["", *texts], texts, strict=False):
        assert later.startswith(earlier) and whole.startswith(later)
    if texts and not whole.endswith(REPLACEMENT):
        assert texts[-1] == whole


def test_special_tokens_within_a_stream_are_passed_over(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode(END)
    token_ids = [*b"a", *end, *"é".encode()[:1], *"é".encode()[1:], *end]
    assert stream(tokenizer, token_ids, []) == ["a", "a", "a", "aé", "aé"]


class SentencePieceLike:
    """A space before each word; that before the first is dropped, as such decoders do. 0 is a special token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f" {chr(token)}" for token in token_ids if token)[1:]


@pytest.mark.parametrize("sizes", [[], [1, 2], [3], [2, 1, 2]])
def test_spaces_between_words_are_kept_where_decoders_drop_the_first(sizes: list[int]) -> None:
    assert stream(SentencePieceLike(), [97, 98, 99, 0, 100, 0, 0, 101], sizes)[-1] == "a b c d e"


class CountingTokenizer:
    """Counts the tokens that it is asked to decode."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        self.decoded += len(token_ids)
        return bytes(token_ids).decode(errors="replace")


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    counting = CountingTokenizer()
    detokenizer, token_ids = IncrementalDetokenizer(counting), list("日本語のテキスト".encode() * 20)
    for length in range(1, len(token_ids) + 1):
        detokenizer.update(token_ids[:length])
    assert detokenizer.text == "日本語のテキスト" * 20
    assert counting.decoded < 20 * len(token_ids)


# ---- files


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").mkdir()  # not a file
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "file, content",
    [
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab"'),
        ("tokenizer.json", ""),
        ("tokenizer.json", "[1, 2]"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{"),
    ],
)
def test_damaged_files_are_refused_with_their_directory(
    file: str, content: str, model_dir: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=rf"tokenizer files in {re.escape(str(tmp_path))} cannot be read: \S"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("lonely", ["tokenizer_config.json", "vocab.json"])
def test_files_that_make_no_tokenizer_are_refused(lonely: str, model_dir: Path, tmp_path: Path) -> None:
    content = (model_dir / lonely).read_text() if lonely == "tokenizer_config.json" else '{"a": 0}'
    (tmp_path / lonely).write_text(content)
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        HuggingFaceTokenizer(tmp_path / "absent")
