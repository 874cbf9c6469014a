"""Choosing the next token of each row. A row's draw depends on its logits, its seed and its index, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.layers.logits import LogitAdjustments, adjust_
from nanovllm.ops import cpu_rows
from nanovllm.ops.triton_support import use_triton
from nanovllm.ops.upload import upload

# Logits at a time: drawing takes about twelve times their memory. On the CPU that should stay in the cache.
CPU_PIECE = 2**18
DEVICE_PIECE = 2**23
WINDOW = 1024  # logits of a row that are sorted first
# In place of a token: the row's logits hold NaN or infinity; all tokens of the row are banned.
NOT_FINITE, ALL_BANNED = -1, -2
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


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
    """Where the largest of score plus noise stands in each row: int64 [rows]; tokens as for `gumbel_noise`."""
    if use_triton(scores):
        from nanovllm.ops.triton_gumbel import draw_triton

        return draw_triton(scores, tokens, upload(_noise_starts(rows), scores.device))
    if cpu_rows.takes(scores, 2):
        return cpu_rows.draw(scores, tokens, _noise_starts(rows))
    return torch.argmax(scores + gumbel_noise(rows, tokens), dim=-1)


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
    probs = _softmax(ordered)
    if width < vocab_size:
        probs = torch.where(top_k > width, _softmax(scores).gather(1, tokens), probs)
    # A token is kept while the ones before it have not reached top_p: the most likely one always is.
    beyond_p = (probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0)
    beyond_p[:, 0] = False  # also when a tiny top_p is 0 in fp32
    ordered.masked_fill_(beyond_p, float("-inf"))
    complete = (ordered > float("-inf")).sum(dim=-1) <= certain.sum(dim=-1)
    complete &= ((top_k <= width) | (top_k >= vocab_size)).squeeze(1)  # else top_p's share is of what top_k leaves
    return ordered, tokens, complete | (width == vocab_size)


def _softmax(scores: Tensor) -> Tensor:
    return cpu_rows.softmax(scores) if cpu_rows.takes(scores, 2) else torch.softmax(scores, dim=-1)


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
    """Gumbel(0, 1) noise of tokens [width] or [rows, width]: fp64 [rows, width], a function of (seed, index, token).

    Counter-based, so that it is the same in every batch and process: token i takes the i-th number of SplitMix64
    (Steele, Lea and Flood, 2014) started at a hash of seed and index, as a uniform u of 52 bits (one more, and the
    largest would round to 1), and -log(-log(u)) is a Gumbel variable. fp64, because an fp32 uniform is its smallest
    value once in 2^24 draws, which would make tokens certain that the distribution all but excludes.
    """
    starts = upload(_noise_starts(rows), tokens.device)
    numbers = _finalise(starts.unsqueeze(1) + (tokens + 1) * _signed(_GOLDEN_GAMMA))
    uniform = (_shift(numbers, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _noise_starts(rows: Sequence[SamplingRow]) -> Tensor:
    """Each row's hash of seed and index: int64 [rows], on the host."""
    starts = _finalise(torch.tensor([_signed(row.seed * 0xD1B54A32D192ED03) for row in rows]))
    return _finalise(starts + torch.tensor([_signed(row.index * _GOLDEN_GAMMA) for row in rows]))


def _finalise(z: Tensor) -> Tensor:
    """SplitMix64's mixing of a 64-bit state; int64 stands for the unsigned integers, whose products wrap alike."""
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Unsigned right shift: int64's own would pull the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float32), like.device).unsqueeze(1)
