"""Choosing the next token of each row. A row's draw depends on its logits, its seed and its index, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.layers.logits import LogitAdjustments, adjust_
from nanovllm.ops import torch_rows
from nanovllm.ops.row_kernels import draw, softmax
from nanovllm.ops.torch_rows import GOLDEN_GAMMA, as_int64, splitmix64
from nanovllm.ops.upload import upload

# Logits at a time: drawing takes about twelve times their memory. On the CPU that should stay in the cache.
CPU_PIECE = 2**18
DEVICE_PIECE = 2**23
WINDOW = 1024  # logits of a row that are sorted first
# In place of a token: the row's logits hold NaN or infinity; all tokens of the row are banned.
NOT_FINITE, ALL_BANNED = -1, -2


class SamplingRow(Protocol):
    """What the sampler reads of a row; see `engine.batch.SamplingRow`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def adjustments(self) -> LogitAdjustments | None: ...


# Takes logits that it may change, fp32 [rows, vocab], and gives int64 [rows].
_Choice = Callable[[Tensor, Sequence[SamplingRow]], Tensor]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The next token of each row, or NOT_FINITE or ALL_BANNED. logits: floating [rows, vocab], left as they are.

    vLLM's order: bans, biases and penalties (`adjust_`), temperature, min_p, top_k, and top_p of what these leave. The
    draw is the largest of log-probability plus Gumbel noise (Gumbel-max: P(i is largest) = p_i). Greedy rows without
    adjustments are neither copied nor sorted, and only the likeliest logits of rows with top_k or top_p are sorted.
    """
    choices = [_choice(row) for row in rows]
    # NaN where any logit is. On the CPU, the two together take a fifth of aminmax's time.
    is_finite = logits.amin(dim=-1).isfinite() & logits.amax(dim=-1).isfinite()
    tokens = torch.argmax(logits, dim=-1) if None in choices else logits.new_zeros(len(rows), dtype=torch.int64)
    for choose in {choice for choice in choices if choice is not None}:
        chosen = [i for i, choice in enumerate(choices) if choice is choose]
        at_once = rows_at_once(logits.shape[1], logits.device)
        for start in range(0, len(chosen), at_once):
            part = chosen[start : start + at_once]
            index = upload(torch.tensor(part), logits.device)
            scores = adjust_(logits[index].float(), [rows[i].adjustments for i in part])
            is_banned = scores.amax(dim=-1) == float("-inf")
            tokens[index] = choose(scores, [rows[i] for i in part]).masked_fill(is_banned, ALL_BANNED)
    # The host learns of it with the tokens, which it waits for anyway.
    return [int(token) for token in tokens.masked_fill(~is_finite, NOT_FINITE).tolist()]


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """How many rows are drawn in one piece."""
    return max(1, (CPU_PIECE if device.type == "cpu" else DEVICE_PIECE) // vocab_size)


def _choice(row: SamplingRow) -> _Choice | None:
    """How the row's token is chosen; None takes the largest logit as it is."""
    if row.temperature > 0:
        return draw_from_likeliest if row.top_k > 0 or row.top_p < 1.0 else draw_from_all
    return _take_largest if row.adjustments is not None else None


def _take_largest(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return torch.argmax(logits, dim=-1)


def draw_from_all(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw rows without top_k and top_p: int64 [rows]. Changes logits fp32 [rows, vocab]."""
    scores = scale_(logits, rows)
    tokens = torch.arange(scores.shape[1], device=scores.device)
    return _draw(scores, tokens, rows)


def draw_from_likeliest(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw rows with top_k or top_p: int64 [rows]. Changes logits fp32 [rows, vocab].

    The WINDOW largest logits are nearly always more than what is kept; only rows where they are not are sorted whole.
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
    if scores.device.type == "cpu":  # elsewhere to ask for the number costs more than noise for all
        width = max(1, int((scores > float("-inf")).sum(dim=-1).max()))  # what is cut off lies behind what is kept
        scores, tokens = scores[:, :width], tokens[:, :width]
    return tokens.gather(1, _draw(scores, tokens, rows).unsqueeze(1)).squeeze(1)


def _draw(scores: Tensor, tokens: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return draw(scores, tokens, upload(noise_starts(rows), scores.device))


def kept_in_order(scores: Tensor, rows: Sequence[SamplingRow], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest scores, largest first, -inf where top_k or top_p cuts off, and their tokens: [rows, width].

    Of equal scores the lower token stands first. Third, bool [rows]: whether everything that is kept is among them.
    """
    ordered, tokens = _largest_in_order(scores, width)
    vocab_size = scores.shape[1]
    top_k = upload(torch.tensor([row.top_k or vocab_size for row in rows]), scores.device).unsqueeze(1)
    top_p = _column(scores, [row.top_p for row in rows])
    certain = ordered > ordered[:, -1:]  # which of several scores like the last one are here is anyone's guess
    ordered.masked_fill_(torch.arange(width, device=scores.device) >= top_k, float("-inf"))
    probs = softmax(ordered)
    if width < vocab_size:
        probs = torch.where(top_k > width, softmax(scores).gather(1, tokens), probs)
    # A token is kept while the ones before it have not reached top_p: the most likely one always is.
    beyond_p = (probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0)
    beyond_p[:, 0] = False  # also when a tiny top_p is 0 in fp32
    ordered.masked_fill_(beyond_p, float("-inf"))
    complete = (ordered > float("-inf")).sum(dim=-1) <= certain.sum(dim=-1)
    complete &= ((top_k <= width) | (top_k >= vocab_size)).squeeze(1)  # else top_p's share is of what top_k leaves
    return ordered, tokens, complete | (width == vocab_size)


def _largest_in_order(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    if width == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    tokens = scores.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered, tokens.gather(1, order)


def scale_(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide by the temperatures, and cut off what min_p does, in place."""
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
