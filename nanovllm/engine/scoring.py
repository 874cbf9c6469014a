"""From a step's hidden states to drawn tokens and log-probabilities. Logits exist only for rows that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.engine.batch import Sample, ScheduledSequence, TokenLogprobs
from nanovllm.layers.logprobs import MAX_ROWS, token_logprobs
from nanovllm.layers.sampler import NOT_FINITE, sample
from nanovllm.models.decoder import Decoder, row_chunks
from nanovllm.models.non_finite import is_finite
from nanovllm.ops.upload import upload

EVERYTHING_BANNED = (
    "no token is left to choose: logit_bias, bad_words and min_tokens ban all of them; ban fewer, or lower min_tokens"
)


@dataclass(slots=True)
class Scores:
    """What a pass gives for each of its sequences; `errors` by the sequence's index, as in StepResult."""

    samples: list[list[Sample]]
    prompt_logprobs: list[list[TokenLogprobs]]
    errors: dict[int, str]

    def extend(self, other: Scores) -> None:
        """Take in what a pass gave for sequences that follow these."""
        self.errors |= {len(self.samples) + index: error for index, error in other.errors.items()}
        self.samples += other.samples
        self.prompt_logprobs += other.prompt_logprobs


def score(
    model: Decoder,
    hidden: Tensor,
    sequences: Sequence[ScheduledSequence],
    starts: Sequence[int],
    why_not_finite: Callable[[], str],
) -> Scores:
    """Draw the tokens that are due, and measure the prompts' tokens that are asked for.

    hidden: [tokens, hidden]; starts: each sequence's first row; why_not_finite: the error of a sequence whose logits
    hold NaN or infinity. Of a sequence with an error, samples mean nothing.
    """
    scores = Scores([[] for _ in sequences], [[] for _ in sequences], {})
    for i in _measure_prompts(model, hidden, sequences, starts, scores.prompt_logprobs):
        scores.errors[i] = why_not_finite()
    for i, code in _draw_samples(model, hidden, sequences, starts, scores.samples).items():
        scores.errors[i] = why_not_finite() if code == NOT_FINITE else EVERYTHING_BANNED
    return scores


def _draw_samples(
    model: Decoder,
    hidden: Tensor,
    sequences: Sequence[ScheduledSequence],
    starts: Sequence[int],
    samples: list[list[Sample]],
) -> dict[int, int]:
    """Add the tokens of each sequence's `samples`. Returns what `sample` gives in place of a token, by sequence."""
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return {}
    last_rows = torch.tensor([starts[i] + len(sequences[i].token_ids) - 1 for i, _ in due])
    logits = model.compute_logits(hidden[upload(last_rows, hidden.device)])
    tokens = sample(logits, [row for _, row in due])
    failed = {i: token for (i, _), token in zip(due, tokens, strict=True) if token < 0}
    logprobs = token_logprobs(logits, tokens, [None if i in failed else row.num_logprobs for i, row in due])
    for (i, _), token, found in zip(due, tokens, logprobs, strict=True):
        samples[i].append(Sample(token, TokenLogprobs(*found) if found is not None else None))
    return failed


def _measure_prompts(
    model: Decoder,
    hidden: Tensor,
    sequences: Sequence[ScheduledSequence],
    starts: Sequence[int],
    results: list[list[TokenLogprobs]],
) -> set[int]:
    """Add what is known of each sequence's `prompt_targets`. Returns the sequences whose logits are not finite.

    MAX_ROWS at a time: logits of a whole prompt never exist at once.
    """
    failed: set[int] = set()
    for i, (seq, start) in enumerate(zip(sequences, starts, strict=True)):
        targets = seq.prompt_targets
        for rows in row_chunks(len(targets.token_ids) if targets is not None else 0, MAX_ROWS):
            assert targets is not None
            first = start + targets.first_row
            logits = model.compute_logits(hidden[first + rows.start : first + rows.stop])
            found = token_logprobs(logits, targets.token_ids[rows], [targets.num_logprobs] * logits.shape[0])
            if not is_finite(logits):
                failed.add(i)
            results[i] += [TokenLogprobs(*row) for row in found if row is not None]
    return failed
