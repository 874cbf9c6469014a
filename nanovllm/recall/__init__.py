"""The recall checkpoint: a constructed model whose every answer hangs on one position, and its words."""

from __future__ import annotations

from nanovllm.recall.documents import (
    UNK_TOKEN_ID,
    WordExam,
    expected_answer,
    make_document,
    make_prompt,
    make_words,
    notable_positions,
    write_demo_model,
    write_word_tokenizer,
)
from nanovllm.recall.network import EOS_TOKEN_ID, FIRST_WORD_ID, write_recall_checkpoint

__all__ = [
    "EOS_TOKEN_ID",
    "FIRST_WORD_ID",
    "UNK_TOKEN_ID",
    "WordExam",
    "expected_answer",
    "make_document",
    "make_prompt",
    "make_words",
    "notable_positions",
    "write_demo_model",
    "write_recall_checkpoint",
    "write_word_tokenizer",
]
