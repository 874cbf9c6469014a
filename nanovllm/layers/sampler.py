"""Sampling the next token of each row. A draw depends on the logits, seed and index of its row alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from nanovllm.data.batch import SamplingRow, TokenLogprobs
from nanovllm.layers.logits import adjust_, mask_
from nanovllm.layers.row_limits import CPU_PIECE, DEVICE_PIECE, LOGPROB_ROWS
from nanovllm.ops import torch_rows
from nanovllm.ops.row_kernels import draw, likeliest, softmax
from nanovllm.ops.torch_rows import GOLDEN_GAMMA, as_int64, splitmix64
from nanovllm.ops.upload import upload

WINDOW = 1024  # number of largest logits of a row that are sorted first
# Returned instead of a token: the logits of the row hold NaN or infinity; all tokens of the row are banned.
NOT_FINITE = -1
ALL_BANNED = -2


# Takes fp32 logits [rows, vocab], which it may change, and returns int64 [rows].
_Choice = Callable[[Tensor, Sequence[SamplingRow]], Tensor]


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], processed: Mapping[int, Tensor] = MappingProxyType({})
) -> list[int]:
    """The next token of each row, or NOT_FINITE or ALL_BANNED. logits: floating [rows, vocab], not modified.

    processed: by row, the logits [vocab] to use instead. The order is vLLM's: masks, bans, biases and penalties
    (`adjust_`), temperature, min_p, top_k, then top_p of the remaining tokens. The drawn token has the largest
    log-probability plus Gumbel noise (Gumbel-max: P(i is largest) = p_i). Greedy rows without adjustments are neither
    copied nor sorted; rows with top_k or top_p sort their largest logits only.
    """
    choices = [_choice(row, index in processed) for index, row in enumerate(rows)]
    tokens = likeliest(logits)
    is_finite = tokens != NOT_FINITE
    for choose in {choice for choice in choices if choice is not None}:
        chosen = [i for i, choice in enumerate(choices) if choice is choose]
        at_once = rows_at_once(logits.shape[1], logits.device)
        for start in range(0, len(chosen), at_once):
            part = chosen[start : start + at_once]
            index = upload(torch.tensor(part), logits.device)
            scores = logits[index].float()
            for place, i in enumerate(part):
                if i in processed:
                    scores[place] = processed[i]
            adjust_(mask_(scores, [rows[i].mask for i in part]), [rows[i].adjustments for i in part])
            is_banned = scores.amax(dim=-1) == float("-inf")
            tokens[index] = choose(scores, [rows[i] for i in part]).masked_fill(is_banned, ALL_BANNED)
    # Sent with the tokens, for which the host waits anyway.
    return [int(token) for token in tokens.masked_fill(~is_finite, NOT_FINITE).tolist()]


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """The number of rows per draw."""
    return max(1, (CPU_PIECE if device.type == "cpu" else DEVICE_PIECE) // vocab_size)


def _choice(row: SamplingRow, is_processed: bool) -> _Choice | None:
    """How to choose the token of the row; None for the argmax of the original logits."""
    if row.temperature > 0:
        return draw_from_likeliest if row.top_k > 0 or row.top_p < 1.0 else draw_from_all
    return _take_largest if row.adjustments is not None or row.mask is not None or is_processed else None


def _take_largest(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return torch.argmax(logits, dim=-1)


def draw_from_all(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw rows without top_k and top_p: int64 [rows]. Changes logits fp32 [rows, vocab]."""
    scores = scale_(logits, rows)
    tokens = torch.arange(scores.shape[1], device=scores.device)
    return _draw(scores, tokens, rows)


def draw_from_likeliest(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw rows with top_k or top_p: int64 [rows]. Changes logits fp32 [rows, vocab].

    The WINDOW largest logits nearly always include all kept ones; only rows where they do not are sorted completely.
    """
    scores = scale_(logits, rows)
    width = min(WINDOW, scores.shape[1])
    kept, tokens, complete = kept_in_order(scores, rows, width)
    drawn = _draw_in_order(kept, tokens, rows)
    if width < scores.shape[1] and not complete.all():
        wide = torch.nonzero(~complete).flatten()
        wide_rows = [rows[i] for i in wide.tolist()]
        kept, tokens, _ = kept_in_order(scores[wide], wide_rows, scores.shape[1])
        drawn[wide] = _draw_in_order(kept, tokens, wide_rows)
    return drawn


def _draw_in_order(scores: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    if scores.device.type == "cpu":  # elsewhere reading the number costs more than noise for all
        width = max(1, int((scores > float("-inf")).sum(dim=-1).max()))  # kept scores come first
        scores = scores[:, :width]
        tokens = tokens[:, :width]
    return tokens.gather(1, _draw(scores, tokens, rows).unsqueeze(1)).squeeze(1)


def _draw(scores: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return draw(scores, tokens, upload(noise_starts(rows), scores.device))


def kept_in_order(scores: Tensor, rows: Sequence[SamplingRow], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest scores, largest first, -inf where top_k or top_p cuts off, and their tokens: [rows, width].

    Of equal scores the lower token comes first. The third result, bool [rows], says whether all kept scores are
    included.
    """
    ordered, tokens = _largest_in_order(scores, width)
    vocab_size = scores.shape[1]
    top_k = upload(torch.tensor([row.top_k or vocab_size for row in rows]), scores.device).unsqueeze(1)
    top_p = _column(scores, [row.top_p for row in rows])
    certain = ordered > ordered[:, -1:]  # scores equal to the last one may also be outside the window
    ordered.masked_fill_(torch.arange(width, device=scores.device) >= top_k, float("-inf"))
    probs = softmax(ordered)
    if width < vocab_size:
        probs = torch.where(top_k > width, softmax(scores).gather(1, tokens), probs)
    # A token is kept if the tokens before it have not reached top_p; the most likely token is always kept.
    beyond_p = (probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0)
    beyond_p[:, 0] = False  # even if a tiny top_p rounds to 0 in fp32
    ordered.masked_fill_(beyond_p, float("-inf"))
    complete = (ordered > float("-inf")).sum(dim=-1) <= certain.sum(dim=-1)
    complete &= ((top_k <= width) | (top_k >= vocab_size)).squeeze(1)  # else top_p would apply to other tokens
    return ordered, tokens, complete | (width == vocab_size)


def _largest_in_order(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    if width == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    tokens = scores.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered, tokens.gather(1, order)


def scale_(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide by the temperatures and apply min_p, in place."""
    scores = logits.div_(_column(logits, [row.temperature for row in rows]))
    if any(row.min_p > 0.0 for row in rows):
        log_min_p = _column(scores, [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in rows])
        scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + log_min_p, float("-inf"))
    return scores


def gumbel_noise(rows: Sequence[SamplingRow], tokens: Tensor) -> Tensor:
    """`torch_rows.gumbel_noise` of tokens [width] or [rows, width]: fp64 [rows, width]."""
    return torch_rows.gumbel_noise(tokens, upload(noise_starts(rows), tokens.device))


def noise_starts(rows: Sequence[SamplingRow]) -> Tensor:
    """The hash of each row's seed and index, from which its noise is generated: int64 [rows], on the host."""
    starts = splitmix64(torch.tensor([as_int64(row.seed * 0xD1B54A32D192ED03) for row in rows]))
    return splitmix64(starts + torch.tensor([as_int64(row.index * GOLDEN_GAMMA) for row in rows]))


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float32), like.device).unsqueeze(1)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Each row's natural-log probability of its token, the token's rank, and the `count` most likely tokens.

    logits: floating [rows, vocab], not modified; the softmax is fp32. A row with count None is skipped. The rank is
    1 + the number of tokens with a larger log-probability. A result depends on the logits, token and count of its row
    alone.
    """
    logprobs: list[TokenLogprobs | None] = [None] * len(counts)
    asked = [row for row, count in enumerate(counts) if count is not None]
    for start in range(0, len(asked), LOGPROB_ROWS):
        rows = asked[start : start + LOGPROB_ROWS]
        of_rows = logits if len(rows) == len(counts) else logits[rows]
        measured = _measure(of_rows, [token_ids[row] for row in rows], [counts[row] or 0 for row in rows])
        for row, measures in zip(rows, measured, strict=True):
            logprobs[row] = measures
    return logprobs


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
