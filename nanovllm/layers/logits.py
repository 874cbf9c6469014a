"""What requests change in their logits before a token is drawn: bans, biases, penalties."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops.upload import upload


class LogitAdjustments(Protocol):
    """What is read of a row; see `engine.batch.LogitAdjustments`."""

    @property
    def banned(self) -> array[int]: ...
    @property
    def biased(self) -> array[int]: ...
    @property
    def biases(self) -> array[float]: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def prompt_tokens(self) -> array[int]: ...
    @property
    def output_tokens(self) -> array[int]: ...


def adjust_(logits: Tensor, adjustments: Sequence[LogitAdjustments | None]) -> Tensor:
    """Change contiguous fp32 logits [rows, vocab] in place, all rows in one pass, and return them.

    Banned tokens become -inf and biases are added. Then the repetition penalty divides positive and multiplies negative
    logits of tokens in the prompt or the output; frequency and presence penalty are subtracted from those of tokens in
    the output, times their count and once. This is vLLM's order. The work grows with the lists, not the vocabulary.
    """
    rows = [(index, row) for index, row in enumerate(adjustments) if row is not None]
    if any(row.banned for _, row in rows):
        logits.view(-1)[_flat_indices(logits, [(index, row.banned) for index, row in rows])] = float("-inf")
    if any(row.biased for _, row in rows):
        biases = torch.frombuffer(bytearray(b"".join(row.biases for _, row in rows)), dtype=torch.float64)
        indices = _flat_indices(logits, [(index, row.biased) for index, row in rows])
        logits.view(-1)[indices] += upload(biases.to(logits.dtype), logits.device)
    if any(row.repetition_penalty != 1.0 for _, row in rows):
        _penalize_repetition_(logits, rows)
    if any(row.frequency_penalty or row.presence_penalty for _, row in rows):
        _penalize_output_(logits, rows)
    return logits


def _penalize_repetition_(logits: Tensor, rows: Sequence[tuple[int, LogitAdjustments]]) -> None:
    indices = _flat_indices(logits, [(index, row.prompt_tokens + row.output_tokens) for index, row in rows])
    penalties = _by_row(logits, [(index, row.repetition_penalty) for index, row in rows], indices)
    seen = logits.view(-1)[indices]
    # A token that occurs twice is written twice, with the same value.
    logits.view(-1)[indices] = torch.where(seen > 0, seen / penalties, seen * penalties)


def _penalize_output_(logits: Tensor, rows: Sequence[tuple[int, LogitAdjustments]]) -> None:
    indices, counts = torch.unique(
        _flat_indices(logits, [(index, row.output_tokens) for index, row in rows]), return_counts=True
    )
    frequency = _by_row(logits, [(index, row.frequency_penalty) for index, row in rows], indices)
    presence = _by_row(logits, [(index, row.presence_penalty) for index, row in rows], indices)
    logits.view(-1)[indices] -= frequency * counts
    logits.view(-1)[indices] -= presence


def _flat_indices(logits: Tensor, tokens: Sequence[tuple[int, array[int]]]) -> Tensor:
    """Where the tokens of the given rows lie in the flat logits: int64 [tokens]."""
    joined = bytearray(b"".join(part for _, part in tokens))
    token_ids = torch.frombuffer(joined, dtype=torch.int64) if joined else torch.empty(0, dtype=torch.int64)
    lengths = torch.tensor([len(part) for _, part in tokens])
    starts = torch.tensor([index * logits.shape[1] for index, _ in tokens])
    return upload(torch.repeat_interleave(starts, lengths) + token_ids, logits.device)


def _by_row(logits: Tensor, values: Sequence[tuple[int, float]], indices: Tensor) -> Tensor:
    """The value of the row in which each place lies."""
    column = torch.zeros(logits.shape[0], dtype=logits.dtype)
    column[[index for index, _ in values]] = torch.tensor([value for _, value in values], dtype=logits.dtype)
    return upload(column, logits.device)[indices // logits.shape[1]]
