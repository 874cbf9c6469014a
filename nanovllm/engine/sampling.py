"""From a step's hidden states to drawn tokens and log-probabilities. Logits exist only for rows that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanovllm.data.batch import Sample, SamplingRow, StepResult, TokenLogprobs
from nanovllm.engine.forward_pass import ComputedRows
from nanovllm.errors import told
from nanovllm.layers.logits import process
from nanovllm.layers.logprobs import token_logprobs
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.layers.sampler import NOT_FINITE, sample
from nanovllm.models.decoder import Decoder
from nanovllm.ops.upload import upload

EVERYTHING_BANNED = (
    "no token is left to choose: logit_bias, bad_words, min_tokens, allowed_token_ids, structured_outputs and "
    "logits_processors together ban all of them; ban fewer"
)
MOST_NAMED = 3  # weights in an error message


def sample_rows(model: Decoder, rows: ComputedRows, result: StepResult, why_not_finite: Callable[[], str]) -> None:
    """Append the sequences of `rows` to `result`: the tokens that are due, and the asked prompt log-probabilities.

    why_not_finite: gives the error of a sequence whose logits hold NaN or infinity. The samples of a sequence with an
    error are meaningless.
    """
    first = len(result.samples)
    result.samples.extend([] for _ in rows.sequences)
    result.prompt_logprobs.extend([] for _ in rows.sequences)
    if any(seq.prompt_targets is not None for seq in rows.sequences):
        for i in _measure_prompts(model, rows, result.prompt_logprobs[first:]):
            result.errors[first + i] = why_not_finite()
    for i, error in _draw_samples(model, rows, result.samples[first:]).items():
        result.errors[first + i] = error if error is not None else why_not_finite()


def _draw_samples(model: Decoder, rows: ComputedRows, samples: list[list[Sample]]) -> dict[int, str | None]:
    """Append the tokens of each sequence's `samples`. Returns errors by index of a sequence, None for logits that are
    not finite.
    """
    hidden, sequences, starts = rows.hidden, rows.sequences, rows.starts
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return {}
    last_rows = torch.tensor([starts[i] + len(sequences[i].token_ids) - 1 for i, _ in due])
    logits = model.compute_logits(hidden[upload(last_rows, hidden.device)])
    if not model.has_logits:
        return {}
    sampling = [row for _, row in due]
    has_processors = any(row.processors is not None for row in sampling)
    processed, errors = _processed(logits, sampling) if has_processors else ({}, {})
    tokens = sample(logits, sampling, processed)
    failed: dict[int, str | None] = {}
    for position, ((i, row), token) in enumerate(zip(due, tokens, strict=True)):
        error = errors.get(position) or (row.mask.error if row.mask is not None else None)
        if token == NOT_FINITE:
            failed[i] = None
        elif error is not None or token < 0:
            failed.setdefault(i, error or EVERYTHING_BANNED)
    counts = [None if i in failed else row.num_logprobs for i, row in due]
    asked = any(count is not None for count in counts)
    logprobs = token_logprobs(logits, tokens, counts) if asked else [None] * len(due)
    for (i, _), token, found in zip(due, tokens, logprobs, strict=True):
        samples[i].append(Sample(token, found))
    return failed


def _processed(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Logits [vocab] and errors of the rows with logits processors, by row."""
    found: dict[int, Tensor] = {}
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        if row.processors is not None:
            try:
                found[index] = process(logits[index], row.processors)
            except Exception as error:  # a caller's function may raise any type
                errors[index] = f"a logits processor has failed: {told(error)}"
    return found, errors


def _measure_prompts(model: Decoder, rows: ComputedRows, results: list[list[TokenLogprobs]]) -> set[int]:
    """Append the log-probabilities of each sequence's `prompt_targets`. Returns the indices of sequences whose logits
    are not finite.

    Computes the logits of LOGPROB_ROWS rows at a time, to bound their memory.
    """
    failed: set[int] = set()
    for i, (seq, start) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        targets = seq.prompt_targets
        for begin in range(0, len(targets.token_ids) if targets is not None else 0, LOGPROB_ROWS):
            assert targets is not None
            token_ids, first = targets.token_ids[begin : begin + LOGPROB_ROWS], start + targets.first_row + begin
            logits = model.compute_logits(rows.hidden[first : first + len(token_ids)])
            if not model.has_logits:
                continue
            found = token_logprobs(logits, token_ids, [targets.num_logprobs] * len(token_ids))
            if not is_finite(logits):
                failed.add(i)
            results[i].extend(row for row in found if row is not None)
    return failed


def explain_non_finite_logits(model: Decoder) -> str:
    """A sentence that says which weights hold NaN or infinity, or that it was computed. Reads all weights."""
    damaged = [name for name, slot in model.slots() if not is_finite(slot.view)]
    if damaged:
        named = ", ".join(damaged[:MOST_NAMED])
        others = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        return f"the logits hold NaN or infinity, and so do the weights, in {named}{others}: get the checkpoint anew"
    if model.group is not None:
        return (
            "the logits hold NaN or infinity, which was computed, or is in weights that another rank holds: those of "
            "the first are finite; run one rank to see which, or get the checkpoint anew"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    advice = "use dtype='bfloat16' or 'float32'" if model.dtype is torch.float16 else "check the checkpoint's config"
    return (
        f"the logits hold NaN or infinity, which was computed: all weights are finite, and {dtype} ends at "
        f"{torch.finfo(model.dtype).max:.3g}: {advice}"
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Allocates nothing of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
