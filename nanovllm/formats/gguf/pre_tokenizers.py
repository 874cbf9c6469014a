"""How byte-level BPE splits text before it merges: a GGUF file only names the pre-tokenizer (`tokenizer.ggml.pre`).

The expressions are those of the models' own tokenizer.json, and llama.cpp's for "default", which no such file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THREE_DIGITS = rf"{CASELESS}\p{{N}}{{1,3}}{REST}"
ONE_DIGIT = rf"{CASELESS}\p{{N}}{REST}"
QWEN_3_5 = (  # with marks, such as accents, in words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
SEED_CODER = rf"{CASELESS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split."""

    expressions: tuple[str, ...]  # each splits the pieces of the one before into its matches and the rest
    ignore_merges: bool = False  # a piece that is a token stays one, whatever the merges say
    add_bos: bool = False  # if the file does not say it
    nfc: bool = False  # text is normalized to NFC first


_GPT2 = PreTokenizer((WORDS,))
_DIGITS = PreTokenizer((r"\p{N}", WORDS))
_LLAMA3 = PreTokenizer((THREE_DIGITS,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((ONE_DIGIT,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", WORDS.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
        **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((THREE_DIGITS,))),
        "qwen2": PreTokenizer((ONE_DIGIT,), nfc=True),
        "qwen35": PreTokenizer((QWEN_3_5,), nfc=True),
        "gpt-4o": PreTokenizer((GPT_4O,)),
        **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _QWEN),
        "seed-coder": PreTokenizer((SEED_CODER,)),
        "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
        "deepseek-coder": PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
        ),
    }
)
