"""Choosing the next token of each row. A row's draw depends on its logits, its seed and its index, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops.upload import upload

MAX_ROWS = 64  # at a time: sorting takes about ten times the memory of the logits
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


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The next token of each row. logits: floating [rows, vocab].

    Sampling draws from softmax(logits / temperature), cut to the tokens that min_p and top_k leave, and of these to the
    ones within top_p: vLLM's order. The draw is the largest of log-probability plus Gumbel noise (Gumbel-max:
    P(i is largest) = p_i).
    """
    tokens = torch.argmax(logits, dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    for start in range(0, len(drawn), MAX_ROWS):
        part = drawn[start : start + MAX_ROWS]
        index = upload(torch.tensor(part), logits.device)
        scores = kept_scores(logits[index].float(), [rows[i] for i in part])
        noise = torch.stack([gumbel_noise(rows[i].seed, rows[i].index, logits.shape[-1]) for i in part])
        tokens[index] = torch.argmax(scores + upload(noise, logits.device), dim=-1)
    return [int(token) for token in tokens.tolist()]


def gumbel_noise(seed: int, index: int, vocab_size: int) -> Tensor:
    """Gumbel(0, 1) noise fp64 [vocab], a function of (seed, index, token) alone: the same in every batch and process.

    Counter-based: token i takes the i-th number of SplitMix64 (Steele, Lea and Flood, 2014) started at a hash of seed
    and index, as a uniform u of 52 bits (one more, and the largest would round to 1), and -log(-log(u)) is a Gumbel
    variable. fp64, because an fp32 uniform is its smallest value once in 2^24 draws, which would make tokens certain
    that the distribution all but excludes.
    """
    start = _finalise(torch.tensor([_signed(seed * 0xD1B54A32D192ED03)]))
    start = _finalise(start + _signed(index * _GOLDEN_GAMMA))
    numbers = _finalise(start + torch.arange(1, vocab_size + 1) * _signed(_GOLDEN_GAMMA))
    uniform = (_shift(numbers, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


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


def kept_scores(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scaled logits fp32 [rows, vocab], -inf where a row's top_k, top_p or min_p cuts a token off."""

    def column(values: Sequence[float]) -> Tensor:
        return upload(torch.tensor(values, dtype=torch.float32), logits.device).unsqueeze(1)

    scores = logits / column([row.temperature for row in rows])
    if all(row.top_k == 0 and row.top_p >= 1.0 and row.min_p == 0.0 for row in rows):
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores.shape[-1]
    top_k = upload(torch.tensor([row.top_k or vocab_size for row in rows]), logits.device).unsqueeze(1)
    beyond_k = torch.arange(vocab_size, device=logits.device) >= top_k
    too_small = torch.exp(ordered - ordered[:, :1]) < column([row.min_p for row in rows])
    ordered = ordered.masked_fill(beyond_k | too_small, float("-inf"))
    # A token is kept while the ones before it have not reached top_p: the most likely one always is.
    probs = torch.softmax(ordered, dim=-1)
    top_p = column([row.top_p for row in rows])
    beyond_p = (probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0)
    beyond_p[:, 0] = False  # also when a tiny top_p is 0 in fp32
    return torch.empty_like(scores).scatter_(1, order, ordered.masked_fill(beyond_p, float("-inf")))
