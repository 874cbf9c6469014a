"""A demonstration of recall in words: a model, a document, and what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanovllm.recall.documents import expected_answer, make_document, make_prompt, notable_positions
from nanovllm.recall.network import write_recall_checkpoint
from nanovllm.recall.words import FIRST_WORD_ID, make_words, write_word_tokenizer


@dataclass(frozen=True)
class WordExam:
    """A document of token ids, the word of each id, and the positions asked for with what is there."""

    document: list[int]
    words: dict[int, str]
    places: dict[int, str]
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
        """Write a model with exactly `document_tokens` words into `path`; the document has each of them once.

        pieces and max_edges choose what is asked, as in `notable_positions`.
        Errors: those of the two writers, and RequestError for a document without room for an answer.
        """
        vocab_size = write_demo_model(path, document_tokens, answer_tokens, seed)
        return cls(
            document=make_document(vocab_size, document_tokens, seed),
            words=dict(enumerate(make_words(document_tokens, seed), FIRST_WORD_ID)),
            places=notable_positions(document_tokens, answer_tokens, pieces, max_edges),
            answer_tokens=answer_tokens,
        )

    def question(self, position: int) -> str:
        """The word that the answer starting at `position` follows."""
        return self.words[self.document[position - 1]]

    def expected(self, position: int) -> str:
        """The only right answer at `position`, as text."""
        return self._text(expected_answer(self.document, position, self.answer_tokens))

    def prompts(self) -> list[str]:
        """The document and a question word, for each place in order."""
        return [self._text(make_prompt(self.document, position)) for position in self.places]

    def _text(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def write_demo_model(path: str | Path, document_tokens: int, answer_tokens: int, seed: int = 0) -> int:
    """Write a bfloat16 recall checkpoint and its word tokenizer; returns the vocabulary size.

    The vocabulary has exactly `document_tokens` words, and the model positions for a document of them all, a
    question word and `answer_tokens` of answer. Errors: those of the two writers.
    """
    vocab_size = FIRST_WORD_ID + document_tokens
    write_recall_checkpoint(path, vocab_size, document_tokens + 1 + answer_tokens, seed)
    write_word_tokenizer(path, vocab_size, seed)
    return vocab_size
