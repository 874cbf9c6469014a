"""Documents for the recall network: their words, questions about them, and the right answers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from nanovllm.apps.recall.network import FIRST_WORD_ID, write_recall_checkpoint
from nanovllm.errors import ConfigError, RequestError

UNK_TOKEN = "<unk>"
EOS_TOKEN = "<eos>"
UNK_TOKEN_ID = 0

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

    Ids 0 and 1 are `<unk>` and `<eos>`; all others are distinct words. Text is split at white space, encoding adds no
    special tokens, and decoding joins words by single spaces. Raises ConfigError for a vocabulary without a word, or
    with more words than three syllables can spell.
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


def make_document(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """`length` distinct token ids of ordinary words: the start of a random permutation of the vocabulary."""
    words = vocab_size - FIRST_WORD_ID
    if not 1 <= length <= words:
        raise RequestError(
            f"a document of {length} tokens: it must have between 1 and {words}, the distinct words of a"
            f" vocabulary of {vocab_size}"
        )
    return random.Random(seed).sample(range(FIRST_WORD_ID, vocab_size), length)


def make_prompt(document: Sequence[int], position: int) -> list[int]:
    """The prompt whose answer starts at `document[position]`: the document, then the token before that position."""
    _check_position(document, position, 1)
    return [*document, document[position - 1]]


def expected_answer(document: Sequence[int], position: int, count: int) -> list[int]:
    """The `count` tokens that the network must generate for `make_prompt(document, position)`."""
    _check_position(document, position, count)
    return list(document[position : position + count])


def notable_positions(
    length: int, answer_tokens: int, pieces: Mapping[str, int], max_edges: int | None = None
) -> dict[int, str]:
    """Positions in a document of `length` tokens at which errors are likely, in order, each with a description.

    These are position 1, the middle and the end, and for each named piece size ("block", "chunk") the last token before
    and the first token after the edges between pieces: all edges, or `max_edges` evenly spread ones. Positions with
    fewer than `answer_tokens` tokens of document after them are left out. Raises RequestError if none are left.
    """
    last = length - answer_tokens
    if last < 1:
        raise RequestError(
            f"a document of {length} tokens has no room for an answer of {answer_tokens}: it must"
            f" have at least {answer_tokens + 1}"
        )
    found = {1: "start", length // 2: "middle", last: "end"}
    for name, size in pieces.items():
        for edge in _spread((length - 1) // size, max_edges):
            found.setdefault(edge * size - 1, f"last token of {name} {edge - 1}")
            found.setdefault(edge * size, f"first token of {name} {edge}")
    return {position: found[position] for position in sorted(found) if 1 <= position <= last}


def _spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` of 1..count, evenly spread, both ends included."""
    if limit is None or count <= limit:
        return list(range(1, count + 1))
    return [1 + round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)]


def _check_position(document: Sequence[int], position: int, count: int) -> None:
    last = len(document) - count
    if count < 1 or not 1 <= position <= last:
        raise RequestError(
            f"{count} tokens at position {position} of a document of {len(document)}: ask for at least one,"
            f" at a position from 1 to {last}; position 0 follows no token, and nothing follows the last one"
        )


@dataclass(frozen=True)
class WordExam:
    """A document of token ids, the word of each id, and the positions that are asked for with their descriptions."""

    document: list[int]
    words: dict[int, str]
    positions: dict[int, str]
    answer_tokens: int

    @classmethod
    def write(
        cls,
        path: str | Path,
        document_tokens: int,
        answer_tokens: int,
        pieces: Mapping[str, int],
        max_edges: int | None = None,
        seed: int = 0,
    ) -> WordExam:
        """Write a model with exactly `document_tokens` words into `path`; the document holds each word once.

        pieces and max_edges choose the questions, as in `notable_positions`. Raises the errors of `write_demo_model`,
        and RequestError for a document that is too short for an answer.
        """
        vocab_size = write_demo_model(path, document_tokens, answer_tokens, seed)
        return cls(
            document=make_document(vocab_size, document_tokens, seed),
            words=dict(enumerate(make_words(document_tokens, seed), FIRST_WORD_ID)),
            positions=notable_positions(document_tokens, answer_tokens, pieces, max_edges),
            answer_tokens=answer_tokens,
        )

    def question(self, position: int) -> str:
        """The word that the answer starting at `position` follows."""
        return self.words[self.document[position - 1]]

    def expected(self, position: int) -> str:
        """The only right answer at `position`, as text."""
        return self._text(expected_answer(self.document, position, self.answer_tokens))

    def prompts(self) -> list[str]:
        """The document and a question word, for each position in order."""
        return [self._text(make_prompt(self.document, position)) for position in self.positions]

    def _text(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def write_demo_model(path: str | Path, document_tokens: int, answer_tokens: int, seed: int = 0) -> int:
    """Write a bfloat16 recall checkpoint and its word tokenizer; returns the vocabulary size.

    The vocabulary has exactly `document_tokens` words. The model has positions for a document of all words, a question
    word and an answer of `answer_tokens`. Raises the errors of `write_recall_checkpoint` and `write_word_tokenizer`.
    """
    vocab_size = FIRST_WORD_ID + document_tokens
    write_recall_checkpoint(path, vocab_size, document_tokens + 1 + answer_tokens, seed)
    write_word_tokenizer(path, vocab_size, seed)
    return vocab_size
