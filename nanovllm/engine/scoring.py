"""From a step's hidden states to drawn tokens and log-probabilities. Logits exist only for rows that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.engine.batch import Sample, ScheduledSequence, TokenLogprobs
from nanovllm.layers.logprobs import MAX_ROWS, token_logprobs
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import Decoder, row_chunks
from nanovllm.ops.upload import upload


def draw_samples(
    model: Decoder, hidden: Tensor, sequences: Sequence[ScheduledSequence], starts: Sequence[int]
) -> list[list[Sample]]:
    """The tokens of each sequence's `samples`. hidden: [tokens, hidden]; starts: each sequence's first row."""
    samples: list[list[Sample]] = [[] for _ in sequences]
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return samples
    last_rows = torch.tensor([starts[i] + len(sequences[i].token_ids) - 1 for i, _ in due])
    logits = model.compute_logits(hidden[upload(last_rows, hidden.device)])
    tokens = sample(logits, [row for _, row in due])
    logprobs = token_logprobs(logits, tokens, [row.num_logprobs for _, row in due])
    for (i, _), token, found in zip(due, tokens, logprobs, strict=True):
        samples[i].append(Sample(token, TokenLogprobs(*found) if found is not None else None))
    return samples


def prompt_logprobs(
    model: Decoder, hidden: Tensor, sequences: Sequence[ScheduledSequence], starts: Sequence[int]
) -> list[list[TokenLogprobs]]:
    """Of each sequence's `prompt_targets`, MAX_ROWS at a time: logits of a whole prompt never exist at once."""
    results: list[list[TokenLogprobs]] = [[] for _ in sequences]
    for seq, start, result in zip(sequences, starts, results, strict=True):
        targets = seq.prompt_targets
        for rows in row_chunks(len(targets.token_ids) if targets is not None else 0, MAX_ROWS):
            assert targets is not None
            first = start + targets.first_row
            logits = model.compute_logits(hidden[first + rows.start : first + rows.stop])
            found = token_logprobs(logits, targets.token_ids[rows], [targets.num_logprobs] * logits.shape[0])
            result += [TokenLogprobs(*row) for row in found if row is not None]
    return results
