"""The bytes of single tokens, and where tokens begin in a text: of every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cases import QUICK, TEXTS
from tokenizer_files import END, data_of, write_by_class, write_byte_fallback, write_byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanovllm.apps.server.completions import Completions
from nanovllm.apps.server.logprobs import LegacyLogprobs, chat_logprobs
from nanovllm.apps.server.protocol import CompletionRequest
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.text.tokenizer import HuggingFaceTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def saved(tokenizer: Tokenizer, path: Path) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_unigram(path: Path) -> None:
    """As T5's and XLM-R's, with bytes for what it does not know, and a token behind every text."""
    words = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "▁in", "日", "é"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    saved(tokenizer, path)


def write_trimming(path: Path) -> None:
    """A byte-level tokenizer that counts spaces to no token, as Llama 3's, with a special token before every text."""
    write_byte_level(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    first = (END, tokenizer.token_to_id(END))
    template = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[first])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    tokenizer.save(str(path / "tokenizer.json"))


WRITERS: dict[str, Callable[[Path], None]] = {
    "byte-level": write_byte_level,
    "byte-level of Llama 3": write_trimming,
    "SentencePiece": write_byte_fallback,
    "unigram": write_unigram,
    **{name: lambda path, name=name: write_by_class(path, name) for name in ("GemmaTokenizer", "LlamaTokenizer")},
}


@pytest.fixture(scope="module", params=WRITERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    WRITERS[request.param](path)
    return HuggingFaceTokenizer(path)


@given(text=TEXTS)
@QUICK
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    data = data_of(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    shown = tokenizer.decode(tokenizer.encode(text)).encode()
    assert data in (shown, b" " + shown), "decoders drop the space that was put before the first word"


def test_special_and_unknown_tokens(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.backend is not None
    end = tokenizer.backend.token_to_id(END)
    assert tokenizer.token_bytes(end) == END.encode() and tokenizer.token_string(end) == END
    assert tokenizer.token_bytes(100_000) is None and tokenizer.token_string(100_000) is None


def test_added_tokens_have_the_bytes_of_their_names(tmp_path: Path) -> None:
    """In a byte-level vocabulary é stands for a byte, but not as the name of an added token."""
    write_byte_level(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("é", normalized=False), AddedToken("<|日|>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("aé<|日|>")] == [
        b"a",
        "é".encode(),
        "<|日|>".encode(),
    ]


def test_words_of_word_pieces_bring_their_space(tmp_path: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", "a"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", special=True), AddedToken("[SEP]", special=True)])
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    saved(backend, tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    text = "Héllo  World"
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(token) for token in ids] == [b"[CLS]", b" hello", b" wor", b"ld", b"[SEP]"]
    assert tokenizer.offsets(text, ids) == [0, 0, 5, 10, 12]


# ---- log-probabilities in answers


def positions_of(tokenizer: HuggingFaceTokenizer, token_ids: Sequence[int]) -> list[dict[int, Logprob]]:
    return [{token: Logprob(-0.5, 1, tokenizer.token_text(token))} for token in token_ids]


def check_places(tokenizer: HuggingFaceTokenizer, token_ids: Sequence[int], found: dict[str, Any], text: str) -> None:
    """The text goes on with the text of each token where that begins, or with the character of which it is a part."""
    for token_id, name, offset in zip(token_ids, found["tokens"], found["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        if token_id in tokenizer.silent_ids:
            continue
        if name.startswith("bytes:"):
            assert 0 <= text[offset:].encode().find(tokenizer.token_bytes(token_id) or b"") < 4
        else:
            assert text.startswith(name, offset)
    assert found["text_offset"] == sorted(found["text_offset"])


def pieces_of(logprobs: LegacyLogprobs, tokenizer: HuggingFaceTokenizer, *parts: Sequence[int]) -> dict[str, list[Any]]:
    """The answer that comes in these parts."""
    found = [logprobs.piece(part, positions_of(tokenizer, part)) for part in parts]
    return {name: [value for each in found for value in each[name]] for name in found[0]}


@given(prompt=TEXTS, text=TEXTS)
@QUICK
def test_tokens_begin_where_their_text_does(tokenizer: HuggingFaceTokenizer, prompt: str, text: str) -> None:
    """Of the text that follows a prompt, in two pieces, however tokens are shown."""
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
    parts = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    found, numbers = (pieces_of(LegacyLogprobs(tokenizer, 0, by, before), tokenizer, *parts) for by in (False, True))
    check_places(tokenizer, ids, found, whole)
    assert numbers["text_offset"] == found["text_offset"]
    assert numbers["tokens"] == [f"token_id:{token}" for token in ids]


def test_tokens_after_a_character_that_stays_incomplete(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    ids = list(b"a\xdcb\xf0\x9f\xdc\x98=")
    assert tokenizer.decode(ids) == "a\ufffdb\ufffd\u0718="
    for found in (
        pieces_of(LegacyLogprobs(tokenizer, 0, False), tokenizer, ids[:5], ids[5:]),
        echoed(tokenizer, None, ids, [])["logprobs"],
    ):
        assert found["text_offset"] == [0, 1, 2, 3, 3, 4, 4, 5]


def echoed(tokenizer: HuggingFaceTokenizer, prompt: str | None, before: list[int], after: list[int]) -> Any:
    """The answer that echoes a prompt, and goes on with `after`."""
    body = CompletionRequest(prompt="", echo=True, logprobs=0)
    text = tokenizer.decode([*before, *after]).removeprefix(tokenizer.decode(before))
    completion = CompletionOutput(0, text, after, logprobs=[*positions_of(tokenizer, after)], finish_reason="length")
    scored = [None, *positions_of(tokenizer, before[1:])][: len(before)]
    output = RequestOutput("", prompt, before, [completion], True, RequestMetrics(0.0), prompt_logprobs=scored)
    return Completions(body, tokenizer).complete([output])["choices"][0]


@given(prompt=TEXTS, text=TEXTS, is_text=st.booleans())
@QUICK
def test_tokens_of_an_echo_begin_where_their_text_does(
    tokenizer: HuggingFaceTokenizer, prompt: str, text: str, is_text: bool
) -> None:
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(text, add_special_tokens=False)
    choice = echoed(tokenizer, prompt if is_text else None, before, after)
    shown = prompt if is_text else tokenizer.decode(before)
    assert choice["text"].startswith(shown)
    if shown == tokenizer.decode(before):
        check_places(tokenizer, [*before, *after], choice["logprobs"], choice["text"])
    if after:
        assert choice["logprobs"]["text_offset"][len(before)] == len(shown)


def test_an_echo_of_text_that_the_tokenizer_changes(tmp_path: Path) -> None:
    """A special token before it, one that the text spells, and two characters that become one."""
    write_trimming(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    text = f"e\u0301 in{END} a"
    choice = echoed(tokenizer, text, tokenizer.encode(text), tokenizer.encode("b", add_special_tokens=False))
    assert choice["text"] == f"{text}b"
    assert choice["logprobs"]["tokens"] == [END, "é", " ", "in", END, " a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 3, 5, 12, 14]


def test_a_stop_string_ends_the_text_before_its_tokens(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    ids = list(b"abSTOP")
    logprobs = LegacyLogprobs(tokenizer, 0, False)
    found = logprobs.piece(ids, positions_of(tokenizer, ids), "ab", ends=True)
    assert found["text_offset"] == [0, 1, 2, 2, 2, 2]


def test_alternatives_that_are_parts_of_characters_differ(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    position = {token: Logprob(-float(i), i, tokenizer.token_text(token)) for i, token in enumerate(b"\xf0\xf1 a", 1)}
    legacy = LegacyLogprobs(tokenizer, 4, False).piece([0xF0], [position])
    assert legacy["top_logprobs"] == [{r"bytes:\xf0": -1.0, r"bytes:\xf1": -2.0, " ": -3.0, "a": -4.0}]
    assert legacy["tokens"] == [r"bytes:\xf0"]
    for as_ids in (False, True):
        (entry,) = chat_logprobs([0xF0], [position], 4, as_ids, tokenizer)["content"]
        assert [top["bytes"] for top in entry["top_logprobs"]] == [[0xF0], [0xF1], [0x20], [0x61]]
        assert entry["token"] == ("token_id:240" if as_ids else r"\xf0")
    (unknown,) = chat_logprobs([100_000], [{100_000: Logprob(-1.0, 1, None)}], 0, False, tokenizer)["content"]
    assert (unknown["token"], unknown["bytes"]) == ("token_id:100000", None)
