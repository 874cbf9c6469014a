"""Small tokenizers of both common kinds, written as a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm.text.tokenizer import HuggingFaceTokenizer

END = "<|end|>"
MERGED = ("th", "in", " a", "日本", "é", "👍🏽", "한")
CROSSING = ((0x97, 0xA5, 0xE6), (0xA5, 0xE6, 0x9C), (0x9F, 0x8E))  # bytes of two characters, or of parts of one
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_symbols() -> dict[int, str]:
    """The printable character that represents each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_byte_level(path: Path, *, chat_template: str | None = None) -> None:
    """A byte-level tokenizer: one token for each byte, a few merged ones, some across characters, and an end token."""
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
    for values in CROSSING:
        vocab.setdefault("".join(symbols[byte] for byte in values), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    _save(tokenizer, path, chat_template)


def byte_level_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of `write_byte_level`, whose text begins with `<s>` where templates ask for it."""
    write_byte_level(path)
    found = HuggingFaceTokenizer(path)
    found.tokenizer.bos_token = "<s>"
    return found


def add_special(path: Path, *texts: str, special: bool = True) -> None:
    """Add special tokens to a tokenizer that is written; without `special`, tokens that text shows."""
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    first = max(token["id"] for token in content["added_tokens"]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    content["added_tokens"] += [{"id": first + i, "content": text, **flags} for i, text in enumerate(texts)]
    file.write_text(json.dumps(content))


def write_byte_fallback(path: Path) -> None:
    """As SentencePiece makes them: a mark instead of each space, none shown in front, bytes for unknown characters."""
    words = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz", "日", "é", "▁a"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    _save(tokenizer, path, None)


def write_by_class(path: Path, name: str, **options: Any) -> None:
    """A tokenizer as one of Transformers' classes builds and saves it. options: of the class."""
    import transformers

    symbols = list(byte_symbols().values())
    end = "<|endoftext|>"
    if name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer"):
        words = [*symbols, "th", "the", "Ġa", "in", end, "<|end|>"]
        merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n")]
    else:
        marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<s>", "</s>", "<|end|>"]
        words = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghinost.日é", "▁a", "in", "▁in"]
        merges = [("▁", "a"), ("i", "n"), ("▁", "in")]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = getattr(transformers, name)(vocab=vocab, merges=merges, **options)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken(END, special=True)])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


def data_of(tokenizer: Any, token_ids: Sequence[int]) -> bytes:
    """The bytes of all tokens, which have to be known."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    assert None not in pieces
    return b"".join(pieces)


def _save(tokenizer: Tokenizer, path: Path, chat_template: str | None) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
