"""A word-level tokenizer of made-up words, so that a person can read what the recall network answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from nanovllm.errors import ConfigError

UNK_TOKEN = "<unk>"
EOS_TOKEN = "<eos>"
UNK_TOKEN_ID = 0
EOS_TOKEN_ID = 1
FIRST_WORD_ID = 2  # ids below it are reserved; from here to the vocabulary's end all ids are ordinary words

_SYLLABLES = [onset + vowel for onset in "bdfghjklmnprstvwyz" for vowel in "aeiou"]
_SYLLABLES_PER_WORD = 3
MAX_WORDS = len(_SYLLABLES) ** _SYLLABLES_PER_WORD


def make_words(count: int, seed: int = 0) -> list[str]:
    """`count` distinct lower-case words of three open syllables each, in an order drawn from the seed."""
    if not 0 <= count <= MAX_WORDS:
        raise ConfigError(f"{count} words were asked for: three syllables make between 0 and {MAX_WORDS}")
    return [_word(number) for number in random.Random(seed).sample(range(MAX_WORDS), count)]


def write_word_tokenizer(path: str | Path, vocab_size: int, seed: int = 0) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for `vocab_size` ids into the directory `path`.

    Ids 0 and 1 are `<unk>` and `<eos>`; all others are distinct words. Text is split at white space, encoding
    adds no token of its own, and decoding joins words by single spaces.
    Errors: ConfigError for a vocabulary without room for a word, or beyond what three syllables can spell.
    """
    if vocab_size <= FIRST_WORD_ID:
        raise ConfigError(
            f"vocab_size={vocab_size}: must be above {FIRST_WORD_ID}, the ids of {UNK_TOKEN} and {EOS_TOKEN}"
        )
    words = [UNK_TOKEN, EOS_TOKEN, *make_words(vocab_size - FIRST_WORD_ID, seed)]
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK_TOKEN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(UNK_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNK_TOKEN,
        "eos_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _word(number: int) -> str:
    syllables = []
    for _ in range(_SYLLABLES_PER_WORD):
        number, index = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[index])
    return "".join(syllables)
