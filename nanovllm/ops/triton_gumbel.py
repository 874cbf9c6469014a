"""Drawing tokens in Triton: the largest of score plus Gumbel noise, without the noise ever being in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 2048


@triton.jit
def _finalise(z):  # type: ignore[no-untyped-def]
    """SplitMix64's mixing of a 64-bit state."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(
    do_not_specialize=["width", "tiles", "scores_stride", "tokens_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "best_ptr", "index_ptr"],
)
def _draw_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    tokens_ptr,
    starts_ptr,
    best_ptr,
    index_ptr,
    width,
    tiles,
    scores_stride,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """Program (row, tile): the largest of the tile, and where it stands in the row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * scores_stride + column, mask=column < width, other=float("-inf"))
    token = tl.load(tokens_ptr + row * tokens_stride + column, mask=column < width, other=0)
    start = tl.load(starts_ptr + row).to(tl.uint64)
    number = _finalise(start + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = ((number >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    value = score.to(tl.float64) - tl.log(-tl.log(uniform))
    best, index = tl.max(value, 0, return_indices=True)
    tl.store(best_ptr + row * tiles + tile, best)
    tl.store(index_ptr + row * tiles + tile, (tile * BLOCK + index).to(tl.int64))


def draw_triton(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """argmax(scores + noise) of each row, int64 [rows]; the first of equal ones.

    scores: fp32 [rows, width]; tokens: int64 [width] or [rows, width]; starts: int64 [rows], the state from which
    SplitMix64 gives a row's tokens their numbers (`layers.sampler.gumbel_noise`).
    """
    rows, width = scores.shape
    assert scores.stride(1) == tokens.stride(-1) == 1, "rows must be contiguous"
    tiles = triton.cdiv(width, TOKENS_PER_PROGRAM)
    best = torch.empty(rows, tiles, dtype=torch.float64, device=scores.device)
    index = torch.empty(rows, tiles, dtype=torch.int64, device=scores.device)
    _draw_kernel[(rows, tiles)](
        scores, tokens, starts, best, index, width, tiles, scores.stride(0),
        tokens.stride(0) if tokens.dim() == 2 else 0, BLOCK=TOKENS_PER_PROGRAM, enable_fp_fusion=True,
    )  # fmt: skip
    return index.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)
