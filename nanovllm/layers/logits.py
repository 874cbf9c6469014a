"""Changes of logits before a token is drawn: processors, masks, bans, biases and penalties of each request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.data.batch import LogitAdjustments, LogitsProcessors, TokenMask
from nanovllm.errors import quoted
from nanovllm.ops.upload import upload


def process(logits: Tensor, processors: LogitsProcessors) -> Tensor:
    """What the functions make, one after the other, of the logits [vocab] of a row: fp32 [vocab].

    logits: not modified; the functions get a copy in fp32. Raises what a function raises, and ValueError for a result
    that is no such tensor or holds NaN or +infinity.
    """
    scores = logits.to(torch.float32, copy=True)
    for function, takes_prompt in processors.functions:
        prompt = [list(processors.prompt_token_ids)] if takes_prompt else []
        result = function(*prompt, list(processors.output_token_ids), scores)
        if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
            got = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else quoted(result)
            raise ValueError(f"it returned {got}, and must return logits of shape {list(logits.shape)}")
        scores = result.to(logits.device, torch.float32)
        if not bool((scores < float("inf")).all()):
            raise ValueError("it returned NaN or +infinity: only finite logits and -infinity can be used")
    return scores


def mask_(logits: Tensor, masks: Sequence[TokenMask | None]) -> Tensor:
    """Set the logits [rows, vocab] of tokens that a row's mask does not allow to -inf, in place, and return them.

    The packed bits go to the device, and are unpacked there. An empty mask allows nothing.
    """
    if any(mask is not None for mask in masks):
        vocab_size = logits.shape[1]
        num_bytes = -(-logits.shape[1] // 8)
        everything = b"\xff" * num_bytes
        parts = [everything if mask is None else mask.bits[:num_bytes].ljust(num_bytes, b"\0") for mask in masks]
        packed = upload(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), logits.device)
        bits = packed.view(len(masks), num_bytes, 1) >> torch.arange(8, dtype=torch.uint8, device=logits.device)
        logits.masked_fill_((bits & 1).flatten(1)[:, :vocab_size] == 0, float("-inf"))
    return logits


def adjust_(logits: Tensor, adjustments: Sequence[LogitAdjustments | None]) -> Tensor:
    """Adjust contiguous fp32 logits [rows, vocab] in place, all rows in one pass, and return them.

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
    # A repeated token is written repeatedly with the same value.
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
    """Indices of the tokens of the given rows into the flat logits: int64 [tokens]."""
    joined = bytearray(b"".join(part for _, part in tokens))
    token_ids = torch.frombuffer(joined, dtype=torch.int64) if joined else torch.empty(0, dtype=torch.int64)
    lengths = torch.tensor([len(part) for _, part in tokens])
    starts = torch.tensor([index * logits.shape[1] for index, _ in tokens])
    return upload(torch.repeat_interleave(starts, lengths) + token_ids, logits.device)


def _by_row(logits: Tensor, values: Sequence[tuple[int, float]], indices: Tensor) -> Tensor:
    """For each flat index, the value of its row."""
    column = torch.zeros(logits.shape[0], dtype=logits.dtype)
    column[[index for index, _ in values]] = torch.tensor([value for _, value in values], dtype=logits.dtype)
    return upload(column, logits.device)[indices // logits.shape[1]]
