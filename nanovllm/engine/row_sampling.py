"""From the hidden states of a step to its tokens: draws, prompt log-probabilities, and what is wrong with logits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from nanovllm.data.batch import Sample, SamplingRow, ScheduledSequence, StepResult, TokenLogprobs
from nanovllm.errors import told
from nanovllm.kvcache.forward_pass import ComputedRows
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.logits import process
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.layers.sampler import NOT_FINITE, sample, token_logprobs
from nanovllm.ops.upload import upload

EVERYTHING_BANNED = (
    "no token is left to choose: logit_bias, bad_words, min_tokens, allowed_token_ids, structured_outputs and "
    "logits_processors together ban all of them; ban fewer"
)
ALL_ROWS = sys.maxsize  # as many as read every expert
MOST_NAMED = 3  # weights in an error message


def sample_rows(model: CausalLM, rows: ComputedRows, result: StepResult, why_not_finite: Callable[[], str]) -> None:
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


def _draw_samples(model: CausalLM, rows: ComputedRows, samples: list[list[Sample]]) -> dict[int, str | None]:
    """Append the tokens of each sequence's `samples`.

    Returns errors by index of a sequence; the error is None if the logits are not finite.
    """
    hidden = rows.hidden
    sequences = rows.sequences
    due = [(i, row) for i, seq in enumerate(sequences) for row in seq.samples]
    if not due:
        return {}
    sampling = [row for _, row in due]
    drawn_rows = [row for i in range(len(sequences)) for row in _drawn_rows(rows, i)]
    if rows.likeliest is not None and all(row.takes_likeliest for row in sampling):
        of_rows = rows.likeliest()
        return _count_samples(sequences, due, [of_rows[row] for row in drawn_rows], {}, samples, None)
    logits = model.compute_logits(hidden[upload(torch.tensor(drawn_rows), hidden.device)])
    if not model.has_logits:
        return {}
    has_processors = any(row.processors is not None for row in sampling)
    processed, errors = _processed(logits, sampling) if has_processors else ({}, {})
    return _count_samples(sequences, due, sample(logits, sampling, processed), errors, samples, logits)


def _count_samples(
    sequences: Sequence[ScheduledSequence],
    due: Sequence[tuple[int, SamplingRow]],
    tokens: Sequence[int],
    errors: Mapping[int, str],
    samples: list[list[Sample]],
    logits: Tensor | None,
) -> dict[int, str | None]:
    """Append those tokens that count to the `samples` of their sequences; see `_draw_samples`.

    due: of each token the index of its sequence, and how it was drawn; errors: by place among them. logits: [due,
    vocab], None if no log-probabilities are asked.
    """
    failed: dict[int, str | None] = {}
    counting = _Counting(sequences)
    for position, ((i, row), token) in enumerate(zip(due, tokens, strict=True)):
        error = errors.get(position) or (row.mask.error if row.mask is not None else None)
        is_wrong = error is not None or token < 0
        if not counting.count(position, i, token, is_wrong) or not is_wrong:
            continue
        if token == NOT_FINITE:
            failed[i] = None
        else:
            failed.setdefault(i, error or EVERYTHING_BANNED)
    drawn = enumerate(due)
    counts = [row.num_logprobs if i not in failed and at in counting.positions else None for at, (i, row) in drawn]
    asked = any(count is not None for count in counts)
    assert logits is not None or not asked, "log-probabilities need logits"
    logprobs = [None] * len(due) if logits is None or not asked else token_logprobs(logits, tokens, counts)
    for position, ((i, _), token, of_token) in enumerate(zip(due, tokens, logprobs, strict=True)):
        if position in counting.positions:
            samples[i].append(Sample(token, of_token))
    return failed


def _drawn_rows(rows: ComputedRows, index: int) -> Iterator[int]:
    """The rows from which the `samples` of a sequence are drawn."""
    seq = rows.sequences[index]
    last = rows.starts[index] + len(seq.token_ids) - 1
    for place in range(len(seq.samples)):
        yield last - seq.num_drafts + place if seq.num_drafts else last


class _Counting:
    """Which of the draws count. With drafts they count up to the first that is not the drafted token.

    After an accepted draft, a draw that fails (everything is banned) does not count: the next step draws it again,
    unless the sequence has ended before it. With drafts, draws from logits that are not finite do not count: attention
    multiplies the value of a later token by 0, so that a draft whose value is infinite spoils the rows before it.
    """

    def __init__(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.positions: set[int] = set()  # of the draws that count
        self._drafts = [seq.drafts if seq.num_drafts else None for seq in sequences]
        self._accepted = [0] * len(sequences)  # drafts so far; -1 once one was refused

    def count(self, position: int, index: int, token: int, is_wrong: bool) -> bool:
        """Whether the next draw of a sequence counts."""
        drafts = self._drafts[index]
        accepted = self._accepted[index]
        if drafts is not None:
            if accepted < 0 or (is_wrong and accepted > 0) or token == NOT_FINITE:
                self._accepted[index] = -1
                return False
            is_right = accepted < len(drafts) and token == drafts[accepted]
            self._accepted[index] = accepted + 1 if is_right else -1
        self.positions.add(position)
        return True


def _processed(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Logits [vocab] and errors of the rows with logits processors, by row."""
    changed: dict[int, Tensor] = {}
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        if row.processors is not None:
            try:
                changed[index] = process(logits[index], row.processors)
            except Exception as error:  # a caller's function may raise any type
                errors[index] = f"a logits processor has failed: {told(error)}"
    return changed, errors


def _measure_prompts(model: CausalLM, rows: ComputedRows, results: list[list[TokenLogprobs]]) -> set[int]:
    """Append the log-probabilities of each sequence's `prompt_targets`.

    Returns the indices of sequences whose logits are not finite. Computes the logits of LOGPROB_ROWS rows at a time, to
    bound their memory.
    """
    failed: set[int] = set()
    for i, (seq, start) in enumerate(zip(rows.sequences, rows.starts, strict=True)):
        targets = seq.prompt_targets
        for begin in range(0, len(targets.token_ids) if targets is not None else 0, LOGPROB_ROWS):
            assert targets is not None
            token_ids = targets.token_ids[begin : begin + LOGPROB_ROWS]
            first = start + targets.first_row + begin
            logits = model.compute_logits(rows.hidden[first : first + len(token_ids)])
            if not model.has_logits:
                continue
            logprobs = token_logprobs(logits, token_ids, [targets.num_logprobs] * len(token_ids))
            if not is_finite(logits):
                failed.add(i)
            results[i].extend(row for row in logprobs if row is not None)
    return failed


def explain_non_finite_logits(model: CausalLM) -> str:
    """A sentence that says which weights hold NaN or infinity, or that it was computed. Reads all weights."""
    not_layers = (child for child in model.children() if child not in model.layers)
    modules = chain((model.layer(index, ALL_ROWS) for index in range(len(model.layers))), not_layers)
    damaged = [name for module in modules for name, slot in module.slots() if not is_finite(slot.view)]
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
