"""The recall checkpoint: a constructed model, each of whose answers depends on a single position, and its words."""

from __future__ import annotations

from nanovllm.apps.recall.documents import (
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
from nanovllm.apps.recall.network import EOS_TOKEN_ID, FIRST_WORD_ID, write_recall_checkpoint

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
