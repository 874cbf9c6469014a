"""The tokenizer that a GGUF file describes, with its chat template.

Three kinds: "gpt2", byte-level BPE with merges, "llama", SentencePiece's BPE, whose merges follow from scores, and
"gemma4", the same with the merges of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm.data.json_fields import FLAG, TEXT, integer
from nanovllm.errors import ModelError, quoted
from nanovllm.formats.gguf.header import GgufHeader, read_header
from nanovllm.formats.gguf.pre_tokenizers import PRE_TOKENIZERS

PREFIX = "tokenizer.ggml."
# types of tokens
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
NO_TOKENIZER = (None, "none", "no_vocab")
MAX_TOKENS = 1 << 21
SPACE = "▁"  # SentencePiece's mark
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens that end a turn. Files name only one end, and llama.cpp too stops at these.
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<turn|>"),
)


class NoTokenizerError(ModelError):
    """A file describes a network without its tokenizer."""


def load_tokenizer(path: Path) -> Any:
    """Transformers' tokenizer.

    Raises ModelError for one that is not supported, NoTokenizerError if there is none, and what the tokenizers library
    raises on a damaged vocabulary.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import

    header = read_header(path)
    kind = header.get(f"{PREFIX}model", TEXT)
    remedy = f"supported: {', '.join(_KINDS)}. Name another with tokenizer=, or skip_tokenizer_init."
    if kind in NO_TOKENIZER:
        raise NoTokenizerError(f"{path} has no tokenizer; {remedy}")
    if kind not in _KINDS:
        raise ModelError(f"{path} has a tokenizer of kind {quoted(kind)}; {remedy}")
    tokens, types = _tokens(header)
    backend = _KINDS[kind](header, tokens, types)
    backend.add_tokens([_added(text) for text, type_ in zip(tokens, types, strict=True) if type_ == USER_DEFINED])
    backend.add_special_tokens(
        [_added(text) for text, type_ in zip(tokens, types, strict=True) if type_ in (UNKNOWN, CONTROL)]
    )
    special = {name: tokens[i] for name, key in SPECIAL.items() if (i := token_id(header, key)) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        add_bos_token=_adds(header, "bos", kind) and "bos_token" in special,
        add_eos_token=_adds(header, "eos", kind) and "eos_token" in special,
        chat_template=_chat_template(header),
        **special,
    )


def end_token_ids(header: GgufHeader) -> list[int]:
    """The tokens that end a sequence: those that the metadata name, and the control tokens of `END_TEXTS`."""
    tokens, types = _tokens(header)
    named = [token_id(header, name) for name in ("eos", "eot", "eom")]
    known = [i for i, text in enumerate(tokens) if text in END_TEXTS and types[i] == CONTROL]
    if {"<|return|>", "<|call|>"} <= {tokens[i] for i in known}:  # gpt-oss, whose <|end|> ends one message of several
        known = [i for i in known if tokens[i] != "<|end|>"]
    return list(dict.fromkeys(i for i in (*named, *known) if i is not None))


def token_id(header: GgufHeader, name: str) -> int | None:
    """The id of a special token, such as "eos"; None if there is none."""
    count = len(header.texts(f"{PREFIX}tokens"))
    key = f"{PREFIX}{name}_token_id"
    given = header.get(key, integer(0, 2**32 - 1))
    if given is None or given == 2**32 - 1:  # which older files have for "none"
        return None
    if given >= count:
        raise ModelError(f"{header.path}: {key}={given}: must be one of the {count} tokens.")
    return int(given)


def _tokens(header: GgufHeader) -> tuple[list[str], list[int]]:
    """The texts and the types of all tokens."""
    tokens = header.texts(f"{PREFIX}tokens")
    if len(tokens) > MAX_TOKENS:
        raise ModelError(f"{header.path}: {PREFIX}tokens has {len(tokens)} tokens; at most {MAX_TOKENS} are read.")
    types = header.numbers(f"{PREFIX}token_type", len(tokens), default=1)
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)], [int(type_) for type_ in types]


def _vocab(header: GgufHeader, tokens: list[str]) -> dict[str, int]:
    vocab = {text: i for i, text in enumerate(tokens)}
    if not tokens:
        raise ModelError(f"{header.path} has no {PREFIX}tokens, which its tokenizer needs.")
    if len(vocab) < len(tokens):
        first = next(i for i, text in enumerate(tokens) if vocab[text] != i)
        raise ModelError(
            f"{header.path}: {PREFIX}tokens has {quoted(tokens[first])} twice, as tokens {first} and "
            f"{vocab[tokens[first]]}; name the model's own tokenizer with tokenizer=."
        )
    return vocab


def _byte_level(header: GgufHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it."""
    name = header.get(f"{PREFIX}pre", TEXT) or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{header.path}: {PREFIX}pre={quoted(name)}: this pre-tokenizer is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}. Name the model's own tokenizer with tokenizer=."
        )
    _refuse_set(header, "add_space_prefix", "remove_extra_whitespaces")
    vocab = _vocab(header, tokens)
    merges = _pairs(header)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _refuse_set(header: GgufHeader, *names: str) -> None:
    """Raise ModelError for a value that is there and not false."""
    for name in names:
        value = header.metadata.get(f"{PREFIX}{name}", False)
        if value is not False:
            raise ModelError(f"{header.path}: {PREFIX}{name}={quoted(value)} is not supported; use tokenizer=.")


def _pairs(header: GgufHeader) -> list[tuple[str, str]]:
    """The merges of the file."""
    return [_pair(header, text) for text in header.texts(f"{PREFIX}merges")]


def _pair(header: GgufHeader, merge: str) -> tuple[str, str]:
    first, space, second = merge[1:].partition(" ")  # the first token may be a space itself
    if not space or not second:
        raise ModelError(f"{header.path}: {PREFIX}merges has {quoted(merge)}, which are not two tokens.")
    return merge[0] + first, second


def _sentence_piece(header: GgufHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE over characters, as Llama 2 and Mistral have it; bytes stand for characters that the vocabulary lacks."""
    scores = header.numbers(f"{PREFIX}scores", len(tokens), default=None)
    special = {text for text, type_ in zip(tokens, types, strict=True) if type_ in (UNKNOWN, CONTROL, BYTE)}
    merges = merges_by_score(_vocab(header, tokens), dict(zip(tokens, map(float, scores), strict=True)), special)
    return _with_byte_fallback(header, tokens, merges, header.get(f"{PREFIX}add_space_prefix", FLAG) is not False)


def _gemma4(header: GgufHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    """The same with given merges, as Gemma 4 has it."""
    _refuse_set(header, "add_space_prefix")
    return _with_byte_fallback(header, tokens, _pairs(header), False)


def _with_byte_fallback(
    header: GgufHeader, tokens: list[str], merges: list[tuple[str, str]], space_prefix: bool
) -> Tokenizer:
    _refuse_set(header, "precompiled_charsmap", "remove_extra_whitespaces")
    vocab = _vocab(header, tokens)
    unknown = token_id(header, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = normalizers.Replace(" ", SPACE)
    show_spaces = decoders.Replace(SPACE, " ")
    show = [show_spaces, decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), mark_spaces])
        tokenizer.decoder = decoders.Sequence([*show, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = mark_spaces
        tokenizer.decoder = decoders.Sequence(show)
    return tokenizer


def merges_by_score(
    vocab: Mapping[str, int], scores: Mapping[str, float], special: Collection[str]
) -> list[tuple[str, str]]:
    """The merges of a vocabulary whose tokens have scores: every pair that makes a token, the best token first.

    Among equal scores the pair with the longer first part comes first, then the pair with the lower ids.
    """
    pairs: list[tuple[float, int, int, str, str]] = []
    for text, score in scores.items():
        if text in special:
            continue
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(a, b) for a, b in splits if a in vocab and b in vocab and a not in special and b not in special]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        pairs.extend((score, len(a), len(b), a, b) for a, b in known)
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(a, b) for *_, a, b in pairs]


_KINDS: Mapping[str, Callable[[GgufHeader, list[str], list[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma4,
}


def _added(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _adds(header: GgufHeader, name: str, kind: str) -> bool:
    """Whether encoding adds "bos" in front, or "eos" at the end: as the file says, else as llama.cpp does."""
    given = header.get(f"{PREFIX}add_{name}_token", FLAG)
    if given is not None or name == "eos":
        return bool(given)
    return kind in ("llama", "gemma4") or PRE_TOKENIZERS[header.get(f"{PREFIX}pre", TEXT) or "default"].add_bos


def _chat_template(header: GgufHeader) -> str | dict[str, str] | None:
    """The template's text; several named ones as a dict."""
    own = header.get("tokenizer.chat_template", TEXT)
    names = header.texts("tokenizer.chat_templates")
    named = {name: header.get(f"tokenizer.chat_template.{name}", TEXT) for name in names}
    if not any(named.values()):
        return own
    return {name: text for name, text in ({"default": own} | named).items() if text is not None}
