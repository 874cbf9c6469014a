"""Log-probabilities and ranks of tokens under raw logits, and the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.data.batch import TokenLogprobs
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.ops.row_kernels import softmax
from nanovllm.ops.upload import upload


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Each row's natural-log probability of its token, the token's rank, and the `count` most likely tokens.

    logits: floating [rows, vocab], not modified; the softmax is fp32. A row with count None is skipped. The rank is
    1 + the number of tokens with a larger log-probability. A result depends on the logits, token and count of its row
    alone.
    """
    found: list[TokenLogprobs | None] = [None] * len(counts)
    asked = [row for row, count in enumerate(counts) if count is not None]
    for start in range(0, len(asked), LOGPROB_ROWS):
        rows = asked[start : start + LOGPROB_ROWS]
        of_rows = logits if len(rows) == len(counts) else logits[rows]
        measured = _measure(of_rows, [token_ids[row] for row in rows], [counts[row] or 0 for row in rows])
        for row, measures in zip(rows, measured, strict=True):
            found[row] = measures
    return found


def _measure(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs, chosen, ranks = chosen_logprobs(logits, upload(torch.tensor(token_ids), logits.device))
    top: list[tuple[list[int], list[float]]] = [([], [])] * len(counts)
    # One call per count: with the largest count for all rows, the order of equally likely tokens would depend on other
    # rows.
    for count in set(counts) - {0}:
        rows = [row for row, asked in enumerate(counts) if asked == count]
        values, tokens = (logprobs if len(rows) == len(counts) else logprobs[rows]).topk(count, dim=-1)
        for row, ids, likely in zip(rows, tokens.tolist(), values.tolist(), strict=True):
            top[row] = (ids, likely)
    measured = zip(chosen.tolist(), ranks.tolist(), top, strict=True)
    return [TokenLogprobs(logprob, rank, ids, likely) for logprob, rank, (ids, likely) in measured]


def chosen_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities fp32 [rows, vocab], those of the given tokens and their ranks, both [rows]."""
    logprobs = softmax(logits.float(), log=True)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    return logprobs, chosen.squeeze(1), (logprobs > chosen).sum(dim=-1) + 1
